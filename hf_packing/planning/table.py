"""PatternTable, a plan that is made from counts of document lengths, and the assignment of documents to its packs.

Documents are assigned all at once or shard by shard. Both ways give the same packs. An assignment consists of four
random choices. If the seed is None, nothing is shuffled.

1. Choose the way in which each document is cut, if a strategy (such as Bucket) cuts documents of one length in several
   ways.
2. Choose a slot of the same length for each piece of a document. A slot is the position of one segment in a pack.
3. Choose the order of the segments in each pack.
4. Choose the order of the packs.

Each choice is a permutation that can be evaluated one element at a time, so a shard can be assigned without the
documents of other shards. Permutations are evaluated in blocks that fit in the CPU cache.

In this module, the rank of a piece is the index of the piece in the list of all pieces, sorted by length (see `Cuts`).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hf_packing.errors import PackingError
from hf_packing.planning.lengths import (
    IntArray,
    LengthCounts,
    check_counts,
    check_lengths,
    count_lengths,
    counts_of_histogram,
    groups_of,
    indices_in_ranges,
    offsets_of,
    smallest_index_type,
    sort_by_length,
)
from hf_packing.planning.metrics import PackingMetrics, make_metrics, pack_lower_bound
from hf_packing.planning.patterns import Cuts, Patterns
from hf_packing.planning.permutation import derive_key, keys_for, permute, shuffle_indices
from hf_packing.planning.plan import PackingPlan

_BLOCK = 1 << 16


@dataclass(frozen=True)
class DealtShard:
    """The segments of one shard's documents. For each segment, `pack` and `place` say where the segment goes.

    Segments are listed in the order of the shard's documents.
    """

    document: IntArray
    """int64 [segments]: index of the segment's document in the shard."""
    start: IntArray
    """int64 [segments]: index of the segment's first token in the document."""
    length: IntArray
    """int32 [segments]: length of the segment, in tokens."""
    pack: IntArray
    """int64 [segments]: index of the segment's pack among the packs of all shards."""
    place: IntArray
    """int64 [segments]: position of the segment in the pack; the first segment of a pack has position 0."""


