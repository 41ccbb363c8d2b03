"""Assign documents to the packs of a PatternTable, either all documents at once or shard by shard.

Both ways give the same packs. An assignment consists of four random choices. If the seed is None, nothing is shuffled.

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

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hf_packing.planning.lengths import IntArray, indices_in_ranges, offsets_of, smallest_index_type, sort_by_length
from hf_packing.planning.patterns import Cuts, Patterns
from hf_packing.planning.permutation import derive_key, keys_for, permute, permute_back
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


class _Places(NamedTuple):
    """The pack of each segment, and the position of the segment in the pack."""

    pack: IntArray
    """int64 [segments]: index of the segment's pack in the order of the patterns, before packs are shuffled."""
    place: IntArray
    """int64 [segments]: position of the segment in the pack; the first segment of a pack has position 0."""
    length: IntArray
    """int32 [segments]: length of the segment, in tokens."""


class Slots:
    """All slots of the packs that a `Patterns` object describes, sorted by slot length, shortest first.

    A slot is the position of one segment in a pack, and the length of the slot is the length of the segment. With a
    seed, a random permutation assigns the pieces of each length to the slots of that length. If the seed is None,
    pieces and slots are paired in order. `block` returns the pieces for a range of slots, and `find` returns the slots
    for some pieces. Both methods identify a piece by rank. The rank is the index of the piece in the list of all
    pieces, sorted by length (see `Cuts`).
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
        """Return, for the slots begin, ..., end - 1, the pack, the position in the pack, and the rank of the piece.

        A slot is the position of one segment in a pack. Slots are numbered in the order of slot length. The rank of a
        piece is the index of the piece in the list of all pieces, sorted by length.
        """
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
        """Return the pack of each piece, and the position of the piece in the pack.

        Args:
            length: integers [pieces]: length of each piece, in tokens.
            rank: int64 [pieces]: index of each piece in the list of all pieces, sorted by length.
        """
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
    """The assignment of documents to the packs of a PatternTable. The fields are those of the table."""

    patterns: Patterns
    cuts: Cuts
    seed: int | None

    def plan(self, lengths: IntArray, proven_lower_bound: int, note: str) -> PackingPlan:
        """Return the plan that assigns all documents to packs.

        Args:
            lengths: integers [documents]: document lengths in tokens, already checked. The PatternTable must have been
                made from counts of these lengths.
            proven_lower_bound: lower bound on the number of packs, to be stored in the plan.
            note: remark of the strategy, to be stored in the plan.
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
        """Assign the documents of one shard to packs.

        Args:
            order: int64 [documents]: indices of the shard's documents, sorted by document length.
            kind: int64 [documents]: for each document in sorted order, the index of the document's length in the result
                of `Cuts.by_length`.
            number: int64 [documents]: for each document in sorted order, the number of earlier documents of the same
                length, counted in this shard and in all shards before this shard.

        Returns:
            DealtShard with all segments of the shard's documents.
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
        """Return the positions of some documents in the list of all documents, sorted by length and then by group.

        A group consists of documents of one length that are cut in the same way (see `Cuts`). If there are several
        groups of one length, documents of that length are first shuffled, unless the seed is None.

        `kind` and `number` describe the documents, and are explained in `shard`.
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
        """Return the indices of all documents, sorted by document length and then by group.

        A group consists of documents of one length that are cut in the same way (see `Cuts`).
        """
        order = sort_by_length(lengths).astype(smallest_index_type(len(lengths)), copy=False)
        by_length = self.cuts.by_length()
        mixed = np.flatnonzero(by_length.several_groups)
        if not len(mixed):
            return order
        kind, number = np.repeat(mixed, by_length.documents[mixed]), indices_in_ranges(0, by_length.documents[mixed])
        sorted_at = by_length.first[kind] + number
        listed = order.copy()
        listed[self._places_in_list(kind, number)] = order[sorted_at]
        return listed

    def _pieces_of_documents(self, group: IntArray) -> tuple[IntArray, IntArray]:
        """Return all pieces of some documents.

        Args:
            group: int64 [documents]: index of each document's group in `Cuts`.

        Returns:
            int64 [pieces]: document of the piece, as an index into `group`; int64 [pieces]: index of the piece in
            `Cuts.piece_length`.
        """
        pieces_each = self.cuts.pieces_each[group]
        nth = np.repeat(np.arange(len(group)), pieces_each)
        return nth, indices_in_ranges(self.cuts.piece_offsets[group], pieces_each)

    def _pieces_by_rank(self, lengths: IntArray) -> tuple[IntArray, IntArray | None]:
        """Return the document and the start of every piece. Pieces are listed in the order that `Cuts` describes.

        Returns:
            integers [pieces]: index of the piece's document; int64 [pieces]: index of the piece's first token in the
            document, or None if every piece begins at token 0.
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
        # among pieces of one length, whole documents come before pieces of cut documents
        whole_up_to = offsets_of(cuts.documents[cuts.whole])
        at = whole_up_to[np.searchsorted(cuts.document_length[cuts.whole], cuts.piece_length[piece], side="right")]
        start = None
        if cuts.piece_start.any():
            start = np.zeros(len(whole) + len(document), dtype=np.int64)
            start[at + np.arange(len(at))] = cuts.piece_start[piece]
        return np.insert(whole, at, document), start

    def _final_pack(self, pack: IntArray) -> IntArray:
        """Convert indices of packs before shuffling to the indices of the same packs in the plan, after shuffling."""
        if self.seed is None:
            return pack
        return permute(pack, np.array([self.patterns.num_packs]), np.array([derive_key(self.seed, "packs")]))

    def pack_capacity(self, first: int, end: int) -> IntArray:
        """Return the capacities of the packs first:end of the plan, int32 [packs]."""
        pack = np.arange(first, end)
        if self.seed is not None:
            key = derive_key(self.seed, "packs")
            pack = permute_back(pack, np.array([self.patterns.num_packs]), np.array([key]))
        pattern = np.searchsorted(np.cumsum(self.patterns.packs), pack, side="right")
        capacity: IntArray = self.patterns.capacity[pattern]
        return capacity

    def _place_packs(self) -> tuple[IntArray, IntArray, IntArray]:
        """Return the index of every pack after shuffling, and the plan's arrays `pack_offsets` and `pack_capacity`.

        Returns:
            int64 [packs]: element i is the index in the plan, after shuffling, of the pack that had index i before
            shuffling; int64 [packs + 1]: `pack_offsets` of the plan; int32 [packs]: `pack_capacity` of the plan.
        """
        patterns = self.patterns
        row = np.arange(patterns.num_packs)
        for begin in range(0, len(row), _BLOCK):
            block = slice(begin, begin + _BLOCK)
            row[block] = self._final_pack(row[block])
        size, capacity = np.empty_like(row), np.empty(len(row), dtype=patterns.capacity.dtype)
        size[row] = np.repeat(patterns.segments_per_pack(), patterns.packs)
        capacity[row] = np.repeat(patterns.capacity, patterns.packs)
        return row, offsets_of(size), capacity
