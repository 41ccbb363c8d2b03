"""Nested arguments of modules: find their token axes, cut segments out of them, and join segments again."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_packing.errors import PackingError

Path = tuple[str | int, ...]
"""Where a leaf is in nested tuples, lists and dictionaries."""

Fill = Callable[[Tensor, tuple[int, ...]], Tensor]
"""Makes padding, from the tensor to pad and the shape of the padding."""

LARGEST_FINITE = 1e30
"""Larger values stand for infinity: masks are filled with the smallest float."""

_LINE_TOLERANCE = 0.01
"""How far a bias may be from a straight line, as a share of its last value. Biases in half precision are not exact."""


def map_leaves(value: Any, change: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Return the same nest of tuples, lists and dictionaries, with every leaf replaced by change(path, leaf)."""
    if isinstance(value, tuple):
        items = [map_leaves(item, change, (*path, number)) for number, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return [map_leaves(item, change, (*path, number)) for number, item in enumerate(value)]
    if isinstance(value, dict):  # such as the outputs of transformers' models
        named = {name: map_leaves(item, change, (*path, name)) for name, item in value.items() if item is not None}
        return {**value, **named} if type(value) is dict else type(value)(**named)
    return change(path, value)


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield (path, leaf) for every leaf."""
    if isinstance(value, (tuple, list)):
        for number, item in enumerate(value):
            yield from leaves(item, (*path, number))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from leaves(item, (*path, name))
    else:
        yield path, value


def tensors_in(value: Any) -> list[Tensor]:
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, Tensor)]


def detached_copy(value: Any) -> Any:
    return map_leaves(value, lambda _, leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf)


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _is_integer(leaf: Any) -> bool:
    return isinstance(leaf, int) and not isinstance(leaf, bool)


class TokenAxes:
    """Which axes of a module's arguments, or of its outputs, are the tokens of a row.

    Axes are recorded on one row whose length no other axis of the model has, so that an axis of that size is an axis of
    tokens. After `freeze`, a tensor's axes are known by its place among the arguments, whatever its sizes are.

    Args:
        where: the module, for messages.
        row_length: tokens of the row on which axes are recorded.
    """

    def __init__(self, where: str, row_length: int) -> None:
        self.where = where
        self._row_length: int | None = row_length
        self._known: dict[tuple[Path, int], tuple[int, ...]] = {}
        """By path and number of dimensions. An integer has -1 dimensions; if it counts tokens, its axes are (0,)."""
        self._counting: set[Path] = set()
        """Tensors that count tokens along the row. A segment gets their first values, not those at its own place."""

    @property
    def is_recording(self) -> bool:
        return self._row_length is not None

    def freeze(self) -> None:
        """End the recording."""
        self._row_length = None

    def record(self, value: Any) -> None:
        """Learn the token axes of every leaf that has not been seen before."""
        for path, leaf in leaves(value):
            if (key := _key(path, leaf)) is None or key in self._known:
                continue
            self._known[key] = self._axes_by_size(leaf)
            if isinstance(leaf, Tensor) and counts_along(leaf, self._known[key]):
                self._counting.add(path)

    def of(self, path: Path, leaf: Any) -> tuple[int, ...]:
        """Return the token axes of a leaf: (0,) for an integer that counts tokens, () for anything without tokens.

        Raises:
            PackingError: a tensor that was not there when axes were recorded.
        """
        if (key := _key(path, leaf)) is None:
            return ()
        if key in self._known:
            return self._known[key]
        if self.is_recording:
            return self._axes_by_size(leaf)
        if isinstance(leaf, Tensor) and leaf.ndim:
            raise PackingError(
                f"{self.where}: {_dotted(path)} of shape {list(leaf.shape)} was not seen when the model was patched, "
                "so its axis of tokens is not known"
            )
        return ()

    def _axes_by_size(self, leaf: Any) -> tuple[int, ...]:
        sizes: Sequence[int] = leaf.shape if isinstance(leaf, Tensor) else [leaf]
        return tuple(axis for axis, size in enumerate(sizes) if size == self._row_length)

    def any_in(self, value: Any) -> bool:
        """Return whether any leaf has tokens."""
        return any(self.of(path, leaf) for path, leaf in leaves(value))

    def most_in_one_tensor(self, value: Any) -> int:
        """Return the largest number of token axes that a tensor has."""
        return max((len(self.of(path, leaf)) for path, leaf in leaves(value) if isinstance(leaf, Tensor)), default=0)

    def has_count(self, value: Any) -> bool:
        """Return whether an integer is the number of tokens."""
        return any(_is_integer(leaf) and self.of(path, leaf) for path, leaf in leaves(value))

    def is_counting(self, path: Path) -> bool:
        return path in self._counting

    def check(self, value: Any) -> None:
        """Raise PackingError for a tensor that was not there when axes were recorded."""
        for path, leaf in leaves(value):
            self.of(path, leaf)

    def check_row(self, value: Any, tokens: int) -> None:
        """Raise PackingError for a tensor whose axes of tokens have another size, or that no longer counts tokens."""
        for path, leaf in leaves(value):
            if not isinstance(leaf, Tensor):
                continue
            axes = self.of(path, leaf)
            for axis in axes:
                if leaf.shape[axis] != tokens:
                    raise PackingError(
                        f"{self.where}: expected {tokens} tokens along axis {axis} of {_dotted(path)}, "
                        f"got shape {list(leaf.shape)}"
                    )
            is_float = leaf.is_floating_point()  # in half precision, the steps of large values are uneven
            if path in self._counting and not is_float and not counts_along(leaf, axes):
                raise PackingError(
                    f"{self.where}: expected {_dotted(path)} to count the tokens of a row; is there a padding token in "
                    "a document?"
                )


def _key(path: Path, leaf: Any) -> tuple[Path, int] | None:
    """Return the key of a leaf that may have tokens, or None."""
    if isinstance(leaf, Tensor):
        return path, leaf.ndim
    return (path, -1) if _is_integer(leaf) else None


def counts_along(leaf: Tensor, axes: tuple[int, ...]) -> bool:
    """Return whether values rise in equal steps from token to token: positions, or a bias of ALiBi that starts at 0."""
    if leaf.dtype == torch.bool or not axes or leaf.shape[axes[0]] < 2:
        return False
    if len(axes) == 2 and leaf.is_floating_point():
        return _grows_along_diagonal(leaf.detach().movedim(axes, (-2, -1)).double())
    if len(axes) > 1:
        return False
    tokens = leaf.shape[axes[0]]
    by_token = leaf.detach().movedim(axes[0], -1).reshape(-1, tokens)
    if not leaf.is_floating_point():
        return bool((by_token.diff() == 1).all()) and bool((by_token == by_token[:1]).all())
    last = by_token[:, -1:].double()
    line = torch.arange(tokens, device=leaf.device) * last / (tokens - 1)
    return bool(last.any()) and bool(((by_token - line).abs() <= _LINE_TOLERANCE * last.abs()).all())


def _grows_along_diagonal(mask: Tensor) -> bool:
    """Return whether the blocks on a mask's diagonal hide the same tokens, and differ by a constant, as with ALiBi."""
    size = mask.shape[-1] // 2
    first, last = mask[..., :size, :size], mask[..., -size:, -size:]
    visible = first.abs() < LARGEST_FINITE
    if not torch.equal(visible, last.abs() < LARGEST_FINITE):
        return False
    added = torch.where(visible, last - first, 0)
    most = added.abs().amax((-2, -1), keepdim=True)
    return bool(most.any()) and bool(
        (torch.where(visible, added.abs() - most, 0).abs() <= _LINE_TOLERANCE * most).all()
    )


def cut_inputs(value: Any, axes: TokenAxes, slices: Sequence[tuple[int, int]], fill: Fill | None = None) -> Any:
    """Cut slices out of a row's arguments, and stack them as the rows of a batch, padded on the right.

    Args:
        value: arguments for the row.
        axes: where their tokens are.
        slices: (start, end) of each slice.
        fill: makes the padding; zeros by default.

    Raises:
        PackingError: several slices of a tensor that has no axis for rows before its tokens.
    """
    longest = max(end - start for start, end in slices)

    def cut_leaf(path: Path, leaf: Any) -> Any:
        along = axes.of(path, leaf)
        if not along:
            return leaf
        if not isinstance(leaf, Tensor):
            return longest
        if along[0] == 0 and len(slices) > 1:
            raise PackingError(f"{axes.where}: its {_dotted(path)} has no axis for rows")
        parts = []
        for start, end in slices:
            part = leaf
            for axis in along:
                part = part.narrow(axis, 0 if axes.is_counting(path) else start, end - start)
            if end - start < longest:
                for axis in along:
                    part = _pad(part, axis, longest - (end - start), fill)
            parts.append(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return map_leaves(value, cut_leaf)


def _pad(tensor: Tensor, axis: int, missing: int, fill: Fill | None) -> Tensor:
    if fill is None:
        return F.pad(tensor, [0, 0] * (tensor.ndim - axis - 1) + [0, missing])
    return torch.cat([tensor, fill(tensor, (*tensor.shape[:axis], missing, *tensor.shape[axis + 1 :]))], dim=axis)


def split_outputs(value: Any, axes: TokenAxes, lengths: Sequence[int]) -> list[dict[Path, Any]]:
    """Split what a call with several slices returned into what each slice would have returned alone.

    Returns:
        For each slice, its leaves by path, without padding.
    """
    parts: list[dict[Path, Any]] = [{} for _ in lengths]
    for path, leaf in leaves(value):
        along = axes.of(path, leaf)
        if not along:
            each: Sequence[Any] = [leaf] * len(lengths)
        elif not isinstance(leaf, Tensor):  # a count of tokens
            each = lengths
        elif len(lengths) == 1:
            each = [leaf]
        else:
            if along[0] == 0 or leaf.shape[0] % len(lengths):
                raise PackingError(f"{axes.where}: it returns a tensor without an axis for rows")
            each = leaf.chunk(len(lengths))
        for part, piece, length in zip(parts, each, lengths, strict=True):
            shortened = piece
            for axis in along if isinstance(leaf, Tensor) else ():
                shortened = shortened.narrow(axis, 0, length)
            part[path] = shortened
    return parts


def join_outputs(value: Any, axes: TokenAxes, parts: Sequence[dict[Path, Any]]) -> Any:
    """Join the parts of all segments into one nest like `value`.

    A tensor with two token axes, such as attention weights, gets zeros between segments. For a leaf without tokens,
    such as a last state, the last part is used. Single numbers must be the same in all parts.
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
            raise PackingError(f"{axes.where}: it returns a tensor with {len(along)} axes of tokens")
        return _block_diagonal(each, *along)

    return map_leaves(value, join_leaf)


def _check_equal_numbers(each: Sequence[Tensor], where: str) -> None:
    """Raise PackingError for single numbers that differ between parts, since none of them is right for the row."""
    if each[0].is_floating_point() and not each[0].ndim and any(not torch.equal(each[0], other) for other in each[1:]):
        raise PackingError(
            f"{where}: it returns a number computed from all its tokens, such as the loss of a router; the number for "
            "a row cannot be computed from the numbers for its segments"
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
