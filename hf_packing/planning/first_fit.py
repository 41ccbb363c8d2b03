"""Documents that are not packed yet, while a strategy fills one pack after the other; and first-fit decreasing.

First-fit decreasing fills a pack with the longest document that fits, again and again, then opens the next.
"""

from collections.abc import Mapping

from hf_packing.planning.lengths import IntArray
from hf_packing.planning.open_packs import lengths_descending
from hf_packing.planning.patterns import Pattern, Patterns, patterns_from_list


class Remaining:
    """How many documents are left of each length. The lengths in use are the bits of one big integer."""

    def __init__(self, number: Mapping[int, int]) -> None:
        self.number = dict(number)
        bits = bytearray(max(self.number, default=0) // 8 + 1)
        for length in self.number:
            bits[length >> 3] |= 1 << (length & 7)
        self.lengths = int.from_bytes(bits, "little")

    def longest(self, room: int) -> int:
        """Return the longest length that fits in the room; -1 if none does."""
        return (self.lengths & ((2 << room) - 1)).bit_length() - 1

    def shortest(self) -> int:
        """Return the shortest length that is left."""
        return (self.lengths & -self.lengths).bit_length() - 1

    def add(self, length: int) -> None:
        """Put one document back."""
        self.number[length] = self.number.get(length, 0) + 1
        self.lengths |= 1 << length

    def take(self, length: int, number: int) -> None:
        """Take so many documents of a length."""
        self.number[length] -= number
        if not self.number[length]:
            self.lengths ^= 1 << length

    def fill(self, room: int) -> tuple[list[tuple[int, int]], int]:
        """Choose what fills a pack: the longest that fits, then the next. Nothing is taken yet.

        Returns:
            (length, copies) for each length in the pack, and the room that stays free.
        """
        copies: list[tuple[int, int]] = []
        limit = room
        while (length := self.longest(limit)) > 0:
            number = min(room // length, self.number[length])
            copies.append((length, number))
            room -= number * length
            limit = min(room, length - 1)
        return copies, room

    def packs_alike(self, copies: list[tuple[int, int]]) -> int:
        """Return how many packs in a row would be filled with these same copies."""
        return min(self.number[length] // number for length, number in copies)


def first_fit_patterns(counts: IntArray, capacity: int) -> Patterns:
    """Pack counted segments first-fit decreasing.

    Packs are filled one by one, which has the same result as placing documents one by one.

    Args:
        counts: int64 [longest + 1]: how many segments there are of each length; none is empty.
        capacity: tokens that a pack holds.

    Returns:
        Patterns with exactly the counted segments.
    """
    remaining = Remaining(dict(lengths_descending(counts)))
    patterns = []
    while remaining.lengths:
        copies, _ = remaining.fill(capacity)
        packs = remaining.packs_alike(copies)
        for length, number in copies:
            remaining.take(length, packs * number)
        patterns.append(Pattern(packs, capacity, copies))
    return patterns_from_list(patterns)
