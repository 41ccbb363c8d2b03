"""Cut parts of a row, such as segments, out of a module's arguments, and join the module's outputs for the parts."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_packing.attention.token_axes import Path, TokenAxes, dotted, leaves, map_leaves
from hf_packing.errors import PackingError

Place = tuple[int, int] | Tensor
"""The tokens of a part of a row: the indices (start, end) of a slice, with end excluded, or the index of every token,
int64 [tokens], in a row of trees, where the tokens of a path are not next to each other."""

Fill = Callable[[Tensor, tuple[int, ...]], Tensor]
"""A function that returns padding. Its arguments are the tensor to pad and the shape of the padding."""


def length_of(place: Place) -> int:
    """Return the number of tokens of a part of a row."""
    return len(place) if isinstance(place, Tensor) else place[1] - place[0]


def cut_inputs(value: Any, axes: TokenAxes, places: Sequence[Place], fill: Fill | None = None) -> Any:
    """Cut parts out of a module's arguments for a row, and return arguments for a batch with one row per part.

    Shorter parts are padded on the right to the length of the longest part.

    Args:
        value: nested arguments of the module for the whole row.
        axes: token axes of the arguments.
        places: the tokens of each part.
        fill: function that returns the padding; by default, the padding is zeros.

    Raises:
        PackingError: a tensor's first axis is a token axis, so that several parts cannot be stacked as rows.
    """
    lengths = list(map(length_of, places))
    longest = max(lengths)

    def cut_leaf(path: Path, leaf: Any) -> Any:
        along = axes.of(path, leaf)
        if not along:
            return leaf
        if not isinstance(leaf, Tensor):
            return longest
        if along[0] == 0 and len(places) > 1:
            raise PackingError(f"{axes.where}: expected {dotted(path)} to have an axis for rows before its token axis")
        parts = []
        for place, length in zip(places, lengths, strict=True):
            part = _take(leaf, along, place, length, axes.is_counting(path))
            if length < longest:
                for axis in along:
                    part = _pad(part, axis, longest - length, fill)
            parts.append(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return map_leaves(value, cut_leaf)


def _take(leaf: Tensor, along: tuple[int, ...], place: Place, length: int, from_first: bool) -> Tensor:
    """Return the part of a tensor for some tokens along its token axes.

    For tokens that are not next to each other, a mask with two token axes is taken from the first tokens of the row:
    the model made it from places in the row, and a window would be measured there, not along the path.
    """
    for axis in along:
        if not isinstance(place, Tensor):
            leaf = leaf.narrow(axis, 0 if from_first else place[0], length)
        elif from_first or len(along) > 1:
            leaf = leaf.narrow(axis, 0, length)
        else:
            leaf = leaf.index_select(axis, place)
    return leaf


def _pad(tensor: Tensor, axis: int, missing: int, fill: Fill | None) -> Tensor:
    if fill is None:
        return F.pad(tensor, [0, 0] * (tensor.ndim - axis - 1) + [0, missing])
    return torch.cat([tensor, fill(tensor, (*tensor.shape[:axis], missing, *tensor.shape[axis + 1 :]))], dim=axis)


def split_outputs(value: Any, axes: TokenAxes, lengths: Sequence[int]) -> list[dict[Path, Any]]:
    """Split the output of a module that was called with the batch from `cut_inputs` into one output for each slice.

    Returns:
        For each slice, a dictionary that maps the path of each leaf to the slice's part of the leaf, without padding. A
        leaf without token axes is not split: every slice gets the whole leaf.
    """
    parts: list[dict[Path, Any]] = [{} for _ in lengths]
    for path, leaf in leaves(value):
        along = axes.of(path, leaf)
        if not along:
            each: Sequence[Any] = [leaf] * len(lengths)
        elif not isinstance(leaf, Tensor):  # an integer that is the number of tokens
            each = lengths
        elif len(lengths) == 1:
            each = [leaf]
        else:
            if along[0] == 0 or leaf.shape[0] % len(lengths):
                raise PackingError(
                    f"{axes.where}: expected the module to return tensors whose first axis is the axis of rows, with a "
                    f"size that {len(lengths)} divides, got shape {list(leaf.shape)}"
                )
            each = leaf.chunk(len(lengths))
        for part, piece, length in zip(parts, each, lengths, strict=True):
            shortened = piece
            for axis in along if isinstance(leaf, Tensor) else ():
                shortened = shortened.narrow(axis, 0, length)
            part[path] = shortened
    return parts


def join_outputs(value: Any, axes: TokenAxes, parts: Sequence[dict[Path, Any]]) -> Any:
    """Join a module's outputs for the segments of a row, and return the output for the whole row.

    In a tensor with two token axes, such as attention weights, the entries for two tokens in different segments are 0.
    A leaf without token axes, such as a final state, is taken from the last segment. A single floating-point number
    must be the same for all segments.

    Args:
        value: output of one call of the module. The result is nested in the same way.
        axes: token axes of the module's outputs.
        parts: for each segment, a dictionary from path to leaf, as returned by `split_outputs`.
    """

    def join_leaf(path: Path, _: Any) -> Any:
        each = [part[path] for part in parts]
        along = axes.of(path, each[0])
        if not isinstance(each[0], Tensor):
            return sum(each) if along else each[-1]
        if not along:
            _check_equal_numbers(each, axes.where)
            return each[-1]
        if len(along) == 1:
            return torch.cat(each, dim=along[0])
        if len(along) > 2:
            raise PackingError(f"{axes.where}: the module returns a tensor with {len(along)} token axes, not 1 or 2")
        return _block_diagonal(each, *along)

    return map_leaves(value, join_leaf)


def _check_equal_numbers(each: Sequence[Tensor], where: str) -> None:
    """Raise PackingError if the tensors in `each`, one per segment, are single floating-point numbers that differ. The
    number for the whole row is then unknown."""
    if each[0].is_floating_point() and not each[0].ndim and any(not torch.equal(each[0], other) for other in each[1:]):
        raise PackingError(
            f"{where}: the module returns a number computed from all tokens of a row, such as the loss of a router; "
            "the number for a row cannot be computed from the numbers for the row's segments"
        )


def _block_diagonal(blocks: Sequence[Tensor], row_axis: int, column_axis: int) -> Tensor:
    width = sum(block.shape[column_axis] for block in blocks)
    before = 0
    padded = []
    for block in blocks:
        after = width - before - block.shape[column_axis]
        padding = [0] * (2 * block.ndim)
        padding[2 * (block.ndim - column_axis) - 2 : 2 * (block.ndim - column_axis)] = [before, after]
        padded.append(F.pad(block, padding))
        before += block.shape[column_axis]
    return torch.cat(padded, dim=row_axis)
