"""Fill packs one after the other as exactly as possible, to save packs where best fit leaves some room in each.

Best fit places one item after the other, so packs of a few large items keep room that no item fits in. Here, a pack
gets its items at once: the largest that is left, and of all others those that fill the pack best. This is the heuristic
of minimum bin slack (Gupta and Ho, Production Planning & Control 10, 1999), in the variant MBS' of Fleszar and Hindi
(Computers & Operations Research 29, 2002), with the sums that items can have as the bits of an integer.
"""

import numpy as np

from hf_packing.planning.lengths import IntArray
from hf_packing.planning.plan import PackingPlan

_ITEMS_AT_ONCE = 1024
"""At most so many items are packed together; more items are divided into groups, since the time grows with the square
of a group. A group needs up to one pack more than its share of all packs."""


def save_packs(plan: PackingPlan) -> PackingPlan:
    """Return a plan of the same documents with fewer packs, or the same plan if none are saved.

    The documents keep their order, as far as possible: that of packs is the order of their longest documents.

    Args:
        plan: a plan of whole documents, in packs of one capacity.

    Example:
        >>> import hf_packing as hfp
        >>> plan = hfp.plan_packing([4, 4, 3, 3, 2, 2], hfp.BestFit(9))
        >>> plan.num_packs, save_packs(plan).num_packs
        (3, 2)
    """
    capacity, lengths = int(plan.pack_capacity.max(initial=1)), plan.segment_length
    groups = -(-len(lengths) // _ITEMS_AT_ONCE)
    if plan.num_packs - (groups - 1) <= -(-int(lengths.sum(dtype=np.int64)) // capacity):
        return plan
    by_length = np.argsort(-lengths, kind="stable")
    packs = [
        group[pack]
        for group in (by_length[first::groups] for first in range(groups))
        for pack in fill_exactly(lengths[group], capacity)
    ]
    if len(packs) >= plan.num_packs:
        return plan
    packs.sort(key=lambda segments: int(segments[0]))  # of the longest document, which comes first
    segments = np.concatenate([np.sort(pack) for pack in packs])
    documents = plan.segment_document[segments]
    return PackingPlan(
        document_length=plan.document_length,
        segment_document=documents,
        segment_start=np.zeros_like(documents),
        segment_length=lengths[segments],
        pack_offsets=np.cumsum([0, *map(len, packs)]),
        pack_capacity=np.full(len(packs), capacity),
        proven_lower_bound=plan.proven_lower_bound,
        note=plan.note,
    )


def fill_exactly(sizes: IntArray, capacity: int) -> list[list[int]]:
    """Return packs of items, as lists of indices, the largest item of each pack first.

    A pack is full enough if it has no more room than packs have on average, if they are as few as possible.

    Args:
        sizes: integers [items]: the size of each item, from 1 to `capacity`.
        capacity: the most that the items of a pack may have together.

    Example:
        >>> fill_exactly(np.array([5, 5, 5, 6, 6, 3]), 15)
        [[3, 5, 4], [0, 2, 1]]
    """
    size_of, total = sizes.tolist(), int(sizes.sum(dtype=np.int64))
    fewest = -(-total // capacity)
    room_of_pack = (fewest * capacity - total) // max(fewest, 1)
    left = np.argsort(-sizes, kind="stable").tolist()
    packs = []
    while left:
        largest, *others = left
        pack = [largest, *_best_subset(size_of, others, capacity - size_of[largest], room_of_pack)]
        packs.append(pack)
        taken = set(pack)
        left = [item for item in left if item not in taken]
    return packs


def _best_subset(size_of: list[int], items: list[int], room: int, enough: int) -> list[int]:
    """Return the items that fill a room best, or well enough, and large items rather than small ones.

    Args:
        size_of: the size of each item.
        items: the items to choose from, the largest first.
        room: the most that they may have together.
        enough: the search ends if no more than so much room is left.
    """
    sums, sums_before, tried = 1, [], []  # bit n of an integer says that some items have n together
    for item in items:
        if size_of[item] > room:
            continue
        sums_before.append(sums)
        tried.append(item)
        sums |= (sums << size_of[item]) & ((2 << room) - 1)
        if sums >> max(room - enough, 0):
            break
    rest, chosen = sums.bit_length() - 1, []
    for item, before in zip(reversed(tried), reversed(sums_before), strict=True):
        if not before >> rest & 1:
            chosen.append(item)
            rest -= size_of[item]
    return chosen
