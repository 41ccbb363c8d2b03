"""All places for segments that patterns have, in one list: which pack, and where in it.

Slots stand in the order of their lengths, shortest first; pieces are ranked the same way. Which of the pieces of one
length goes into which of its slots is a random permutation, and so is the order inside a pack. Both are evaluated place
by place (`scramble`), from either side: a block of slots asks for its pieces, a piece asks for its slot.
"""

from typing import NamedTuple

import numpy as np

from hf_packing.planning.lengths import IntArray
from hf_packing.planning.patterns import Patterns
from hf_packing.planning.scramble import derive_key, keys_for, scramble, unscramble

EQUAL_LENGTH, WITHIN_PACK = "documents of equal length", "documents of a pack"


class Places(NamedTuple):
    """Where segments stand, one element for each."""

    pack: IntArray
    """int64: number of the pack among those of the patterns."""
    place: IntArray
    """int64: which segment of the pack."""
    length: IntArray
    """int32, tokens."""


class Slots:
    """The slots of patterns."""

    def __init__(self, patterns: Patterns, seed: int | None) -> None:
        by_length = np.argsort(patterns.entry_length, kind="stable")
        pattern_first_pack = np.cumsum(patterns.packs) - patterns.packs
        copies_before = np.cumsum(patterns.entry_copies) - patterns.entry_copies
        pattern_copies_before = np.append(copies_before, 0)[patterns.entry_offsets[:-1]]
        pattern = patterns.entry_pattern[by_length]

        self.length = patterns.entry_length[by_length]
        self.copies = patterns.entry_copies[by_length]
        self.first_pack = pattern_first_pack[pattern]
        self.first_place = copies_before[by_length] - pattern_copies_before[pattern]
        self.pack_size = patterns.segments_per_pack()[pattern]
        slots = patterns.packs[pattern] * self.copies
        self.end = np.cumsum(slots)
        self.begin = self.end - slots
        self.counts = patterns.counts()
        self.first_rank = np.cumsum(self.counts) - self.counts
        self.seed = seed
        if seed is not None:
            self.equal_length_key = derive_key(seed, EQUAL_LENGTH)
            self.within_pack_key = derive_key(seed, WITHIN_PACK)

    def block(self, begin: int, end: int) -> tuple[Places, IntArray]:
        """The slots begin:end, and for each the rank of its piece among all pieces by length."""
        first, last = np.searchsorted(self.end, [begin, end - 1], side="right")
        entries = slice(first, last + 1)
        shown = np.minimum(self.end[entries], end) - np.maximum(self.begin[entries], begin)
        entry = np.repeat(np.arange(first, last + 1), shown)
        slot = np.arange(begin, end)
        places = self.places(slot, entry)
        if self.seed is None:
            return places, slot
        first_rank = self.first_rank[places.length]
        keys = keys_for(places.length, self.equal_length_key)
        return places, first_rank + scramble(slot - first_rank, self.counts[places.length], keys)

    def find(self, length: IntArray, rank: IntArray) -> Places:
        """Where the pieces of these lengths and ranks stand."""
        slot = rank
        if self.seed is not None:
            first_rank = self.first_rank[length]
            keys = keys_for(length, self.equal_length_key)
            slot = first_rank + unscramble(rank - first_rank, self.counts[length], keys)
        return self.places(slot, np.searchsorted(self.end, slot, side="right"))

    def places(self, slot: IntArray, entry: IntArray) -> Places:
        number, copies = slot - self.begin[entry], self.copies[entry]
        turn = number // copies
        pack = self.first_pack[entry] + turn
        place = self.first_place[entry] + number - turn * copies
        if self.seed is not None:
            place = scramble(place, self.pack_size[entry], keys_for(pack, self.within_pack_key))
        return Places(pack, place, self.length[entry])
