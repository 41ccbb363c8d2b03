"""Run a model and leave it as it was: modes, weights, state and chance are restored."""

import random
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from hf_packing.attention.inspect_model import configurations

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


RANDOM_SETTINGS = ("drop", "jitter", "noise")
"""Parts of the names of probabilities and scales of noise: attention_dropout, layerdrop, router_jitter_noise,
neftune_noise_alpha."""

DROPOUTS = (
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout),
)


@contextmanager
def modes_put_back(model: nn.Module) -> Iterator[None]:
    """Whether each module is in training mode, which may differ between them, is as it was afterwards."""
    before = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def chance_put_back(device: torch.device) -> Iterator[None]:
    """The random states of torch, NumPy and Python are as they were afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def begin_chance(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def state_of_chance(device: torch.device) -> tuple[Any, ...]:
    """What changes when a random number is drawn."""
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    return (*(bytes(state.numpy()) for state in states), random.getstate(), _of_numpy())


def _of_numpy() -> tuple[bytes, int]:
    _, keys, place, *_ = np.random.get_state(legacy=True)
    return np.asarray(keys).tobytes(), int(place)


@contextmanager
def without_chance(model: PreTrainedModel) -> Iterator[None]:
    """What a model drops and which noise it adds in training is nothing, for the length of the block."""
    with ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(switched_off(module, ("p",) if isinstance(module, _DropoutNd) else ()))
        for config in configurations(model):
            stack.enter_context(switched_off(config))
        stack.enter_context(NoDropout())
        yield


@contextmanager
def switched_off(owner: Any, also: tuple[str, ...] = ()) -> Iterator[None]:
    """Attributes that are probabilities or scales of noise are 0."""
    settings = {
        name: value
        for name, value in vars(owner).items()
        if type(value) is float and value and (name in also or any(part in name for part in RANDOM_SETTINGS))
    }
    vars(owner).update(dict.fromkeys(settings, 0.0))
    try:
        yield
    finally:
        vars(owner).update(settings)


class NoDropout(TorchFunctionMode):
    """Dropout returns what it is given, wherever its probability was written."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in DROPOUTS:
            return args[0] if args else kwargs["input"]
        if function is F.scaled_dot_product_attention:
            args, kwargs = without_dropout(args, kwargs)
        return function(*args, **kwargs)


def without_dropout(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Of scaled_dot_product_attention, whose fifth argument it is."""
    return (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args, kwargs if len(args) > 4 else {
        **kwargs,
        "dropout_p": 0.0,
    }
