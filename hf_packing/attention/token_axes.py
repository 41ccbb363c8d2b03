"""Find the token axes of a module's arguments and outputs, which run along the tokens of a row.

Along these axes, parts of a row, such as segments, are cut out of the arguments, and the outputs for the parts are
joined.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_packing.errors import PackingError

Path = tuple[str | int, ...]
"""The indices and keys that lead to a leaf in nested tuples, lists and dictionaries. A leaf is a value of any other
type."""

Place = tuple[int, int] | Tensor
"""The tokens of a part of a row: the indices (start, end) of a slice, with end excluded, or the index of every token,
int64 [tokens], in a row of trees, where the tokens of a path are not next to each other."""

Fill = Callable[[Tensor, list[int]], Tensor]
"""A function that returns padding. Its arguments are the tensor to pad and the shape of the padding."""

_STEP_TOLERANCE = 0.01
"""Steps of attention biases count as equal up to this share of what they rise by in all. Biases in half precision are
not exact."""


def cat(parts: list[Tensor], dim: int) -> Tensor:
    """Concatenate tensors along the axis `dim`. A single tensor is returned unchanged, without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def length_of(place: Place) -> int:
    """Return the number of tokens of a part of a row."""
    return len(place) if isinstance(place, Tensor) else place[1] - place[0]


def map_leaves(value: Any, change: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Return a copy of nested tuples, lists and dictionaries in which every leaf is replaced by change(path, leaf). A
    leaf is a value of any other type. If a value in a dictionary is None, it is not replaced."""
    if isinstance(value, (tuple, list)):
        items = [map_leaves(item, change, (*path, number)) for number, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):  # such as the outputs of transformers' models
        named = {name: map_leaves(item, change, (*path, name)) for name, item in value.items() if item is not None}
        return {**value, **named} if type(value) is dict else type(value)(**named)
    return change(path, value)


def map_tensors(value: Any, change: Callable[[Path, Tensor], Any]) -> Any:
    """Return what `map_leaves` returns if only tensors are replaced."""
    return map_leaves(value, lambda path, leaf: change(path, leaf) if isinstance(leaf, Tensor) else leaf)


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield (path, leaf) for every leaf in nested tuples, lists and dictionaries. A leaf is a value of any other
    type."""
    if isinstance(value, (tuple, list, dict)):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, (*path, name))
    else:
        yield path, value


def tensors_in(value: Any) -> list[Tensor]:
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, Tensor)]


def detached_copy(value: Any) -> Any:
    return map_tensors(value, lambda _, leaf: leaf.detach().clone())


@dataclass
class TokenAxes:
    """A record of the axes that run along the tokens of a row, in the arguments or in the outputs of a module.

    The record is made on a row whose number of tokens differs from every other size in the model. Every axis of this
    size is therefore a token axis. Once the recording has ended, rows may have any number of tokens, and the token axes
    of a tensor are looked up by the tensor's path and number of dimensions.

    Args:
        where: the module's class, for error messages.
        row_length: number of tokens in the row on which token axes are recorded; None once the recording has ended.
    """

    where: str
    row_length: int | None
    known: dict[tuple[Path, int], tuple[int, ...]] = field(default_factory=dict)
    """Maps (path, number of dimensions) of a tensor to the token axes. An integer is stored with -1 dimensions; its
    token axes are (0,) if it is the number of tokens, otherwise ()."""
    counting: set[Path] = field(default_factory=set)
    """Paths of tensors that count the tokens of the row, such as positions. The count restarts in every segment: a
    segment gets the first values of such a tensor, wherever the segment is in the row."""

    def of(self, path: Path, leaf: Any) -> tuple[int, ...]:
        """Return the token axes of a leaf: (0,) if it is an integer that is the number of tokens, () if it has none.

        Raises:
            PackingError: no tensor with the leaf's path and number of dimensions was recorded.
        """
        if isinstance(leaf, Tensor):
            key, sizes = (path, leaf.ndim), list(leaf.shape)
        elif type(leaf) is int:
            key, sizes = (path, -1), [leaf]
        else:
            return ()
        if key not in self.known and self.row_length is not None:
            self.known[key] = tuple(axis for axis, size in enumerate(sizes) if size == self.row_length)
            if isinstance(leaf, Tensor) and counts_along(leaf, self.known[key]):
                self.counting.add(path)
        if key not in self.known and key[1] > 0:
            raise PackingError(
                f"{self.where}: the tensor {_dotted(path)} of shape {sizes} did not occur when the model was patched, "
                "so its token axis is unknown; call the model with the usual inputs of training. A model that makes "
                "inputs of the labels, as those with an encoder and a decoder do, cannot train on packed rows"
            )
        return self.known.get(key, ())

    def found_in(self, value: Any) -> list[tuple[Path, Any, tuple[int, ...]]]:
        """Return (path, leaf, token axes) of every leaf in `value` that has token axes. While token axes are recorded,
        record those of every leaf."""
        found = [(path, leaf, self.of(path, leaf)) for path, leaf in leaves(value)]
        return [each for each in found if each[2]]

    def check_row(self, value: Any, tokens: int) -> None:
        """Raise PackingError if a token axis in `value` does not have the size `tokens`, or if integers that counted
        the tokens of the recorded row, as positions do, no longer rise by 1 from token to token in `value`."""
        for path, leaf, axes in self.found_in(value):
            if not isinstance(leaf, Tensor):
                continue
            if wrong := [axis for axis in axes if leaf.shape[axis] != tokens]:
                raise PackingError(
                    f"{self.where}: expected {tokens} tokens along axis {wrong[0]} of the tensor {_dotted(path)}, got "
                    f"shape {list(leaf.shape)}"
                )
            # in half precision, large values rise in uneven steps
            if path in self.counting and not leaf.is_floating_point() and not counts_along(leaf, axes):
                raise PackingError(
                    f"{self.where}: expected the values of {_dotted(path)} to rise by 1 from token to token, got other "
                    "steps; a padding token in a document may be the cause, since some models do not count padding"
                )


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def counts_along(leaf: Tensor, axes: tuple[int, ...]) -> bool:
    """Return whether a tensor's values change in equal steps from token to token, as positions and ALiBi biases do.

    Integers have to rise by 1, and floating-point values by any steps but 0, which may differ, as from head to head. In
    a tensor with two token axes, such as a mask, the values are those of each token for itself.
    """
    if not axes or len(axes) > 2 or leaf.shape[axes[0]] < 2:
        return False
    by_token = leaf.diagonal(0, *axes) if len(axes) == 2 else leaf.movedim(axes[0], -1)
    values = by_token.detach().reshape(-1, leaf.shape[axes[0]]).double()
    first, places = values[:, :1], torch.arange(values.shape[1], device=leaf.device)
    if not leaf.is_floating_point():
        return bool((values == first[:1] + places).all())
    rise = values[:, -1:] - first
    uneven = values - first - rise * places / places[-1]
    return bool(rise.any()) and bool((uneven.abs() <= _STEP_TOLERANCE * rise.abs()).all())