class Slots:
    """All slots of the packs that a `Patterns` object describes, sorted by slot length, shortest first.

    A slot is the position of one segment in a pack, and the length of the slot is the length of the segment. With a
    seed, a random permutation assigns the pieces of each length to the slots of that length. If the seed is None,
    pieces and slots are paired in order.
    """

    def __init__(self, patterns: Patterns, seed: int | None) -> None:
        by_length = np.argsort(patterns.entry_length, kind="stable")
        pattern = patterns.entry_pattern[by_length]
        place = offsets_of(patterns.entry_copies)

        # one element for each entry of the patterns, sorted by length
        self._copies = patterns.entry_copies[by_length]
        self._first_pack = offsets_of(patterns.packs)[pattern]
        self._first_place = place[by_length] - place[patterns.entry_offsets[pattern]]
        self._pack_size = patterns.segments_per_pack()[pattern]
        self._offsets = offsets_of(patterns.packs[pattern] * self._copies)

        # one element for each length
        self._counts = patterns.counts()
        self._first_of_length = offsets_of(self._counts)

        self._seed = seed
        if seed is not None:
            self._length_keys = keys_for(np.arange(len(self._counts)), derive_key(seed, "documents of equal length"))
            self._within_pack_key = derive_key(seed, "documents of a pack")

    def find(self, length: IntArray, rank: IntArray) -> tuple[IntArray, IntArray]:
        """Return the pack of each piece, and the position of the piece in the pack, int64 [pieces].

        Args:
            length: integers [pieces]: length of each piece, in tokens.
            rank: int64 [pieces]: index of each piece in the list of all pieces, sorted by length.

        Returns:
            The index of each pack in the order of the patterns, before packs are shuffled; and positions from 0.
        """
        slot = rank
        if self._seed is not None:
            first = self._first_of_length[length]
            slot = first + permute(rank - first, self._counts[length], self._length_keys[length], back=True)
        entry = groups_of(slot, self._offsets)
        number, copies = slot - self._offsets[entry], self._copies[entry]
        nth_pack = number // copies
        pack = self._first_pack[entry] + nth_pack
        place = self._first_place[entry] + number - nth_pack * copies
        if self._seed is not None:
            place = permute(place, self._pack_size[entry], keys_for(pack, self._within_pack_key))
        return pack, place


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PatternTable:
    """A plan that is made from counts of document lengths alone.

    The table describes the packs, but does not yet assign documents to packs. `plan_counts` returns a PatternTable. The
    size of a table depends on the number of distinct lengths and, with `Bucket`, on the number of cut documents.

    To assign a shard of documents to packs, a worker needs only the table, the lengths of the shard's documents, and
    the number of documents of each length in earlier shards. Together, the workers make the same packs as a plan for
    all documents.

    Example:
        >>> import numpy as np, hf_packing as hfp
        >>> lengths = np.array([5, 3, 6, 2])
        >>> table = hfp.plan_counts(np.bincount(lengths), hfp.BestFit(8))
        >>> table
        PatternTable(4 documents, 4 segments, 2 packs, efficiency 1.0000)
        >>> first = table.deal(lengths[:2])
        >>> second = table.deal(lengths[2:], already_dealt=np.bincount(lengths[:2]))
        >>> sorted(first.pack.tolist() + second.pack.tolist())
        [0, 0, 1, 1]
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
        patterns, cuts = self.patterns, self.cuts
        row = self._final_pack(np.arange(self.num_packs))
        size, pack_capacity = np.empty_like(row), np.empty(len(row), dtype=np.int32)
        size[row] = np.repeat(patterns.segments_per_pack(), patterns.packs)
        pack_capacity[row] = np.repeat(patterns.capacity, patterns.packs)
        pack_offsets = offsets_of(size)
        first_segment, segments = pack_offsets[row], int(pack_offsets[-1])
        by_length = sort_by_length(lengths).astype(smallest_index_type(len(lengths)), copy=False)
        document = np.empty(segments, dtype=by_length.dtype)
        start = np.zeros(segments, dtype=lengths.dtype)
        length = np.empty(segments, dtype=np.int32)
        has_starts = cuts.piece_start.any()
        for begin in range(0, len(lengths), _BLOCK):
            nth, piece, pack, place = self._place_pieces(np.arange(begin, min(begin + _BLOCK, len(lengths))))
            target = first_segment[pack] + place
            document[target] = by_length[begin + nth]
            length[target] = cuts.piece_length[piece]
            if has_starts:
                start[target] = cuts.piece_start[piece]
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

    def deal(self, shard_lengths: Any, already_dealt: Any = None) -> DealtShard:
        """Assign the documents of one shard to packs. The documents of other shards are not needed.

        Args:
            shard_lengths: 1-d integers [documents]: lengths of the shard's documents, in tokens.
            already_dealt: 1-d integers: already_dealt[n] is the number of documents of n tokens in all earlier shards
                together, that is, the sum of `np.bincount(shard_lengths)` over the earlier shards. The array may end
                before the longest length; missing counts are 0. None for the first shard.

        Returns:
            DealtShard with all segments of the shard's documents. Together, the results for all shards contain every
            segment of every pack exactly once.

        Raises:
            PackingError: an argument is not a 1-d array of non-negative integers, or this shard and the earlier shards
                have more documents of some length than the table has.
        """
        lengths = check_lengths(shard_lengths, "shard_lengths")
        before = counts_of_histogram(check_counts(() if already_dealt is None else already_dealt, "already_dealt"))
        dealt = self._take_from_counts("already_dealt", before, np.zeros_like(self.cuts.by_length.documents))
        in_shard = self._take_from_counts("shard_lengths", count_lengths(lengths), dealt)
        kind = np.repeat(np.arange(len(in_shard)), in_shard)
        position = offsets_of(self.cuts.by_length.documents)[kind] + dealt[kind] + indices_in_ranges(0, in_shard)
        nth, piece, pack, place = self._place_pieces(position)
        document = sort_by_length(lengths)[nth]
        in_order = np.argsort(document, kind="stable")
        start, length = self.cuts.piece_start[piece[in_order]], self.cuts.piece_length[piece[in_order]]
        return DealtShard(document[in_order], start, length, self._final_pack(pack[in_order]), place[in_order])

    def _take_from_counts(self, name: str, taken: LengthCounts, dealt: IntArray) -> IntArray:
        """Return the number of documents of each length of the table in `taken`, int64 [lengths].

        Args:
            name: name of the argument that `taken` comes from.
            taken: number of documents of each length.
            dealt: int64 [lengths]: number of documents of each length that earlier shards have.
        """
        counts = self.cuts.by_length
        known = np.isin(taken.length, counts.length)
        place = np.searchsorted(counts.length, taken.length[known])
        left = np.zeros_like(taken.length)
        left[known] = counts.documents[place] - dealt[place]
        if (beyond := taken.documents > left).any():
            first = int(beyond.argmax())
            raise PackingError(
                f"{name}: expected at most {left[first]} documents of length {taken.length[first]}, as the counts of "
                f"the PatternTable have no more that earlier shards leave over, got {taken.documents[first]}"
            )
        result = np.zeros_like(dealt)
        result[place] = taken.documents[known]
        return result

    def metrics(self) -> PackingMetrics:
        """Return the metrics of the plan. The PackingPlan that `plan` returns has the same metrics."""
        cuts, patterns = self.cuts, self.patterns
        counts = cuts.counts()
        largest = int(patterns.capacity.max(initial=0))
        return make_metrics(
            documents=cuts.documents,
            document_length=cuts.document_length,
            segments_each=cuts.pieces_each,
            tokens_kept=cuts.tokens_kept,
            packs=self.num_packs,
            slots=sum(map(operator.mul, patterns.packs.tolist(), patterns.capacity.tolist())),
            squared_segments=float(counts @ np.arange(len(counts), dtype=np.float64) ** 2),
            squared_capacities=float(patterns.packs @ patterns.capacity.astype(np.float64) ** 2),
            lower_bound=max(pack_lower_bound(counts, largest) if largest else 0, self.proven_lower_bound),
        )

    def __repr__(self) -> str:
        metrics = self.metrics()
        return (
            f"PatternTable({metrics.num_documents} documents, {metrics.num_segments} segments, "
            f"{metrics.num_packs} packs, efficiency {metrics.packing_efficiency:.4f})"
        )

    @cached_property
    def _cut_in_several_ways(self) -> IntArray:
        """True for each group of `Cuts` that is not the only group of its length, bool [groups]."""
        _, kind, groups = np.unique(self.cuts.document_length, return_inverse=True, return_counts=True)
        several: IntArray = groups[kind] > 1
        return several

    @cached_property
    def _slots(self) -> Slots:
        return Slots(self.patterns, self.seed)

    def _place_pieces(self, position: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Choose how some documents are cut, and where their pieces go.

        Args:
            position: int64 [documents]: index of each document in a list of all documents, sorted by length.

        Returns:
            Four arrays, int64 [pieces]: index of the piece's document in `position`; index of the piece in
            `Cuts.piece_length`; pack of the piece, before packs are shuffled; position of the piece in the pack.
        """
        cuts = self.cuts
        first_of_group = offsets_of(cuts.documents)
        group = groups_of(position, first_of_group)
        if self.seed is not None and self._cut_in_several_ways.any():
            mixed = np.flatnonzero(self._cut_in_several_ways[group])
            length = cuts.document_length[group[mixed]]
            kind = np.searchsorted(cuts.by_length.length, length)
            first, size = offsets_of(cuts.by_length.documents)[kind], cuts.by_length.documents[kind]
            keys = keys_for(length, derive_key(self.seed, "cuts"))
            position = position.copy()
            position[mixed] = first + permute(position[mixed] - first, size, keys)
            group[mixed] = groups_of(position[mixed], first_of_group)
        nth, piece, pieces = np.arange(len(position)), cuts.piece_offsets[group], cuts.pieces_each[group]
        if (pieces != 1).any():
            nth, piece = np.repeat(nth, pieces), indices_in_ranges(piece, pieces)
        first_rank, stride = cuts.ranks
        rank = first_rank[piece] + position[nth] * stride[piece]
        return nth, piece, *self._slots.find(cuts.piece_length[piece], rank)

    def _final_pack(self, pack: IntArray) -> IntArray:
        """Convert indices of packs before shuffling to the indices of the same packs in the plan, after shuffling."""
        return shuffle_indices(pack, self.num_packs, self.seed, "packs")
