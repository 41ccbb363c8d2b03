"""The class `Patterns`, which describes packs, and the class `Cuts`, which describes how documents are cut.

Strategies that need only the counts of lengths compute one object of each class. In `Patterns`, one pattern describes
many packs with the same segment lengths. In `Cuts`, one group describes all documents of one length that are cut in the
same way. So both objects are small, even for many documents.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from hf_packing.errors import PackingError
from hf_packing.planning.lengths import (
    IntArray,
    LengthCounts,
    Overflow,
    cut_to_pieces,
    indices_in_ranges,
    offsets_of,
    sums_by,
    sums_of,
)

Run = tuple[int, int, int, int]
"""A step in which packs are filled: (length, first pack, packs, copies) puts `copies` segments of `length` tokens into
each of `packs` packs, from number `first pack` on."""


@dataclass(frozen=True)
class Patterns:
    """A description of packs by the lengths of their segments. Pattern i describes `packs[i]` equal packs.

    A pattern consists of entries. An entry stores a segment length, and the number of segments of that length in each
    pack. Packs are numbered in the order of the patterns.
    """

    packs: IntArray
    """int64 [patterns]: number of packs with this pattern."""
    capacity: IntArray
    """int32 [patterns]: capacity of each pack, in tokens."""
    entry_offsets: IntArray
    """int64 [patterns + 1]: the entries of pattern i are entry_offsets[i]:entry_offsets[i + 1]."""
    entry_length: IntArray
    """int32 [entries]: length of the entry's segments, in tokens."""
    entry_copies: IntArray
    """int64 [entries]: number of segments of that length in each pack."""

    @cached_property
    def num_packs(self) -> int:
        return int(self.packs.sum())

    @property
    def entry_pattern(self) -> IntArray:
        """The index of the pattern to which each entry belongs (see `Patterns`), int64 [entries]."""
        return np.repeat(np.arange(len(self.packs)), np.diff(self.entry_offsets))

    def segments_per_pack(self) -> IntArray:
        """Return, for each pattern, the number of segments in one pack, int64 [patterns]."""
        return sums_of(self.entry_copies, self.entry_offsets)

    def tokens_per_pack(self) -> IntArray:
        """Return, for each pattern, the number of tokens in one pack, int64 [patterns]."""
        return sums_of(self.entry_copies * self.entry_length, self.entry_offsets)

    def without_empty(self) -> "Patterns":
        """Return the patterns of non-empty packs. Patterns without segments are left out."""
        entries = np.diff(self.entry_offsets)
        kept = entries > 0
        offsets = offsets_of(entries[kept])
        return Patterns(self.packs[kept], self.capacity[kept], offsets, self.entry_length, self.entry_copies)

    def counts(self) -> IntArray:
        """Return a histogram of segment lengths, int64 [longest + 1].

        Element n is the number of segments of n tokens in all packs together.
        """
        segments = self.packs[self.entry_pattern] * self.entry_copies
        return sums_by(self.entry_length, segments, int(self.entry_length.max(initial=0)) + 1)


def patterns_from_runs(runs: Iterable[Run], num_packs: int, capacity: int | Sequence[int]) -> Patterns:
    """Return the patterns of packs that are filled step by step.

    Args:
        runs: the steps, in order. All numbers of packs are below num_packs.
        num_packs: total number of packs.
        capacity: capacity of each pack, in tokens; or the capacity of each pattern, if they differ.
    """
    length, first, packs, copies = np.fromiter(chain.from_iterable(runs), dtype=np.int64).reshape(-1, 4).T
    borders = np.unique(np.concatenate([first, first + packs, [0, num_packs]]))
    first_pattern, end_pattern = np.searchsorted(borders, first), np.searchsorted(borders, first + packs)
    spans = end_pattern - first_pattern
    run = np.repeat(np.arange(len(spans)), spans)
    pattern = indices_in_ranges(first_pattern, spans)
    by_pattern = np.argsort(pattern, kind="stable")
    run = run[by_pattern]
    patterns = len(borders) - 1
    return Patterns(
        packs=np.diff(borders),
        capacity=np.full(patterns, capacity, dtype=np.int32),
        entry_offsets=offsets_of(np.bincount(pattern, minlength=patterns)),
        entry_length=length[run].astype(np.int32),
        entry_copies=copies[run],
    )


@dataclass(frozen=True)
class Cuts:
    """The pieces that documents are cut into. Documents of one length that are cut in the same way form a group.

    Groups are sorted by document length. Among groups of one length, the group of uncut documents comes first. Tokens
    after a document's last piece are dropped.

    A list of all pieces has them sorted by length; pieces of equal length are in the order of the groups, of the
    documents, and of the pieces in their document.
    """

    document_length: IntArray
    """int64 [groups]: length of the group's documents in tokens, ascending."""
    documents: IntArray
    """int64 [groups]: number of documents in the group."""
    piece_offsets: IntArray
    """int64 [groups + 1]: each document of group i is cut into the pieces piece_offsets[i]:piece_offsets[i + 1]."""
    piece_length: IntArray
    """int32 [pieces]: length of the piece in tokens.

    The first piece of a document starts at token 0, and each further piece starts where the previous piece ends.
    """

    @property
    def num_documents(self) -> int:
        return int(self.documents.sum())

    @cached_property
    def pieces_each(self) -> IntArray:
        """The number of pieces of one document in each group, int64 [groups]."""
        return np.diff(self.piece_offsets)

    @cached_property
    def tokens_kept(self) -> IntArray:
        """The number of tokens in all pieces of one document in each group, int64 [groups].

        The other tokens of the document are dropped.
        """
        return sums_of(self.piece_length, self.piece_offsets)

    @cached_property
    def piece_start(self) -> IntArray:
        """The index in the document of the first token of each piece, int64 [pieces]."""
        begin = offsets_of(self.piece_length)
        start: IntArray = begin[:-1] - np.repeat(begin[self.piece_offsets[:-1]], self.pieces_each)
        return start

    def counts(self) -> IntArray:
        """Return a histogram of piece lengths, int64 [longest + 1].

        Element n is the number of pieces of n tokens, over all documents.
        """
        pieces = np.repeat(self.documents, self.pieces_each)
        return sums_by(self.piece_length, pieces, int(self.piece_length.max(initial=0)) + 1)


def cut_by_overflow(counts: LengthCounts, capacity: int, overflow: Overflow) -> Cuts:
    """Cut documents into pieces that fit in a pack, given only the number of documents of each length.

    The values of `overflow` are described in `cut_to_pieces`.

    Args:
        counts: number of documents of each length.
        capacity: capacity of each pack, in tokens.
        overflow: treatment of documents longer than `capacity`: "split", "truncate", "drop" or "error".

    Returns:
        Cuts with one group for each length.

    Raises:
        PackingError: `overflow` is "error" and a document is too long.
    """
    length = counts.length
    long = length > capacity
    if overflow == "error" and long.any():
        raise PackingError(
            f"counts: {counts.documents[long].sum()} documents have more than max_length={capacity} tokens, and the "
            f"longest document has {length[-1]} tokens; with overflow='error', no document may be longer than "
            "max_length. Use overflow='split', 'truncate' or 'drop' for long documents"
        )
    pieces = cut_to_pieces(length, capacity, overflow)
    pieces_each = np.bincount(pieces.document, minlength=len(length))
    return Cuts(length, counts.documents, offsets_of(pieces_each), pieces.length)
