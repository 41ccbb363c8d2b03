"""Which slot lengths an optimiser looks at: all lengths, or, where there are too many, lengths rounded up to fewer."""

import numpy as np

from hf_packing.planning.column_generation import Problem
from hf_packing.planning.lengths import IntArray

MAX_SLOTS = 1000
MAX_UNITS = 1 << 17
"""A pack of more tokens is measured in units of several, rounded up."""
MAX_WORK = 1 << 28
"""Slots times room times the limit on documents, which is what one pricing costs."""
FEWEST_SLOTS = 50
TOO_MUCH = 1 << 30
TOO_LARGE = 1 << 25
"""Room times the limit on documents, which is what a pricing keeps in memory, 16 bytes each."""


def slots_wanted(counts: IntArray, capacity: int, max_documents: int | None) -> tuple[IntArray, Problem]:
    """The problem in slots.

    Args:
        counts: int64 [longest + 1]: how many segments there are of each length, at least one in all, none empty.
        capacity: tokens a pack holds.
        max_documents: most segments in one pack; None for no limit.

    Returns:
        int64 [slots], the tokens of each slot, and the problem, in units of one or more tokens.
    """
    lengths = np.flatnonzero(counts)
    if max_documents is not None and max_documents >= most_that_fit(counts, capacity):
        max_documents = None
    most = MAX_SLOTS
    if max_documents is not None:
        most = max(FEWEST_SLOTS, min(most, MAX_WORK // (max_documents * min(capacity, MAX_UNITS))))
    chosen = lengths if len(lengths) <= most else spread_slots(counts, most)
    unit = -(-capacity // MAX_UNITS)
    room = capacity // unit
    units = np.unique(np.minimum(-(-chosen // unit), room))
    slots = np.where(units == room, capacity, units * unit)
    slot_of_length = np.searchsorted(slots, lengths)
    demand = np.bincount(slot_of_length, weights=counts[lengths], minlength=len(slots)).astype(np.float64)
    grouped = len(slots) < len(lengths) or unit > 1
    return slots, Problem(units, demand, room, max_documents, grouped)


def most_that_fit(counts: IntArray, capacity: int) -> int:
    """How many of the documents, the shortest first, fit in one pack."""
    documents, room = 0, capacity
    for length in np.flatnonzero(counts).tolist():
        fitting = min(int(counts[length]), room // length)
        if not fitting:
            break
        documents, room = documents + fitting, room - fitting * length
    return documents


def too_much_work(problem: Problem) -> bool:
    """Whether a limit on documents makes one pricing so long, or so large, that no time limit could be kept."""
    if problem.max_documents is None:
        return False
    layers = problem.max_documents * problem.capacity
    return layers > TOO_LARGE or layers * len(problem.slots) > TOO_MUCH


def spread_slots(counts: IntArray, most: int) -> IntArray:
    """Lengths to round up to, so that rounding costs little.

    Rounding up in steps of width w costs about w / 2 tokens a document, which is least for widths that go with the
    square root of one over the density of documents: equal shares of the integral of its root.
    """
    lengths = np.flatnonzero(counts)
    window = max(3, 4 * int(lengths[-1] - lengths[0]) // most)
    density = np.convolve(counts, np.full(window, 1 / window), mode="same")[: len(counts)]
    density[: lengths[0]] = 0
    share = np.cumsum(np.sqrt(density))
    borders = np.searchsorted(share, share[-1] * np.arange(1, most + 1) / most)
    below = np.searchsorted(lengths, borders, side="right") - 1
    return np.unique(np.append(lengths[np.maximum(below, 0)], lengths[-1]))
