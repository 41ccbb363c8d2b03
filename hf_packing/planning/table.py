"""PatternTable, a plan that is made from counts of document lengths, and the assignment of documents to its packs.

An assignment consists of four random choices. If the seed is None, nothing is shuffled.

1. Shuffle documents of equal length. Some strategies (such as Bucket) cut documents of one length in several ways.
2. If documents are cut, shuffle pieces of equal length.
3. Choose the order of the packs.
4. Shuffle the segments in each pack.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_packing.errors import PackingError
from hf_packing.planning.lengths import (
    IntArray,
    check_lengths,
    count_lengths,
    indices_in_ranges,
    offsets_of,
    smallest_index_type,
    sort_by_length,
)
from hf_packing.planning.metrics import PackingMetrics, make_metrics, pack_lower_bound
from hf_packing.planning.patterns import Cuts, Patterns
from hf_packing.planning.permutation import generator_for, random_order, shuffle_in_groups
from hf_packing.planning.plan import PackingPlan

_BLOCK = 1 << 16
"""Segments that are placed at a time, so that arrays fit in the CPU cache."""


def pieces_of_packs(patterns: Patterns) -> Iterator[tuple[IntArray, IntArray]]:
    """Yield the pieces of all packs block by block. The packs of a block have equally many segments.

    Args:
        patterns: the packs, none of them empty.

    Yields:
        The numbers of the packs, int64 [packs]; and the index of each of their pieces in the list of all pieces, sorted
        by length, int64 [packs, segments of a pack].
    """
    by_length = np.argsort(patterns.entry_length, kind="stable")
    number = (patterns.packs[patterns.entry_pattern] * patterns.entry_copies)[by_length]
    first_piece = np.empty_like(number)
    first_piece[by_length] = offsets_of(number)[:-1]
    # a place in a pattern has a piece in the pattern's first pack, and another one so many pieces further in the next
    piece = indices_in_ranges(first_piece, patterns.entry_copies)
    further = np.repeat(patterns.entry_copies, patterns.entry_copies)
    sizes, first_pack = patterns.segments_per_pack(), offsets_of(patterns.packs)
    first_place, by_size = offsets_of(sizes), np.argsort(sizes, kind="stable")
    distinct, first = np.unique(sizes[by_size], return_index=True)
    for size, own in zip(distinct.tolist(), np.split(by_size, first[1:]), strict=False):  # none for no packs
        places = first_place[own, None] + np.arange(size)
        of_first, of_next, ends = piece[places], further[places], offsets_of(patterns.packs[own])
        at_once = max(1, _BLOCK // size)
        for begin in range(0, int(ends[-1]), at_once):
            number = np.arange(begin, min(begin + at_once, ends[-1]))
            pattern = np.searchsorted(ends, number, side="right") - 1
            number -= ends[pattern]
            yield first_pack[own[pattern]] + number, of_first[pattern] + of_next[pattern] * number[:, None]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PatternTable:
    """A plan that is made from counts of document lengths alone.

    The table describes the packs, but does not yet assign documents to packs. `plan_counts` returns a PatternTable. The
    size of a table depends on the number of distinct lengths and, with `Bucket`, on the number of cut documents.

    Example:
        >>> import numpy as np, hf_packing as hfp
        >>> lengths = np.array([5, 3, 6, 2])
        >>> table = hfp.plan_counts(np.bincount(lengths), hfp.BestFit(8))
        >>> table
        PatternTable(4 documents, 4 segments, 2 packs, efficiency 1.0000)
        >>> table.metrics().num_padding_slots
        0
    """

    patterns: Patterns
    """The packs, described by the lengths of their segments."""
    cuts: Cuts
    """The pieces that documents of each length are cut into."""
    seed: int | None
    """Seed for shuffling packs, the segments in each pack, and documents of equal length; None for no shuffling."""
    proven_lower_bound: int = 0
    """Lower bound on the number of packs, proven by the strategy; 0 if the strategy proves no bound.

    The bound holds for packs that respect the limits of the strategy, such as `max_documents`.
    """
    note: str = ""
    """Remark of the strategy, such as that the time limit was too short; empty if there is no remark."""

    def __post_init__(self) -> None:
        pieces, segments = (np.trim_zeros(each.counts(), "b") for each in (self.cuts, self.patterns))
        assert np.array_equal(pieces, segments)

    @property
    def num_documents(self) -> int:
        return self.cuts.num_documents

    @property
    def num_packs(self) -> int:
        return self.patterns.num_packs

    def plan(self, lengths: Any) -> PackingPlan:
        """Return the plan that assigns all documents to packs.

        Args:
            lengths: integers [documents]: document lengths in tokens.

        Raises:
            PackingError: the table was not made from the counts of these lengths.
        """
        checked = check_lengths(lengths)
        length, group = np.unique(self.cuts.document_length, return_inverse=True)
        made_of, counted = np.bincount(group, self.cuts.documents), count_lengths(checked)
        if not (np.array_equal(length, counted.length) and np.array_equal(made_of, counted.documents)):
            raise PackingError(
                f"lengths: expected as many documents of each length as the table was made for, {self.num_documents:,} "
                f"in all, got {len(checked):,} documents with other lengths"
            )
        return self.plan_checked(checked)

    def plan_checked(self, lengths: IntArray) -> PackingPlan:
        """Return the plan of checked lengths, from whose counts the table was made."""
        patterns = self.patterns
        row = random_order(self.num_packs, self.seed, "packs")
        size, pack_capacity = np.empty_like(row), np.empty(len(row), dtype=np.int32)
        size[row] = np.repeat(patterns.segments_per_pack(), patterns.packs)
        pack_capacity[row] = np.repeat(patterns.capacity, patterns.packs)
        pack_offsets = offsets_of(size)
        return PackingPlan(
            document_length=lengths,
            **self._segments(pack_offsets[row], lengths),
            pack_offsets=pack_offsets,
            pack_capacity=pack_capacity,
            proven_lower_bound=self.proven_lower_bound,
            note=self.note,
        )

    def _segments(self, first_segment: IntArray, lengths: IntArray) -> dict[str, IntArray]:
        """Return the arrays of the segments, given each pack's first segment and the lengths of the documents."""
        of_piece, start_of_piece = self._cut(lengths)
        counts = self.cuts.counts()
        length_of_piece = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        document, length = np.empty_like(of_piece), np.empty_like(length_of_piece)
        start = np.zeros(len(document), dtype=lengths.dtype)
        generator = None if self.seed is None else generator_for(self.seed, "documents of a pack")
        for packs, piece in pieces_of_packs(self.patterns):
            if generator is not None:
                generator.permuted(piece, axis=1, out=piece)
            segment = first_segment[packs, None] + np.arange(piece.shape[1])
            document[segment], length[segment] = of_piece[piece], length_of_piece[piece]
            if start_of_piece is not None:
                start[segment] = start_of_piece[piece]
        return {"segment_document": document, "segment_start": start, "segment_length": length}

    def _cut(self, lengths: IntArray) -> tuple[IntArray, IntArray | None]:
        """Return the document and the start of each piece, in the order of `Cuts`; no starts if no document is cut."""
        cuts, document = self.cuts, sort_by_length(lengths)
        is_whole = bool((cuts.pieces_each == 1).all())
        _, first = np.unique(cuts.document_length, return_index=True)
        if self.seed is not None and (is_whole or len(first) < len(cuts.documents)):  # else, pieces are shuffled
            of_length = np.add.reduceat(cuts.documents, first)
            shuffle_in_groups(document, of_length, generator_for(self.seed, "documents of equal length"))
        document = document.astype(smallest_index_type(len(lengths)), copy=False)
        if is_whole:
            return document, None
        # the n-th pieces of a group's documents are next to each other
        group = np.repeat(np.arange(len(cuts.documents)), cuts.pieces_each)
        by_length = np.argsort(cuts.piece_length, kind="stable")
        first, number = offsets_of(cuts.documents)[group[by_length]], cuts.documents[group[by_length]]
        document = document[indices_in_ranges(first, number)]
        start = np.repeat(cuts.piece_start[by_length].astype(lengths.dtype), number)
        if self.seed is not None:
            order = np.arange(len(document), dtype=smallest_index_type(len(document)))
            shuffle_in_groups(order, cuts.counts(), generator_for(self.seed, "pieces of equal length"))
            document, start = document[order], start[order]
        return document, start

    def metrics(self) -> PackingMetrics:
        """Return the metrics of the plan. The PackingPlan that `plan` returns has the same metrics."""
        cuts, patterns = self.cuts, self.patterns
        counts = cuts.counts()
        bound = pack_lower_bound(counts, int(patterns.capacity.max(initial=1)))
        return make_metrics(
            documents=cuts.documents,
            document_length=cuts.document_length,
            segments_each=cuts.pieces_each,
            tokens_kept=cuts.tokens_kept,
            packs=self.num_packs,
            slots=sum(map(operator.mul, patterns.packs.tolist(), patterns.capacity.tolist())),
            squared_segments=float(counts @ np.arange(len(counts), dtype=np.float64) ** 2),
            squared_capacities=float(patterns.packs @ patterns.capacity.astype(np.float64) ** 2),
            lower_bound=max(bound, self.proven_lower_bound),
        )

    def __repr__(self) -> str:
        metrics = self.metrics()
        return (
            f"PatternTable({metrics.num_documents} documents, {metrics.num_segments} segments, "
            f"{metrics.num_packs} packs, efficiency {metrics.packing_efficiency:.4f})"
        )
