"""Find the module in which the outputs of packed documents begin to differ from what they should be."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from hf_packing.attention.batch_runs import BatchRuns
from hf_packing.attention.token_axes import map_leaves, tensors_in
from hf_packing.attention.tolerance import ALWAYS_ALLOWED

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype with the same number of bytes as a floating-point dtype."""

_PLACES = 16
"""Largest number of tokens of a document at which the outputs of all modules are kept in memory."""

_NOISE_FACTOR, _CLEAR_IN_HALF_PRECISION = 8, 0.2
"""A module's outputs differ if their difference is larger than this number times the effect of rounding. In half
precision, the difference is also larger than this number of standard deviations."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


class _Record(NamedTuple):
    """A call of a module whose output has one entry for each token of the batch."""

    name: str
    inputs: list[Tensor]
    outputs: list[Tensor]


_Key = tuple[str, int]
"""The name of a module, and the number of its earlier calls in the same forward."""

_Differs = Callable[[list[Tensor], list[Tensor]], bool]


Compared = Literal["replaced", "gradients", "alone"]
"""What is compared: the batch and the batch in which documents are replaced; the gradients of documents at their own
tokens and at other tokens; or the documents in the batch and the same documents alone."""


def locate_leak(runs: BatchRuns, compared: Compared) -> str:
    """Return the class and name of the module in which a difference begins; empty if there is no such module.

    The model runs again on the batch. The difference begins in the first module whose output differs. If the input of
    this module differs, too, then the difference begins in the code of the module that contains it.

    Args:
        runs: the model and the batch.
        compared: the comparison that shows the difference.
    """
    if compared == "gradients":
        return _of_gradients(runs)
    return _against_documents_alone(runs) if compared == "alone" else _against_replaced_documents(runs)


def _against_replaced_documents(runs: BatchRuns) -> str:
    kept, shape = runs.kept, (1, runs.tokens)

    def checksum(values: Tensor) -> Tensor:
        """Return the sum of the bits of each kept token as integers: int64 [kept tokens]."""
        rows = values[kept].reshape(len(kept), -1)
        return rows.view(_INTEGERS[values.element_size()]).sum(1, dtype=torch.int64)

    with runs.undisturbed(), runs.eagerly():
        with _recorded(runs.inner, shape, checksum) as before:
            runs.packed(gradients=runs.training)
        with _recorded(runs.inner, shape, checksum) as after:
            runs.with_replaced()

    def differs(left: list[Tensor], right: list[Tensor]) -> bool:
        return not all(map(torch.equal, left, right))

    return _first_difference(runs.inner, before, after, differs)


def _against_documents_alone(runs: BatchRuns) -> str:
    samples = runs.sampled_documents()
    places = [_spread_out(runs.lengths[documents[0]]) for documents in samples]
    in_batch = [runs.tokens_of(group[0])[own] for group, own in zip(samples, places, strict=True)]
    found: list[dict[_Key, _Record]] = []

    @contextmanager
    def watch(_: list[int], shape: tuple[int, int]) -> Iterator[None]:
        if len(found) == len(samples):  # a call that counts for other ranks only
            yield
            return
        own, half = places[len(found)], shape[0] * shape[1] // 2
        with _recorded(runs.inner, shape, lambda values: _as_floats(values[torch.cat([own, half + own])])) as records:
            yield
        found.append(records)

    together = torch.cat(in_batch or [torch.arange(0)])
    with runs.undisturbed(), runs.eagerly():
        runs.alone(watch=watch)
        shape = 1, runs.tokens
        with _recorded(runs.inner, shape, lambda values: _as_floats(values[together])) as packed:
            runs.packed(gradients=runs.training)
    least = ALWAYS_ALLOWED.get(runs.dtype, _CLEAR_IN_HALF_PRECISION)
    begin = 0
    for own, records in zip(places, found, strict=True):
        part = slice(begin, begin + len(own))
        begin += len(own)

        def differs(packed: list[Tensor], alone: list[Tensor], part: slice = part) -> bool:
            return any(_is_apart(left[part], right, least) for left, right in zip(packed, alone, strict=True))

        if place := _first_difference(runs.inner, packed, records, differs):
            return place
    return ""


def _is_apart(packed: Tensor, alone: Tensor, least: float) -> bool:
    """Return whether rounding does not explain the difference between a document packed and the document alone.

    Args:
        packed: values of the packed document, float [tokens, width].
        alone: values of the document alone, and then of its noisy copy, float [2 * tokens, width].
        least: largest difference that is always allowed, in standard deviations.
    """
    exact, noisy = alone.chunk(2)
    unit = float(exact.std()) or 1.0
    noise = float((noisy - exact).abs().max()) / unit
    return not float((packed - exact).abs().max()) / unit <= max(least, _NOISE_FACTOR * noise)


def _spread_out(length: int) -> Tensor:
    """Return the indices of at most `_PLACES` tokens of a document, from the first to the last token."""
    return torch.linspace(0, length - 1, min(length, _PLACES)).long()


def _as_floats(values: Tensor) -> Tensor:
    return values.detach().reshape(len(values), -1).float().cpu()


@contextmanager
def _recorded(
    model: nn.Module, shape: tuple[int, int], pick: Callable[[Tensor], Tensor]
) -> Iterator[dict[_Key, _Record]]:
    """Context manager: within the block, record the calls of all modules, in the order in which the calls end.

    Args:
        model: the model.
        shape: numbers of rows and tokens in a forward of the model. Several packed rows count as one long row.
        pick: function that reduces a tensor [tokens, ...] to what is recorded.
    """
    records: dict[_Key, _Record] = {}
    calls: Counter[str] = Counter()
    open_inputs: list[list[Tensor]] = []

    def begin(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        open_inputs.append([pick(each) for each in _per_token((args, kwargs), shape)])

    def end(name: str) -> Any:
        def record(_: nn.Module, __: Any, output: Any) -> None:
            inputs, outputs = open_inputs.pop(), [pick(each) for each in _per_token(output, shape)]
            if outputs:
                records[name, calls[name]] = _Record(name, inputs, outputs)
                calls[name] += 1

        return record

    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(begin, with_kwargs=True))
        hooks.append(module.register_forward_hook(end(name)))
    try:
        yield records
    finally:
        for hook in hooks:
            hook.remove()


def _per_token(value: Any, shape: tuple[int, int]) -> list[Tensor]:
    """Return the tensors in `value` that have an entry for each token, as tensors [tokens, ...].

    A tensor that all rows share, such as a rotary embedding, is repeated for each row.
    """
    rows, tokens = shape
    found = []
    for tensor in tensors_in(value):
        if tensor.dtype != torch.bool and tensor.ndim > 1:
            if tensor.shape[:2].numel() == rows * tokens:
                found.append(tensor.flatten(0, 1))
            elif tensor.shape[:2] == (1, tokens):
                found.append(tensor.expand(rows, *tensor.shape[1:]).flatten(0, 1))
            elif len(tensor) == rows * tokens:
                found.append(tensor)
    return found


def _first_difference(
    model: nn.Module, left: dict[_Key, _Record], right: dict[_Key, _Record], differs: _Differs
) -> str:
    for key, record in left.items():
        other = right.get(key)
        if other is None or len(record.outputs) != len(other.outputs) or not differs(record.outputs, other.outputs):
            continue
        name = key[0]
        if record.inputs and len(record.inputs) == len(other.inputs) and differs(record.inputs, other.inputs):
            name = name.rpartition(".")[0]
            while name and isinstance(model.get_submodule(name), _CONTAINERS):
                name = name.rpartition(".")[0]
        return _described(model, name)
    return ""


def _described(model: nn.Module, name: str) -> str:
    return f"{type(model.get_submodule(name)).__name__} ({name or 'the model itself'})"


def _of_gradients(runs: BatchRuns) -> str:
    """Return the innermost module that passes gradients on to other documents, but does not get such gradients."""
    graded, shape = set(runs.graded.tolist()), (1, runs.tokens)
    others = torch.tensor([token for token in range(shape[1]) if token not in graded])
    leaks_in: set[str] = set()
    leaks_out: set[str] = set()
    order: list[str] = []

    def watch(value: Any, name: str, leaking: set[str]) -> None:
        def see(gradient: Tensor) -> None:
            if any(bool(each[others].any()) for each in _per_token(gradient, shape)):
                leaking.add(name)

        for tensor in tensors_in(value):
            if tensor.requires_grad:
                tensor.register_hook(see)  # type: ignore[no-untyped-call]

    def begin(name: str) -> Any:
        def replace(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            # other modules may get the same tensors, so the gradients of this module need tensors of their own
            own = map_leaves((args, kwargs), lambda _, leaf: leaf.view_as(leaf) if isinstance(leaf, Tensor) else leaf)
            watch(own, name, leaks_out)
            return own

        return replace

    def end(name: str) -> Any:
        def see(_: nn.Module, __: Any, output: Any) -> None:
            order.append(name)
            watch(output, name, leaks_in)

        return see

    hooks = []
    for name, module in runs.inner.named_modules():
        hooks.append(module.register_forward_pre_hook(begin(name), with_kwargs=True))
        hooks.append(module.register_forward_hook(end(name)))
    try:
        with runs.undisturbed(), runs.eagerly():
            runs.packed(gradients=True)
    finally:
        for hook in hooks:
            hook.remove()
    found = [name for name in order if name in leaks_out and name not in leaks_in]
    return _described(runs.inner, found[0]) if found else ""
