"""Assign documents to the packs of a table: all at once, or shard by shard with the same result.

Both ways make the same four decisions, each at random, or in order if the seed is None:

1. which documents of one length are cut in which way; this gives each document a place in one long list;
2. which piece of one length goes into which slot of that length (a piece's rank follows from its document's place);
3. the order of the segments inside each pack;
4. the order of the packs.

Each is a permutation that can be evaluated one element at a time, so a shard needs only its own documents. It is
evaluated in blocks that fit in the CPU cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hf_packing.planning.lengths import IntArray, smallest_index_type, sort_by_length
from hf_packing.planning.patterns import Cuts, Patterns
from hf_packing.planning.permutation import derive_key, keys_for, permute, permute_back
from hf_packing.planning.plan import PackingPlan

_BLOCK = 1 << 16


@dataclass(frozen=True)
class DealtShard:
    """Where the segments of one shard's documents go, in the order of the documents."""

    document: IntArray
    """integers [segments]: the document that a segment is cut from, numbered within the shard."""
    start: IntArray
    """int64 [segments], tokens: where in its document it begins."""
    length: IntArray
    """int32 [segments], tokens."""
    pack: IntArray
    """int64 [segments]: number of the pack among the packs of all shards."""
    place: IntArray
    """int64 [segments]: index of the segment in its pack, from 0."""


class _Places(NamedTuple):
    """Where segments go, one element for each segment."""

    pack: IntArray
    """int64: number of the pack, as the patterns number them."""
    place: IntArray
    """int64: index of the segment in its pack."""
    length: IntArray
    """int32, tokens."""


class Slots:
    """The places for segments in all packs of some patterns, listed by length, shortest first.

    Slots and pieces of one length are paired by a random permutation, or in order if the seed is None. The permutation
    works in both directions: `block` finds the pieces for given slots, `find` finds the slots for given pieces.
    """

    def __init__(self, patterns: Patterns, seed: int | None) -> None:
        by_length = np.argsort(patterns.entry_length, kind="stable")
        pattern_first_pack = np.cumsum(patterns.packs) - patterns.packs
        copies_before = np.cumsum(patterns.entry_copies) - patterns.entry_copies
        pattern_copies_before = np.append(copies_before, 0)[patterns.entry_offsets[:-1]]
        pattern = patterns.entry_pattern[by_length]

        # one element for each entry of the patterns, sorted by length
        self._length = patterns.entry_length[by_length]
        self._copies = patterns.entry_copies[by_length]
        self._first_pack = pattern_first_pack[pattern]
        self._first_place = copies_before[by_length] - pattern_copies_before[pattern]
        self._pack_size = patterns.segments_per_pack()[pattern]
        slots = patterns.packs[pattern] * self._copies
        self._end = np.cumsum(slots)
        self._begin = self._end - slots

        # one element for each length
        self._counts = patterns.counts()
        self._first_rank = np.cumsum(self._counts) - self._counts

        self._seed = seed
        if seed is not None:
            self._equal_length_key = derive_key(seed, "documents of equal length")
            self._within_pack_key = derive_key(seed, "documents of a pack")

    def block(self, begin: int, end: int) -> tuple[_Places, IntArray]:
        """Return where the slots begin:end are, and the rank of the piece that goes into each."""
        first, last = np.searchsorted(self._end, [begin, end - 1], side="right")
        entries = slice(first, last + 1)
        shown = np.minimum(self._end[entries], end) - np.maximum(self._begin[entries], begin)
        entry = np.repeat(np.arange(first, last + 1), shown)
        slot = np.arange(begin, end)
        places = self._places(slot, entry)
        if self._seed is None:
            return places, slot
        first_rank = self._first_rank[places.length]
        keys = keys_for(places.length, self._equal_length_key)
        return places, first_rank + permute(slot - first_rank, self._counts[places.length], keys)

    def find(self, length: IntArray, rank: IntArray) -> _Places:
        """Return where the pieces of these lengths and ranks go."""
        slot = rank
        if self._seed is not None:
            first_rank = self._first_rank[length]
            keys = keys_for(length, self._equal_length_key)
            slot = first_rank + permute_back(rank - first_rank, self._counts[length], keys)
        return self._places(slot, np.searchsorted(self._end, slot, side="right"))

    def _places(self, slot: IntArray, entry: IntArray) -> _Places:
        number, copies = slot - self._begin[entry], self._copies[entry]
        nth_pack = number // copies
        pack = self._first_pack[entry] + nth_pack
        place = self._first_place[entry] + number - nth_pack * copies
        if self._seed is not None:
            place = permute(place, self._pack_size[entry], keys_for(pack, self._within_pack_key))
        return _Places(pack, place, self._length[entry])


