"""Check whether a module's output for a whole packed row equals the module's joined outputs for the row's segments.

`Search` runs these checks on the modules of a model, each with up to a dozen calls of the module.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_packing.attention.by_segment import SegmentedForward
from hf_packing.attention.layout import Layout, SharedCall, Sharing, calls_of
from hf_packing.attention.token_axes import (
    LARGEST_FINITE,
    Path,
    TokenAxes,
    detached_copy,
    leaves,
    map_leaves,
)
from hf_packing.errors import PackingError

_TOLERANCE = 1e-4
"""Largest difference that rounding may cause in a module's float32 or float64 output, as a share of the largest value
in the output."""

_HALF_TOLERANCE = 0.05
"""Largest difference that rounding may cause in half precision. For the outputs of a whole row, the limit is a share of
the root mean square of a token's output. For other outputs, the limit is a share of the largest value.

In a mixture of experts, rounding may also route a few tokens to other experts. Two outputs of a whole row therefore
count as different only if the difference exceeds the limit at more than half of the tokens directly before borders, or
at more than half of the tokens directly after borders.
"""

_LONGEST_TABLE = 8192
"""Largest table of learned positions that is tested, in positions. A test of a larger table would take too long, and
most tables have only a few hundred or a few thousand positions."""

_FAR = 2**20
"""A position far beyond the lengths on which models are usually trained. At such a position, scaled rotary embeddings
use another scale than at short lengths."""


class WatchFunctions(TorchFunctionMode):
    """Context manager: within the block, watch the torch functions that modules call on a row.

    - `F.dropout` always returns a new tensor. If dropout is off, it normally returns its input itself, but the search
      tells tensors apart by object identity, so every module has to return a new tensor.
    - `ranks` becomes True if code ranks the tokens of the row, as torch.topk does. If several tokens have equal scores,
      padding may change which of these tokens ranks first.
    - `offset` is added to every result of torch.arange that has one number for each token of the row.
    """

    _RANKING = ("topk", "sort", "argsort", "argmax", "argmin", "kthvalue")

    def __init__(self, tokens: int, offset: int = 0) -> None:
        super().__init__()
        self.tokens, self.offset, self.ranks = tokens, offset, False

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in self._RANKING:
            self.ranks |= any(self.tokens in tensor.shape[-1:] for tensor in args[:1])
        result = function(*args, **(kwargs or {}))
        if function is F.dropout:
            return result.clone()
        is_count = self.offset and function is torch.arange and result.shape == (self.tokens,)
        return result + self.offset if is_count else result


def run_one_by_one(forward: SegmentedForward, inputs: Any, row: Layout) -> Any:
    """Call a module once for each segment of a packed row, and return the joined outputs."""
    return forward.join(*forward.run_segments(detached_copy(inputs), calls_of(row, "none"), len(row.lengths)))


def _run_whole(forward: SegmentedForward, inputs: Any) -> Any:
    """Call a module once on the whole packed row, and return the output."""
    return forward.run_restored(*detached_copy(inputs))


def outputs_differ(
    left: Any, right: Any, axes: TokenAxes | None = None, slices: Sequence[tuple[int, int]] = ()
) -> bool:
    """Return whether two outputs of a module differ by more than rounding explains.

    Args:
        left: tensors in nested tuples, lists or dictionaries.
        right: tensors that are nested in the same way as in `left`.
        axes: token axes of the outputs for a whole row. If given, tensors without a token axis are ignored, and
            half-precision tensors are compared only at the tokens next to borders.
        slices: token indices (start, end) of each segment in the row; used only together with `axes`.
    """
    for (path, one), (_, other) in zip(leaves(left), leaves(right), strict=True):
        along = axes.of(path, one) if axes is not None else (0,)
        if isinstance(one, Tensor) and along and not _agree(one, other, along[0], slices):
            return True
    return False


def _agree(one: Tensor, other: Tensor, axis: int, slices: Sequence[tuple[int, int]]) -> bool:
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    is_half = one.dtype not in (torch.float32, torch.float64)
    if slices and is_half:
        return _agree_beside_borders(one, other, axis, slices)
    finite = one.abs() < LARGEST_FINITE
    if not torch.equal(finite, other.abs() < LARGEST_FINITE):
        return False
    one, other = one[finite].double(), other[finite].double()
    limit = _HALF_TOLERANCE if is_half else _TOLERANCE
    return not one.numel() or bool((one - other).abs().max() <= limit * one.abs().max())


def _agree_beside_borders(left: Tensor, right: Tensor, axis: int, slices: Sequence[tuple[int, int]]) -> bool:
    left, right = (tensor.double().movedim(axis, 0).flatten(1) for tensor in (left, right))
    apart = (left - right).pow(2).mean(1).sqrt() / left.pow(2).mean(1).sqrt().clamp(min=1e-12)
    differs = ~(apart <= _HALF_TOLERANCE)
    beside = [start for start, _ in slices[1:]], [end - 1 for _, end in slices[:-1]]
    return not any(float(differs[tokens].double().mean()) > 0.5 for tokens in beside)


def depends_on_length(forward: SegmentedForward, inputs: Any, row: Layout, embedding: nn.Module | None) -> bool:
    """Return whether a module works differently on long rows: because it counts tokens with torch.arange, as an
    attention layer does whose temperature grows with the position after the first 8192 tokens; or because it fails on
    rows that are longer than its table of learned positions. The model's `embedding` of tokens is no such table."""
    with suppress(Exception):  # large counts may be no indices of a table
        near = _run_whole(forward, inputs)
        with WatchFunctions(row.tokens, offset=_FAR):
            far = _run_whole(forward, inputs)
        if outputs_differ(near, far, forward.plan.outputs, row.slices):
            return True
    embeddings = (each for each in forward.module.modules() if isinstance(each, nn.Embedding) and each is not embedding)
    longest = max((each.num_embeddings for each in embeddings), default=0)
    if not row.tokens < longest <= _LONGEST_TABLE:
        return False
    times = longest // row.tokens + 1

    def repeat(path: Path, leaf: Any) -> Any:
        along = forward.plan.inputs.of(path, leaf)
        if not isinstance(leaf, Tensor):
            return leaf * times if along else leaf
        return leaf.repeat([times if axis in along else 1 for axis in range(leaf.ndim)])

    try:
        _run_whole(forward, map_leaves(inputs, repeat))
    except Exception:  # an error means that the row is too long for the table
        return True
    return False


