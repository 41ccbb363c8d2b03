"""What a counting strategy decides from counts alone: `Patterns` of packs, and `Cuts` of documents.

Both list equal packs or documents once, so their size depends on the number of distinct lengths, not of documents.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np

from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray, LengthCounts, Overflow, check_num_pieces


@dataclass(frozen=True)
class Patterns:
    """Packs by the lengths of their segments. Pattern i stands for `packs[i]` equal packs; packs are numbered in order.

    A pattern has one entry for each length in it.
    """

    packs: IntArray
    """int64 [patterns]: how many packs are made like this."""
    capacity: IntArray
    """int32 [patterns], tokens."""
    entry_offsets: IntArray
    """int64 [patterns + 1]: entries of pattern i are entry_offsets[i]:entry_offsets[i + 1]."""
    entry_length: IntArray
    """int32 [entries], tokens: a segment length in the pattern."""
    entry_copies: IntArray
    """int64 [entries]: how many segments of that length each pack has."""

    @cached_property
    def num_packs(self) -> int:
        return int(self.packs.sum())

    @property
    def entry_pattern(self) -> IntArray:
        """int64 [entries]: the pattern that an entry belongs to."""
        return np.repeat(np.arange(len(self.packs)), np.diff(self.entry_offsets))

    def segments_per_pack(self) -> IntArray:
        """int64 [patterns]: segments in each pack of a pattern."""
        total = np.concatenate([[0], np.cumsum(self.entry_copies)])
        return np.diff(total[self.entry_offsets])

    def tokens_per_pack(self) -> IntArray:
        """int64 [patterns]: tokens in each pack of a pattern."""
        total = np.concatenate([[0], np.cumsum(self.entry_copies * self.entry_length)])
        return np.diff(total[self.entry_offsets])

    def without_empty(self) -> "Patterns":
        """Leave out the patterns that have no segment."""
        entries = np.diff(self.entry_offsets)
        kept = entries > 0
        offsets = np.concatenate([[0], np.cumsum(entries[kept])])
        return Patterns(self.packs[kept], self.capacity[kept], offsets, self.entry_length, self.entry_copies)

    def counts(self) -> IntArray:
        """int64 [longest + 1]: how many segments of each length the packs hold."""
        segments = self.packs[self.entry_pattern] * self.entry_copies
        counts = np.zeros(int(self.entry_length.max(initial=0)) + 1, dtype=np.int64)
        np.add.at(counts, self.entry_length, segments)
        return counts


class Pattern(NamedTuple):
    """One pattern, for callers that make patterns one by one."""

    packs: int
    """How many packs have this pattern."""
    capacity: int
    copies: Sequence[tuple[int, int]]
    """(length, copies), each length once."""


class Run(NamedTuple):
    """One move of a counting strategy: add the same number of copies of a length to each of some consecutive packs."""

    length: int
    first_pack: int
    packs: int
    copies: int


def patterns_from_list(patterns: Sequence[Pattern]) -> Patterns:
    """Collect patterns that were made one by one."""
    sizes = [len(pattern.copies) for pattern in patterns]
    entries = np.array([entry for pattern in patterns for entry in pattern.copies], dtype=np.int64).reshape(-1, 2)
    return Patterns(
        packs=np.array([pattern.packs for pattern in patterns], dtype=np.int64),
        capacity=np.array([pattern.capacity for pattern in patterns], dtype=np.int32),
        entry_offsets=np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]),
        entry_length=entries[:, 0].astype(np.int32),
        entry_copies=entries[:, 1].copy(),
    )


def patterns_from_runs(runs: Iterable[Run], num_packs: int, capacity: int) -> Patterns:
    """Collect the patterns of packs that were filled by runs.

    Args:
        runs: moves in the order they were made; their packs are intervals of range(num_packs).
        num_packs: packs opened in all.
        capacity: tokens of every pack.
    """
    length, first, packs, copies = np.array(list(runs), dtype=np.int64).reshape(-1, 4).T
    borders = np.unique(np.concatenate([first, first + packs, [0, num_packs]]))
    first_pattern, end_pattern = np.searchsorted(borders, first), np.searchsorted(borders, first + packs)
    spans = end_pattern - first_pattern
    run = np.repeat(np.arange(len(spans)), spans)
    pattern = first_pattern[run] + np.arange(len(run)) - np.repeat(np.cumsum(spans) - spans, spans)
    by_pattern = np.argsort(pattern, kind="stable")
    run = run[by_pattern]
    patterns = len(borders) - 1
    return Patterns(
        packs=np.diff(borders),
        capacity=np.full(patterns, capacity, dtype=np.int32),
        entry_offsets=np.concatenate([[0], np.cumsum(np.bincount(pattern, minlength=patterns))]),
        entry_length=length[run].astype(np.int32),
        entry_copies=copies[run],
    )


class DocumentsByLength(NamedTuple):
    """Documents by length, no matter how they are cut; one element for each length."""

    length: IntArray
    """int64 [lengths], tokens, ascending."""
    documents: IntArray
    """int64 [lengths]: how many there are."""
    first: IntArray
    """int64 [lengths]: how many shorter documents there are."""
    several_groups: IntArray
    """bool [lengths]: whether documents of this length are cut in different ways."""


@dataclass(frozen=True)
class Cuts:
    """Which pieces documents are cut into. Documents of one length that are cut alike form a group.

    Groups are sorted by document length; among groups of one length, the one that stays whole comes first. Documents
    and their pieces are listed in the order of groups. A piece's rank is its index when this list of pieces is sorted
    by length. It follows from its document's place in the list, so no worker needs another worker's documents.
    """

    document_length: IntArray
    """int64 [groups], tokens, ascending."""
    documents: IntArray
    """int64 [groups]: how many documents are in the group."""
    piece_offsets: IntArray
    """int64 [groups + 1]: pieces of group i are piece_offsets[i]:piece_offsets[i + 1], in document order."""
    piece_length: IntArray
    """int32 [pieces], tokens. Pieces are consecutive from a document's first token; tokens left over are dropped."""

    @property
    def num_documents(self) -> int:
        return int(self.documents.sum())

    @cached_property
    def pieces_each(self) -> IntArray:
        """int64 [groups]: pieces that each document becomes."""
        return np.diff(self.piece_offsets)

    @cached_property
    def tokens_kept(self) -> IntArray:
        """int64 [groups]: tokens of each document that are in its pieces."""
        total = np.concatenate([[0], np.cumsum(self.piece_length, dtype=np.int64)])
        return np.diff(total[self.piece_offsets])

    @cached_property
    def piece_start(self) -> IntArray:
        """int64 [pieces], tokens: where in its document a piece begins."""
        begin = np.cumsum(self.piece_length, dtype=np.int64) - self.piece_length
        first = np.append(begin, 0)[self.piece_offsets[:-1]]
        start: IntArray = begin - np.repeat(first, self.pieces_each)
        return start

    @cached_property
    def whole(self) -> IntArray:
        """bool [groups]: documents that are one piece with all of their tokens."""
        whole: IntArray = (self.pieces_each == 1) & (self.tokens_kept == self.document_length)
        return whole

    @cached_property
    def cut(self) -> IntArray:
        """bool [groups]: documents of which some tokens are kept, but not all in one piece."""
        cut: IntArray = (self.pieces_each > 0) & ~self.whole
        return cut

    def by_length(self) -> DocumentsByLength:
        """Count the documents of each length over all groups."""
        length, first_group, groups = np.unique(self.document_length, return_index=True, return_counts=True)
        documents = np.add.reduceat(self.documents, first_group) if len(length) else self.documents
        return DocumentsByLength(length, documents, np.cumsum(documents) - documents, groups > 1)

    def counts(self) -> IntArray:
        """int64 [longest + 1]: pieces of each length."""
        counts = np.zeros(int(self.piece_length.max(initial=0)) + 1, dtype=np.int64)
        np.add.at(counts, self.piece_length, np.repeat(self.documents, self.pieces_each))
        return counts

    def ranks(self) -> tuple[IntArray, IntArray]:
        """Rank the pieces of each group's first document, and return the stride from one document's ranks to the next.

        Returns:
            int64 [pieces], the rank of the piece in the group's first document; int64 [pieces], the stride to add for
            each further document of the group.
        """
        by_length = np.argsort(self.piece_length, kind="stable")
        group = np.repeat(np.arange(len(self.documents)), self.pieces_each)[by_length]
        length = self.piece_length[by_length]
        opens = np.append(True, (np.diff(group) != 0) | (np.diff(length) != 0))[: len(group)]
        run = np.cumsum(opens) - 1
        first_of_run = np.flatnonzero(opens)
        before = np.cumsum(self.documents[group]) - self.documents[group]
        first_rank, stride = np.empty_like(before), np.empty_like(before)
        first_rank[by_length] = before[first_of_run][run] + np.arange(len(group)) - first_of_run[run]
        stride[by_length] = np.bincount(run)[run]
        return first_rank, stride


