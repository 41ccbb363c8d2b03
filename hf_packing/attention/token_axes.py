"""Find the token axes of a module's arguments and outputs, which run along the tokens of a row.

Along these axes, parts of a row, such as segments, are cut out of the arguments, and the outputs for the parts are
joined.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_packing.attention.token_pairs import LINE_TOLERANCE, block_diagonal, grows_along_diagonal
from hf_packing.errors import PackingError

Path = tuple[str | int, ...]
"""The indices and keys that lead to a leaf in nested tuples, lists and dictionaries. A leaf is a value of any other
type."""

Place = tuple[int, int] | Tensor
"""The tokens of a part of a row: the indices (start, end) of a slice, with end excluded, or the index of every token,
int64 [tokens], in a row of trees, where the tokens of a path are not next to each other."""

Fill = Callable[[Tensor, tuple[int, ...]], Tensor]
"""A function that returns padding. Its arguments are the tensor to pad and the shape of the padding."""


def length_of(place: Place) -> int:
    """Return the number of tokens of a part of a row."""
    return len(place) if isinstance(place, Tensor) else place[1] - place[0]


def map_leaves(value: Any, change: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Return a copy of nested tuples, lists and dictionaries in which every leaf is replaced by change(path, leaf). A
    leaf is a value of any other type. If a value in a dictionary is None, it is not replaced."""
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
    """Yield (path, leaf) for every leaf in nested tuples, lists and dictionaries. A leaf is a value of any other
    type."""
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


def dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _is_integer(leaf: Any) -> bool:
    return isinstance(leaf, int) and not isinstance(leaf, bool)


class TokenAxes:
    """A record of the axes that run along the tokens of a row, in the arguments or in the outputs of a module.

    The record is made on a row whose number of tokens differs from every other size in the model. Every axis of this
    size is therefore a token axis. After `freeze`, rows may have any number of tokens, and the token axes of a tensor
    are looked up by the tensor's path and number of dimensions.

    Args:
        where: the module's class and name, for error messages.
        row_length: number of tokens in the row on which token axes are recorded.
    """

    def __init__(self, where: str, row_length: int) -> None:
        self.where = where
        self._row_length: int | None = row_length
        self._known: dict[tuple[Path, int], tuple[int, ...]] = {}
        """Maps (path, number of dimensions) of a tensor to the token axes. An integer is stored with -1 dimensions; its
        token axes are (0,) if it is the number of tokens, otherwise ()."""
        self._counting: set[Path] = set()
        """Paths of tensors that count the tokens of the row, such as positions. The count restarts in every segment: a
        segment gets the first values of such a tensor, wherever the segment is in the row."""

    @property
    def is_recording(self) -> bool:
        return self._row_length is not None

    def freeze(self) -> None:
        """End the recording of token axes."""
        self._row_length = None

    def record(self, value: Any) -> None:
        """Record the token axes of every leaf in `value` whose path and number of dimensions are not recorded yet."""
        for path, leaf in leaves(value):
            if (key := _key(path, leaf)) is None or key in self._known:
                continue
            self._known[key] = self._axes_by_size(leaf)
            if isinstance(leaf, Tensor) and counts_along(leaf, self._known[key]):
                self._counting.add(path)

    def of(self, path: Path, leaf: Any) -> tuple[int, ...]:
        """Return the token axes of a leaf: (0,) if it is an integer that is the number of tokens, () if it has none.

        Raises:
            PackingError: no tensor with the leaf's path and number of dimensions was recorded before `freeze`.
        """
        if (key := _key(path, leaf)) is None:
            return ()
        if key in self._known:
            return self._known[key]
        if self.is_recording:
            return self._axes_by_size(leaf)
        if isinstance(leaf, Tensor) and leaf.ndim:
            raise PackingError(
                f"{self.where}: the tensor {dotted(path)} of shape {list(leaf.shape)} did not occur when the model "
                "was patched, so its token axis is unknown; call the model with the usual inputs of training, such as "
                "input_ids and labels"
            )
        return ()

    def _axes_by_size(self, leaf: Any) -> tuple[int, ...]:
        sizes: Sequence[int] = leaf.shape if isinstance(leaf, Tensor) else [leaf]
        return tuple(axis for axis, size in enumerate(sizes) if size == self._row_length)

    def any_in(self, value: Any) -> bool:
        """Return whether any leaf of the nested `value` has a token axis."""
        return any(self.of(path, leaf) for path, leaf in leaves(value))

    def most_in_one_tensor(self, value: Any) -> int:
        """Return the largest number of token axes that a single tensor in `value` has; 0 if `value` has no tensors."""
        return max((len(self.of(path, leaf)) for path, leaf in leaves(value) if isinstance(leaf, Tensor)), default=0)

    def has_count(self, value: Any) -> bool:
        """Return whether any leaf of the nested `value` is an integer that stands for the number of tokens."""
        return any(_is_integer(leaf) and self.of(path, leaf) for path, leaf in leaves(value))

    def is_counting(self, path: Path) -> bool:
        return path in self._counting

    def check(self, value: Any) -> None:
        """Raise PackingError if `value` contains a tensor whose token axes were not recorded before `freeze`."""
        for path, leaf in leaves(value):
            self.of(path, leaf)

    def check_row(self, value: Any, tokens: int) -> None:
        """Raise PackingError if a token axis in `value` does not have the size `tokens`, or if integers that counted
        the tokens of the recorded row, as positions do, no longer rise by 1 from token to token in `value`."""
        for path, leaf in leaves(value):
            if not isinstance(leaf, Tensor):
                continue
            axes = self.of(path, leaf)
            for axis in axes:
                if leaf.shape[axis] != tokens:
                    raise PackingError(
                        f"{self.where}: expected {tokens} tokens along axis {axis} of the tensor {dotted(path)}, "
                        f"got shape {list(leaf.shape)}"
                    )
            is_float = leaf.is_floating_point()  # in half precision, large values rise in uneven steps
            if path in self._counting and not is_float and not counts_along(leaf, axes):
                raise PackingError(
                    f"{self.where}: expected the values of {dotted(path)} to rise by 1 from token to token, got other "
                    "steps; a padding token in a document may be the cause, since some models do not count padding"
                )


