"""The greedy strategies BestFit and ShortestPackFirst, which need only the number of documents of each length.

Both strategies place the longest documents first. BestFit puts each document into the fullest pack in which the
document fits, and ShortestPackFirst puts each document into the emptiest pack.
"""

from dataclasses import dataclass

from hf_packing.planning.best_fit import OpenPacks, best_fit_patterns, lengths_descending
from hf_packing.planning.lengths import IntArray
from hf_packing.strategies.base import OneCapacity, Solution, register_strategy


@register_strategy
@dataclass(frozen=True)
class BestFit(OneCapacity):
    """The best-fit decreasing strategy: each document, longest first, goes into the fullest pack in which it fits.

    A document of at most max_length tokens is never cut ("Fewer truncations improve language modeling", arXiv
    2404.10830). With `max_documents`, BestFit is longest-pack-first histogram packing (LPFHP, arXiv 2107.02027).

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
    """The strategy shortest-pack-first histogram packing: each document, longest first, goes into the emptiest pack.

    A document that does not fit in the emptiest pack starts a new pack. The paper calls the strategy SPFHP.
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
        # each step takes packs with the same content, and adds as many segments of one length to each of them as go in
        # before another pack has more room
        packs = OpenPacks(self.max_length, self.max_documents)
        for length, left in lengths_descending(counts):
            while left:
                room = packs.most_room()
                if room < length:
                    packs.open(left, length, 1)
                    break
                taken = packs.take(room, left)
                until = max(packs.most_room(), length)  # down to this room, no other pack has more room
                _, number, documents = taken
                copies = min((room - until) // length + 1, packs.limit - documents, left // number)
                packs.fill(taken, room, length, copies)
                left -= number * copies
        return Solution(packs.patterns())
