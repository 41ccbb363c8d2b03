"""Deal documents into the packs of a pattern table, in seeded random order.

Three orders are random: which of the documents of equal length goes where, the order of the packs, and the order of the
documents inside a pack. Each is a permutation evaluated place by place (`scramble`), in blocks that stay in the cache.
"""

import numpy as np

from hf_packing.planning.lengths import IntArray, sort_by_length
from hf_packing.planning.overflow import Pieces
from hf_packing.planning.patterns import PatternTable
from hf_packing.planning.plan import PackingPlan
from hf_packing.planning.scramble import derive_key, keys_for, scramble

BLOCK = 1 << 16


def deal(
    table: PatternTable, pieces: Pieces, document_length: IntArray, seed: int | None, lower_bound: int = 0
) -> PackingPlan:
    """The plan in which every piece has its place in a pack of the table.

    Args:
        table: patterns whose segment counts are those of the pieces.
        pieces: what is to be packed.
        document_length: integers [documents], tokens, of the whole documents; the plan keeps them.
        seed: of the three random orders; None deals in document order and keeps the order of the table.
        lower_bound: packs that any plan under the strategy's own limits needs, where it has proven one.

    Returns:
        PackingPlan.
    """
    counts = np.bincount(pieces.length, minlength=1)
    if not np.array_equal(np.trim_zeros(table.counts(), "b"), np.trim_zeros(counts, "b")):
        raise AssertionError("the pattern table and the pieces hold different lengths")
    pack_place, pack_offsets, pack_capacity = place_packs(table, seed)
    document = np.empty(len(pieces.length), dtype=pieces.document.dtype)
    start = np.zeros(len(document), dtype=pieces.start.dtype)
    length = np.empty(len(document), dtype=np.int32)
    cut = bool(pieces.start.any())
    pieces_are_documents = not cut and len(document) == len(document_length)
    by_length = sort_by_length(pieces.length)
    slots = Slots(table, counts, seed)
    for begin in range(0, len(document), BLOCK):
        end = min(begin + BLOCK, len(document))
        pack, place, slot_length, rank = slots.block(begin, end)
        target = pack_offsets[pack_place[pack]] + place
        piece = by_length[rank]
        document[target] = piece if pieces_are_documents else pieces.document[piece]
        length[target] = slot_length
        if cut:
            start[target] = pieces.start[piece]
    return PackingPlan(
        document_length=document_length,
        segment_document=document,
        segment_start=start,
        segment_length=length,
        pack_offsets=pack_offsets,
        pack_capacity=pack_capacity,
        proven_lower_bound=lower_bound,
    )


def place_packs(table: PatternTable, seed: int | None) -> tuple[IntArray, IntArray, IntArray]:
    """Where each pack of the table stands in the plan, and the plan's pack_offsets and pack_capacity."""
    num_packs = table.num_packs
    size = np.repeat(table.segments_per_pack(), table.packs)
    capacity = np.repeat(table.capacity, table.packs)
    place = np.arange(num_packs)
    if seed is not None and num_packs:
        key = derive_key(seed, "packs")
        for begin in range(0, num_packs, BLOCK):
            block = slice(begin, begin + BLOCK)
            place[block] = scramble(place[block], np.array([num_packs]), np.array([key]))
    placed_size, placed_capacity = np.empty_like(size), np.empty_like(capacity)
    placed_size[place], placed_capacity[place] = size, capacity
    return place, np.concatenate([[0], np.cumsum(placed_size)]), placed_capacity


class Slots:
    """All segments of a table as one list, shortest first: for each its pack, its place in it, and its piece."""

    def __init__(self, table: PatternTable, counts: IntArray, seed: int | None) -> None:
        by_length = np.argsort(table.entry_length, kind="stable")
        entry_pattern = table.entry_pattern
        pattern_first_pack = np.cumsum(table.packs) - table.packs
        copies_before = np.cumsum(table.entry_copies) - table.entry_copies
        pattern_copies_before = np.concatenate([copies_before, [0]])[table.entry_offsets[:-1]]
        pattern = entry_pattern[by_length]

        self.length = table.entry_length[by_length]
        self.copies = table.entry_copies[by_length]
        self.first_pack = pattern_first_pack[pattern]
        self.first_place = copies_before[by_length] - pattern_copies_before[pattern]
        self.pack_size = table.segments_per_pack()[pattern]
        slots = table.packs[pattern] * self.copies
        self.end = np.cumsum(slots)
        self.begin = self.end - slots
        self.counts = counts
        self.first_rank = np.cumsum(counts) - counts
        self.seed = seed
        if seed is not None:
            self.equal_length_key = derive_key(seed, "documents of equal length")
            self.pack_key = derive_key(seed, "documents of a pack")

    def block(self, begin: int, end: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """For the slots begin:end: pack, place in the pack, segment length, rank of the piece among all by length."""
        first, last = np.searchsorted(self.end, [begin, end - 1], side="right")
        entries = slice(first, last + 1)
        shown = np.minimum(self.end[entries], end) - np.maximum(self.begin[entries], begin)
        entry = np.repeat(np.arange(first, last + 1), shown)
        slot = np.arange(begin, end)
        number, copies = slot - self.begin[entry], self.copies[entry]
        turn = number // copies
        pack, place, length = (
            self.first_pack[entry] + turn,
            self.first_place[entry] + number - turn * copies,
            self.length[entry],
        )
        if self.seed is None:
            return pack, place, length, slot
        rank = self.first_rank[length]
        rank = rank + scramble(slot - rank, self.counts[length], keys_for(length, self.equal_length_key))
        place = scramble(place, self.pack_size[entry], keys_for(pack, self.pack_key))
        return pack, place, length, rank
