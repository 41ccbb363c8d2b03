"""What a forward leaves behind in the modules, such as the scale of a rotary embedding, is put back."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

INNER = (
    *("_buffers", "_modules", "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)
"""Dictionaries that are changed in place. transformers hooks its layers when hidden states are asked for."""

KEPT = ("forward", "training")
"""What others may set on purpose while a forward runs."""


OF_ALL_MODULES = frozenset(vars(nn.Module()))


@contextmanager
def as_it_was(*modules: nn.Module) -> Iterator[list[str]]:
    """Attributes, buffers, hooks and inner modules of these modules are put back, new ones are taken away, and lists,
    dictionaries and sets have in them what they had.

    Their names are in the list that is yielded, at the end of the block.
    """
    before = [(module, dict(vars(module)), [dict(vars(module)[name]) for name in INNER]) for module in modules]
    collections = [(name, value, items_of(value)) for module in modules for name, value in collections_of(module)]
    changed: list[str] = []
    try:
        yield changed
    finally:
        for module, attributes, inner in before:
            for name, known in zip(INNER, inner, strict=True):
                changed += put_back(vars(module)[name], known)
            changed += put_back(vars(module), attributes, KEPT)
        for name, value, items in collections:
            now = items_of(value)
            if len(now) != len(items) or any(one is not other for one, other in zip(now, items, strict=True)):
                fill(value, items)
                changed.append(name)


def collections_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if name not in OF_ALL_MODULES and isinstance(value, (list, dict, set, deque)):
            yield name, value


def items_of(value: Any) -> list[Any]:
    """What is in a list, a dictionary (all keys, then all values), a set or a deque."""
    return [*value, *(value.values() if isinstance(value, dict) else ())]


def fill(value: Any, items: list[Any]) -> None:
    """Have these items in a list, dictionary, set or deque, and no others."""
    value.clear()
    if isinstance(value, dict):
        half = len(items) // 2
        value.update(zip(items[:half], items[half:], strict=True))
    elif isinstance(value, set):
        value.update(items)
    else:
        value.extend(items)


def put_back(now: dict[str, Any], before: dict[str, Any], kept: tuple[str, ...] = ()) -> list[str]:
    """The names that had to be put back."""
    added = now.keys() - before.keys() - set(kept)
    others = [name for name in before if name not in kept and (name not in now or now[name] is not before[name])]
    for name in added:
        del now[name]
    now.update({name: before[name] for name in others})
    return [*added, *others]


SMALL_BUFFER = 2**20
"""Entries of a buffer that is copied before anything has been seen to write to it: kernels, such as those of BatchNorm,
write unseen. Larger ones are tables, or weights of quantised models."""


class KeptWeights(TorchFunctionMode):
    """Keeps a copy of a parameter before somebody writes to it, as RWKV does to its weights at its first evaluation,
    and of buffers, such as moving averages.

    Args:
        model: whose parameters and buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.tensors: dict[int, list[Tensor]] = {}
        """In memory, by storage, which some share."""
        self.before: list[tuple[Tensor, Tensor]] = []
        for parameter in model.parameters():
            if type(parameter) is nn.Parameter and parameter.numel() and not parameter.is_meta:
                self.tensors.setdefault(parameter.untyped_storage().data_ptr(), []).append(parameter)
        for buffer in model.buffers():
            if type(buffer) is not Tensor or not buffer.numel() or buffer.is_meta:
                continue
            if buffer.numel() <= SMALL_BUFFER:
                self.before.append((buffer, buffer.detach().clone()))
            else:
                self.tensors.setdefault(buffer.untyped_storage().data_ptr(), []).append(buffer)

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if writes(getattr(function, "__name__", "")) and args and isinstance(args[0], Tensor):
            written = self.tensors.pop(args[0].untyped_storage().data_ptr(), [])
            self.before += [(tensor, tensor.detach().clone()) for tensor in written]
        return function(*args, **(kwargs or {}))

    def written(self) -> list[Tensor]:
        """Those that are not what they were."""
        return [tensor for tensor, before in self.before if not torch.equal(tensor, before)]

    def put_back(self) -> None:
        with torch.no_grad():
            for tensor, before in self.before:
                if not torch.equal(tensor, before):
                    tensor.copy_(before)


def writes(function: str) -> bool:
    """Whether a function of this name changes its first argument: `div_`, `__idiv__`, `__setitem__`, `data.__set__`."""
    return function.endswith("_") and (not function.endswith("__") or function.startswith(("__i", "__set")))


SMALL = 0.1
"""Standard deviation of gates and biases that are zero otherwise."""

SHARE_OF_KERNEL = 0.5
"""Noise in a kernel, as a share of its root mean square."""

LONGEST_KERNEL = 16
"""Tokens that a convolution in a language model sees at once; the last axis of its weight."""


@contextmanager
def with_weights_everywhere(model: nn.Module) -> Iterator[None]:
    """What may hide a leak before training is random for the length of the block: parameters that are all zero, as some
    projections and gates are, and kernels of convolutions, which some begin as the identity.
    """
    parameters = [p for p in model.parameters() if p.ndim and p.numel() and p.is_floating_point() and not p.is_meta]
    silent = [parameter for parameter in parameters if not parameter.any()]
    kernels = [(p, p.detach().clone()) for p in parameters if p.ndim == 3 and p.shape[-1] <= LONGEST_KERNEL and p.any()]
    generator = torch.Generator().manual_seed(0)

    def noise(parameter: nn.Parameter, scale: float) -> Tensor:
        return (torch.randn(parameter.shape, generator=generator) * scale).to(parameter)

    try:
        with torch.no_grad():
            for parameter in silent:
                parameter.copy_(noise(parameter, parameter[0].numel() ** -0.5 if parameter.ndim > 1 else SMALL))
            for parameter, _ in kernels:
                parameter.add_(noise(parameter, SHARE_OF_KERNEL * float(parameter.float().square().mean().sqrt())))
        yield
    finally:
        with torch.no_grad():
            for parameter in silent:
                parameter.zero_()
            for parameter, before in kernels:
                parameter.copy_(before)
