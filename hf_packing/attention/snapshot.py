"""Restore the state of a model and of random generators after a run of the model, and switch off randomness."""

import builtins
import gc
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import partial
from itertools import chain, islice
from operator import is_
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from hf_packing.attention.model import configurations, has_local_weights
from hf_packing.upstream.torch import CHANGED_IN_PLACE, HOOKS, PARAMETERS, Dropout, global_hooks
from hf_packing.upstream.transformers import ATTENTION

_NOT_RESTORED = ("forward", "training")
"""Names of module attributes that `restored` leaves alone, since code within the block may set them on purpose."""

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Names of the attributes that every module has."""

_COLLECTIONS = (list, dict, set, deque)

Attention = list[tuple[PreTrainedConfig, Any]]
"""Pairs of a configuration and the name of its attention function."""


@contextmanager
def temporarily(of: Any, **values: Any) -> Iterator[None]:
    """Context manager: within the block, attributes of an object itself, which it need not have, are these values."""
    own = vars(of)
    before = {name: own[name] for name in values if name in own}
    own.update(values)
    try:
        yield
    finally:
        own.update(before)
        for name in values.keys() - before:
            del own[name]


class ModuleSnapshot:
    """The state of some modules at one moment: their attributes, buffers, hooks and inner modules.

    A snapshot may serve many forwards, since most forwards change nothing, and since it is cheap to find that out: it
    takes a millisecond for 1,000 modules.

    Args:
        *modules: the modules. Inner modules are included only if they are passed, too.
    """

    def __init__(self, *modules: nn.Module) -> None:
        owners = [vars(module) for module in modules]
        dictionaries = [each for own in owners for each in (own, *(own[name] for name in CHANGED_IN_PLACE))]
        self._dictionaries = [(each, dict(each)) for each in dictionaries]
        own = [(name, own[name]) for own in owners for name in own.keys() - OF_EVERY_MODULE]
        self._collections = [(name, each, _items(each)) for name, each in own if isinstance(each, _COLLECTIONS)]

    def restore(self) -> dict[str, Any]:
        """Undo all changes that were made to the modules since the snapshot.

        Replaced attributes, buffers, hooks and inner modules are restored, and so are the items of attributes that are
        collections. New values in existing tensors are not undone; `WeightSnapshot` undoes such changes.

        Returns:
            The names and the new values of the changed attributes and items.
        """
        changed: dict[str, Any] = {}
        for current, before in self._dictionaries:
            if _have_same_items(current, before):
                continue
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
                _refill(each, kept)
        return changed


def _have_same_items(one: Any, other: Any) -> bool:
    """Return whether two collections consist of the same objects."""
    pairs = [(one, other), (one.values(), other.values())] if isinstance(one, dict) else [(one, other)]
    return len(one) == len(other) and all(all(map(is_, *pair)) for pair in pairs)


def _items(collection: Any) -> Any:
    return dict(collection) if isinstance(collection, dict) else [*collection]


def _refill(collection: Any, items: Any) -> None:
    collection.clear()
    (collection.update if isinstance(collection, (dict, set)) else collection.extend)(items)


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


_LEVELS, _MANY, _HUGE = 5, 1000, 1_000_000
"""`ObjectSnapshot` follows references over this number of levels, follows this number of references of each object, and
takes larger collections for data."""

_OPAQUE = (type, ModuleType, CodeType, PreTrainedConfig, str, bytes, int, float, np.ndarray)
"""Classes of objects that `ObjectSnapshot` leaves out. Proofs change configurations themselves."""

_TRANSPARENT = (tuple, CellType, MethodType, BuiltinMethodType, partial)
"""Classes of objects that count as no level of their own."""

_SHARED = ("notify", "fileno", "is_alive")
"""Names of methods of locks that threads wait for, of files, and of threads and processes. What has one of these must
not change behind its back."""


class ObjectSnapshot:
    """Snapshot of what some objects hold: attributes, the items of collections, and the variables of functions, with
    the global ones that their code names. The objects in these follow, but neither data nor what this package made.

    Args:
        roots: the objects, such as hooks.
        without: objects that are left out.
    """

    def __init__(self, roots: Iterable[Any], without: Iterable[Any]) -> None:
        self.tensors: list[Tensor] = []
        """The tensors that were found, whose values are not kept."""
        self._kept: list[tuple[Any, Any]] = []
        """Collections, and dictionaries of attributes, with the items that they had."""
        self._undo: list[Callable[[], None]] = []
        """Functions that write the old values of variables."""
        known, level = {id(vars(builtins)), *map(id, without)}, [*roots]
        for _ in range(_LEVELS):
            inner: list[Any] = []
            while level:
                each = level.pop()
                if id(each) not in known and not isinstance(each, _OPAQUE):
                    known.add(id(each))
                    following = level if isinstance(each, _TRANSPARENT) else inner
                    following += islice(self._add(each, known), _MANY)
            level = inner

    def _add(self, each: Any, known: set[int]) -> Iterable[Any]:
        """Keep what an object holds, and return the objects that it refers to."""
        if isinstance(each, Tensor):
            self.tensors.append(each)
            return ()
        if isinstance(each, _COLLECTIONS):
            self._kept += [(each, _items(each))] if len(each) <= _HUGE else []
            return each.values() if isinstance(each, dict) else each
        attributes = getattr(each, "__dict__", {})
        # a decorated function may name the module of what it wraps
        made_by = (
            each.__globals__.get("__name__") if isinstance(each, FunctionType) else getattr(each, "__module__", "")
        )
        is_shared = any(hasattr(type(value), name) for value in attributes.values() for name in _SHARED)
        if is_shared or str(made_by).startswith(_NOT_OF_USERS):
            return ()
        known.add(id(attributes))  # before they are found
        self._kept.append((attributes, _items(attributes)))
        found = [vars(type(each)).get("__call__"), *attributes.values()]
        if isinstance(each, (FunctionType, *_TRANSPARENT)):
            found += gc.get_referents(each)
        if isinstance(each, CellType):
            self._undo += [partial(setattr, each, "cell_contents", value) for value in gc.get_referents(each)]
        if isinstance(each, FunctionType):
            outside = each.__globals__
            known.add(id(outside))
            values = {name: outside[name] for name in _names_in(each.__code__) if name in outside}
            self._undo.append(partial(outside.update, values))
            # functions of other files work for other callers, too
            found += [value for value in values.values() if getattr(value, "__globals__", outside) is outside]
        return found

    def restore(self) -> bool:
        """Undo all changes, and return whether collections or attributes had changed."""
        changed = [(each, items) for each, items in self._kept if not _have_same_items(each, items)]
        for each, items in changed:
            _refill(each, items)
        for undo in self._undo:
            undo()
        return bool(changed)


_NOT_OF_USERS = (__package__.partition(".")[0] + ".", "torch._")
"""The beginnings of the names of modules whose objects `ObjectSnapshot` leaves out: this package, and compilers, which
keep what they have compiled."""


def _names_in(code: CodeType) -> list[str]:
    """Return the names in the code of a function and of those inside it."""
    return [*code.co_names, *chain(*(_names_in(each) for each in code.co_consts if isinstance(each, CodeType)))]


MOST_KEPT = 2**16
"""Buffers, and tensors that hooks or trainers hold, are copied in advance if they have at most so many entries. Some
kernels, such as BatchNorm's, write to small buffers without a call that `WeightSnapshot` could intercept, and hooks
also run in backward passes. Larger buffers are tables, or the weights of quantized models."""


class WeightSnapshot(TorchFunctionMode):
    """Context manager: within the block, copy a parameter or buffer just before a function writes to it in place.

    `restore` writes the old values back. Some modules write to their parameters or buffers when they run: RWKV rescales
    its weights when it first runs in evaluation mode, and BatchNorm updates its moving averages. Small buffers are
    copied earlier, when the snapshot is created. Quantized layers may also give a weight other data or other
    attributes; the old ones are restored, unless the weights are sharded.

    Args:
        model: the model whose parameters and buffers are copied.
        probed: whether to copy small buffers in advance, and to restore what the hooks of the model hold.
    """

    def __init__(self, model: nn.Module, probed: bool = True) -> None:
        super().__init__()
        self._not_copied: dict[int, list[Tensor]] = {}
        """Maps the address of a storage to the tensors in this storage that have not been copied yet."""
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._data: list[tuple[Tensor, Tensor, bool]] = []
        """Tensors with the data, and the need of a gradient, that they had."""
        self._is_probed, is_local = probed, has_local_weights(model)
        modules, parameters, buffers = [*model.modules()], [*model.parameters()], [*model.buffers()]
        owners = [*map(vars, modules)]
        held: list[Any] = [*map(vars, parameters), *(own[PARAMETERS] for own in owners)]
        others = [own[name] for own in owners for name in own.keys() - OF_EVERY_MODULE]
        if probed:
            owners.append(global_hooks())
            others += [hook for own in owners for name in HOOKS for hook in own[name].values()]
        self._of_weights, self._of_modules = (
            ObjectSnapshot(roots if is_local else (), (*modules, *parameters)) for roots in (held, others)
        )
        inside = self._of_modules.tensors
        for tensor in (*parameters, *buffers, *self._of_weights.tensors, *inside):
            data = tensor.data
            if type(data) is not Tensor or not data.numel() or data.is_meta:
                continue
            self._data += [(tensor, data, tensor.requires_grad)] if is_local else []
            self._not_copied.setdefault(data.untyped_storage().data_ptr(), []).append(data)
        for tensor in (*buffers, *inside) if probed else ():
            if type(tensor) is Tensor and tensor.numel() <= MOST_KEPT and not tensor.is_meta:
                self._copy(tensor)

    def _copy(self, tensor: Tensor) -> None:
        """Copy the tensors in a storage, unless they were copied already."""
        written = self._not_copied.pop(tensor.untyped_storage().data_ptr(), [])
        self._copies += [(each, each.clone()) for each in written]

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if writes(getattr(function, "__name__", "")) and args and isinstance(args[0], Tensor):
            self._copy(args[0])
        return function(*args, **(kwargs or {}))

    def restore(self) -> bool:
        """Undo all changes, and return whether there were any."""
        is_changed = self._of_weights.restore()
        with torch.no_grad():
            for tensor, data, needs_gradient in self._data:
                if tensor.dtype != data.dtype or not tensor.is_set_to(data):
                    tensor.data, is_changed = data, True
                if tensor.requires_grad != needs_gradient:
                    tensor.requires_grad_(needs_gradient)
            for tensor, before in self._copies:
                if not torch.equal(tensor, before):
                    is_changed = True
                    tensor.copy_(before)
        if is_changed or self._is_probed:
            self._of_modules.restore()
        return is_changed


def writes(function: str) -> bool:
    """Return whether a torch function with this name changes its first argument in place, as `div_` and `__setitem__`
    do."""
    return function.endswith("_") and (not function.endswith("__") or function.startswith(("__i", "__seti")))


@contextmanager
def in_mode(model: nn.Module, training: bool, probed: bool = False) -> Iterator[None]:
    """Context manager: within the block, a model is in training or in evaluation mode. After the block, every module
    has its own mode again, so that modules that the user has frozen in evaluation mode stay frozen.

    The model's own `train` and `eval` change the modes, and all weights are then as before. Layers may merge weights in
    evaluation mode, for example, which cannot be undone exactly. If weights have changed, the modules are restored as
    well, since their attributes may say so.

    Args:
        model: the model.
        training: whether the mode is training mode.
        probed: whether to restore the modules in any case, with what the hooks of the model have collected.
    """
    before = [(module, module.training) for module in model.modules()]
    weights, modules = WeightSnapshot(model, probed), ModuleSnapshot(*model.modules())
    try:
        with weights:
            if any(mode != training for _, mode in before):
                (model.train if training else model.eval)()
        yield
    finally:
        with weights:
            for module, mode in before:
                if module.training != mode:  # with the modules inside it, which come later
                    (module.train if mode else module.eval)()
        for module, mode in before:  # some modules keep a mode
            module.training = mode
        if weights.restore() or probed:
            modules.restore()


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


RANDOM_SETTINGS = ("drop", "jitter", "noise")
"""Words in the names of settings. A setting whose name contains one of these words is a probability or a noise scale.
Examples are attention_dropout, layerdrop, router_jitter_noise and neftune_noise_alpha."""


@contextmanager
def without_randomness(model: PreTrainedModel, words: Sequence[str] = RANDOM_SETTINGS) -> Iterator[None]:
    """Context manager: within the block, a model's dropout, layer dropping and noise are switched off, as far as their
    probabilities and scales are settings with one of these words. Training mode is not changed."""
    with ExitStack() as stack:
        for owner in (*model.modules(), *configurations(model)):
            stack.enter_context(temporarily(owner, **dict.fromkeys(_random_settings(owner, words), 0.0)))
        yield


def _random_settings(owner: Any, words: Sequence[str]) -> list[str]:
    """Return the attributes of a module or a configuration that are probabilities or noise scales, except zeros."""
    also = "p" if isinstance(owner, Dropout) else None
    return [
        name
        for name, value in vars(owner).items()
        if type(value) is float and value and (name == also or any(part in name for part in words))
    ]


class ConstantDraws(TorchFunctionMode):
    """Context manager: within the block, uniform and normal random numbers are two values in turn along the width of
    embedded tokens, and one value elsewhere.

    Noise of which each token gets its own is then the same in any batch. Noise that depends on the size of the batch,
    as that of NEFTune, is not.
    """

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, name = function(*args, **(kwargs or {})), getattr(function, "__name__", "")
        names = _PARAMETERS.get(name.partition("_like")[0])
        if names is None:
            return found
        given = {} if name.startswith("rand") else dict(zip(names, args[1:], strict=False))
        of = {"from": 0.0, "to": 1.0, "mean": 0.0, "std": 1.0} | given | (kwargs or {})
        low, high = (of["from"], of["to"]) if "to" in names else (of["mean"] - of["std"], of["mean"] + of["std"])
        with torch.no_grad():  # new parameters of a model that changes its layers
            found.fill_(low + 0.75 * (high - low))
            if found.ndim > 2:
                found[..., ::2] = low + 0.25 * (high - low)
        return found


_PARAMETERS = {
    **dict.fromkeys(("uniform_", "rand"), ("from", "to")),
    **dict.fromkeys(("normal_", "randn"), ("mean", "std")),
}
"""The parameters of the distributions of random functions."""


def attention_of(model: PreTrainedModel) -> Attention:
    """Return pairs of a configuration and the name of its attention function, for all configurations in a model."""
    return attention_now([(config, None) for config in configurations(model)])


def attention_now(settings: Attention) -> Attention:
    """Return the configurations in `settings` with the names of the attention functions that they have now."""
    return [(config, getattr(config, ATTENTION, None)) for config, _ in settings]


def restore_attention(before: Attention) -> None:
    for config, attention in before:
        setattr(config, ATTENTION, attention)


@contextmanager
def use_attention(settings: Attention) -> Iterator[None]:
    """Context manager: within the block, configurations name the attention functions in `settings`."""
    before = attention_now(settings)
    restore_attention(settings)
    try:
        yield
    finally:
        restore_attention(before)