def cuts_from_list(groups: list[tuple[int, int, tuple[int, ...]]]) -> Cuts:
    """Collect groups of (document length, documents, lengths of the pieces), in the order that `Cuts` asks for."""
    sizes = [len(pieces) for _, _, pieces in groups]
    return Cuts(
        document_length=np.array([length for length, _, _ in groups], dtype=np.int64),
        documents=np.array([documents for _, documents, _ in groups], dtype=np.int64),
        piece_offsets=np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]),
        piece_length=np.fromiter(chain.from_iterable(pieces for _, _, pieces in groups), dtype=np.int32),
    )


def cut_by_overflow(counts: LengthCounts, capacity: int, overflow: Overflow) -> Cuts:
    """Cut counted documents into pieces that fit in a pack; `cut_to_pieces` says what each overflow does.

    Args:
        counts: documents by length.
        capacity: tokens that a pack holds.
        overflow: "split", "truncate", "drop" or "error".

    Raises:
        PackingError: a document is too long and overflow is "error", or there would be too many pieces.
    """
    length = counts.length
    long = length > capacity
    if overflow == "error" and long.any():
        raise PackingError(
            f"counts: {counts.documents[long].sum()} documents have more tokens than max_length={capacity}, the "
            f"longest {length[-1]}, and overflow='error' (accepted: split, truncate, drop)"
        )
    pieces_each = (length > 0).astype(np.int64)
    if overflow == "drop":
        pieces_each[long] = 0
    elif overflow == "split":
        pieces_each = -(-length // capacity)
        check_num_pieces(float(pieces_each[long] @ counts.documents[long].astype(np.float64)), capacity)
    offsets = np.concatenate([[0], np.cumsum(pieces_each)])
    piece_length = np.repeat(np.minimum(length, capacity), pieces_each).astype(np.int32)
    if overflow == "split" and long.any():
        piece_length[offsets[1:][long] - 1] = length[long] - (pieces_each[long] - 1) * capacity
    return Cuts(length, counts.documents, offsets, piece_length)
