"""What a forward leaves behind in the modules, such as the scale of a rotary embedding, is put back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

INNER = ("_buffers", "_modules")

KEPT = ("forward", "training")
"""What others may set on purpose while a forward runs."""


@contextmanager
def as_it_was(*modules: nn.Module) -> Iterator[None]:
    """Attributes, buffers and inner modules of these modules are put back, and new ones taken away."""
    before = [(module, dict(vars(module)), [dict(vars(module)[name]) for name in INNER]) for module in modules]
    try:
        yield
    finally:
        for module, attributes, inner in before:
            for name, known in zip(INNER, inner, strict=True):
                put_back(vars(module)[name], known)
            put_back(vars(module), attributes, KEPT)


def put_back(now: dict[str, Any], before: dict[str, Any], kept: tuple[str, ...] = ()) -> None:
    for name in now.keys() - before.keys() - set(kept):
        del now[name]
    now.update({name: value for name, value in before.items() if name not in kept})


class KeptWeights(TorchFunctionMode):
    """Keeps a copy of a parameter before somebody writes to it, as RWKV does to its weights at its first evaluation.

    Args:
        model: whose parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.parameters: dict[int, list[nn.Parameter]] = {}
        """In memory, by storage, which some share."""
        for parameter in model.parameters():
            if type(parameter) is nn.Parameter and parameter.numel() and not parameter.is_meta:
                self.parameters.setdefault(parameter.untyped_storage().data_ptr(), []).append(parameter)
        self.before: list[tuple[nn.Parameter, Tensor]] = []

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if writes(getattr(function, "__name__", "")) and args and isinstance(args[0], Tensor):
            written = self.parameters.pop(args[0].untyped_storage().data_ptr(), [])
            self.before += [(parameter, parameter.detach().clone()) for parameter in written]
        return function(*args, **(kwargs or {}))

    def put_back(self) -> None:
        with torch.no_grad():
            for parameter, before in self.before:
                parameter.copy_(before)


def writes(function: str) -> bool:
    """Whether a function of this name changes its first argument: `div_`, `__idiv__`, `__setitem__`, `data.__set__`."""
    return function.endswith("_") and (not function.endswith("__") or function.startswith(("__i", "__set")))


@contextmanager
def with_weights_everywhere(model: nn.Module) -> Iterator[None]:
    """Weights that are all zero, as some projections are before training, are random for the length of the block.

    A module behind such a projection cannot be seen to leak, and will as soon as it is trained.
    """
    weights = [p for p in model.parameters() if p.ndim >= 2 and p.numel() and p.is_floating_point() and not p.is_meta]
    silent = [parameter for parameter in weights if not parameter.any()]
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for parameter in silent:
                scale = parameter[0].numel() ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        yield
    finally:
        with torch.no_grad():
            for parameter in silent:
                parameter.zero_()
