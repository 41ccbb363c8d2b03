"""Shortest-pack-first histogram packing (SPFHP, arXiv 2107.02027): worst-fit decreasing on length counts.

Each length, longest first, goes into the packs with the most room. Packs with the same content move together, and they
take several copies at once as long as no other pack would have more room.
"""

from hf_packing.planning.lengths import IntArray
from hf_packing.planning.open_packs import OpenPacks, lengths_descending
from hf_packing.planning.patterns import Patterns


def shortest_pack_first_patterns(counts: IntArray, capacity: int, max_documents: int | None = None) -> Patterns:
    """The packs of shortest-pack-first histogram packing.

    Args:
        counts: int64 [longest + 1]: how many segments there are of each length; none is empty.
        capacity: tokens a pack holds.
        max_documents: most segments in one pack; None for no limit.

    Returns:
        Patterns with exactly the counted segments.
    """
    packs = OpenPacks(capacity, max_documents)
    for length, left in lengths_descending(counts):
        while left:
            room = packs.most_room()
            if room < length:
                packs.open(left, length, 1)
                break
            taken = packs.take(room, left)
            until = max(packs.most_room(), length)  # it stays first while it has at least the room of the next
            copies = min((room - until) // length + 1, packs.limit - taken.documents, left // taken.packs)
            packs.fill(taken, room, length, copies)
            left -= taken.packs * copies
    return packs.patterns()
