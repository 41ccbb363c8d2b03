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

import numpy as np

from hf_packing.planning.lengths import (
    IntArray,
    indices_in_ranges,
    offsets_of,
    smallest_index_type,
    sort_by_length,
)
from hf_packing.planning.metrics import PackingMetrics, make_metrics, pack_lower_bound
from hf_packing.planning.patterns import Cuts, Patterns
from hf_packing.planning.permutation import generator_for, random_order, shuffle_in_groups
from hf_packing.planning.plan import PackingPlan

_BLOCK, _PACKS_AT_ONCE = 1 << 16, 1 << 13
"""Segments that are placed, and packs that are shuffled, at a time, so that arrays fit in the CPU cache."""


def place_segments(patterns: Patterns, first_segment: IntArray) -> Iterator[tuple[IntArray, IntArray, IntArray]]:
    """Yield the segments of all packs block by block, shortest first.

    Args:
        patterns: the packs.
        first_segment: int64 [packs or more]: index in the plan of each pack's first segment.

    Yields:
        The index of each segment in the plan; the index of its piece in the list of all pieces, sorted by length; and
        the length of the segment in tokens.
    """
    by_length = np.argsort(patterns.entry_length, kind="stable")
    pattern, entry_length = patterns.entry_pattern[by_length], patterns.entry_length[by_length]
    copies = patterns.entry_copies[by_length]
    first_pack, places = offsets_of(patterns.packs)[pattern], offsets_of(patterns.entry_copies)
    first_place = places[by_length] - places[patterns.entry_offsets[pattern]]
    offsets = offsets_of(patterns.packs[pattern] * copies)
    for begin in range(0, int(offsets[-1]), _BLOCK):
        in_block = np.diff(offsets.clip(begin, begin + _BLOCK))
        entry = np.repeat(np.arange(len(in_block)), in_block)
        piece = begin + np.arange(len(entry))
        nth_pack, place = np.divmod(piece - offsets[entry], copies[entry])
        yield first_segment[first_pack[entry] + nth_pack] + first_place[entry] + place, piece, entry_length[entry]


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

    def plan(self, lengths: IntArray) -> PackingPlan:
        """Return the plan that assigns all documents to packs.

        Args:
            lengths: integers [documents]: document lengths in tokens, already checked. The table must have been made
                from counts of these lengths.
        """
        patterns = self.patterns
        row = random_order(self.num_packs, self.seed, "packs")
        size, pack_capacity = np.empty_like(row), np.empty(len(row), dtype=np.int32)
        size[row] = np.repeat(patterns.segments_per_pack(), patterns.packs)
        pack_capacity[row] = np.repeat(patterns.capacity, patterns.packs)
        pack_offsets = offsets_of(size)
        of_piece, start_of_piece = self._cut(lengths)
        segments = int(pack_offsets[-1])
        document = np.empty(segments, dtype=of_piece.dtype)
        start = np.zeros(segments, dtype=lengths.dtype)
        length = np.empty(segments, dtype=np.int32)
        for target, piece, tokens in place_segments(patterns, pack_offsets[row]):
            document[target], length[target] = of_piece[piece], tokens
            if start_of_piece is not None:
                start[target] = start_of_piece[piece]
        if self.seed is not None:
            columns = [document, length] if start_of_piece is None else [document, length, start]
            generator = generator_for(self.seed, "documents of a pack")
            for first in range(0, len(size), _PACKS_AT_ONCE):
                own = slice(pack_offsets[first], pack_offsets[min(first + _PACKS_AT_ONCE, len(size))])
                order = np.arange(own.stop - own.start)
                shuffle_in_groups(order, size[first : first + _PACKS_AT_ONCE], generator)
                for column in columns:
                    column[own] = column[own][order]
        return PackingPlan(
            document_length=lengths,
            segment_document=document,
            segment_start=start,
            segment_length=length,
            pack_offsets=pack_offsets,
            pack_capacity=pack_capacity,
            proven_lower_bound=self.proven_lower_bound,
            note=self.note,
        )

    def _cut(self, lengths: IntArray) -> tuple[IntArray, IntArray | None]:
        """Return the document and the start of each piece, in the order of `Cuts`; no starts if no document is cut."""
        cuts = self.cuts
        document = sort_by_length(lengths).astype(smallest_index_type(len(lengths)), copy=False)
        if self.seed is not None:
            _, first = np.unique(cuts.document_length, return_index=True)
            of_length = np.add.reduceat(cuts.documents, first)
            shuffle_in_groups(document, of_length, generator_for(self.seed, "documents of equal length"))
        if (cuts.pieces_each == 1).all():
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
