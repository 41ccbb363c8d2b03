"""Which slot lengths the optimizer looks at: all lengths or, if there are too many, lengths rounded up to fewer."""

import numpy as np

from hf_packing.planning.lengths import IntArray
from hf_packing.strategies.optimal.column_generation import Problem

_MAX_SLOTS = 1000
_MAX_UNITS = 1 << 17
"""A pack of more tokens is measured in units of several tokens, rounded up."""
_MAX_WORK = 1 << 28
"""Slots times room times the limit on documents, which is what one pricing costs."""
_FEWEST_SLOTS = 50
_TOO_MUCH = 1 << 30
"""Room times the limit on documents times slots, above which one pricing takes too long."""
_TOO_LARGE = 1 << 25
"""Room times the limit on documents, above which a pricing needs too much memory, 16 bytes each."""


def slots_wanted(counts: IntArray, capacity: int, max_documents: int | None) -> tuple[IntArray, Problem]:
    """Formulate the problem in slots.

    Args:
        counts: int64 [longest + 1]: how many segments there are of each length, at least one in all, none empty.
        capacity: tokens that a pack holds.
        max_documents: most segments in one pack; None for no limit.

    Returns:
        int64 [slots], the tokens of each slot, and the problem, in units of one or more tokens.
    """
    lengths = np.flatnonzero(counts)
    if max_documents is not None and max_documents >= _most_that_fit(counts, capacity):
        max_documents = None
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


def _most_that_fit(counts: IntArray, capacity: int) -> int:
    """Return how many of the documents, the shortest first, fit in one pack."""
    documents, room = 0, capacity
    for length in np.flatnonzero(counts).tolist():
        fitting = min(int(counts[length]), room // length)
        if not fitting:
            break
        documents, room = documents + fitting, room - fitting * length
    return documents


def too_much_work(problem: Problem) -> bool:
    """Return whether a limit on documents makes one pricing so slow or large that no time limit could be kept."""
    if problem.max_documents is None:
        return False
    layers = problem.max_documents * problem.capacity
    return layers > _TOO_LARGE or layers * len(problem.slots) > _TOO_MUCH


def _spread_slots(counts: IntArray, most: int) -> IntArray:
    """Return lengths to round up to, so that rounding costs little.

    Rounding up to multiples of a width w costs about w / 2 tokens per document. The total is least if w is proportional
    to 1 / sqrt(density of documents), that is if every width has the same share of the integral of sqrt(density).
    """
    lengths = np.flatnonzero(counts)
    window = max(3, 4 * int(lengths[-1] - lengths[0]) // most)
    density = np.convolve(counts, np.full(window, 1 / window), mode="same")[: len(counts)]
    density[: lengths[0]] = 0
    share = np.cumsum(np.sqrt(density))
    borders = np.searchsorted(share, share[-1] * np.arange(1, most + 1) / most)
    below = np.searchsorted(lengths, borders, side="right") - 1
    return np.unique(np.append(lengths[np.maximum(below, 0)], lengths[-1]))
