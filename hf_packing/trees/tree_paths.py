"""Where the tokens of each document stand in rows of trees.

A document takes its first tokens from the document before it, and that one may have taken some of them from an earlier
one. Only the rest, its own tokens, is added to the row. So the tokens of a document are a few ranges of the row, one
for each of these documents.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hf_packing.planning.lengths import IntArray


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
        return np.cumsum(self.own) - self.own

    @cached_property
    def above(self) -> IntArray:
        """int64 [documents]: the document that has added the last of each document's shared tokens; -1 without any.

        It is the nearest document before it that shares fewer tokens.
        """
        above, path = [], [-1]
        shared = [*self.shared.tolist(), -1]  # the last entry is for the -1 in path
        for document, taken in enumerate(shared[:-1]):
            if not taken:
                path = [-1]
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
        return np.where(above < 0, 0, branch) if len(above) else above

    def find(self, document: IntArray, first: IntArray, end: IntArray) -> Ranges:
        """Return where the tokens first:end of documents stand.

        Args:
            document: integers [parts]: index of the document of each part.
            first: integers [parts]: place of the first token in the document.
            end: integers [parts]: place of the last token in the document, plus 1.
        """
        shared = self.shared.astype(np.int64)
        found: list[tuple[IntArray, ...]] = [(np.zeros(0, dtype=np.int64),) * 4]
        part = np.flatnonzero(end > first)
        owner, first, end = document[part], first[part].astype(np.int64), end[part].astype(np.int64)
        while len(part):
            depth = np.maximum(first, shared[owner])
            has = np.flatnonzero(end > depth)
            found.append((part[has], (self.begin[owner] + depth - shared[owner])[has], (end - depth)[has], depth[has]))
            end = np.minimum(end, shared[owner])
            left = np.flatnonzero(end > first)
            part, owner, first, end = part[left], self.above[owner[left]], first[left], end[left]
        return Ranges(*(np.concatenate(arrays) for arrays in zip(*found, strict=True)))


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
    tokens = int(paths.own.sum())
    adds, branches = np.flatnonzero(paths.own), np.flatnonzero(paths.shared)
    is_start = np.zeros(tokens + 1, dtype=bool)
    is_start[paths.begin[adds]] = True
    is_start[paths.branch[branches]] = True
    starts = np.flatnonzero(is_start[:tokens])
    lengths = np.diff(starts, append=tokens)
    segment_of = np.cumsum(is_start) - 1  # of each token
    last = np.where(paths.own > 0, paths.begin + paths.own, paths.branch) - 1
    parents = np.arange(-1, len(starts) - 1)
    parents[segment_of[paths.begin[adds]]] = np.where(
        paths.shared[adds] > 0, segment_of[np.maximum(paths.branch[adds] - 1, 0)], -1
    )
    row_tokens = np.append(paths.begin, tokens)[row_documents]
    first = np.append(segment_of[:tokens], len(starts))[row_tokens]
    per_row = np.diff(first)
    parents -= np.where(parents < 0, 0, np.repeat(first[:-1], per_row))
    ends = segment_of[last] - np.repeat(first[:-1], np.diff(row_documents))
    return Segments(lengths, parents, ends, per_row)
