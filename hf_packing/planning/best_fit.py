"""Best-fit decreasing on length counts: the cost depends on the distinct lengths, not on the number of documents.

Document by document, best-fit decreasing puts each length, longest first, into the pack with the least room that still
holds it (arXiv 2404.10830). On counts, all packs with the same room and the same content move together: while the room
left is at least the length, the same pack stays the best fit, so it takes as many copies as it holds before another is
touched. With a limit on documents per pack this is longest-pack-first histogram packing (arXiv 2107.02027).
"""

import numpy as np

from hf_packing.planning.lengths import IntArray
from hf_packing.planning.patterns import Patterns, Run, patterns_from_runs


class OpenPacks:
    """Packs that still have room, as intervals of pack numbers grouped by the room they have.

    The rooms in use are the bits of one big integer: shifting it right by a length and taking the lowest set bit finds
    the least room that holds the length, in a fraction of a microsecond and with no tree to keep.
    """

    def __init__(self) -> None:
        self.intervals: dict[int, list[tuple[int, int, int]]] = {}
        self.rooms = 0

    def add(self, room: int, first_pack: int, packs: int, documents: int) -> None:
        self.intervals.setdefault(room, []).append((first_pack, packs, documents))
        self.rooms |= 1 << room

    def least_room(self, length: int) -> int | None:
        fitting = self.rooms >> length
        return length + (fitting & -fitting).bit_length() - 1 if fitting else None

    def pop(self, room: int) -> tuple[int, int, int]:
        intervals = self.intervals[room]
        interval = intervals.pop()
        if not intervals:
            self.rooms &= ~(1 << room)
        return interval


def best_fit_patterns(counts: IntArray, capacity: int, max_documents: int | None = None) -> Patterns:
    """The packs of best-fit decreasing.

    Args:
        counts: int64 [capacity + 1]: how many segments there are of each length; none is empty.
        capacity: tokens a pack holds.
        max_documents: most segments in one pack; None for no limit.

    Returns:
        Patterns with exactly the counted segments.
    """
    limit = max_documents or capacity
    open_packs, runs, num_packs = OpenPacks(), [], 0

    def fill(first_pack: int, packs: int, room: int, documents: int, length: int, copies: int) -> None:
        runs.append(Run(length, first_pack, packs, copies))
        room, documents = room - copies * length, documents + copies
        if room and documents < limit:
            open_packs.add(room, first_pack, packs, documents)

    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left and (room := open_packs.least_room(length)):
            first_pack, packs, documents = open_packs.pop(room)
            copies = min(room // length, limit - documents, left)
            filled = min(packs, left // copies)
            if filled < packs:
                open_packs.add(room, first_pack + filled, packs - filled, documents)
            fill(first_pack, filled, room, documents, length, copies)
            left -= filled * copies
        copies = min(capacity // length, limit)
        for packs, each in ((left // copies, copies), (1, left % copies)):
            if packs and each:
                fill(num_packs, packs, capacity, 0, length, each)
                num_packs += packs
    return patterns_from_runs(runs, num_packs, capacity)