def cut_inputs(value: Any, axes: TokenAxes, places: Sequence[Place], fill: Fill = Tensor.new_zeros) -> Any:
    """Cut parts out of a module's arguments for a row, and return arguments for a batch with one row per part.

    Shorter parts are padded on the right to the length of the longest part.

    Args:
        value: nested arguments of the module for the whole row.
        axes: token axes of the arguments.
        places: the tokens of each part.
        fill: function that returns the padding.
    """
    longest = max(map(length_of, places))

    def cut_leaf(path: Path, leaf: Any) -> Any:
        along = axes.of(path, leaf)
        if not along:
            return leaf
        if not isinstance(leaf, Tensor):
            return longest
        parts = []
        for place in places:
            # for tokens that are not next to each other, a mask with two token axes is taken from the first tokens of
            # the row: the model made it from places in the row, and a window would be measured there
            from_first = path in axes.counting or (len(along) > 1 and isinstance(place, Tensor))
            part = leaf
            for axis in along:
                part = _take(part, axis, (0, length_of(place)) if from_first else place)
                shape = list(part.shape)
                shape[axis] = longest - shape[axis]
                if shape[axis]:
                    part = torch.cat([part, fill(part, shape)], dim=axis)
            parts.append(part)
        return cat(parts, 0)

    return map_leaves(value, cut_leaf)


def _take(leaf: Tensor, axis: int, place: Place) -> Tensor:
    if isinstance(place, Tensor):
        return leaf.index_select(axis, place)
    return leaf.narrow(axis, place[0], place[1] - place[0])


def join_outputs(calls: Sequence[tuple[Sequence[int], Sequence[int], Any]], axes: TokenAxes) -> Any:
    """Join what calls of a module have returned for the parts of a row, and return the output for the whole row.

    In a tensor with two token axes, such as attention weights, the entries for two tokens in different parts are 0. A
    leaf without token axes, such as a final state, is taken from the call with the last part.

    Args:
        calls: for each call with a batch from `cut_inputs`: the numbers of its parts in the row, the numbers of tokens
            in these parts, and the output of the module.
        axes: token axes of the module's outputs.
    """
    outputs = [dict(leaves(output)) for *_, output in calls]

    def join_leaf(path: Path, last: Any) -> Any:
        along = axes.of(path, last)
        if not along:
            return last
        if not isinstance(last, Tensor):
            return sum(sum(lengths) for _, lengths, _ in calls)
        pieces = {}
        for (numbers, lengths, _), output in zip(calls, outputs, strict=True):
            for number, rows, length in zip(numbers, output[path].chunk(len(lengths)), lengths, strict=True):
                for axis in along:
                    rows = rows.narrow(axis, 0, length)
                pieces[number] = rows
        parts = [pieces[number] for number in sorted(pieces)]
        return cat(parts, along[0]) if len(along) == 1 else _block_diagonal(parts, *along)

    return map_leaves(max(calls, key=lambda call: max(call[0]))[2], join_leaf)


def _block_diagonal(blocks: Sequence[Tensor], row_axis: int, column_axis: int) -> Tensor:
    """Join the parts of a tensor with two token axes, one per segment. The entries for two tokens in different segments
    are 0."""
    sizes, beyond = [block.shape[column_axis] for block in blocks], [0, 0] * (blocks[0].ndim - 1 - column_axis)
    return torch.cat(
        [F.pad(block, (*beyond, sum(sizes[:number]), sum(sizes[number + 1 :]))) for number, block in enumerate(blocks)],
        dim=row_axis,
    )
