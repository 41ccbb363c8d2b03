"""Best-fit and first-fit decreasing bin packing on counts of lengths, instead of on single documents.

Best-fit decreasing takes documents from the longest to the shortest. Each document goes into the pack with the fewest
free tokens, among all packs in which the document fits (arXiv 2404.10830). A pack that has just taken a document is
still the best fit for the next document of the same length, as long as that document fits. So a pack takes as many
documents of one length as fit before another pack is used. This module fills packs with the same content together, so
the cost depends on the number of distinct lengths, not on the number of documents. With a limit on documents per pack,
best-fit decreasing is longest-pack-first histogram packing (arXiv 2107.02027).

First-fit decreasing fills one pack after the other, and always adds the longest remaining document that fits.
"""

from collections.abc import Mapping

import numpy as np

from hf_packing.planning.lengths import IntArray
from hf_packing.planning.patterns import Patterns, Run, patterns_from_runs

Interval = tuple[int, int, int]
"""Consecutively numbered packs with the same content: the first pack, the number of packs, the segments in each."""


class OpenPacks:
    """The packs to which segments can still be added (open packs), and a record of how all packs were filled.

    The record is `runs`: how many segments of which length were put into which packs, as for `patterns_from_runs`.

    The room of a pack is the number of free tokens. Open packs with the same room are stored as intervals of
    consecutive packs, and the newest interval is used first. The integer `rooms` has bit n set if an open pack has a
    room of n tokens. So the highest set bit gives the most room, and the lowest set bit from bit n on gives the least
    room in which a segment of n tokens fits. Either lookup takes a fraction of a microsecond and needs no search tree.
    """

    def __init__(self, capacity: int, max_documents: int | None) -> None:
        self.capacity = capacity
        self.limit = max_documents or capacity
        self.num_packs = 0
        self.runs: list[Run] = []
        """How the packs were filled, in order."""
        self.intervals: dict[int, list[Interval]] = {}
        """Open packs by their room."""
        self.rooms = 0

    def most_room(self) -> int:
        """Return the number of free tokens of the emptiest open pack, or -1 if no pack is open."""
        return self.rooms.bit_length() - 1

    def add(self, room: int, interval: Interval) -> None:
        """Add an interval of open packs with `room` free tokens in each pack."""
        self.intervals.setdefault(room, []).append(interval)
        self.rooms |= 1 << room

    def take(self, room: int, packs: int) -> Interval:
        """Remove packs from the newest interval of open packs with `room` free tokens, and return the removed packs.

        `packs` is the maximum number of packs to remove.
        """
        intervals = self.intervals[room]
        first_pack, there, documents = intervals.pop()
        if not intervals:
            self.rooms ^= 1 << room
        if packs < there:
            self.add(room, (first_pack + packs, there - packs, documents))
        return first_pack, min(packs, there), documents

    def fill(self, interval: Interval, room: int, length: int, copies: int) -> None:
        """Put `copies` segments of `length` tokens into each pack of the interval.

        `room` is the number of free tokens in each pack before the call. The packs must be new, or must have been
        removed by `take`. After the call, the packs are open, unless they are full or have the maximum number of
        segments.
        """
        first_pack, packs, documents = interval
        self.runs.append((length, first_pack, packs, copies))
        room, documents = room - copies * length, documents + copies
        if room and documents < self.limit:
            self.add(room, (first_pack, packs, documents))

    def open(self, packs: int, length: int, copies: int) -> None:
        """Create `packs` new packs, and put `copies` segments of `length` tokens into each new pack."""
        self.fill((self.num_packs, packs, 0), self.capacity, length, copies)
        self.num_packs += packs

    def patterns(self) -> Patterns:
        """Return the patterns of all packs, open or full."""
        return patterns_from_runs(self.runs, self.num_packs, self.capacity)


def lengths_descending(counts: IntArray) -> list[tuple[int, int]]:
    """Return (n, counts[n]) for every length n with a nonzero count, the longest length first."""
    lengths = counts.nonzero()[0][::-1]
    return list(zip(lengths.tolist(), counts[lengths].tolist(), strict=True))


