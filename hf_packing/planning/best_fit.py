"""Best-fit decreasing on length counts: the cost depends on the distinct lengths, not on the number of documents.

Document by document, best-fit decreasing puts each length, longest first, into the pack with the least room that still
holds it (arXiv 2404.10830). On counts, all packs with the same room and the same content move together: while the room
left is at least the length, the same pack stays the best fit, so it takes as many copies as it holds before another is
touched. With a limit on documents per pack this is longest-pack-first histogram packing (arXiv 2107.02027).
"""

from hf_packing.planning.lengths import IntArray
from hf_packing.planning.open_packs import OpenPacks, lengths_descending
from hf_packing.planning.patterns import Patterns


def best_fit_patterns(counts: IntArray, capacity: int, max_documents: int | None = None) -> Patterns:
    """The packs of best-fit decreasing.

    Args:
        counts: int64 [longest + 1]: how many segments there are of each length; none is empty.
        capacity: tokens a pack holds.
        max_documents: most segments in one pack; None for no limit.

    Returns:
        Patterns with exactly the counted segments.
    """
    packs = OpenPacks(capacity, max_documents)
    fill_best_fit(packs, counts)
    return packs.patterns()


def fill_best_fit(packs: OpenPacks, counts: IntArray) -> None:
    """Put counted segments into packs that may already be open, and into new ones."""
    for length, left in lengths_descending(counts):
        while left and (room := packs.least_room(length)):
            newest = packs.intervals[room][-1]
            copies = min(room // length, packs.limit - newest.documents, left)
            taken = packs.take(room, left // copies)
            packs.fill(taken, room, length, copies)
            left -= taken.packs * copies
        copies = min(packs.capacity // length, packs.limit)
        if left >= copies:
            packs.open(left // copies, length, copies)
        if left % copies:
            packs.open(1, length, left % copies)
