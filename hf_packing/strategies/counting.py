"""Strategies that look at nothing but the counts of lengths, with packs of one capacity."""

from dataclasses import dataclass

from hf_packing.planning.best_fit import best_fit_patterns
from hf_packing.planning.lengths import IntArray
from hf_packing.planning.patterns import Patterns
from hf_packing.planning.shortest_pack_first import shortest_pack_first_patterns
from hf_packing.strategies.base import OneCapacity


@dataclass(frozen=True)
class BestFit(OneCapacity):
    """Best-fit decreasing: longest documents first, each into the pack with the least room that holds it.

    No document that fits in a pack is cut ("Fewer truncations improve language modeling", arXiv 2404.10830). With
    `max_documents` it is longest-pack-first histogram packing (arXiv 2107.02027).

    Args:
        max_length: tokens a pack holds, at least 1.
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

    def patterns(self, counts: IntArray) -> Patterns:
        return best_fit_patterns(counts, self.max_length, self.max_documents)


@dataclass(frozen=True)
class ShortestPackFirst(OneCapacity):
    """Shortest-pack-first histogram packing (SPFHP): longest documents first, each into the pack with the most room.

    It evens out the fill of packs and the number of documents in them, and needs more packs than BestFit
    ("Efficient sequence packing without cross-contamination", arXiv 2107.02027).

    Args:
        max_length: tokens a pack holds, at least 1.
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

    def patterns(self, counts: IntArray) -> Patterns:
        return shortest_pack_first_patterns(counts, self.max_length, self.max_documents)
