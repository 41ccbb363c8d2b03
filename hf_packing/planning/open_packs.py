"""Packs that still have room, while a counting strategy fills them."""

from typing import NamedTuple

from hf_packing.planning.lengths import IntArray
from hf_packing.planning.patterns import Patterns, Run, patterns_from_runs


class Interval(NamedTuple):
    """Consecutive packs with the same content."""

    first_pack: int
    packs: int
    documents: int
    """In each of them."""


class OpenPacks:
    """Packs with room, as intervals of pack numbers grouped by the room they have, and the moves that filled them.

    The rooms in use are the bits of one big integer: shifting it right by a length and taking the lowest set bit finds
    the least room that holds the length, the highest bit is the most room, each in a fraction of a microsecond and with
    no tree to keep. Among packs with the same room the newest are taken first.
    """

    def __init__(self, capacity: int, max_documents: int | None) -> None:
        self.capacity = capacity
        self.limit = max_documents or capacity
        self.num_packs = 0
        self.runs: list[Run] = []
        self.intervals: dict[int, list[Interval]] = {}
        self.rooms = 0

    def least_room(self, length: int) -> int | None:
        """The least room that holds the length."""
        fitting = self.rooms >> length
        return length + (fitting & -fitting).bit_length() - 1 if fitting else None

    def most_room(self) -> int:
        """The most room that any open pack has; -1 when none is open."""
        return self.rooms.bit_length() - 1

    def add(self, room: int, interval: Interval) -> None:
        self.intervals.setdefault(room, []).append(interval)
        self.rooms |= 1 << room

    def pop(self, room: int) -> Interval:
        intervals = self.intervals[room]
        interval = intervals.pop()
        if not intervals:
            self.rooms &= ~(1 << room)
        return interval

    def take(self, room: int, packs: int) -> Interval:
        """The newest interval with this room, or as many of its packs as are wanted; the rest stays."""
        interval = self.pop(room)
        if packs < interval.packs:
            self.add(room, Interval(interval.first_pack + packs, interval.packs - packs, interval.documents))
        return Interval(interval.first_pack, min(packs, interval.packs), interval.documents)

    def fill(self, interval: Interval, room: int, length: int, copies: int) -> None:
        """Put copies of a length into each pack of a taken interval; full packs and those at the limit close."""
        self.runs.append(Run(length, interval.first_pack, interval.packs, copies))
        room, documents = room - copies * length, interval.documents + copies
        if room and documents < self.limit:
            self.add(room, Interval(interval.first_pack, interval.packs, documents))

    def open(self, packs: int, length: int, copies: int) -> None:
        """New packs, each with copies of a length."""
        self.fill(Interval(self.num_packs, packs, 0), self.capacity, length, copies)
        self.num_packs += packs

    def patterns(self) -> Patterns:
        return patterns_from_runs(self.runs, self.num_packs, self.capacity)


def lengths_descending(counts: IntArray) -> list[tuple[int, int]]:
    """(length, documents) for every length that occurs, the longest first."""
    lengths = counts.nonzero()[0][::-1]
    return list(zip(lengths.tolist(), counts[lengths].tolist(), strict=True))
