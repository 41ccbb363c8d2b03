"""Best-fit and first-fit decreasing on counts of lengths, and records of open packs and of remaining documents.

Best-fit decreasing takes documents from the longest to the shortest, and puts each document into the pack with the
least room that still holds the document (arXiv 2404.10830). This module fills consecutive packs with the same content
together. A pack that has just taken a document is still the best fit for the next document of the same length, as long
as that document fits. So a pack takes as many documents of one length as fit before another pack is used. The cost
depends on the number of distinct lengths, not on the number of documents. With a limit on documents per pack, best-fit
decreasing is longest-pack-first histogram packing (arXiv 2107.02027). First-fit decreasing fills one pack after the
other, each time with the longest remaining document that fits.
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
    """Number of documents in each pack."""


class OpenPacks:
    """The packs that still have room, grouped by room, and the filling steps (`Run`) of all packs, open or full.

    Packs with the same room are stored as intervals of consecutive packs, and the newest interval is used first. The
    distinct values of room are the set bits of one big integer. After a right shift by a length, the lowest set bit
    gives the least room that holds the length. The highest set bit gives the most room. Finding either value takes a
    fraction of a microsecond and needs no search tree.
    """

    def __init__(self, capacity: int, max_documents: int | None) -> None:
        self.capacity = capacity
        self.limit = max_documents or capacity
        self.num_packs = 0
        self.runs: list[Run] = []
        self._intervals: dict[int, list[Interval]] = {}
        self._rooms = 0

    def least_room(self, length: int) -> int | None:
        """Return the room of the fullest open pack that can still take `length` tokens, or None if no open pack can."""
        fitting = self._rooms >> length
        return length + (fitting & -fitting).bit_length() - 1 if fitting else None

    def most_room(self) -> int:
        """Return the most room of any open pack, or -1 if no pack is open."""
        return self._rooms.bit_length() - 1

    def newest(self, room: int) -> Interval:
        """Return the newest interval of packs with this room."""
        return self._intervals[room][-1]

    def add(self, room: int, interval: Interval) -> None:
        """Add an interval of open packs with this room."""
        self._intervals.setdefault(room, []).append(interval)
        self._rooms |= 1 << room

    def take(self, room: int, packs: int) -> Interval:
        """Remove at most `packs` packs from the newest interval with this room, and return the removed packs."""
        intervals = self._intervals[room]
        interval = intervals.pop()
        if not intervals:
            self._rooms &= ~(1 << room)
        if packs < interval.packs:
            self.add(room, Interval(interval.first_pack + packs, interval.packs - packs, interval.documents))
        return Interval(interval.first_pack, min(packs, interval.packs), interval.documents)

    def fill(self, interval: Interval, room: int, length: int, copies: int) -> None:
        """Put `copies` segments of this length into each pack of the interval.

        `room` is the room of each pack before the call. Packs stay open unless the packs are full or have the maximum
        number of segments.
        """
        self.runs.append(Run(length, interval.first_pack, interval.packs, copies))
        room, documents = room - copies * length, interval.documents + copies
        if room and documents < self.limit:
            self.add(room, Interval(interval.first_pack, interval.packs, documents))

    def open(self, packs: int, length: int, copies: int) -> None:
        """Open new packs, and put `copies` segments of this length into each new pack."""
        self.fill(Interval(self.num_packs, packs, 0), self.capacity, length, copies)
        self.num_packs += packs

    def patterns(self) -> Patterns:
        """Return the patterns of all packs."""
        return patterns_from_runs(self.runs, self.num_packs, self.capacity)


def lengths_descending(counts: IntArray) -> list[tuple[int, int]]:
    """Return (length, number of documents) for every length that occurs, the longest length first."""
    lengths = counts.nonzero()[0][::-1]
    return list(zip(lengths.tolist(), counts[lengths].tolist(), strict=True))


def fill_best_fit(packs: OpenPacks, counts: IntArray) -> None:
    """Pack counted segments best-fit decreasing, into open packs where possible and otherwise into new packs.

    Args:
        packs: open packs, changed in place.
        counts: int64 [longest + 1]: counts[n] is the number of segments of n tokens; counts[0] is 0.
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
        counts: int64 [longest + 1]: counts[n] is the number of segments of n tokens; counts[0] is 0.
        capacity: capacity of each pack, in tokens.
        max_documents: maximum number of segments in a pack; None for no limit.

    Returns:
        Patterns whose packs hold exactly the counted segments.
    """
    packs = OpenPacks(capacity, max_documents)
    fill_best_fit(packs, counts)
    return packs.patterns()


class Remaining:
    """The number of remaining documents of each length.

    The lengths that occur are the set bits of one big integer, so the longest length that fits is found without a
    search.
    """

    def __init__(self, number: Mapping[int, int]) -> None:
        self.number = dict(number)
        bits = bytearray(max(self.number, default=0) // 8 + 1)
        for length in self.number:
            bits[length >> 3] |= 1 << (length & 7)
        self.lengths = int.from_bytes(bits, "little")

    def longest(self, room: int) -> int:
        """Return the longest remaining length that fits in the room, or -1 if no remaining length fits."""
        return (self.lengths & ((2 << room) - 1)).bit_length() - 1

    def shortest(self) -> int:
        """Return the shortest remaining length."""
        return (self.lengths & -self.lengths).bit_length() - 1

    def add(self, length: int) -> None:
        """Add one document of this length."""
        self.number[length] = self.number.get(length, 0) + 1
        self.lengths |= 1 << length

    def take(self, length: int, number: int) -> None:
        """Remove `number` documents of this length."""
        self.number[length] -= number
        if not self.number[length]:
            self.lengths ^= 1 << length

    def fill(self, room: int) -> tuple[list[tuple[int, int]], int]:
        """Choose documents for one pack by repeatedly choosing the longest remaining document that fits.

        The chosen documents are not removed.

        Returns:
            (length, number of documents) for each length in the pack, and the room that stays free.
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
        """Return the number of packs with the same documents that can be made from the remaining documents.

        `copies` lists the documents of one pack, as returned by `fill`.
        """
        return min(self.number[length] // number for length, number in copies)


def first_fit_patterns(counts: IntArray, capacity: int) -> Patterns:
    """Pack counted segments first-fit decreasing.

    Packs are filled one after the other; the result is the same as placing documents one after the other.

    Args:
        counts: int64 [longest + 1]: counts[n] is the number of segments of n tokens; counts[0] is 0.
        capacity: capacity of each pack, in tokens.

    Returns:
        Patterns whose packs hold exactly the counted segments.
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
