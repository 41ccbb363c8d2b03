"""Greedy strategies, by counts: longest documents first, each into the pack with the least room, or the most."""

from dataclasses import dataclass

from hf_packing.planning.lengths import IntArray
from hf_packing.planning.open_packs import OpenPacks, best_fit_patterns, lengths_descending
from hf_packing.planning.patterns import Patterns
from hf_packing.strategies.base import OneCapacity, Solution, register_strategy


@register_strategy
@dataclass(frozen=True)
class BestFit(OneCapacity):
    """Best-fit decreasing: longest documents first, each into the pack with the least room that holds it.

    No document that fits in a pack is cut ("Fewer truncations improve language modeling", arXiv 2404.10830). With
    `max_documents` it is longest-pack-first histogram packing (arXiv 2107.02027).

    Args:
        max_length: tokens that a pack holds, at least 1.
        overflow: what happens to a longer document: "split" into chunks of max_length and a remainder, "truncate",
            "drop", or "error".
        max_documents: most segments in a pack; None for no limit.
        seed: of the random order of packs, of the documents in them, and of documents of equal length; None leaves
            them sorted.

    Raises:
        PackingError: an argument that is not as above.

    Example:
        >>> import hf_packing as hfp
        >>> batch = {"input_ids": [[1, 2, 3], [4, 5], [6]]}
        >>> hfp.BestFit(4, seed=None)(batch)["input_ids"]
        [[1, 2, 3, 6], [4, 5]]
    """

    def solve(self, counts: IntArray) -> Solution:
        return Solution(best_fit_patterns(counts, self.max_length, self.max_documents))


@register_strategy
@dataclass(frozen=True)
class ShortestPackFirst(OneCapacity):
    """Shortest-pack-first histogram packing (SPFHP): longest documents first, into the packs with the most room.

    Length by length, each open pack takes one document, and documents that are left over open new packs. It usually
    needs more packs than BestFit, especially with few distinct lengths ("Efficient sequence packing without
    cross-contamination", arXiv 2107.02027).

    Args:
        max_length: tokens that a pack holds, at least 1.
        overflow: what happens to a longer document: "split", "truncate", "drop" or "error".
        max_documents: most segments in a pack, the paper's depth; None for no limit.
        seed: of the random order of packs, of the documents in them, and of documents of equal length; None leaves
            them sorted.

    Raises:
        PackingError: an argument that is not as above.

    Example:
        >>> import hf_packing as hfp
        >>> batch = {"input_ids": [[1, 2, 3], [4, 5], [6]]}
        >>> hfp.ShortestPackFirst(4, seed=None)(batch)["input_ids"]
        [[1, 2, 3], [4, 5, 6]]
    """

    def solve(self, counts: IntArray) -> Solution:
        return Solution(_shortest_pack_first_patterns(counts, self.max_length, self.max_documents))


def _shortest_pack_first_patterns(counts: IntArray, capacity: int, max_documents: int | None) -> Patterns:
    """Pack counted segments worst-fit decreasing.

    Packs with the same content are filled together, and they take several copies at once as long as no other pack would
    have more room.

    Args:
        counts: int64 [longest + 1]: how many segments there are of each length; none is empty.
        capacity: tokens that a pack holds.
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
            until = max(packs.most_room(), length)  # they stay first while they have at least the room of the next
            copies = min((room - until) // length + 1, packs.limit - taken.documents, left // taken.packs)
            packs.fill(taken, room, length, copies)
            left -= taken.packs * copies
    return packs.patterns()
