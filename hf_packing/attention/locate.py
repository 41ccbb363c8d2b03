"""Find the module in which the outputs of packed documents begin to differ from what they should be."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from hf_packing.attention.cases import BatchCase, Run
from hf_packing.attention.token_axes import tensors_in

_ALWAYS_ALLOWED, _ALWAYS_ALLOWED_IN_HALF, _NOISE_FACTOR = 1e-4, 1e-2, 8
"""Sums of magnitudes of a document in the batch and of the same document alone differ if their difference is larger
than this share of them, and than this number times the effect of rounding."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


class _Record(NamedTuple):
    """What is known of each token in a call of a module: the sum of magnitudes in each tensor, float64 [tokens]."""

    inputs: list[Tensor]
    outputs: list[Tensor]


_Records = dict[tuple[str, int], _Record]
"""The calls in a forward, by the name of the module and the number of its earlier calls, in the order in which they
end."""

_Differs = Callable[[Tensor, Tensor], bool]


def locate_leak(case: BatchCase, compared: Literal["replaced", "alone"]) -> str:
    """Return the class and name of the module in which a difference begins; empty if there is no such module.

    The model runs again on the batch. The difference begins in the first module whose output differs. If the input of
    this module differs, too, then the difference begins in the code of the module that contains it.

    Args:
        case: the model and the batch.
        compared: whether the batch is compared with the batch in which segments are replaced, or with documents alone.
    """
    whole = torch.Size((1, case.trees.tokens))
    others: list[tuple[list[int], _Records]] = []

    @contextmanager
    def watch(documents: list[int], shape: torch.Size) -> Iterator[None]:
        with _recorded(case.model, shape) as records:
            yield
        others.append((documents, records))

    with case.undisturbed(), case.runner.eagerly():
        with _recorded(case.model, whole) as packed:
            found = case.run(gradients=case.training)
        if compared == "replaced":
            with watch([], whole):
                case.run(case.replaced)
        else:
            case.alone(watch=watch)
    ways = [(records, each) for documents, records in others for each in _ways(case, found, compared, documents)]
    places = (_first_difference(case.model, packed, records, differs) for records, differs in ways)
    return next(filter(None, places), "")


def _ways(case: BatchCase, found: Run, compared: str, documents: list[int]) -> Iterator[_Differs]:
    """Yield functions that compare the sums of all tokens of the batch with those of another call."""
    if compared == "replaced":
        kept = ~found.are_in(case.replaced)
        yield lambda packed, other: not torch.equal(packed[kept], other[kept])
    half = case.runner.dtype not in (torch.float32, torch.float64)
    allowed = _ALWAYS_ALLOWED_IN_HALF if half else _ALWAYS_ALLOWED
    for place, document in enumerate(documents):

        def differs(packed: Tensor, alone: Tensor, place: int = place, document: int = document) -> bool:
            rows = alone.chunk(2 * len(documents))
            exact, noisy = rows[place], rows[place + len(documents)]
            limit = max(allowed * exact.mean(), _NOISE_FACTOR * (noisy - exact).abs().max())
            return not bool((packed[case.tokens_of(document)] - exact).abs().max() <= limit)

        yield differs


@contextmanager
def _recorded(model: nn.Module, shape: torch.Size) -> Iterator[_Records]:
    """Context manager: within the block, record the calls of all modules, in the order in which the calls end.

    Args:
        model: the model.
        shape: numbers of rows and tokens in a forward of the model. Several packed rows count as one long row.
    """
    records: _Records = {}
    calls: Counter[str] = Counter()
    open_inputs: list[list[Tensor]] = []

    def begin(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        open_inputs.append(_sums((args, kwargs), shape))

    def end(name: str) -> Any:
        def record(_: nn.Module, __: Any, output: Any) -> None:
            inputs = open_inputs.pop()
            if outputs := _sums(output, shape):
                records[name, calls[name]] = _Record(inputs, outputs)
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


def _sums(value: Any, shape: torch.Size) -> list[Tensor]:
    """Return the sums of magnitudes for each token, float64 [tokens], of the tensors in `value` that have an entry for
    each token. A tensor that all rows share, such as a rotary embedding, is repeated for each row."""
    found = []
    for tensor in tensors_in(value):
        if tensor.dtype == torch.bool or tensor.ndim < 2:
            continue
        if tensor.shape[:2].numel() == shape.numel():
            tensor = tensor.flatten(0, 1)
        elif tensor.shape[:2] == (1, shape[1]):
            tensor = tensor.expand(shape[0], *tensor.shape[1:]).flatten(0, 1)
        if len(tensor) == shape.numel():
            values = tensor.detach().reshape(len(tensor), -1)
            values = values if values.is_floating_point() else values.double()
            found.append(values.norm(1, dim=1, dtype=torch.float64))
    return found


def _first_difference(model: nn.Module, left: _Records, right: _Records, differs: _Differs) -> str:
    def differ(ones: list[Tensor], others: list[Tensor]) -> bool:
        return len(ones) == len(others) and any(map(differs, ones, others))

    for key, record in left.items():
        other = right.get(key)
        if other is not None and differ(record.outputs, other.outputs):
            name = key[0]
            if differ(record.inputs, other.inputs):
                name = name.rpartition(".")[0]
                while name and isinstance(model.get_submodule(name), _CONTAINERS):
                    name = name.rpartition(".")[0]
            return f"{type(model.get_submodule(name)).__name__} ({name or 'the model itself'})"
    return ""
