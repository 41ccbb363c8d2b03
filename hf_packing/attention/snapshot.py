"""Run a model and leave no trace: restore module state, weights, modes and random state; switch off randomness."""

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

_CHANGED_IN_PLACE = (
    *("_buffers", "_modules", "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)
"""Dictionaries of a module that a forward may change: transformers adds hooks when hidden states are requested."""

_NOT_RESTORED = ("forward", "training")
"""Attributes that other code may set on purpose while a forward runs."""

_ATTRIBUTES_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@contextmanager
def restored(*modules: nn.Module) -> Iterator[list[str]]:
    """Restore what changes in these modules inside the block: attributes, buffers, hooks, inner modules, and the items
    of lists, dictionaries and sets.

    Yields:
        A list that is filled, at the end of the block, with the names of what has changed.
    """
    before = [
        (module, dict(vars(module)), [dict(vars(module)[name]) for name in _CHANGED_IN_PLACE]) for module in modules
    ]
    collections = [(name, value, _items(value)) for module in modules for name, value in _collections(module)]
    changed: list[str] = []
    try:
        yield changed
    finally:
        for module, attributes, inner in before:
            for name, known in zip(_CHANGED_IN_PLACE, inner, strict=True):
                changed += _restore_items(vars(module)[name], known)
            changed += _restore_items(vars(module), attributes, _NOT_RESTORED)
        for name, value, items in collections:
            now = _items(value)
            if len(now) != len(items) or any(one is not other for one, other in zip(now, items, strict=True)):
                _refill(value, items)
                changed.append(name)


def _collections(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if name not in _ATTRIBUTES_OF_EVERY_MODULE and isinstance(value, (list, dict, set, deque)):
            yield name, value


def _items(value: Any) -> list[Any]:
    """Return the items of a list, set or deque; of a dictionary all keys, then all values."""
    return [*value, *(value.values() if isinstance(value, dict) else ())]


def _refill(value: Any, items: list[Any]) -> None:
    value.clear()
    if isinstance(value, dict):
        half = len(items) // 2
        value.update(zip(items[:half], items[half:], strict=True))
    elif isinstance(value, set):
        value.update(items)
    else:
        value.extend(items)


def _restore_items(now: dict[str, Any], before: dict[str, Any], kept: tuple[str, ...] = ()) -> list[str]:
    """Restore a dictionary, and return the names of what had changed."""
    added = now.keys() - before.keys() - set(kept)
    others = [name for name in before if name not in kept and (name not in now or now[name] is not before[name])]
    for name in added:
        del now[name]
    now.update({name: before[name] for name in others})
    return [*added, *others]


_SMALL_BUFFER = 2**20
"""Buffers of up to this many entries are always copied, since kernels, such as those of BatchNorm, write to them
without a call that could be seen here. Larger buffers are tables, or the weights of quantized models."""


class WeightSnapshot(TorchFunctionMode):
    """Inside the block, copy each parameter and buffer before it is written to, so that it can be restored later.

    RWKV rescales its weights at its first evaluation; BatchNorm updates its moving averages.

    Args:
        model: the model whose parameters and buffers are kept.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._not_copied: dict[int, list[Tensor]] = {}
        """Tensors by the address of their storage, which several may share."""
        self._copies: list[tuple[Tensor, Tensor]] = []
        for parameter in model.parameters():
            if type(parameter) is nn.Parameter and parameter.numel() and not parameter.is_meta:
                self._not_copied.setdefault(parameter.untyped_storage().data_ptr(), []).append(parameter)
        for buffer in model.buffers():
            if type(buffer) is not Tensor or not buffer.numel() or buffer.is_meta:
                continue
            if buffer.numel() <= _SMALL_BUFFER:
                self._copies.append((buffer, buffer.detach().clone()))
            else:
                self._not_copied.setdefault(buffer.untyped_storage().data_ptr(), []).append(buffer)

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if writes(getattr(function, "__name__", "")) and args and isinstance(args[0], Tensor):
            written = self._not_copied.pop(args[0].untyped_storage().data_ptr(), [])
            self._copies += [(tensor, tensor.detach().clone()) for tensor in written]
        return function(*args, **(kwargs or {}))

    def changed(self) -> list[Tensor]:
        """Return the tensors whose values have changed."""
        return [tensor for tensor, before in self._copies if not torch.equal(tensor, before)]

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, before in self._copies:
                if not torch.equal(tensor, before):
                    tensor.copy_(before)


def writes(function: str) -> bool:
    """Return whether a function of this name changes its first argument, as `div_`, `__idiv__` and `__setitem__` do."""
    return function.endswith("_") and (not function.endswith("__") or function.startswith(("__i", "__set")))


@contextmanager
def restored_modes(model: nn.Module) -> Iterator[None]:
    """Restore which modules are in training mode."""
    before = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def restored_random_state(device: torch.device) -> Iterator[None]:
    """Restore the random states of torch, NumPy and Python."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def seed_all(seed: int) -> None:
    """Seed torch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def random_state(device: torch.device) -> tuple[Any, ...]:
    """Return something that changes whenever a random number is drawn."""
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    _, keys, place, *_ = np.random.get_state(legacy=True)
    numpy = np.asarray(keys).tobytes(), int(place)
    return (*(bytes(state.numpy()) for state in states), random.getstate(), numpy)


_RANDOM_SETTINGS = ("drop", "jitter", "noise")
"""Parts of the names of probabilities and noise scales: attention_dropout, layerdrop, router_jitter_noise,
neftune_noise_alpha."""

_DROPOUTS = (
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout),
)


@contextmanager
def without_randomness(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block, switch off dropout, layer dropping and noise, but leave training mode on."""
    with ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(_zero_settings(module, ("p",) if isinstance(module, _DropoutNd) else ()))
        for config in configurations(model):
            stack.enter_context(_zero_settings(config))
        stack.enter_context(_NoDropout())
        yield


@contextmanager
def _zero_settings(owner: Any, also: tuple[str, ...] = ()) -> Iterator[None]:
    """Set to 0 the attributes that are probabilities or scales of noise."""
    settings = {
        name: value
        for name, value in vars(owner).items()
        if type(value) is float and value and (name in also or any(part in name for part in _RANDOM_SETTINGS))
    }
    vars(owner).update(dict.fromkeys(settings, 0.0))
    try:
        yield
    finally:
        vars(owner).update(settings)


class _NoDropout(TorchFunctionMode):
    """Inside the block, dropout functions return their input, whatever probability they are called with."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if function is F.scaled_dot_product_attention:
            if len(args) > 4:  # dropout_p is the fifth argument
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs = {**kwargs, "dropout_p": 0.0}
        return function(*args, **kwargs)