def fill_best_fit(packs: OpenPacks, counts: IntArray) -> None:
    """Pack segments by best-fit decreasing, into open packs where possible and otherwise into new packs.

    Args:
        packs: open packs, changed in place.
        counts: int64 [longest + 1]: counts[n] is the number of segments of n tokens; counts[0] is 0.
    """
    for length, left in lengths_descending(counts):
        while left and (fitting := packs.rooms >> length):
            room = length + (fitting & -fitting).bit_length() - 1
            *_, (_, _, documents) = packs.intervals[room]
            copies = min(room // length, packs.limit - documents, left)
            interval = packs.take(room, left // copies)
            packs.fill(interval, room, length, copies)
            left -= interval[1] * copies
        copies = min(packs.capacity // length, packs.limit)
        if left >= copies:
            packs.open(left // copies, length, copies)
        if left % copies:
            packs.open(1, length, left % copies)


def best_fit_patterns(counts: IntArray, capacity: int, max_documents: int | None = None) -> Patterns:
    """Pack segments by best-fit decreasing, and return the patterns of the packs.

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
    """The documents that are not packed yet, stored as the number of remaining documents of each length.

    The integer `lengths` has bit n set if a document of n tokens remains. So the longest document that fits into a pack
    is found without a search.
    """

    def __init__(self, number: Mapping[int, int]) -> None:
        self.number = dict(number)
        remains = np.zeros(max(self.number, default=0) + 1, dtype=bool)
        remains[list(self.number)] = True
        self.lengths = int.from_bytes(np.packbits(remains, bitorder="little").tobytes(), "little")

    def longest(self, room: int) -> int:
        """Return the length of the longest remaining document of at most `room` tokens, or -1 if there is none."""
        return (self.lengths & ((2 << room) - 1)).bit_length() - 1

    def shortest(self) -> int:
        """Return the length of the shortest remaining document."""
        return (self.lengths & -self.lengths).bit_length() - 1

    def add(self, length: int) -> None:
        """Add one document of `length` tokens."""
        self.number[length] = self.number.get(length, 0) + 1
        self.lengths |= 1 << length

    def take(self, length: int, number: int) -> None:
        """Remove `number` documents of `length` tokens."""
        self.number[length] -= number
        if not self.number[length]:
            self.lengths ^= 1 << length

    def fill(self, room: int) -> tuple[dict[int, int], int]:
        """Choose documents for a pack with `room` free tokens. Each choice is the longest remaining document that fits.

        The chosen documents are not removed from this object.

        Returns:
            The number of chosen documents by their length, and the number of tokens that stay free in the pack.
        """
        copies: dict[int, int] = {}
        limit = room
        while (length := self.longest(limit)) > 0:
            number = min(room // length, self.number[length])
            copies[length] = number
            room -= number * length
            limit = min(room, length - 1)
        return copies, room

    def packs_alike(self, copies: dict[int, int]) -> int:
        """Return how many packs with the same copies, as returned by `fill`, the remaining documents can make."""
        return min(self.number[length] // number for length, number in copies.items())


def first_fit_patterns(counts: IntArray, capacity: int) -> Patterns:
    """Pack segments by first-fit decreasing, and return the patterns of the packs.

    Packs are filled one after the other. The result is the same as if each segment, the longest first, went into the
    first pack in which the segment fits.

    Args:
        counts: int64 [longest + 1]: counts[n] is the number of segments of n tokens; counts[0] is 0.
        capacity: capacity of each pack, in tokens.

    Returns:
        Patterns whose packs hold exactly the counted segments.
    """
    remaining = Remaining(dict(lengths_descending(counts)))
    runs: list[Run] = []
    num_packs = 0
    while remaining.lengths:
        copies, _ = remaining.fill(capacity)
        packs = remaining.packs_alike(copies)
        for length, number in copies.items():
            remaining.take(length, packs * number)
            runs.append((length, num_packs, packs, number))
        num_packs += packs
    return patterns_from_runs(runs, num_packs, capacity)