@dataclass(frozen=True)
class Assignment:
    """Which document goes where, for the patterns and cuts of a table."""

    patterns: Patterns
    cuts: Cuts
    seed: int | None

    def plan(self, lengths: IntArray, proven_lower_bound: int, note: str) -> PackingPlan:
        """Make the plan for all documents.

        Args:
            lengths: integers [documents], tokens: the checked lengths that were counted.
            proven_lower_bound: packs, stored in the plan.
            note: stored in the plan.
        """
        piece_document, piece_start = self._pieces_by_rank(lengths)
        final_pack, pack_offsets, pack_capacity = self._place_packs()
        document = np.empty(len(piece_document), dtype=smallest_index_type(len(lengths)))
        start = np.zeros(len(document), dtype=lengths.dtype)
        length = np.empty(len(document), dtype=np.int32)
        for begin in range(0, len(document), _BLOCK):
            places, rank = self._slots.block(begin, min(begin + _BLOCK, len(document)))
            target = pack_offsets[final_pack[places.pack]] + places.place
            document[target] = piece_document[rank]
            length[target] = places.length
            if piece_start is not None:
                start[target] = piece_start[rank]
        return PackingPlan(
            document_length=lengths,
            segment_document=document,
            segment_start=start,
            segment_length=length,
            pack_offsets=pack_offsets,
            pack_capacity=pack_capacity,
            proven_lower_bound=proven_lower_bound,
            note=note,
        )

    def shard(self, order: IntArray, kind: IntArray, number: IntArray) -> DealtShard:
        """Assign the documents of one shard.

        Args:
            order: int64 [documents]: the shard's documents, sorted by length.
            kind: int64 [documents]: the length of each, as an index into `Cuts.by_length`.
            number: int64 [documents]: how many documents of the same length come before it in all shards.
        """
        cuts = self.cuts
        listed_at = self._places_in_list(kind, number)
        group = np.searchsorted(np.cumsum(cuts.documents), listed_at, side="right")
        nth_of_group = listed_at - (np.cumsum(cuts.documents) - cuts.documents)[group]
        nth, piece = self._pieces_of_documents(group)
        first_rank, stride = self._piece_ranks
        pack, place = np.empty(len(nth), dtype=np.int64), np.empty(len(nth), dtype=np.int64)
        for begin in range(0, len(nth), _BLOCK):
            block = slice(begin, begin + _BLOCK)
            rank = first_rank[piece[block]] + nth_of_group[nth[block]] * stride[piece[block]]
            places = self._slots.find(cuts.piece_length[piece[block]], rank)
            pack[block], place[block] = self._final_pack(places.pack), places.place
        document = order[nth]
        in_document_order = np.argsort(document, kind="stable")
        return DealtShard(
            document=document[in_document_order],
            start=cuts.piece_start[piece][in_document_order],
            length=cuts.piece_length[piece][in_document_order],
            pack=pack[in_document_order],
            place=place[in_document_order],
        )

    @cached_property
    def _slots(self) -> Slots:
        return Slots(self.patterns, self.seed)

    @cached_property
    def _piece_ranks(self) -> tuple[IntArray, IntArray]:
        return self.cuts.ranks()

    def _places_in_list(self, kind: IntArray, number: IntArray) -> IntArray:
        """Return the places of documents in the list of all documents, sorted by length and then by group.

        Arguments as in `shard`.
        """
        by_length = self.cuts.by_length()
        listed_at = by_length.first[kind] + number
        if self.seed is not None and by_length.several_groups.any():
            mixed = np.flatnonzero(by_length.several_groups[kind])
            kind = kind[mixed]
            keys = keys_for(by_length.length[kind], derive_key(self.seed, "cuts"))
            listed_at[mixed] = by_length.first[kind] + permute(number[mixed], by_length.documents[kind], keys)
        return listed_at

    def _list_documents(self, lengths: IntArray) -> IntArray:
        """Return all documents, sorted by length and then by group."""
        order = sort_by_length(lengths).astype(smallest_index_type(len(lengths)), copy=False)
        by_length = self.cuts.by_length()
        mixed = np.flatnonzero(by_length.several_groups)
        if not len(mixed):
            return order
        kind, number = np.repeat(mixed, by_length.documents[mixed]), _count_up(by_length.documents[mixed])
        sorted_at = by_length.first[kind] + number
        listed = order.copy()
        listed[self._places_in_list(kind, number)] = order[sorted_at]
        return listed

    def _pieces_of_documents(self, group: IntArray) -> tuple[IntArray, IntArray]:
        """Return the pieces of documents of these groups: for each piece, indices into `group` and into `Cuts`."""
        pieces_each = self.cuts.pieces_each[group]
        nth = np.repeat(np.arange(len(group)), pieces_each)
        return nth, np.repeat(self.cuts.piece_offsets[group], pieces_each) + _count_up(pieces_each)

    def _pieces_by_rank(self, lengths: IntArray) -> tuple[IntArray, IntArray | None]:
        """Return the document of every piece, and where in it the piece begins, in the order of the pieces' ranks.

        Returns:
            integers [pieces]; int64 [pieces], or None if every piece begins at token 0.
        """
        cuts, listed = self.cuts, self._list_documents(lengths)
        if cuts.whole.all():
            return listed, None
        stays_whole = np.repeat(cuts.whole, cuts.documents)
        whole, cut = listed[stays_whole], listed[~stays_whole]
        group = np.repeat(np.flatnonzero(~cuts.whole), cuts.documents[~cuts.whole])
        nth, piece = self._pieces_of_documents(group)
        by_length = sort_by_length(cuts.piece_length[piece])
        document, piece = cut[nth[by_length]], piece[by_length]
        # pieces of cut documents come after the whole documents of their length
        whole_up_to = np.concatenate([[0], np.cumsum(cuts.documents[cuts.whole])])
        at = whole_up_to[np.searchsorted(cuts.document_length[cuts.whole], cuts.piece_length[piece], side="right")]
        start = None
        if cuts.piece_start.any():
            start = np.zeros(len(whole) + len(document), dtype=np.int64)
            start[at + np.arange(len(at))] = cuts.piece_start[piece]
        return np.insert(whole, at, document), start

    def _final_pack(self, pack: IntArray) -> IntArray:
        """Return the row that each pack of the patterns becomes."""
        if self.seed is None:
            return pack
        return permute(pack, np.array([self.patterns.num_packs]), np.array([derive_key(self.seed, "packs")]))

    def _place_packs(self) -> tuple[IntArray, IntArray, IntArray]:
        """Return the row that each pack of the patterns becomes, and the plan's pack_offsets and pack_capacity."""
        patterns = self.patterns
        row = np.arange(patterns.num_packs)
        for begin in range(0, len(row), _BLOCK):
            block = slice(begin, begin + _BLOCK)
            row[block] = self._final_pack(row[block])
        size, capacity = np.empty_like(row), np.empty(len(row), dtype=patterns.capacity.dtype)
        size[row] = np.repeat(patterns.segments_per_pack(), patterns.packs)
        capacity[row] = np.repeat(patterns.capacity, patterns.packs)
        return row, np.concatenate([[0], np.cumsum(size)]), capacity


def _count_up(sizes: IntArray) -> IntArray:
    """Return 0, 1, ..., size - 1 for each size, concatenated."""
    numbers: IntArray = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return numbers
