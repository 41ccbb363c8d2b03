"""Best-fit and first-fit decreasing, by counts: packs that still have room, and documents that are still to be placed.

Document by document, best-fit decreasing puts each length, longest first, into the pack with the least room that still
holds it (arXiv 2404.10830). By counts, all packs with the same room and the same content are filled together: as long
as the room left is at least the length, the same pack stays the best fit, so it takes as many copies as it holds before
another pack is touched. The cost depends on the distinct lengths, not on the number of documents. With a limit on
documents per pack this is longest-pack-first histogram packing (arXiv 2107.02027). First-fit decreasing fills one pack
after the other with the longest document that fits.
"""

from collections.abc import Mapping
from typing import NamedTuple

from hf_packing.planning.lengths import IntArray
from hf_packing.planning.patterns import Pattern, Patterns, Run, patterns_from_list, patterns_from_runs


class Interval(NamedTuple):
    """Consecutive packs with the same content."""

    first_pack: int
    packs: int
    documents: int
    """Documents in each pack."""


class OpenPacks:
    """Packs with room, as intervals of pack numbers grouped by the room they have, and the moves that filled them.

    The rooms that occur are the set bits of one big integer: shifting it right by a length and taking the lowest set
    bit finds the least room that holds the length, and the highest set bit is the most room. Either takes a fraction of
    a microsecond, without a search tree. Among packs with the same room, the newest are taken first.
    """

    def __init__(self, capacity: int, max_documents: int | None) -> None:
        self.capacity = capacity
        self.limit = max_documents or capacity
        self.num_packs = 0
        self.runs: list[Run] = []
        self._intervals: dict[int, list[Interval]] = {}
        self._rooms = 0

    def least_room(self, length: int) -> int | None:
        """Return the least room that holds the length; None if no open pack holds it."""
        fitting = self._rooms >> length
        return length + (fitting & -fitting).bit_length() - 1 if fitting else None

    def most_room(self) -> int:
        """Return the most room that any open pack has; -1 if none is open."""
        return self._rooms.bit_length() - 1

    def newest(self, room: int) -> Interval:
        """Return the newest interval with this room."""
        return self._intervals[room][-1]

    def add(self, room: int, interval: Interval) -> None:
        """Add open packs with this room."""
        self._intervals.setdefault(room, []).append(interval)
        self._rooms |= 1 << room

    def take(self, room: int, packs: int) -> Interval:
        """Remove the newest interval with this room, or only as many of its packs as are wanted."""
        intervals = self._intervals[room]
        interval = intervals.pop()
        if not intervals:
            self._rooms &= ~(1 << room)
        if packs < interval.packs:
            self.add(room, Interval(interval.first_pack + packs, interval.packs - packs, interval.documents))
        return Interval(interval.first_pack, min(packs, interval.packs), interval.documents)

    def fill(self, interval: Interval, room: int, length: int, copies: int) -> None:
        """Put `copies` segments into each pack of a taken interval; close packs that are full or at the limit."""
        self.runs.append(Run(length, interval.first_pack, interval.packs, copies))
        room, documents = room - copies * length, interval.documents + copies
        if room and documents < self.limit:
            self.add(room, Interval(interval.first_pack, interval.packs, documents))

    def open(self, packs: int, length: int, copies: int) -> None:
        """Open new packs, and put `copies` segments of this length into each."""
        self.fill(Interval(self.num_packs, packs, 0), self.capacity, length, copies)
        self.num_packs += packs

    def patterns(self) -> Patterns:
        """Collect the patterns of all packs."""
        return patterns_from_runs(self.runs, self.num_packs, self.capacity)


def lengths_descending(counts: IntArray) -> list[tuple[int, int]]:
    """List (length, documents) for every length that occurs, the longest first."""
    lengths = counts.nonzero()[0][::-1]
    return list(zip(lengths.tolist(), counts[lengths].tolist(), strict=True))


def fill_best_fit(packs: OpenPacks, counts: IntArray) -> None:
    """Put counted segments into packs that may already be open, and into new ones.

    Args:
        packs: changed in place.
        counts: int64 [longest + 1]: how many segments there are of each length; none is empty.
    """
    for length, left in lengths_descending(counts):
        while left and (room := packs.least_room(length)):
            copies = min(room // length, packs.limit - packs.newest(room).documents, left)
            taken = packs.take(room, left // copies)
            packs.fill(taken, room, length, copies)
            left -= taken.packs * copies
        copies = min(packs.capacity // length, packs.limit)
        if left >= copies:
            packs.open(left // copies, length, copies)
        if left % copies:
            packs.open(1, length, left % copies)


def best_fit_patterns(counts: IntArray, capacity: int, max_documents: int | None = None) -> Patterns:
    """Pack counted segments best-fit decreasing.

    Args:
        counts: int64 [longest + 1]: how many segments there are of each length; none is empty.
        capacity: tokens that a pack holds.
        max_documents: most segments in one pack; None for no limit.

    Returns:
        Patterns with exactly the counted segments.
    """
    packs = OpenPacks(capacity, max_documents)
    fill_best_fit(packs, counts)
    return packs.patterns()


class Remaining:
    """How many documents are left of each length. The lengths that occur are the set bits of one big integer."""

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
        """Take `number` documents of a length."""
        self.number[length] -= number
        if not self.number[length]:
            self.lengths ^= 1 << length

    def fill(self, room: int) -> tuple[list[tuple[int, int]], int]:
        """Choose the documents for a pack: the longest that fits, then the next. Does not take them yet.

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
