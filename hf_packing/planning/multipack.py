"""Multipack: documents shuffled, then packed window by window, so that a plan stays random and cheap to refresh.

The sampler that the name comes from packs each window first-fit decreasing and drops the last documents of the epoch
(see arXiv 2407.09105). Here every window is packed both first-fit and best-fit decreasing, whichever needs fewer packs,
and nothing is dropped.
"""

import numpy as np

from hf_packing.planning.best_fit import best_fit_patterns
from hf_packing.planning.first_fit import first_fit_patterns
from hf_packing.planning.lengths import IntArray, smallest_index_type, sort_by_length
from hf_packing.planning.overflow import Overflow, cut_to_pieces
from hf_packing.planning.plan import PackingPlan
from hf_packing.planning.shuffle import random_order, shuffle_packs
from hf_packing.planning.slots import Slots


def multipack_plan(lengths: IntArray, capacity: int, overflow: Overflow, window: int, seed: int) -> PackingPlan:
    """The plan of shuffled windows.

    Args:
        lengths: integers [documents], tokens, checked.
        capacity: tokens a pack holds.
        overflow: "split", "truncate", "drop" or "error".
        window: documents that are packed together; the last window has what is left.
        seed: of the order of documents, packs, and documents in packs.
    """
    shuffled = random_order(len(lengths), seed, "documents").astype(smallest_index_type(len(lengths)), copy=False)
    pieces = cut_to_pieces(lengths[shuffled], capacity, overflow)
    windows = np.searchsorted(pieces.document, np.arange(0, len(lengths) + window, window))
    order, sizes = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for begin, end in zip(windows[:-1].tolist(), windows[1:].tolist(), strict=True):
        if begin == end:  # nothing but empty documents
            continue
        window_order, window_sizes = pack_window(pieces.length[begin:end], capacity)
        order.append(begin + window_order)
        sizes.append(window_sizes)
    pack_offsets = np.concatenate([[0], np.cumsum(np.concatenate(sizes))])
    segments, pack_offsets, _ = shuffle_packs(pack_offsets, seed)
    pieces = pieces.take(np.concatenate(order)[segments])
    return PackingPlan(
        document_length=lengths,
        segment_document=shuffled[pieces.document],
        segment_start=pieces.start,
        segment_length=pieces.length,
        pack_offsets=pack_offsets,
        pack_capacity=np.full(len(pack_offsets) - 1, capacity, dtype=np.int32),
    )


def pack_window(lengths: IntArray, capacity: int) -> tuple[IntArray, IntArray]:
    """The pieces of a window in the order of its packs, and how many each pack has."""
    counts = np.bincount(lengths, minlength=1)
    patterns = min(
        best_fit_patterns(counts, capacity), first_fit_patterns(counts, capacity), key=lambda made: made.num_packs
    )
    sizes = np.repeat(patterns.segments_per_pack(), patterns.packs)
    places, rank = Slots(patterns, seed=None).block(0, len(lengths))
    order = np.empty(len(lengths), dtype=np.int64)
    order[(np.cumsum(sizes) - sizes)[places.pack] + places.place] = sort_by_length(lengths)[rank]
    return order, sizes
