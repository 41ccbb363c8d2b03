"""Find the axes of a module's arguments and outputs that run along the tokens of a row (the token axes)."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_packing.errors import PackingError

Path = tuple[str | int, ...]
"""The indices and keys that lead to a leaf in nested tuples, lists and dictionaries. A leaf is a value of any other
type."""

LARGEST_FINITE = 1e30
"""Values of larger magnitude count as infinite, since masks contain the most negative float in place of minus
infinity."""

_LINE_TOLERANCE = 0.01
"""An attention bias counts as linear if its distance from a straight line is at most this share of its largest value.
Biases in half precision are not exact."""


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
    """Return whether a mask [..., tokens, tokens] has a bias that grows with the position, as some ALiBi masks have.

    In such a mask, the top left and the bottom right quarter hide the same entries. The visible entries of the two
    quarters differ by a constant that is not 0.
    """
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
