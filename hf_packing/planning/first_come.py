"""First come, first packed: documents enter the open pack in turn; one that does not fit closes it and opens the next.

With random order this is RandomPacking, longest first SortedPacking (arXiv 2407.09105).
"""

from typing import Literal

import numpy as np

from hf_packing.planning.lengths import IntArray, sort_by_length
from hf_packing.planning.overflow import Pieces
from hf_packing.planning.plan import PackingPlan
from hf_packing.planning.shuffle import random_order, shuffle_packs

Order = Literal["random", "longest_first", "dataset"]

JUMPS_AT_ONCE = 1 << 20


def first_come_plan(
    pieces: Pieces,
    document_length: IntArray,
    capacity: int,
    order: Order,
    max_documents: int | None,
    seed: int | None,
) -> PackingPlan:
    """The plan of pieces packed as they come.

    Args:
        pieces: what is to be packed, none longer than the capacity.
        document_length: integers [documents], tokens, of the whole documents.
        capacity: tokens a pack holds.
        order: in which the pieces come: in random order, longest first (ties at random), or as in the dataset.
        max_documents: most segments in one pack; None for no limit.
        seed: of the random orders. With one, packs come out shuffled, and the pieces in them; without one, as they
            were filled.
    """
    pieces = pieces.take(arrival(pieces.length, order, seed))
    first = first_of_each_pack(pieces.length, capacity, max_documents or len(pieces.length))
    offsets = np.append(first, len(pieces.length))
    if seed is not None:
        segments, offsets, _ = shuffle_packs(offsets, seed)
        pieces = pieces.take(segments)
    return PackingPlan(
        document_length=document_length,
        segment_document=pieces.document,
        segment_start=pieces.start,
        segment_length=pieces.length,
        pack_offsets=offsets,
        pack_capacity=np.full(len(first), capacity, dtype=np.int32),
        proven_lower_bound=-(-len(pieces.length) // max_documents) if max_documents else 0,
    )


def arrival(length: IntArray, order: Order, seed: int | None) -> IntArray:
    if order == "dataset":
        return np.arange(len(length))
    turn = np.arange(len(length)) if seed is None else random_order(len(length), seed, "documents")
    return turn if order == "random" else turn[sort_by_length(length[turn])[::-1]]


def first_of_each_pack(length: IntArray, capacity: int, max_documents: int) -> IntArray:
    """Which piece opens each pack: a search finds, for every piece, the next that no longer fits; follow them."""
    end = np.cumsum(length, dtype=np.int64)
    first, piece = [], 0
    for begin in range(0, len(length), JUMPS_AT_ONCE):
        block = slice(begin, begin + JUMPS_AT_ONCE)
        number = np.arange(begin, begin + len(length[block]))
        beyond = np.searchsorted(end, end[block] - length[block] + capacity, side="right")
        jump = np.minimum(beyond, number + max_documents).tolist()
        while piece < begin + len(jump):
            first.append(piece)
            piece = jump[piece - begin]
    return np.array(first, dtype=np.int64)
