"""Restore modules, weights, modes and random states after a run of a model, and switch off randomness."""

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
"""Dictionaries in a module that a forward may change. For example, transformers adds hooks when hidden states are
requested."""

_NOT_RESTORED = ("forward", "training")
"""Attributes that other code may set on purpose while a forward runs."""

_ATTRIBUTES_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@contextmanager
def restored(*modules: nn.Module) -> Iterator[list[str]]:
    """Context manager: at the end of the block, restore the state that the block has changed in these modules.

    Attributes, buffers, hooks, inner modules, and the items of lists, dictionaries and sets are restored. Values that
    were written into tensors are not restored; see `WeightSnapshot`.

    Yields:
        A list that is filled, at the end of the block, with the names of the attributes and items that have changed.
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
    """Return the items of a list, set or deque; for a dictionary, return all keys, then all values."""
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
    """Restore a dictionary, except for the names in `kept`, and return the names of the items that had changed."""
    added = now.keys() - before.keys() - set(kept)
    others = [name for name in before if name not in kept and (name not in now or now[name] is not before[name])]
    for name in added:
        del now[name]
    now.update({name: before[name] for name in others})
    return [*added, *others]


_SMALL_BUFFER = 2**20
"""Largest number of entries in a buffer that `WeightSnapshot` always copies. Kernels, such as the kernel of BatchNorm,
write to such buffers without a function call that `WeightSnapshot` could see. Larger buffers are tables, or the weights
of quantized models."""


class WeightSnapshot(TorchFunctionMode):
    """Context manager: within the block, copy each parameter and buffer before the tensor is written to.

    `restore` then restores the tensors that have changed. Two examples: RWKV rescales its weights at its first
    evaluation, and BatchNorm updates its moving averages.

    Args:
        model: the model whose parameters and buffers are kept.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._not_copied: dict[int, list[Tensor]] = {}
        """Tensors that are not copied yet, by the address of their storage. Several tensors may share a storage."""
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
    """Return whether a function with this name changes its first argument, as `div_` and `__setitem__` do."""
    return function.endswith("_") and (not function.endswith("__") or function.startswith(("__i", "__set")))


@contextmanager
def restored_modes(model: nn.Module) -> Iterator[None]:
    """Context manager: at the end of the block, restore the training or evaluation mode of every module."""
    before = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def restored_random_state(device: torch.device) -> Iterator[None]:
    """Context manager: at the end of the block, restore the random states of torch, NumPy and Python."""
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
    """Return the random states of torch, NumPy and Python. The result changes whenever a random number is drawn."""
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    _, keys, place, *_ = np.random.get_state(legacy=True)
    numpy = np.asarray(keys).tobytes(), int(place)
    return (*(bytes(state.numpy()) for state in states), random.getstate(), numpy)


_RANDOM_SETTINGS = ("drop", "jitter", "noise")
"""Parts of the names of settings that are probabilities or noise scales, such as attention_dropout, layerdrop,
router_jitter_noise and neftune_noise_alpha."""

_DROPOUTS = (
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout),
)


@contextmanager
def without_randomness(model: PreTrainedModel) -> Iterator[None]:
    """Context manager: within the block, switch off dropout, layer dropping and noise, but not training mode."""
    with ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(_zero_settings(module, ("p",) if isinstance(module, _DropoutNd) else ()))
        for config in configurations(model):
            stack.enter_context(_zero_settings(config))
        stack.enter_context(_NoDropout())
        yield


@contextmanager
def _zero_settings(owner: Any, also: tuple[str, ...] = ()) -> Iterator[None]:
    """Context manager: within the block, set to 0 the attributes of an object that are probabilities or noise scales.

    Args:
        owner: a module or a configuration.
        also: names of further attributes to set to 0.
    """
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
    """Context manager: within the block, dropout functions return their input, and attention runs without dropout."""

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
