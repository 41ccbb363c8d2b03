"""Find the module in which the outputs of packed documents begin to differ from what they should be."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_packing.attention.cases import Case
from hf_packing.attention.token_axes import tensors_in

_ALWAYS_ALLOWED, _ALWAYS_ALLOWED_IN_HALF, _NOISE_FACTOR = 1e-4, 1e-2, 8
"""Sums of magnitudes of a document in the batch and of the same document alone differ if their difference is larger
than this share of them, and than this number times the effect of rounding."""


_Records = dict[str, tuple[list[Tensor], list[Tensor]]]
"""By the name of a module, what is known of its inputs and of its outputs for each token: the sum of magnitudes in each
tensor, float64 [tokens]. Modules are in the order in which their first calls end."""


def locate_leak(case: Case) -> str:
    """Return the class and name of the module in which a difference begins; empty if there is no such module.

    The model runs again on the batch, with segments replaced, and on a document alone. The difference begins in the
    first module whose output differs. If the input of this module differs, too, then the difference begins in the code
    of the module that contains it. All ranks make the same calls.
    """
    model, tokens, document = case.model, case.trees.tokens, case.sample[0]
    (replaced,) = case.replacements
    with case.undisturbed(), case.runner.eagerly():
        with _recorded(model, tokens) as packed:
            case.run()
        with _recorded(model, tokens) as changed:
            case.run(replaced)
        length = tokens if document is None else case.lengths[document]
        with case.runner.unpatched(), _recorded(model, length) as alone:
            case.run_alone(document)
        with case.runner.unpatched(), _recorded(model, length) as noisy:
            case.run_alone(document, noisy=True)
    segments = case.by_segment(torch.arange(tokens, device=case.tokens.device))
    kept = torch.cat([segments[each] for each in set(range(len(segments))).difference(case.may_notice(replaced))])
    found = _first_difference(model, _at(packed, kept), _at(changed, kept), _at(changed, kept), 0)
    if found or document is None:
        return found
    half = case.runner.dtype not in (torch.float32, torch.float64)
    allowed = _ALWAYS_ALLOWED_IN_HALF if half else _ALWAYS_ALLOWED
    return _first_difference(model, _at(packed, case.tokens_of(document)), alone, noisy, allowed)


@contextmanager
def _recorded(model: nn.Module, tokens: int) -> Iterator[_Records]:
    """Context manager: within the block, record the calls of all modules, in the order in which the calls end, in
    forwards of so many tokens."""
    records: _Records = {}

    def record(name: str) -> Callable[..., None]:
        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if outputs := _sums(output, tokens):
                records.setdefault(name, (_sums((args, kwargs), tokens), outputs))

        return after

    hooks = [each.register_forward_hook(record(name), with_kwargs=True) for name, each in model.named_modules()]
    try:
        yield records
    finally:
        for hook in hooks:
            hook.remove()


def _sums(value: Any, tokens: int) -> list[Tensor]:
    """Return the sums of magnitudes for each token, float64 [tokens], of the tensors in `value` that have an entry for
    each token. Several packed rows count as one long row."""
    found = []
    for tensor in tensors_in(value):
        if tensor.dtype != torch.bool and tensor.ndim > 1 and tokens in (len(tensor), tensor.shape[:2].numel()):
            values = tensor.detach().reshape(tokens, -1)
            values = values if values.is_floating_point() else values.double()
            found.append(values.norm(1, dim=1, dtype=torch.float64))
    return found


def _at(records: _Records, places: Tensor) -> _Records:
    """Return what is known of some tokens."""
    return {
        name: ([one[places] for one in given], [one[places] for one in made]) for name, (given, made) in records.items()
    }


def _first_difference(model: nn.Module, packed: _Records, exact: _Records, noisy: _Records, allowed: float) -> str:
    """Return the module in which the records `packed` begin to differ from `exact` by more than a share `allowed` of
    them, and by more than rounding explains, which is known from `noisy`."""

    def differ(ones: list[Tensor], others: list[Tensor], noises: list[Tensor]) -> bool:
        for one, other, noise in zip(ones, others, noises, strict=False):
            limit = max(allowed * other.mean(), _NOISE_FACTOR * (noise - other).abs().max())
            if not (one - other).abs().max() <= limit:
                return True
        return False

    for name in [each for each in packed if each in exact and each in noisy]:
        inputs, outputs = zip(packed[name], exact[name], noisy[name], strict=True)
        if differ(*outputs):
            if differ(*inputs):
                name = name.rpartition(".")[0]
                while name and isinstance(model.get_submodule(name), (nn.ModuleList, nn.ModuleDict)):
                    name = name.rpartition(".")[0]
            return f"{type(model.get_submodule(name)).__name__} ({name or 'the model itself'})"
    return ""
