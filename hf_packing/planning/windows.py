"""Plan a stream window by window: the seed of each window, and the packs that later documents could still fill."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hf_packing.planning.lengths import IntArray
from hf_packing.planning.permutation import derive_key
from hf_packing.planning.plan import PackingPlan

_FULL = 1 / 512
"""A pack counts as full if at most this share of its capacity is free."""


class WindowPlan(NamedTuple):
    """The plan for the documents of one window, and which of its packs documents of the next window could fill."""

    plan: PackingPlan
    open: npt.NDArray[np.bool_]
    """bool [packs]: True if a later document could still go into the pack."""
    all_wait: bool = False
    """True if all open packs wait for the next window, since the strategy fills one pack after the other."""


def seed_of_window(seed: int | None, number: int) -> int | None:
    """Return the seed of a window, given the seed of the strategy and the number of the window.

    The seeds of different windows are independent. None, which stands for no shuffling, stays None.
    """
    return None if seed is None else int(derive_key(seed, f"window {number}") >> np.uint64(1))


def tokens_of_packs(plan: PackingPlan) -> IntArray:
    """Return the number of tokens in each pack, int64 [packs]."""
    if not plan.num_packs:
        return np.zeros(0, dtype=np.int64)
    return np.add.reduceat(plan.segment_length, plan.pack_offsets[:-1], dtype=np.int64)


def packs_with_room(plan: PackingPlan, max_documents: int | None = None, share: float = _FULL) -> npt.NDArray[np.bool_]:
    """Return the packs that could take another document, bool [packs].

    Args:
        plan: the plan.
        max_documents: the most segments in a pack; None for no limit.
        share: a pack counts as full if at most this share of its capacity is free, from 0 to 1.
    """
    room = plan.pack_capacity - tokens_of_packs(plan)
    open_packs = room > share * plan.pack_capacity
    if max_documents is not None:
        open_packs &= np.diff(plan.pack_offsets) < max_documents
    return open_packs


def packs_that_wait(window: WindowPlan, age: IntArray, *, most_windows: int) -> npt.NDArray[np.bool_]:
    """Return the packs whose documents go into the next window, bool [packs]: the emptiest of the open packs.

    Args:
        window: the plan of the window.
        age: int32 [documents]: how often each document of the window has already waited.
        most_windows: a pack with a document that has waited this often does not wait again.

    Returns:
        At most a quarter of the packs, and of the capacity of all packs, so that the state of a stream stays small. If
        `all_wait` is True, these are all open packs.
    """
    if window.all_wait:
        return window.open
    plan = window.plan
    waiting = np.zeros(plan.num_packs, dtype=bool)
    if not plan.num_packs:
        return waiting
    oldest = np.maximum.reduceat(age[plan.segment_document], plan.pack_offsets[:-1])
    candidates = np.flatnonzero(window.open & (oldest < most_windows))
    free = 1 - tokens_of_packs(plan)[candidates] / plan.pack_capacity[candidates]
    emptiest = candidates[np.argsort(-free, kind="stable")][: plan.num_packs // 4]
    capacity = np.cumsum(plan.pack_capacity[emptiest], dtype=np.int64)
    waiting[emptiest[capacity <= plan.pack_capacity.sum(dtype=np.int64) // 4]] = True
    return waiting


def select_packs(plan: PackingPlan, packs: IntArray) -> PackingPlan:
    """Return the plan with some of its packs only.

    Args:
        plan: the plan.
        packs: int64 [chosen packs]: indices of packs, in the wanted order.
    """
    sizes = np.diff(plan.pack_offsets)[packs]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    segments = np.repeat(plan.pack_offsets[:-1][packs] - offsets[:-1], sizes) + np.arange(offsets[-1])
    return PackingPlan(
        document_length=plan.document_length,
        segment_document=plan.segment_document[segments],
        segment_start=plan.segment_start[segments],
        segment_length=plan.segment_length[segments],
        pack_offsets=offsets,
        pack_capacity=plan.pack_capacity[packs],
    )
