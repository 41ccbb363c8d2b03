"""Choose the slot lengths for Optimal: all document lengths, or fewer lengths to which documents are rounded up.

A slot is a place for one document in a pack, and may be longer than the document.
"""

import numpy as np

from hf_packing.planning.lengths import IntArray
from hf_packing.strategies.optimal.column_generation import Problem

_MAX_SLOTS = 1000
_MAX_UNITS = 1 << 17
"""Largest capacity that is measured in tokens. A larger capacity is measured in units of several tokens."""
_MAX_WORK = 1 << 28
"""Largest product (number of slots) x capacity x max_documents. Larger problems get fewer slots to save time."""
_FEWEST_SLOTS = 50
_TOO_MUCH = 1 << 30
"""Product (number of slots) x capacity x max_documents above which solving one knapsack problem takes too long."""
_TOO_LARGE = 1 << 25
"""Product capacity x max_documents above which the 16-byte entries of one knapsack problem need too much memory."""


def slots_wanted(counts: IntArray, capacity: int, max_documents: int | None) -> tuple[IntArray, Problem]:
    """Choose slot lengths for counted segments, and return the slot lengths and the packing problem with these slots.

    Args:
        counts: int64 [longest + 1]: counts[n] is the number of segments of n tokens; counts[0] is 0, and there is at
            least one segment.
        capacity: capacity of each pack, in tokens.
        max_documents: maximum number of segments in a pack; None for no limit.

    Returns:
        int64 [slots]: slot lengths in tokens, ascending; and the Problem, which measures the slot lengths and the
        capacity in units of one or more tokens.
    """
    lengths = np.flatnonzero(counts)
    if max_documents is not None:
        shortest = np.repeat(lengths, np.minimum(counts[lengths], max_documents + 1))[: max_documents + 1]
        if len(shortest) <= max_documents or shortest.sum() > capacity:
            max_documents = None  # more documents would not fit in a pack anyway
    most = _MAX_SLOTS
    if max_documents is not None:
        most = max(_FEWEST_SLOTS, min(most, _MAX_WORK // (max_documents * min(capacity, _MAX_UNITS))))
    chosen = lengths if len(lengths) <= most else _spread_slots(counts, most)
    unit = -(-capacity // _MAX_UNITS)
    room = capacity // unit
    units = np.unique(np.minimum(-(-chosen // unit), room))
    slots = np.where(units == room, capacity, units * unit)
    slot_of_length = np.searchsorted(slots, lengths)
    demand = np.bincount(slot_of_length, weights=counts[lengths], minlength=len(slots)).astype(np.float64)
    grouped = len(slots) < len(lengths) or unit > 1
    return slots, Problem(units, demand, room, max_documents, grouped)


def too_much_work(problem: Problem) -> bool:
    """Return True if the knapsack problem of one round of column generation needs too much time or memory.

    This can only happen with a limit on documents per pack.
    """
    if problem.max_documents is None:
        return False
    layers = problem.max_documents * problem.capacity
    return layers > _TOO_LARGE or layers * len(problem.slots) > _TOO_MUCH


def _spread_slots(counts: IntArray, most: int) -> IntArray:
    """Return about `most` slot lengths, chosen so that rounding document lengths up to slot lengths adds few tokens.

    If neighboring slot lengths differ by w tokens, rounding up adds about w / 2 tokens per document. The total number
    of added tokens is smallest if w is proportional to 1 / sqrt(density), where density is the smoothed number of
    documents of each length. The integral of sqrt(density) is then the same between all neighboring slot lengths.

    Args:
        counts: int64 [longest + 1]: counts[n] is the number of documents of n tokens.
        most: number of slot lengths to choose.

    Returns:
        int64 [slots]: slot lengths in tokens, ascending. The last slot length is the longest document length.
    """
    lengths = np.flatnonzero(counts)
    window = max(3, 4 * int(lengths[-1] - lengths[0]) // most)
    density = np.convolve(counts, np.full(window, 1 / window), mode="same")[: len(counts)]
    density[: lengths[0]] = 0
    share = np.cumsum(np.sqrt(density))
    borders = np.searchsorted(share, share[-1] * np.arange(1, most + 1) / most)
    below = np.searchsorted(lengths, borders, side="right") - 1
    return np.unique(np.append(lengths[np.maximum(below, 0)], lengths[-1]))
