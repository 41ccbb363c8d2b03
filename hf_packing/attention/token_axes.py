"""Tensors in nested arguments: which of their axes are tokens, cutting segments out of them, and joining them again."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_packing.errors import PackingError

Path = tuple[str | int, ...]

Fill = Callable[[Tensor, tuple[int, ...]], Tensor]


def spelled(path: Path) -> str:
    return ".".join(map(str, path))


def rebuild(value: Any, change: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """The same nest of tuples, lists and dictionaries, with every leaf changed."""
    if isinstance(value, tuple):
        items = [rebuild(item, change, (*path, number)) for number, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return [rebuild(item, change, (*path, number)) for number, item in enumerate(value)]
    if isinstance(value, dict):  # the outputs of transformers' models among them
        named = {name: rebuild(item, change, (*path, name)) for name, item in value.items() if item is not None}
        return {**value, **named} if type(value) is dict else type(value)(**named)
    return change(path, value)


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, (tuple, list)):
        for number, item in enumerate(value):
            yield from leaves(item, (*path, number))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from leaves(item, (*path, name))
    else:
        yield path, value


def tensors(value: Any) -> list[Tensor]:
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, Tensor)]


def copied(value: Any) -> Any:
    return rebuild(value, lambda _, leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf)


def is_count(leaf: Any) -> bool:
    return isinstance(leaf, int) and not isinstance(leaf, bool)


LARGEST = 1e30
"""Masks stand for minus infinity with the smallest float."""

UNEVEN = 0.01
"""How far from a line a bias may be, as a share of its last value: it may be in half precision."""


class TokenAxes:
    """Which axes of a module's arguments, or of what it returns, are the tokens of a row.

    While `row` is set, to a number of tokens that nothing else in the model has, they are learned by their size. After
    that they are known by where a tensor stands, since any other axis may have as many entries as a row has tokens.
    """

    def __init__(self, where: str, row: int | None = None) -> None:
        self.where = where
        self.row = row
        self.known: dict[tuple[Path, int], tuple[int, ...]] = {}
        """By path and number of dimensions; a count of tokens, which has none, is a token axis 0 of -1 dimensions."""
        self.counting: set[Path] = set()
        """Tensors that count the tokens along the row; in every segment they count from the start of the row."""

    def of(self, path: Path, leaf: Any) -> tuple[int, ...]:
        """The token axes of a tensor; (0,) for an integer that counts tokens, () for any other."""
        if isinstance(leaf, Tensor):
            key = path, leaf.ndim
            if key not in self.known and self.row is None and leaf.ndim:
                raise PackingError(
                    f"{self.where}: it has not been seen with {spelled(path)} of shape {list(leaf.shape)} "
                    "when the model was patched, so its tokens cannot be told from its other axes"
                )
            sizes: Sequence[int] = leaf.shape
        elif is_count(leaf):
            key, sizes = (path, -1), [leaf]
        else:
            return ()
        if key not in self.known:
            if self.row is None:
                return ()
            self.known[key] = tuple(axis for axis, size in enumerate(sizes) if size == self.row)
            if isinstance(leaf, Tensor) and counts(leaf, self.known[key]):
                self.counting.add(path)
        return self.known[key]

    def anywhere_in(self, value: Any) -> bool:
        return len([path for path, leaf in leaves(value) if self.of(path, leaf)]) > 0  # of all: they are learned

    def most_in_one(self, value: Any) -> int:
        return max((len(self.of(path, leaf)) for path, leaf in leaves(value) if isinstance(leaf, Tensor)), default=0)

    def counts_in(self, value: Any) -> bool:
        return len([path for path, leaf in leaves(value) if is_count(leaf) and self.of(path, leaf)]) > 0

    def check(self, value: Any, tokens: int) -> None:
        for path, leaf in leaves(value):
            if isinstance(leaf, Tensor):
                for axis in self.of(path, leaf):
                    if leaf.shape[axis] != tokens:
                        raise PackingError(
                            f"{self.where}: expected {tokens} tokens along axis {axis} of {spelled(path)}, "
                            f"got shape {list(leaf.shape)}"
                        )
                is_float = leaf.is_floating_point()  # in half precision, far steps are uneven
                if path in self.counting and not is_float and not counts(leaf, self.of(path, leaf)):
                    raise PackingError(
                        f"{self.where}: expected positions that count the tokens of a row in {spelled(path)}; is there "
                        "a padding token in a document?"
                    )


def counts(leaf: Tensor, along: tuple[int, ...]) -> bool:
    """Whether values go up in equal steps from token to token: positions, or the bias of ALiBi that begins at 0."""
    if leaf.dtype == torch.bool or not along or leaf.shape[along[0]] < 2:
        return False
    if len(along) == 2 and leaf.is_floating_point():
        return grows_along_the_diagonal(leaf.detach().movedim(along, (-2, -1)).double())
    if len(along) > 1:
        return False
    tokens = leaf.shape[along[0]]
    by_token = leaf.detach().movedim(along[0], -1).reshape(-1, tokens)
    if not leaf.is_floating_point():
        return bool((by_token.diff() == 1).all()) and bool((by_token == by_token[:1]).all())
    last = by_token[:, -1:].double()
    line = torch.arange(tokens, device=leaf.device) * last / (tokens - 1)
    return bool(last.any()) and bool(((by_token - line).abs() <= UNEVEN * last.abs()).all())


def grows_along_the_diagonal(mask: Tensor) -> bool:
    """Whether a mask hides the same in every block along its diagonal, and adds a number to one that grows: ALiBi."""
    size = mask.shape[-1] // 2
    first, last = mask[..., :size, :size], mask[..., -size:, -size:]
    seen = first.abs() < LARGEST
    if not torch.equal(seen, last.abs() < LARGEST):
        return False
    added = torch.where(seen, last - first, 0)
    most = added.abs().amax((-2, -1), keepdim=True)
    return bool(most.any()) and bool((torch.where(seen, added.abs() - most, 0).abs() <= UNEVEN * most).all())


def cut(value: Any, axes: TokenAxes, slices: Sequence[tuple[int, int]], fill: Fill | None = None) -> Any:
    """Arguments for a call with these slices of a row alone, each a row of the batch, padded on the right with zeros.

    Args:
        value: arguments for the row.
        axes: where their tokens are.
        slices: (start, end) of each.
        fill: makes the padding, from a tensor and the padding's shape, where it is not zeros.

    Raises:
        PackingError: several slices of a tensor that has no axis for rows before its tokens.
    """
    longest = max(end - start for start, end in slices)

    def slices_of(path: Path, leaf: Any) -> Any:
        along = axes.of(path, leaf)
        if not along:
            return leaf
        if not isinstance(leaf, Tensor):
            return longest
        if along[0] == 0 and len(slices) > 1:
            raise PackingError(f"{axes.where}: its {spelled(path)} has no axis for rows")
        parts = []
        for start, end in slices:
            part = leaf
            for axis in along:
                part = part.narrow(axis, 0 if path in axes.counting else start, end - start)
            if end - start < longest:
                for axis in along:
                    part = padded(part, axis, longest - (end - start), fill)
            parts.append(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return rebuild(value, slices_of)


def padded(tensor: Tensor, axis: int, missing: int, fill: Fill | None) -> Tensor:
    if fill is None:
        return F.pad(tensor, [0, 0] * (tensor.ndim - axis - 1) + [0, missing])
    return torch.cat([tensor, fill(tensor, (*tensor.shape[:axis], missing, *tensor.shape[axis + 1 :]))], dim=axis)


def apart(value: Any, axes: TokenAxes, lengths: Sequence[int]) -> list[dict[Path, Any]]:
    """What a call with several slices returned, as what each slice alone would have returned."""
    parts: list[dict[Path, Any]] = [{} for _ in lengths]
    for path, leaf in leaves(value):
        along = axes.of(path, leaf)
        if not isinstance(leaf, Tensor) or not along:
            each: Sequence[Any] = [leaf] * len(lengths)
        elif len(lengths) == 1:
            each = [leaf]
        else:
            if along[0] == 0 or leaf.shape[0] % len(lengths):
                raise PackingError(f"{axes.where}: it returns a tensor without an axis for rows")
            each = leaf.chunk(len(lengths))
        for part, piece, length in zip(parts, each, lengths, strict=True):
            shortened = piece
            for axis in along if isinstance(piece, Tensor) else ():
                shortened = shortened.narrow(axis, 0, length)
            part[path] = shortened
    return parts


def joined(value: Any, axes: TokenAxes, parts: Sequence[dict[Path, Any]]) -> Any:
    """One nest like `value`, with the tokens of all parts in a row.

    A tensor with two token axes, such as attention weights, has zeros between parts. Of what has no token axis, such as
    a last state, the last is taken, but for single numbers, which have to be the same in all.
    """

    def join(path: Path, _: Any) -> Any:
        each = [part[path] for part in parts]
        along = axes.of(path, each[0])
        if not isinstance(each[0], Tensor):
            return sum(each) if along else each[-1]
        if not along:
            refuse_numbers_that_differ(each, axes.where)
            return each[-1]
        if len(along) == 1:
            return torch.cat(each, dim=along[0])
        if len(along) > 2:
            raise PackingError(f"{axes.where}: it returns a tensor with {len(along)} token axes")
        return along_the_diagonal(each, *along)

    return rebuild(value, join)


def refuse_numbers_that_differ(each: Sequence[Tensor], where: str) -> None:
    """Raise PackingError for single numbers that differ between parts: those of the last would stand for all."""
    if each[0].is_floating_point() and not each[0].ndim and any(not torch.equal(each[0], other) for other in each[1:]):
        raise PackingError(
            f"{where}: it returns a number made of all tokens that it is given, such as the loss of a router, which "
            "cannot be made of those of the segments"
        )


def along_the_diagonal(blocks: Sequence[Tensor], rows: int, columns: int) -> Tensor:
    width = sum(block.shape[columns] for block in blocks)
    before = 0
    padded = []
    for block in blocks:
        after = width - before - block.shape[columns]
        padding = [0] * (2 * block.ndim)
        padding[2 * (block.ndim - columns) - 2 : 2 * (block.ndim - columns)] = [before, after]
        padded.append(F.pad(block, padding))
        before += block.shape[columns]
    return torch.cat(padded, dim=rows)
