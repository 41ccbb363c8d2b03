"""Restore the state of a model and of random generators after a run of the model, and switch off randomness."""

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from hf_packing.attention.model import configurations

_CHANGED_IN_PLACE = (
    "_buffers",
    "_modules",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
"""Names of module attributes that are dictionaries, and that a forward may change in place. For example, transformers
adds hooks when a caller requests hidden states."""

_NOT_RESTORED = ("forward", "training")
"""Names of module attributes that `restored` leaves alone, since code within the block may set them on purpose."""

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Names of the attributes that every module has."""

_COLLECTIONS = (list, dict, set, deque)

Attention = list[tuple[PreTrainedConfig, Any]]
"""Pairs of a configuration and the name of its attention function."""

_ATTENTION = "_attn_implementation_internal"
"""The attribute in which a configuration stores the name of its attention function. The patch restores this attribute
directly. The method `set_attn_implementation` would reject the value None, which some inner configurations have, and
would reject an attention function whose package is not installed."""


class ModuleSnapshot:
    """The state of some modules at one moment: their attributes, buffers, hooks and inner modules.

    A snapshot may serve many forwards, since most forwards change nothing, and since it is cheap to find that out: it
    takes a millisecond for 1,000 modules.

    Args:
        *modules: the modules. Inner modules are included only if they are passed, too.
    """

    def __init__(self, *modules: nn.Module) -> None:
        owners = [vars(module) for module in modules]
        self._dictionaries = [each for own in owners for each in (own, *(own[name] for name in _CHANGED_IN_PLACE))]
        self._before = list(map(dict, self._dictionaries))
        self._values = self._values_now()
        own = [(name, own[name]) for own in owners for name in own.keys() - OF_EVERY_MODULE]
        self._collections = [(name, each, copy(each)) for name, each in own if isinstance(each, _COLLECTIONS)]

    def _values_now(self) -> list[Any]:
        """Return all values of the dictionaries as a flat list, which is fast to compare."""
        return [*chain.from_iterable(map(dict.values, self._dictionaries))]

    @property
    def is_current(self) -> bool:
        """True if the modules are now in the state of this snapshot."""
        return _have_same_items(self._values_now(), self._values) and all(
            _have_same_items(each, before) for _, each, before in self._collections
        )

    def restore(self) -> dict[str, Any]:
        """Undo all changes that were made to the modules since the snapshot.

        Replaced attributes, buffers, hooks and inner modules are restored, and so are the items of attributes that are
        collections. New values in existing tensors are not undone; `WeightSnapshot` undoes such changes.

        Returns:
            The names and the new values of the changed attributes and items.
        """
        changed: dict[str, Any] = {}
        for current, before in () if self.is_current else zip(self._dictionaries, self._before, strict=True):
            for name in {**current, **before}.keys() - set(_NOT_RESTORED):
                if name not in current or name not in before or current[name] is not before[name]:
                    changed[name] = current.get(name)
                    if name in before:
                        current[name] = before[name]
                    else:
                        del current[name]
        for name, each, kept in self._collections:
            if not _have_same_items(each, kept):
                changed[name] = copy(each)
                each.clear()
                (each.update if isinstance(each, (dict, set)) else each.extend)(kept)
        return changed


def _have_same_items(one: Any, other: Any) -> bool:
    """Return whether two collections consist of the same objects."""
    pairs = [(one, other), (one.values(), other.values())] if isinstance(one, dict) else [(one, other)]
    return len(one) == len(other) and all(all(map(is_, *pair)) for pair in pairs)


@contextmanager
def restored(*modules: nn.Module) -> Iterator[dict[str, Any]]:
    """Context manager: at the end of the block, undo the changes that the block has made to these modules.

    `ModuleSnapshot.restore` describes what is undone.

    Args:
        *modules: the modules to restore. Inner modules are restored only if they are passed, too.

    Yields:
        An empty dictionary, which gets the names and the new values of what has changed at the end of the block.
    """
    snapshot = ModuleSnapshot(*modules)
    changed: dict[str, Any] = {}
    try:
        yield changed
    finally:
        changed |= snapshot.restore()


_SMALL_BUFFER = 2**20
"""`WeightSnapshot` copies a buffer in advance if the buffer has at most this number of entries. Some kernels, such as
BatchNorm's, write to small buffers without a call that `WeightSnapshot` could intercept. Larger buffers are tables, or
the weights of quantized models, and such kernels do not write to them."""


class WeightSnapshot(TorchFunctionMode):
    """Context manager: within the block, copy a parameter or buffer just before a function writes to it in place.

    `restore` writes the old values back. Some modules write to their parameters or buffers when they run: RWKV rescales
    its weights when it first runs in evaluation mode, and BatchNorm updates its moving averages. Small buffers are
    copied earlier, when the snapshot is created.

    Args:
        model: the model whose parameters and buffers are copied.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._not_copied: dict[int, list[Tensor]] = {}
        """Maps the address of a storage to the tensors in this storage that have not been copied yet."""
        self._copies: list[tuple[Tensor, Tensor]] = []
        for tensor in (*model.parameters(), *model.buffers()):
            if type(tensor) not in (nn.Parameter, Tensor) or not tensor.numel() or tensor.is_meta:
                continue
            if type(tensor) is Tensor and tensor.numel() <= _SMALL_BUFFER:
                self._copies.append((tensor, tensor.detach().clone()))
            else:
                self._not_copied.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if writes(getattr(function, "__name__", "")) and args and isinstance(args[0], Tensor):
            written = self._not_copied.pop(args[0].untyped_storage().data_ptr(), [])
            self._copies += [(tensor, tensor.detach().clone()) for tensor in written]
        return function(*args, **(kwargs or {}))

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, before in self._copies:
                if not torch.equal(tensor, before):
                    tensor.copy_(before)


def writes(function: str) -> bool:
    """Return whether a torch function with this name changes its first argument in place, as `div_` and `__setitem__`
    do."""
    return function.endswith("_") and (not function.endswith("__") or function.startswith(("__i", "__set")))


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Context manager: within the block, a model is in training or in evaluation mode. After the block, every module
    has its own mode again, so that modules that the user has frozen in evaluation mode stay frozen."""
    before = [(module, module.training) for module in model.modules()]
    try:
        model.train(training)
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def restored_random_state(device: torch.device) -> Iterator[None]:
    """Context manager: at the end of the block, restore the random states of torch, NumPy and Python.

    If `device` is a CUDA device, the random states of all GPUs are restored, too.
    """
    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def seed_all(seed: int) -> None:
    """Seed the global random generators of torch, Python and NumPy."""
    # torch.manual_seed also records a stack trace for each kind of device that this machine lacks, which takes longer
    (torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed)(seed)
    random.seed(seed)
    np.random.seed(seed)


_RANDOM_SETTINGS = ("drop", "jitter", "noise")
"""Words in the names of settings. A setting whose name contains one of these words is a probability or a noise scale.
Examples are attention_dropout, layerdrop, router_jitter_noise and neftune_noise_alpha."""


@contextmanager
def without_randomness(model: PreTrainedModel) -> Iterator[None]:
    """Context manager: within the block, a model's dropout, layer dropping and noise are switched off, as far as their
    probabilities and scales are settings. Training mode is not changed."""
    before = [(owner, _random_settings(owner)) for owner in (*model.modules(), *configurations(model))]
    try:
        for owner, settings in before:
            vars(owner).update(dict.fromkeys(settings, 0.0))
        yield
    finally:
        for owner, settings in before:
            vars(owner).update(settings)


def _random_settings(owner: Any) -> dict[str, float]:
    """Return the attributes of a module or a configuration that are probabilities or noise scales, except zeros."""
    also = "p" if isinstance(owner, _DropoutNd) else None
    return {
        name: value
        for name, value in vars(owner).items()
        if type(value) is float and value and (name == also or any(part in name for part in _RANDOM_SETTINGS))
    }


def attention_of(model: PreTrainedModel) -> Attention:
    """Return pairs of a configuration and the name of its attention function, for all configurations in a model."""
    return attention_now([(config, None) for config in configurations(model)])


def attention_now(settings: Attention) -> Attention:
    """Return the configurations in `settings` with the names of the attention functions that they have now."""
    return [(config, getattr(config, _ATTENTION, None)) for config, _ in settings]


def restore_attention(before: Attention) -> None:
    for config, attention in before:
        setattr(config, _ATTENTION, attention)


@contextmanager
def use_attention(settings: Attention) -> Iterator[None]:
    """Context manager: within the block, configurations name the attention functions in `settings`."""
    before = attention_now(settings)
    restore_attention(settings)
    try:
        yield
    finally:
        restore_attention(before)
