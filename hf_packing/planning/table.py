"""PatternTable, a plan that is made from counts of document lengths, and the assignment of documents to its packs.

An assignment consists of four random choices. If the seed is None, nothing is shuffled.

1. Choose the way in which each document is cut, if a strategy (such as Bucket) cuts documents of one length in several
   ways.
2. Choose a slot of the same length for each piece of a document. A slot is the position of one segment in a pack.
3. Choose the order of the segments in each pack.
4. Choose the order of the packs.

Each choice is a permutation that can be evaluated one element at a time, so permutations are evaluated in blocks that
fit in the CPU cache.

In this module, the rank of a piece is the index of the piece in the list of all pieces, sorted by length (see `Cuts`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hf_packing.planning.lengths import (
    IntArray,
    count_lengths,
    indices_in_ranges,
    offsets_of,
    smallest_index_type,
    sort_by_length,
)
from hf_packing.planning.metrics import PackingMetrics, make_metrics, pack_lower_bound
from hf_packing.planning.patterns import Cuts, Patterns
from hf_packing.planning.permutation import derive_key, keys_for, permute, random_order
from hf_packing.planning.plan import PackingPlan

_BLOCK = 1 << 16


class Slots(NamedTuple):
    """Some slots of packs. A slot is the position of one segment in a pack."""

    pack: IntArray
    """int64 [slots]: index of the slot's pack in the order of the patterns, before packs are shuffled."""
    place: IntArray
    """int64 [slots]: position of the slot in the pack; the first slot of a pack has position 0."""
    length: IntArray
    """int32 [slots]: length of the segment in the slot, in tokens."""
    rank: IntArray
    """int64 [slots]: rank of the piece in the slot, which is its index in the list of all pieces, sorted by length."""


