"""The greedy strategies BestFit and ShortestPackFirst, computed from counts of lengths.

Both strategies place the longest documents first. BestFit puts each document into the pack with the least room that
holds the document, and ShortestPackFirst puts each document into the pack with the most room.
"""

from dataclasses import dataclass

from hf_packing.planning.lengths import IntArray
from hf_packing.planning.open_packs import OpenPacks, best_fit_patterns, lengths_descending
from hf_packing.planning.patterns import Patterns
from hf_packing.strategies.base import OneCapacity, Solution, register_strategy


@register_strategy
@dataclass(frozen=True)
class BestFit(OneCapacity):
    """Best-fit decreasing: put each document, longest first, into the pack with the least room that holds the document.

    No document that fits in a pack is cut ("Fewer truncations improve language modeling", arXiv 2404.10830). With
    `max_documents`, BestFit is longest-pack-first histogram packing (arXiv 2107.02027).

    Args:
        max_length: capacity of each pack in tokens, at least 1.
        overflow: treatment of documents longer than max_length. "split" cuts such a document into chunks of max_length
            tokens and a remainder, "truncate" keeps the first max_length tokens, "drop" leaves the document out, and
            "error" raises PackingError.
        max_documents: maximum number of segments in a pack; None for no limit.
        seed: seed for shuffling the packs, the segments in each pack, and documents of equal length; None for no
            shuffling.

    Raises:
        PackingError: an argument does not match its description above.

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
    """Shortest-pack-first histogram packing (SPFHP): put each document, longest first, into the emptiest pack.

    The emptiest pack is the pack with the most room. Documents that fit in no open pack each open a new pack.
    ShortestPackFirst usually needs more packs than BestFit, especially with few distinct lengths ("Efficient sequence
    packing without cross-contamination", arXiv 2107.02027).

    Args:
        max_length: capacity of each pack in tokens, at least 1.
        overflow: treatment of documents longer than max_length. "split" cuts such a document into chunks of max_length
            tokens and a remainder, "truncate" keeps the first max_length tokens, "drop" leaves the document out, and
            "error" raises PackingError.
        max_documents: maximum number of segments in a pack, called depth in the paper; None for no limit.
        seed: seed for shuffling the packs, the segments in each pack, and documents of equal length; None for no
            shuffling.

    Raises:
        PackingError: an argument does not match its description above.

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

    Packs with the same content are filled together. These packs take several segments of one length at once, as long as
    no other open pack has more room.

    Args:
        counts: int64 [longest + 1]: counts[n] is the number of segments of n tokens; counts[0] is 0.
        capacity: capacity of each pack, in tokens.
        max_documents: maximum number of segments in a pack; None for no limit.

    Returns:
        Patterns whose packs hold exactly the counted segments.
    """
    packs = OpenPacks(capacity, max_documents)
    for length, left in lengths_descending(counts):
        while left:
            room = packs.most_room()
            if room < length:
                packs.open(left, length, 1)
                break
            taken = packs.take(room, left)
            until = max(packs.most_room(), length)  # the taken packs stay first until another pack has more room
            copies = min((room - until) // length + 1, packs.limit - taken.documents, left // taken.packs)
            packs.fill(taken, room, length, copies)
            left -= taken.packs * copies
    return packs.patterns()
