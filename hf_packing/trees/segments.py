"""The segments of a row of trees, in which documents share their prefixes.

A tree is made of documents that begin with the same tokens. Its segments are the runs of tokens that the same documents
share. Each segment stands once, and has a parent: the segment before it in its documents. Segments are in depth-first
order, so that everything below a segment directly follows it. A document is a path from a root down to the segment in
which it ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from hf_packing.columns import PARENTS, SEGMENT_LENGTHS
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import (
    Int32Array,
    Int64Array,
    IntArray,
    indices_in_groups,
    indices_in_ranges,
    offsets_of,
    total_of,
)

Places = Int64Array
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
        check_segments(self.lengths, self.parents)

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
        return max(self.parents, default=-1) >= 0

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
    def position_ids(self) -> Int32Array:
        """int32 [tokens]: the position of each token in its documents, which is its depth in the tree."""
        return indices_in_ranges(self.depths, np.diff(self.begins)).astype(np.int32)

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
        tokens, _ = indices_in_groups(self.begins, np.array(self.segments_of(segment)))
        return tokens

    def find_runs(self, ends: IntArray, runs: IntArray) -> "Ranges":
        """Return where runs of tokens of documents stand.

        Args:
            ends: integers [documents]: the segment in which each document ends.
            runs: integers [runs, 3]: the document, the place in the document at which the run begins, and the number of
                tokens. Every run lies within its document.

        Example:
            >>> trees = TreeSegments((3, 2, 1), (-1, 0, 0))
            >>> found = trees.find_runs(np.array([1, 2]), np.array([[0, 2, 3], [1, 1, 3]]))
            >>> found.part.tolist(), found.begin.tolist(), found.length.tolist()
            ([0, 1, 0, 1], [3, 5, 2, 1], [2, 1, 1, 2])
        """
        document, first, length = runs.T
        parents = np.array(self.parents, dtype=np.int64)
        return _find_ranges(ends[document], first, first + length, self.begins, self.depths, parents)


def attention_costs(lengths: Int64Array, depths: Int64Array | int) -> Int64Array:
    """Return twice the pairs of a token of each segment and a token that it attends to, int64 [segments].

    Args:
        lengths: int64 [segments]: number of tokens in each segment.
        depths: int64 [segments]: number of tokens above each segment, to which its tokens attend as well; or 0.
    """
    return lengths * (2 * depths + lengths)


def check_segments(lengths: Sequence[int] | IntArray, parents: Sequence[int] | IntArray, where: str = "") -> None:
    """Raise PackingError unless segments are trees; see `TreeSegments`. The message ends with `where` they are."""
    if len(lengths) != len(parents):
        raise PackingError(
            f"column {PARENTS!r}: expected one parent for each of the {len(lengths)} segments in {SEGMENT_LENGTHS}, "
            f"got {len(parents)}{where}"
        )
    path: list[int] = []  # the segments from the last root down to the segment before
    for segment, (length, parent) in enumerate(zip(lengths, parents, strict=True)):
        if length < 1:
            raise PackingError(
                f"column {SEGMENT_LENGTHS!r}: expected at least 1 token in each segment, got {length} in segment "
                f"{segment}{where}"
            )
        while path and path[-1] != parent:
            path.pop()
        if parent != -1 and not path:
            raise PackingError(
                f"column {PARENTS!r}: expected segments in depth-first order, each after its parent and whatever is "
                f"below the segments between them, got parent {parent} for segment {segment}{where}"
            )
        path.append(segment)


class Ranges(NamedTuple):
    """Parts of documents, and where they stand among the tokens of all rows."""

    part: IntArray
    """int64 [ranges]: index of the part of a document, in the order in which the parts were given."""
    begin: IntArray
    """int64 [ranges]: index of the first token."""
    length: IntArray
    """int64 [ranges]: number of tokens."""
    depth: IntArray
    """int64 [ranges]: place of the first token in the document."""

    def in_order(self) -> "Ranges":
        """Return the ranges part by part, each part from its first token to its last one."""
        order = np.lexsort((self.depth, self.part))
        return Ranges(*(array[order] for array in self))


def _find_ranges(
    node: IntArray, first: IntArray, end: IntArray, begin: IntArray, depth: IntArray, above: IntArray
) -> Ranges:
    """Return where parts of paths stand. A path is a node, the node above it, and so on up to a root.

    Args:
        node: integers [parts]: the last node of the path of each part.
        first: integers [parts]: place of the first token in the path.
        end: integers [parts]: place of the last token in the path, plus 1.
        begin: int64 [nodes]: index of the first token of each node.
        depth: integers [nodes]: the number of tokens of its path that are above each node.
        above: int64 [nodes]: the node above each node.
    """
    found: list[tuple[IntArray, ...]] = [(np.zeros(0, dtype=np.int64),) * 4]
    part = np.arange(len(node))
    while len(part):  # one node further up in each round, for all parts that are not complete
        top = np.maximum(first, depth[node])
        ranges = (part, begin[node] + top - depth[node], end - top, top)
        found.append(tuple(array[end > top] for array in ranges))
        left = first < depth[node]
        end = np.minimum(end, depth[node])[left]
        part, first, node = part[left], first[left], above[node[left]]
    return Ranges(*(np.concatenate(arrays, dtype=np.int64) for arrays in zip(*found, strict=True)))


@dataclass(frozen=True, eq=False)
class TreePaths:
    """Documents of trees, laid end to end in depth-first order.

    Args:
        length: integers [documents]: number of tokens in each document.
        shared: integers [documents]: number of tokens that each document shares with the one before it; 0 at the first
            document of a tree.
    """

    length: IntArray
    shared: IntArray

    @cached_property
    def own(self) -> IntArray:
        """int64 [documents]: number of tokens that each document adds to its row."""
        return self.length.astype(np.int64) - self.shared

    @cached_property
    def begin(self) -> IntArray:
        """int64 [documents]: index of the first token that each document adds."""
        return offsets_of(self.own)[:-1]

    @cached_property
    def above(self) -> IntArray:
        """int64 [documents]: the document that has added the last of each document's shared tokens; -1 without any.

        It is the nearest document before it that shares fewer tokens.
        """
        if not self.shared.any():  # packed rows, which may have millions of documents
            return np.full(len(self.shared), -1)
        above, path = [], [-1]
        shared = [*self.shared.tolist(), -1]  # the last entry is for the -1 in path
        for document, taken in enumerate(shared[:-1]):
            while shared[path[-1]] >= taken:
                path.pop()
            above.append(path[-1])
            path.append(document)
        return np.array(above, dtype=np.int64)

    @cached_property
    def branch(self) -> IntArray:
        """int64 [documents]: index of the last shared token of each document, plus 1; 0 without any."""
        above = self.above
        branch = self.begin[above] + self.shared - self.shared[above]
        return np.where(above < 0, 0, branch)

    @cached_property
    def tokens(self) -> Places:
        """int64 [tokens of all documents]: where the tokens of one document after the other stand."""
        ranges = self.find(np.arange(len(self.length)), np.zeros(len(self.length), np.int64), self.length).in_order()
        return indices_in_ranges(ranges.begin, ranges.length)

    def find(self, document: IntArray, first: IntArray, end: IntArray) -> Ranges:
        """Return where the tokens first:end of documents stand.

        Args:
            document: integers [parts]: index of the document of each part.
            first: integers [parts]: place of the first token in the document.
            end: integers [parts]: place of the last token in the document, plus 1.
        """
        return _find_ranges(document, first, end, self.begin, self.shared, self.above)


class Segments(NamedTuple):
    """The segments of rows of trees, as the columns of a dataset give them."""

    lengths: IntArray
    """int64 [segments]: number of tokens in each segment."""
    parents: IntArray
    """int64 [segments]: index of the parent in the row; -1 for a root."""
    ends: IntArray
    """int64 [documents]: index in the row of the segment in which each document ends."""
    per_row: IntArray
    """int64 [rows]: number of segments in each row."""


def segments_of(paths: TreePaths, row_documents: IntArray) -> Segments:
    """Return the segments of rows.

    A segment begins where a document adds tokens, and after the last token that a document shares.

    Args:
        paths: the documents of all rows.
        row_documents: int64 [rows + 1]: the documents of row r are row_documents[r]:row_documents[r + 1].
    """
    tokens, adds = total_of(paths.own), paths.own > 0
    begins, branches = paths.begin[adds], paths.branch[adds]
    starts = np.unique(np.concatenate([begins, paths.branch[paths.shared > 0]]))
    starts = starts[starts < tokens]  # documents also branch off after the last token

    def segment_of(token: IntArray) -> IntArray:
        return np.searchsorted(starts, token, side="right") - 1

    parents = np.arange(-1, len(starts) - 1)
    parents[segment_of(begins)] = segment_of(branches - 1)  # -1 for a document that shares no token
    last = np.where(adds, paths.begin + paths.own, paths.branch) - 1
    first = np.searchsorted(starts, np.append(paths.begin, tokens)[row_documents])
    per_row = np.diff(first)
    parents -= np.where(parents < 0, 0, np.repeat(first[:-1], per_row))
    ends = segment_of(last) - np.repeat(first[:-1], np.diff(row_documents))
    return Segments(np.diff(starts, append=tokens), parents, ends, per_row)