def _key(path: Path, leaf: Any) -> tuple[Path, int] | None:
    """Return the key (path, number of dimensions) under which `TokenAxes` stores a leaf's token axes. An integer has -1
    dimensions. Return None for a leaf that is neither a tensor nor an integer."""
    if isinstance(leaf, Tensor):
        return path, leaf.ndim
    return (path, -1) if _is_integer(leaf) else None


def counts_along(leaf: Tensor, axes: tuple[int, ...]) -> bool:
    """Return whether a tensor's values change in equal steps from token to token, as positions and ALiBi biases do.

    Integers have to rise by 1 from token to token. Floating-point values have to lie on a straight line that starts at
    0. A floating-point tensor with two token axes is a mask, and has to change in equal steps along its diagonal.
    """
    if leaf.dtype == torch.bool or not axes or leaf.shape[axes[0]] < 2:
        return False
    if len(axes) == 2 and leaf.is_floating_point():
        return grows_along_diagonal(leaf.detach().movedim(axes, (-2, -1)).double())
    if len(axes) > 1:
        return False
    tokens = leaf.shape[axes[0]]
    by_token = leaf.detach().movedim(axes[0], -1).reshape(-1, tokens)
    if not leaf.is_floating_point():
        return bool((by_token.diff() == 1).all()) and bool((by_token == by_token[:1]).all())
    last = by_token[:, -1:].double()
    line = torch.arange(tokens, device=leaf.device) * last / (tokens - 1)
    return bool(last.any()) and bool(((by_token - line).abs() <= LINE_TOLERANCE * last.abs()).all())


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
        return block_diagonal(each, *along)

    return map_leaves(value, join_leaf)


def _check_equal_numbers(each: Sequence[Tensor], where: str) -> None:
    """Raise PackingError if the tensors in `each`, one per segment, are single floating-point numbers that differ. The
    number for the whole row is then unknown."""
    if each[0].is_floating_point() and not each[0].ndim and any(not torch.equal(each[0], other) for other in each[1:]):
        raise PackingError(
            f"{where}: the module returns a number computed from all tokens of a row, such as the loss of a router; "
            "the number for a row cannot be computed from the numbers for the row's segments"
        )
