"""Restore the state of a model and of random generators after a run of the model, and switch off randomness."""

import builtins
import gc
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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


class Contents:
    """Snapshot of the items of some dictionaries and other collections.

    It may serve many forwards, since most forwards change nothing, and since it is cheap to find that out: it takes
    milliseconds for 1,000 modules.

    Args:
        collections: the collections.
        without: the keys that are left alone in dictionaries.
    """

    def __init__(self, collections: Iterable[Any], without: Sequence[str] = ()) -> None:
        self._without = without
        self._before = [(each, self._items(each)) for each in collections]

    def _items(self, collection: Any) -> dict[Any, Any]:
        """Return the items of a collection by key or, in a list, by place."""
        items = dict(collection if isinstance(collection, dict) else enumerate(collection))
        for key in self._without:
            items.pop(key, None)
        return items

    def restore(self) -> dict[Any, Any]:
        """Put the same objects into the collections again, and return the new items by key or place; None for those
        that were removed."""
        changed: dict[Any, Any] = {}
        for each, before in self._before:
            now = self._items(each)
            if now.keys() == before.keys() and all(map(is_, now.values(), before.values())):
                continue
            changed |= {key: now.get(key) for key in {**before, **now} if now.get(key) is not before.get(key)}
            if isinstance(each, dict):
                for key in now:
                    del each[key]
                each.update(before)
            else:
                each.clear()
                (each.update if isinstance(each, set) else each.extend)(before.values())
        return changed


def contents_of(modules: Iterable[nn.Module]) -> Contents:
    """Return the attributes, buffers, hooks and inner modules of some modules, and the items of attributes that are
    collections. Values of tensors are not among them; `WeightSnapshot` restores these."""
    owners = [vars(module) for module in modules]
    dictionaries = [each for own in owners for each in (own, *(own[name] for name in CHANGED_IN_PLACE))]
    attributes = [own[name] for own in owners for name in own.keys() - OF_EVERY_MODULE]
    return Contents([*dictionaries, *(each for each in attributes if isinstance(each, _COLLECTIONS))], _NOT_RESTORED)


@contextmanager
def restored(*modules: nn.Module) -> Iterator[dict[str, Any]]:
    """Context manager: at the end of the block, undo the changes that the block has made in `contents_of` some modules.

    Args:
        *modules: the modules to restore. Inner modules are restored only if they are passed, too.

    Yields:
        An empty dictionary, which gets the names and the new values of what has changed at the end of the block.
    """
    contents = contents_of(modules)
    changed: dict[str, Any] = {}
    try:
        yield changed
    finally:
        changed |= contents.restore()


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
        self._collections: list[Any] = []
        """Collections, and dictionaries of attributes."""
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
        self._contents = Contents(self._collections)

    def _add(self, each: Any, known: set[int]) -> Iterable[Any]:
        """Keep what an object holds, and return the objects that it refers to."""
        if isinstance(each, Tensor):
            self.tensors.append(each)
            return ()
        if isinstance(each, _COLLECTIONS):
            self._collections += [each] if len(each) <= _HUGE else []
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
        self._collections.append(attributes)
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
        is_changed = bool(self._contents.restore())
        for undo in self._undo:
            undo()
        return is_changed


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


class TensorSnapshot(TorchFunctionMode):
    """Context manager: within the block, copy a tensor just before a function writes to it in place.

    `restore` writes the old values back.

    Args:
        tensors: the tensors, of which subclasses are left alone.
        in_advance: whether to copy small tensors now.
    """

    def __init__(self, tensors: Iterable[Tensor], in_advance: bool = True) -> None:
        super().__init__()
        self._not_copied: dict[int, list[Tensor]] = {}
        """Maps the address of a storage to the tensors in this storage that have not been copied yet."""
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._plain = [
            each
            for each in tensors
            if type(each.data) is Tensor and each.numel() and not each.is_meta and each.layout is torch.strided
        ]
        for each in self._plain:
            self._not_copied.setdefault(each.data.untyped_storage().data_ptr(), []).append(each.data)
        for each in self._plain if in_advance else ():
            if type(each) is Tensor and each.numel() <= MOST_KEPT:
                self._copy(each)

    def _copy(self, tensor: Tensor) -> None:
        """Copy the tensors in a storage, unless they were copied already."""
        written = self._not_copied.pop(tensor.untyped_storage().data_ptr(), [])
        self._copies += [(each, each.clone()) for each in written]

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if writes(getattr(function, "__name__", "")) and args and isinstance(args[0], Tensor):
            self._copy(args[0])
        return function(*args, **(kwargs or {}))

    @torch.no_grad()
    def restore(self) -> bool:
        """Write old values back, and return whether any had changed."""
        changed = [(tensor, before) for tensor, before in self._copies if not torch.equal(tensor, before)]
        for tensor, before in changed:
            tensor.copy_(before)
        return bool(changed)


class WeightSnapshot(TensorSnapshot):
    """Context manager: within the block, copy a parameter or buffer just before a function writes to it in place.

    Some modules write to their parameters or buffers when they run: RWKV rescales its weights when it first runs in
    evaluation mode, and BatchNorm updates its moving averages. Quantized layers may also give a weight other data or
    other attributes; the old ones are restored, unless the weights are sharded.

    Args:
        model: the model whose parameters and buffers are copied.
        probed: whether to copy small buffers in advance, and to restore what the hooks of the model hold.
    """

    def __init__(self, model: nn.Module, probed: bool = True) -> None:
        self._is_probed, is_local = probed, has_local_weights(model)
        modules, parameters = [*model.modules()], [*model.parameters()]
        owners = [*map(vars, modules)]
        held: list[Any] = [*map(vars, parameters), *(own[PARAMETERS] for own in owners)]
        others = [own[name] for own in owners for name in own.keys() - OF_EVERY_MODULE]
        if probed:
            others += [hook for own in (*owners, global_hooks()) for name in HOOKS for hook in own[name].values()]
        self._of_weights, self._of_modules = (
            ObjectSnapshot(roots if is_local else (), (*modules, *parameters)) for roots in (held, others)
        )
        inside = (*self._of_weights.tensors, *self._of_modules.tensors)
        super().__init__((*parameters, *model.buffers(), *inside), probed)
        self._data = [(each, each.data, each.requires_grad) for each in self._plain] if is_local else []
        """Tensors with the data, and the need of a gradient, that they had."""

    def restore(self) -> bool:
        """Undo all changes, and return whether there were any."""
        is_changed = self._of_weights.restore()
        with torch.no_grad():
            for tensor, data, needs_gradient in self._data:
                if tensor.dtype != data.dtype or not tensor.is_set_to(data):
                    tensor.data, is_changed = data, True
                if tensor.requires_grad != needs_gradient:
                    tensor.requires_grad_(needs_gradient)
        is_changed |= super().restore()
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
    weights, modules = WeightSnapshot(model, probed), contents_of(model.modules())
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
        of = dict(zip(names, (0.0, 1.0), strict=True)) | given | (kwargs or {})
        first, second = (of[each] for each in names)
        low, high = (first, second) if "to" in names else (first - second, first + second)
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
