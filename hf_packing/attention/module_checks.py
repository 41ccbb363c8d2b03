"""What the search tries on one module."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_packing.attention.by_segment import BySegment
from hf_packing.attention.packed_row import PackedRow
from hf_packing.attention.token_axes import LARGEST, Path, TokenAxes, copied, leaves, rebuild

TOLERANCE = 1e-4
"""Largest difference that rounding alone may make in what a module returns, as a share of the largest value."""

HALF_TOLERANCE = 0.05
"""In half precision, of a token's root mean square. Rounding may also send single tokens to another expert, so there a
module is held to differ only if most of the tokens beside borders do."""


def differ(left: Any, right: Any, axes: TokenAxes | None = None, slices: Sequence[tuple[int, int]] = ()) -> bool:
    """Whether two outputs are apart by more than rounding.

    Args:
        left: nested tensors.
        right: the same nest.
        axes: of a whole row; tensors without tokens are left out then.
        slices: the row's segments; half precision is compared beside their borders then.
    """
    for (path, one), (_, other) in zip(leaves(left), leaves(right), strict=True):
        if not isinstance(one, Tensor) or (axes is not None and not axes.of(path, one)):
            continue
        if one.shape != other.shape:
            return True
        if not one.is_floating_point():
            if not torch.equal(one, other):
                return True
        elif one.dtype in (torch.float32, torch.float64) or axes is None:
            if not close(one, other):
                return True
        elif differ_beside_borders(one, other, axes.of(path, one)[0], slices):
            return True
    return False


def close(left: Tensor, right: Tensor) -> bool:
    tolerance = TOLERANCE if left.dtype in (torch.float32, torch.float64) else HALF_TOLERANCE
    numbers = left.abs() < LARGEST
    if not torch.equal(numbers, right.abs() < LARGEST):
        return False
    left, right = left[numbers].double(), right[numbers].double()
    return not left.numel() or bool((left - right).abs().max() <= tolerance * left.abs().max())


def differ_beside_borders(left: Tensor, right: Tensor, axis: int, slices: Sequence[tuple[int, int]]) -> bool:
    left, right = (tensor.double().movedim(axis, 0).flatten(1) for tensor in (left, right))
    apart = (left - right).pow(2).mean(1).sqrt() / left.pow(2).mean(1).sqrt().clamp(min=1e-12)
    differing = ~(apart <= HALF_TOLERANCE)
    first = differing[[start for start, _ in slices[1:]]]
    last = differing[[end - 1 for _, end in slices[:-1]]]
    return any(float(tokens.double().mean()) > 0.5 for tokens in (first, last))


LONGEST_TABLE = 8192
"""Learned positions are a few hundred or thousand; a row of many more tokens costs too much to try."""

FAR = 2**20
"""A position beyond the training length of every model, where scaled rotary embeddings have changed their scale."""


def one_by_one(wrapper: BySegment, given: Any, row: PackedRow) -> Any:
    """What a module returns when it is called once for each segment."""
    return wrapper.joined(*wrapper.parts(copied(given), row.calls("none"), len(row.lengths)))


def differs_on_other_rows(wrapper: BySegment, given: Any, row: PackedRow, words: nn.Module | None) -> bool:
    """Whether a module that is segment-local on the probe's row is not so on every row.

    Args:
        wrapper: of the module.
        given: its arguments.
        row: the probe's.
        words: the model's embedding of tokens.
    """
    return counts_by_itself(wrapper, given, row) or fails_on_long_rows(wrapper, given, row, words)


def counts_by_itself(wrapper: BySegment, given: Any, row: PackedRow) -> bool:
    """Whether a module counts along the row, and what it makes of that changes far from its beginning.

    Such as a temperature of attention that grows with the position, by none in the first 8192.
    """
    if is_stack(wrapper.module):
        return False
    try:
        near = wrapper.forward(*copied(given)[0], **copied(given)[1])
        with CountingFromAfar(row.tokens):
            far = wrapper.forward(*copied(given)[0], **copied(given)[1])
    except Exception:  # what indexes by its count is no such module
        return False
    return differ(near, far, wrapper.step.returned, row.slices)


def fails_on_long_rows(wrapper: BySegment, given: Any, row: PackedRow, words: nn.Module | None) -> bool:
    """Whether a module that makes embeddings of positions fails where a row is longer than they are."""
    module = wrapper.module
    if is_stack(module):
        return False
    tables = [m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding) and m is not words]
    longest = max(tables, default=0)
    if not row.tokens < longest <= LONGEST_TABLE:
        return False

    def repeat(path: Path, leaf: Any) -> Any:
        times = longest // row.tokens + 1
        along = wrapper.step.given.of(path, leaf)
        if not isinstance(leaf, Tensor):
            return leaf * times if along else leaf
        return leaf.repeat([times if axis in along else 1 for axis in range(leaf.ndim)])

    args, kwargs = rebuild(given, repeat)
    try:
        wrapper.forward(*args, **kwargs)
    except Exception:  # whatever it raises, it is the table's end
        return True
    return False


def depends_on_far_positions(wrapper: BySegment, given: Any, row: PackedRow) -> bool:
    """Whether a far position in one segment changes what the module makes of the others.

    Rotary embeddings whose scale grows with the longest position do, and may remember it.
    """
    if next(wrapper.module.parameters(), None) is not None:
        return False
    positions = row.position_ids[0].tolist()

    def moved(_: Path, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.is_floating_point() or leaf.dtype == torch.bool or not leaf.ndim:
            return leaf
        if leaf.shape[-1] != len(positions) or leaf.flatten()[-len(positions) :].tolist() != positions:
            return leaf
        far = leaf.clone()
        far[..., -1] = FAR
        return far

    elsewhere = rebuild(given, moved)
    if all(a is b for (_, a), (_, b) in zip(leaves(given), leaves(elsewhere), strict=True)):
        return False
    wrapper.step.remembers = True
    try:
        return differ(wrapper.fresh(*elsewhere), one_by_one(wrapper, elsewhere, row), wrapper.step.returned, row.slices)
    except Exception:  # it takes no such positions, so they do not occur
        return False
    finally:
        wrapper.step.remembers = False


class CountingFromAfar(TorchFunctionMode):
    """Whoever counts as many tokens as the row has counts from a far position on."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result + FAR if function is torch.arange and result.shape == (self.tokens,) else result


def is_stack(module: nn.Module) -> bool:
    """Whether it is more than a layer: what it makes of positions, its layers are given."""
    return any(isinstance(inner, nn.ModuleList) for inner in module.modules())


class RankingTokens(TorchFunctionMode):
    """Notices who picks the best of a row's tokens: which of several equal ones depends on how many there are."""

    NAMES = ("topk", "sort", "argsort", "argmax", "argmin", "kthvalue")

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.seen = False

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in self.NAMES:
            self.seen |= any(self.tokens in tensor.shape[-1:] for tensor in args[:1])
        return function(*args, **(kwargs or {}))
