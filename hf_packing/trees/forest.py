"""A forest of documents that share prefixes, and the cuts that let its trees fit in packs.

A tree is made of documents that begin with the same tokens, in depth-first order: documents that share more tokens are
closer together. So each document takes its shared tokens from the document before it. A tree can be cut before any
document. That document then stands in its row as a whole, which repeats the tokens that it would have shared.
"""

import heapq
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from hf_packing.checks import check_whole_number
from hf_packing.planning.lengths import IntArray, indices_in_groups, offsets_of, sums_of


@dataclass(frozen=True, eq=False)
class Forest:
    """Pieces of documents, tree by tree, and the tokens that each piece shares with the one before it.

    Args:
        order: int64 [pieces]: indices of the pieces, in depth-first order.
        length: int64 [pieces]: length of each piece in tokens, in this order.
        shared: int64 [pieces]: number of tokens that each piece has in common with the one before it; 0 begins a tree.
    """

    order: IntArray
    length: IntArray
    shared: IntArray

    @property
    def offsets(self) -> IntArray:
        """int64 [trees + 1]: the pieces of tree t are offsets[t]:offsets[t + 1] in depth-first order."""
        return np.append(np.flatnonzero(self.shared == 0), len(self.shared))

    @property
    def sizes(self) -> IntArray:
        """int64 [trees]: the number of tokens of each tree; tokens that its pieces share are counted once."""
        return sums_of(self.length - self.shared, self.offsets)

    def select(self, trees: IntArray) -> "Forest":
        """Return the forest of some of the trees, in the order of their indices `trees`."""
        chosen, _ = indices_in_groups(self.offsets, trees)
        return Forest(self.order[chosen], self.length[chosen], self.shared[chosen])


def cut_large_trees(forest: Forest, capacity: int) -> Forest:
    """Cut the trees that are larger than a pack, so that the fewest tokens are repeated.

    Among cuts that repeat equally many tokens, those into the fewest parts are chosen.

    Args:
        forest: the forest; no piece is longer than a pack.
        capacity: capacity of a pack, in tokens.
    """
    offsets = forest.offsets
    order, shared = np.arange(len(forest.order)), forest.shared.copy()
    for tree in np.flatnonzero(forest.sizes > capacity).tolist():
        pieces = slice(offsets[tree], offsets[tree + 1])
        places, taken = smallest_first(forest.length[pieces], forest.shared[pieces])
        order[pieces] = offsets[tree] + np.array(places)
        shared[pieces] = taken
        shared[offsets[tree] + cheapest_cuts(forest.length[order[pieces]], shared[pieces], capacity)] = 0
    return Forest(forest.order[order], forest.length[order], shared)


def cheapest_cuts(length: IntArray, shared: IntArray, capacity: int) -> IntArray:
    """Return the places before which to cut one tree, so that no part is larger than a pack, int64 [cuts].

    The cheapest way to cut the first j pieces ends with a part i:j, for some i, after the cheapest way to cut the first
    i pieces. The part repeats shared[i] tokens. As j grows, parts only grow, so a part that has become too large stays
    too large, and a heap gives the cheapest of the others.

    Args:
        length: integers [pieces]: length of each piece in tokens, at most `capacity`.
        shared: integers [pieces]: number of tokens that each piece shares with the one before it; the first shares 0.
        capacity: capacity of a pack, in tokens.
    """
    total, own_tokens = 0, (length - shared).tolist()
    previous = [0] * (len(own_tokens) + 1)
    best = (0, 0)  # repeated tokens, and number of parts, of the pieces so far
    parts: list[tuple[int, int, int, int]] = []  # repeated tokens, parts, first piece, tokens of the part without end
    for number, (own, repeated) in enumerate(zip(own_tokens, shared.tolist(), strict=True)):
        heapq.heappush(parts, (best[0] + repeated, best[1] + 1, number, repeated - total))
        total += own
        while parts[0][3] + total > capacity:
            heapq.heappop(parts)
        best, previous[number + 1] = parts[0][:2], parts[0][2]
    cuts, place = [], len(own_tokens)
    while place := previous[place]:
        cuts.append(place)
    return np.array(cuts[::-1], dtype=np.int64)


def smallest_first(length: IntArray, shared: IntArray) -> tuple[list[int], list[int]]:
    """Return the documents of a tree in an order that visits small branches before large ones.

    In a chat, each turn is a small branch, and all later turns are a large one. With small branches first, a cut after
    the first turns repeats only the few tokens above them.

    Args:
        length: integers [documents]: length of each document of the tree, in tokens.
        shared: integers [documents]: number of tokens that each document shares with the one before it.

    Returns:
        The places of the documents in the new order, and the number of tokens that each then shares with the one before
        it. The order is depth-first, too.
    """
    depth, before = shared.tolist(), offsets_of(length - shared).tolist()
    order, taken = [], []
    waiting = [(0, len(depth), 0)]  # first document of a branch, end, and tokens shared with the branch before it
    while waiting:
        begin, end, above = waiting.pop()
        if end - begin == 1:
            order.append(begin)
            taken.append(above)
            continue
        top = min(depth[begin + 1 : end])
        borders = [begin, *(place for place in range(begin + 1, end) if depth[place] == top), end]
        branches = sorted(
            pairwise(borders), key=lambda branch: before[branch[1]] - before[branch[0]] + depth[branch[0]]
        )
        waiting += [(*branch, top) for branch in branches[:0:-1]]
        waiting.append((*branches[0], above))
    return order, taken


FEWEST_SHARED = 16
"""The fewest tokens that documents share, with share_prefixes=True. A smaller number saves hardly any more tokens."""


def check_fewest_shared(share_prefixes: Any) -> int | None:
    """Return the fewest tokens that documents share, or None if no prefixes are shared.

    Args:
        share_prefixes: the argument of `pack` and `TokenBudget`: False, True or an integer of at least 1.

    Raises:
        PackingError: it is none of these.
    """
    if share_prefixes is False:
        return None
    if share_prefixes is True:
        return FEWEST_SHARED
    return check_whole_number("share_prefixes", share_prefixes)
