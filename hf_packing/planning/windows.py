"""Plan a stream window by window: the seed of each window, and the packs that later documents could still fill."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hf_packing.planning.lengths import IntArray
from hf_packing.planning.plan import PackingPlan

MOST_WINDOWS = 32
"""A document waits for at most this many windows. After fewer, rows of many short documents would be less full."""

_DOCUMENTS_PER_PACK = 16
"""A window has at least this many documents for each of its packs, since few documents leave padding."""
_MOST_TIMES = 32
"""To have enough documents, a window grows to at most so many times its tokens."""
_MOST_TOKENS = 1 << 22
"""To have enough documents, a window grows to at most so many tokens."""

_FULL = 1 / 512
"""A pack counts as full if at most this share of its capacity is free."""


class WindowPlan(NamedTuple):
    """The plan for the documents of one window, and which of its packs documents of the next window could fill."""

    plan: PackingPlan
    open: npt.NDArray[np.bool_]
    """bool [packs]: True if a later document could still go into the pack."""
    all_wait: bool = False
    """True if all open packs wait for the next window, since the strategy fills one pack after the other."""


def packs_with_room(plan: PackingPlan, max_documents: int | None = None, share: float = _FULL) -> npt.NDArray[np.bool_]:
    """Return the packs that could take another document, bool [packs].

    Args:
        plan: the plan.
        max_documents: the most segments in a pack; None for no limit.
        share: a pack counts as full if at most this share of its capacity is free, from 0 to 1.
    """
    open_packs = plan.pack_capacity - plan.pack_tokens() > share * plan.pack_capacity
    if max_documents is not None:
        open_packs &= np.diff(plan.pack_offsets) < max_documents
    return open_packs


class WindowSize(NamedTuple):
    """The size of a window: so many tokens, and more tokens if these are too few documents to fill packs well."""

    tokens: int
    """The tokens that a window has at least, and four times the capacity that may wait for the next window."""
    documents: int
    """The documents that a window has at least, unless they have more than `most_tokens`."""
    most_tokens: int
    """A window is full when it has so many tokens."""

    @classmethod
    def of_packs(cls, packs: int, capacity: int) -> "WindowSize":
        """Return the size of a window for about so many packs of a capacity in tokens."""
        tokens = packs * capacity
        return cls(tokens, _DOCUMENTS_PER_PACK * packs, max(tokens, min(_MOST_TIMES * tokens, _MOST_TOKENS)))


def choose_waiting(window: WindowPlan, age: IntArray, size: WindowSize) -> npt.NDArray[np.bool_]:
    """Choose the packs whose documents go into the next window: the emptiest open packs, at most a quarter.

    Packs with a document that has waited for MOST_WINDOWS windows go out.

    Args:
        window: the plan of the window.
        age: int8 [documents]: for how many windows each document has waited.
        size: the size of a window. Packs with at most a quarter of its tokens wait, so that the state stays small.

    Returns:
        The packs that wait, bool [packs]. If `all_wait` is True, these are all open packs.
    """
    plan = window.plan
    if window.all_wait:
        return window.open
    may_wait = window.open.copy()
    may_wait[plan.pack_of_segment()[age[plan.segment_document] >= MOST_WINDOWS]] = False
    free = 1 - plan.pack_tokens() / plan.pack_capacity
    candidates = np.flatnonzero(may_wait)
    emptiest = candidates[np.argsort(-free[candidates], kind="stable")][: plan.num_packs // 4]
    capacity = np.cumsum(plan.pack_capacity[emptiest], dtype=np.int64)
    waits = np.zeros(plan.num_packs, dtype=bool)
    waits[emptiest[4 * capacity <= min(plan.pack_capacity.sum(dtype=np.int64), size.tokens)]] = True
    return waits


def order_by_cost(cost: npt.NDArray[np.float64], first_turn: int) -> IntArray:
    """Return an order in which streams with about the same packs yield packs of about the same cost in each turn.

    A turn has a quantile: a number from 0 to 1 that depends on the number of the turn only. The quantiles of any
    neighboring turns are spread evenly (the van der Corput sequence). In each turn, a window yields the pack whose cost
    has this quantile among the window's packs.

    Args:
        cost: float64 [packs]: the cost of each pack of a window.
        first_turn: the number of the window's first turn.

    Returns:
        int64 [packs]: the indices of the packs, in the order of the turns.
    """
    turns = (np.arange(len(cost)) + first_turn).astype(np.uint32)
    quantile = np.zeros(len(cost))
    for bit in range(32):
        quantile += ((turns >> np.uint32(bit)) & np.uint32(1)) / 2.0 ** (bit + 1)
    order = np.empty(len(cost), dtype=np.int64)
    order[np.argsort(quantile, kind="stable")] = np.argsort(cost, kind="stable")
    return order
