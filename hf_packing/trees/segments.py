"""The segments of a row of trees, in which documents share their prefixes.

A tree is made of documents that begin with the same tokens. Its segments are the runs of tokens that the same documents
share. Each segment stands once, and has a parent: the segment before it in its documents. Segments are in depth-first
order, so that everything below a segment directly follows it. A document is a path from a root down to the segment in
which it ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_packing.columns import PARENTS, SEGMENT_LENGTHS
from hf_packing.errors import PackingError

Places = npt.NDArray[np.int64]
"""Indices of tokens in a row."""


@dataclass(frozen=True, eq=False)
class TreeSegments:
    """The lengths and parents of the segments of one or more trees, laid end to end.

    Args:
        lengths: number of tokens in each segment.
        parents: index of each segment's parent; -1 for a root.

    Raises:
        PackingError: a segment is empty, or its parent is neither the segment before it nor above that one.

    Example:
        >>> trees = TreeSegments((3, 2, 1, 4), (-1, 0, 0, -1))
        >>> trees.position_ids.tolist()
        [0, 1, 2, 3, 4, 3, 0, 1, 2, 3]
        >>> trees.path_of(2).tolist()
        [0, 1, 2, 5]
    """

    lengths: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        _check(self.lengths, self.parents)

    @classmethod
    def from_arrays(cls, lengths: Any, parents: Any) -> "TreeSegments":
        """Return the TreeSegments of two lists or arrays of integers."""
        return cls(tuple(np.asarray(lengths).tolist()), tuple(np.asarray(parents).tolist()))

    @property
    def tokens(self) -> int:
        """The number of tokens of all segments."""
        return int(self.begins[-1])

    @property
    def has_branches(self) -> bool:
        """True if a segment has a parent; otherwise, every segment is a document of its own, as in packed rows."""
        return any(parent >= 0 for parent in self.parents)

    @property
    def attention_cost(self) -> int:
        """Twice the pairs of a token and a token that it attends to; for roots, the sum of their squared lengths."""
        return int(attention_costs(np.diff(self.begins), self.depths).sum())

    @cached_property
    def begins(self) -> Places:
        """int64 [segments + 1]: the tokens of segment s are begins[s]:begins[s + 1]."""
        return np.cumsum((0, *self.lengths), dtype=np.int64)

    @cached_property
    def depths(self) -> Places:
        """int64 [segments]: the number of tokens above each segment."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + self.lengths[parent])
        return np.array(depths, dtype=np.int64)

    @cached_property
    def position_ids(self) -> npt.NDArray[np.int32]:
        """int32 [tokens]: the position of each token in its documents, which is its depth in the tree."""
        offset = self.depths - self.begins[:-1]
        return (np.arange(self.tokens) + np.repeat(offset, self.lengths)).astype(np.int32)

    @cached_property
    def predecessors(self) -> Places:
        """int64 [tokens]: the index of the token before each token in its documents; -1 for the first of a tree."""
        predecessors = np.arange(-1, self.tokens - 1, dtype=np.int64)
        if self.parents:
            ends = np.append(self.begins[1:] - 1, -1)  # the last entry is for a root, whose parent is -1
            predecessors[self.begins[:-1]] = ends[list(self.parents)]
        return predecessors

    @cached_property
    def ends_below(self) -> tuple[int, ...]:
        """Index of the last segment below each segment, plus 1."""
        ends = list(range(1, len(self.lengths) + 1))
        for segment in reversed(range(len(self.lengths))):
            if (parent := self.parents[segment]) >= 0:
                ends[parent] = max(ends[parent], ends[segment])
        return tuple(ends)

    @cached_property
    def leaves(self) -> tuple[int, ...]:
        """The segments that have nothing below them, ascending."""
        return tuple(segment for segment, end in enumerate(self.ends_below) if end == segment + 1)

    def segments_of(self, segment: int) -> list[int]:
        """Return the segments from a root down to a segment."""
        path = []
        while segment >= 0:
            path.append(segment)
            segment = self.parents[segment]
        return path[::-1]

    def path_of(self, segment: int) -> Places:
        """Return the indices of the tokens from a root down to the last token of a segment, int64 [tokens]."""
        parts = [np.arange(self.begins[each], self.begins[each + 1]) for each in self.segments_of(segment)]
        return np.concatenate(parts)


def attention_costs(lengths: npt.NDArray[np.int64], depths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return twice the pairs of a token of each segment and a token that it attends to, int64 [segments].

    Args:
        lengths: int64 [segments]: number of tokens in each segment.
        depths: int64 [segments]: number of tokens above each segment, to which its tokens attend as well.
    """
    return lengths * (2 * depths + lengths)


def _check(lengths: Sequence[int], parents: Sequence[int]) -> None:
    if len(lengths) != len(parents):
        raise PackingError(
            f"column {PARENTS!r}: expected one parent for each of the {len(lengths)} segments in {SEGMENT_LENGTHS}, "
            f"got {len(parents)}"
        )
    path: list[int] = []  # the segments from the last root down to the segment before
    for segment, (length, parent) in enumerate(zip(lengths, parents, strict=True)):
        if length < 1:
            raise PackingError(
                f"column {SEGMENT_LENGTHS!r}: expected at least 1 token in each segment, got {length} in segment "
                f"{segment}"
            )
        while path and path[-1] != parent:
            path.pop()
        if parent != -1 and not path:
            raise PackingError(
                f"column {PARENTS!r}: expected segments in depth-first order, each after its parent and whatever is "
                f"below the segments between them, got parent {parent} for segment {segment}"
            )
        path.append(segment)
