"""Cut trees where little is repeated, to fill packs that would stay half empty, and so to need fewer packs.

Trees of more than half a pack leave room that no other tree fits in. The emptiest packs are dissolved: each of their
trees is cut into parts that fit into the room of other packs. For a tree that is a little too large for any room, it is
usually enough to cut off a branch near its root, which repeats few tokens.
"""

from bisect import bisect_left, insort

import numpy as np

from hf_packing.planning.forest import Forest
from hf_packing.planning.lengths import IntArray, offsets_of
from hf_packing.planning.plan import PackingPlan
from hf_packing.planning.sibling_order import smallest_first

_REPEATED = 1 / 32
"""A pack is dissolved only if this repeats at most this share of its capacity."""
_TRIED = 50_000
"""At most this many packs, the emptiest ones, are dissolved or filled."""
_FAILED = 32
"""The search ends after this many packs in a row that cannot be dissolved."""

_Holes = list[tuple[int, int]]
"""The room of each pack in tokens, with the index of the pack; ascending."""


def cut_to_fill(forest: Forest, plan: PackingPlan, capacity: int) -> Forest:
    """Return a forest whose trees fit into fewer packs, or the same forest if cuts would repeat too many tokens.

    Args:
        forest: the forest; no tree is larger than a pack.
        plan: a plan whose documents are the trees of the forest. All packs have the same capacity.
        capacity: capacity of a pack, in tokens.
    """
    rooms = capacity - plan.pack_tokens()
    if rooms.sum() < capacity:
        return forest
    emptiest = np.argsort(-rooms, kind="stable")[:_TRIED]
    holes: _Holes = sorted(zip(rooms[emptiest].tolist(), emptiest.tolist(), strict=True))
    offsets, filled, failed = forest.offsets, set(), 0
    order, shared = np.arange(len(forest.order)), forest.shared.copy()
    for pack in emptiest.tolist():
        if pack in filled:
            continue
        trees = plan.segment_document[plan.pack_offsets[pack] : plan.pack_offsets[pack + 1]].tolist()
        left = [hole for hole in holes if hole[1] != pack]
        cut = _cut_trees(forest, [(offsets[tree], offsets[tree + 1]) for tree in trees], left, capacity * _REPEATED)
        if cut is None:
            failed += 1
            if failed == _FAILED:
                break
            continue
        failed, holes = 0, left
        for first, places, taken, packs in cut:
            order[first : first + len(places)] = first + places
            shared[first : first + len(places)] = taken
            filled |= packs
    return Forest(forest.order[order], forest.length[order], shared)


_Cut = tuple[int, IntArray, IntArray, set[int]]
"""First place of a tree in the forest, its pieces in a new order, what they share after cutting, and the packs they go
to."""


def _cut_trees(forest: Forest, trees: list[tuple[int, int]], holes: _Holes, limit: float) -> list[_Cut] | None:
    """Cut the trees of a pack into parts that fit into holes, and fill the holes, or return None.

    Args:
        forest: the forest.
        trees: for each tree, the places in the forest at which it begins and ends.
        holes: room of the other packs; changed in place.
        limit: the most tokens that may be repeated.
    """
    cuts: list[_Cut] = []
    repeated = 0
    for first, end in sorted(trees, key=lambda tree: tree[0] - tree[1]):
        order, taken = smallest_first(forest.length[first:end], forest.shared[first:end])
        places, shared = np.array(order), np.array(taken)
        own = offsets_of(forest.length[first:end][places] - shared)
        packs: set[int] = set()
        stop = len(places)
        while stop:
            size = int(own[stop])
            best = bisect_left(holes, (size, -1))
            begin = 0
            if best == len(holes):  # no hole is large enough: fill the largest one with the last pieces
                if not holes:
                    return None
                best -= 1
                sizes = size - own[1:stop] + shared[1:stop]
                fitting = np.flatnonzero(sizes <= holes[best][0]) + 1
                if not len(fitting):
                    return None
                begin = int(fitting[shared[fitting].argmin()])
                size = int(sizes[begin - 1])
                repeated += int(shared[begin])
                if repeated > limit:
                    return None
                shared[begin] = 0
            room, pack = holes.pop(best)
            insort(holes, (room - size, pack))
            packs.add(pack)
            stop = begin
        cuts.append((first, places, shared, packs))
    return cuts