def depends_on_far_positions(forward: SegmentedForward, inputs: Any, row: Layout) -> bool:
    """Return whether a very large position in one segment changes the module's output for other segments.

    An example is a rotary embedding whose scale depends on the largest position in the row. The result is False for a
    module that has parameters, or does not get the row's positions as an input.
    """
    if next(forward.module.parameters(), None) is not None:
        return False
    positions, has_moved = row.position_ids[0], False

    def move_last(_: Path, leaf: Any) -> Any:
        nonlocal has_moved
        is_count = isinstance(leaf, Tensor) and leaf.dtype in (torch.int32, torch.int64) and leaf.ndim > 0
        if not is_count or leaf.shape[-1] != row.tokens or not (leaf.reshape(-1, row.tokens)[-1] == positions).all():
            return leaf
        far, has_moved = leaf.clone(), True
        far[..., -1] = _FAR
        return far

    moved = map_leaves(inputs, move_last)
    if not has_moved:
        return False
    stateful = SegmentedForward(forward.module, replace(forward.plan, is_stateful=True))
    try:
        together, apart = _run_whole(stateful, moved), run_one_by_one(stateful, moved, row)
        return outputs_differ(together, apart, forward.plan.outputs, row.slices)
    except Exception:  # the module does not accept far positions, so far positions do not occur
        return False


def find_sharing(forward: SegmentedForward, inputs: Any, row: Layout) -> Sharing:
    """Return which segments of a row may go through a module in one call (see `Sharing`): those that have the same
    outputs together as in separate calls."""
    plan, shortest, device = forward.plan, min(row.lengths), row.cu_seq_lens.device
    with WatchFunctions(row.tokens) as watched:
        _run_whole(forward, inputs)
    may_be_ragged = (
        not watched.ranks
        and not plan.is_stateful
        and all(isinstance(leaf, Tensor) and len(axes) < 2 for _, leaf, axes in plan.inputs.found_in(inputs))
    )
    trials: list[tuple[Sharing, list[tuple[int, int]]]] = [("ragged", row.slices)] if may_be_ragged else []
    trials.append(("equal", [(start, start + shortest) for start, _ in row.slices]))
    for sharing, slices in trials:
        together = [SharedCall.of(list(range(len(slices))), slices, device)]
        one_by_one = [SharedCall.of([number], [place], device) for number, place in enumerate(slices)]
        with suppress(Exception):  # the module does not support batches of segments
            _, alone = forward.run_segments(detached_copy(inputs), one_by_one, len(slices))
            shared = [
                forward.run_segments(detached_copy(inputs), together, len(slices), fill)[1]
                for fill in (Tensor.new_zeros, _noise)
            ]
            if not any(outputs_differ(alone, each) for each in shared):
                return sharing
    return "none"


def _noise(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return random padding, which changes the output of any module that reads tokens after the end of a segment."""
    generator = torch.Generator().manual_seed(0)
    if not tensor.is_floating_point():  # tokens or positions: draw from the values in the tensor
        return tensor.flatten()[torch.randint(tensor.numel(), shape, generator=generator).to(tensor.device)]
    return (torch.randn(shape, generator=generator) * _LARGE).to(tensor)


_LARGE = 10.0
"""Standard deviation of random padding, several times as large as hidden states."""


def refuse_row_outputs(output: Any, by_segment: Any, axes: TokenAxes, changed: Mapping[str, Any]) -> None:
    """Raise PackingError if a module computes a tensor without a token axis from all tokens of a row, such as the loss
    of a router, and returns it or stores it in an attribute. It cannot be joined from the tensors of single segments.

    Args:
        output: the module's output for the whole row.
        by_segment: the joined outputs of the module for the segments.
        axes: token axes of the output.
        changed: the attributes that a call of the module has changed, with their new values.
    """
    of_row = f"{axes.where}: expected no number computed from all tokens of a row, such as the loss of a router, got"
    floats = {name: each for name, each in changed.items() if isinstance(each, Tensor) and each.is_floating_point()}
    if stored := [name for name, each in floats.items() if not each.ndim]:
        raise PackingError(f"{of_row} one in the attribute {stored[0]}")
    for (path, whole), (_, joined) in zip(leaves(output), leaves(by_segment), strict=True):
        if not isinstance(whole, Tensor) or axes.of(path, whole):
            continue
        is_state = 1 in whole.shape  # for the next call, whose values may differ between the row and the segments
        if whole.shape != joined.shape or (not is_state and outputs_differ(whole, joined)):
            raise PackingError(f"{of_row} an output of shape {list(whole.shape)}")