def slots_by_length(patterns: Patterns, seed: int | None) -> Iterator[Slots]:
    """Yield the slots of all packs, given their patterns, the shortest first, in blocks that fit in the CPU cache.

    With a seed, a random permutation assigns the pieces of each length to the slots of that length. If the seed is
    None, pieces and slots are paired in order.
    """
    by_length = np.argsort(patterns.entry_length, kind="stable")
    copies_before = offsets_of(patterns.entry_copies)
    # one element for each entry of the patterns, sorted by length
    pattern = patterns.entry_pattern[by_length]
    entry_length = patterns.entry_length[by_length]
    copies = patterns.entry_copies[by_length]
    first_pack = offsets_of(patterns.packs)[pattern]
    first_place = copies_before[by_length] - copies_before[patterns.entry_offsets[pattern]]
    pack_size = patterns.segments_per_pack()[pattern]
    entry_offsets = offsets_of(patterns.packs[pattern] * copies)
    # one element for each length
    counts = patterns.counts()
    first_rank_of = offsets_of(counts)
    for begin in range(0, int(entry_offsets[-1]), _BLOCK):
        end = min(begin + _BLOCK, int(entry_offsets[-1]))
        first, last = np.searchsorted(entry_offsets, [begin, end - 1], side="right")
        shown = np.diff(entry_offsets[first - 1 : last + 1].clip(begin, end))
        entry = np.repeat(np.arange(first - 1, last), shown)
        slot = np.arange(begin, end)
        length = entry_length[entry]
        number = slot - entry_offsets[entry]
        nth_pack = number // copies[entry]
        pack = first_pack[entry] + nth_pack
        place = first_place[entry] + number - nth_pack * copies[entry]
        rank = slot
        if seed is not None:
            place = permute(place, pack_size[entry], keys_for(pack, derive_key(seed, "documents of a pack")))
            first_rank = first_rank_of[length]
            keys = keys_for(length, derive_key(seed, "documents of equal length"))
            rank = first_rank + permute(slot - first_rank, counts[length], keys)
        yield Slots(pack, place, length, rank)


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
        >>> table.plan(lengths) == hfp.plan_packing(lengths, hfp.BestFit(8))
        True
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
        piece_document, piece_start = self._pieces_by_rank(lengths)
        final_pack, pack_offsets, pack_capacity = self._place_packs()
        document = np.empty(len(piece_document), dtype=smallest_index_type(len(lengths)))
        start = np.zeros(len(document), dtype=lengths.dtype)
        length = np.empty(len(document), dtype=np.int32)
        for slots in slots_by_length(self.patterns, self.seed):
            target = pack_offsets[final_pack[slots.pack]] + slots.place
            document[target] = piece_document[slots.rank]
            length[target] = slots.length
            if piece_start is not None:
                start[target] = piece_start[slots.rank]
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

    def _list_documents(self, lengths: IntArray) -> IntArray:
        """Return the indices of all documents, sorted by document length and then by group.

        A group consists of documents of one length that are cut in the same way (see `Cuts`). If there are several
        groups of one length, documents of that length are first shuffled, unless the seed is None.
        """
        order = sort_by_length(lengths).astype(smallest_index_type(len(lengths)), copy=False)
        several = np.flatnonzero(np.unique(self.cuts.document_length, return_counts=True)[1] > 1)
        if self.seed is None or not len(several):
            return order
        counts = count_lengths(lengths)
        size = counts.documents[several]
        kind, nth = np.repeat(several, size), indices_in_ranges(0, size)
        first = offsets_of(counts.documents)[kind]
        keys = keys_for(counts.length[kind], derive_key(self.seed, "cuts"))
        listed = order.copy()
        listed[first + permute(nth, counts.documents[kind], keys)] = order[first + nth]
        return listed

    def _pieces_by_rank(self, lengths: IntArray) -> tuple[IntArray, IntArray | None]:
        """Return the document and the start of every piece, in the order of their ranks.

        Returns:
            integers [pieces]: index of the piece's document; int64 [pieces]: index of the piece's first token in the
            document, or None if every piece begins at token 0.
        """
        cuts, listed = self.cuts, self._list_documents(lengths)
        if cuts.whole.all():
            return listed, None
        stays_whole = np.repeat(cuts.whole, cuts.documents)
        # one element for each document that is cut or left out, and then one for each of its pieces
        other = np.flatnonzero(~cuts.whole)
        group, nth_of_group = np.repeat(other, cuts.documents[other]), indices_in_ranges(0, cuts.documents[other])
        nth = np.repeat(np.arange(len(group)), cuts.pieces_each[group])
        piece = indices_in_ranges(cuts.piece_offsets[group], cuts.pieces_each[group])
        first_rank, stride = cuts.ranks
        rank = first_rank[piece] + nth_of_group[nth] * stride[piece]
        document = np.empty(np.count_nonzero(stays_whole) + len(rank), dtype=listed.dtype)
        is_whole = np.ones(len(document), dtype=bool)
        is_whole[rank] = False
        document[is_whole], document[rank] = listed[stays_whole], listed[~stays_whole][nth]
        start = None
        if cuts.piece_start.any():
            start = np.zeros(len(document), dtype=np.int64)
            start[rank] = cuts.piece_start[piece]
        return document, start

    def _place_packs(self) -> tuple[IntArray, IntArray, IntArray]:
        """Return the index of every pack after shuffling, and the plan's arrays `pack_offsets` and `pack_capacity`.

        Returns:
            int64 [packs]: element i is the index in the plan, after shuffling, of the pack that had index i before
            shuffling; int64 [packs + 1]: `pack_offsets` of the plan; int32 [packs]: `pack_capacity` of the plan.
        """
        patterns, number = self.patterns, self.num_packs
        row = np.arange(number) if self.seed is None else random_order(number, self.seed, "packs")
        size, capacity = np.empty_like(row), np.empty(len(row), dtype=patterns.capacity.dtype)
        size[row] = np.repeat(patterns.segments_per_pack(), patterns.packs)
        capacity[row] = np.repeat(patterns.capacity, patterns.packs)
        return row, offsets_of(size), capacity
