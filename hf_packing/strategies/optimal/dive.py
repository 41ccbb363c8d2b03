"""Turn fractions of packs into whole packs: keep the whole ones, solve what is left again, and so on."""

from collections.abc import Callable

import numpy as np

from hf_packing.planning.lengths import IntArray
from hf_packing.planning.patterns import Patterns
from hf_packing.strategies.optimal.column_generation import ROUNDING, Relaxation, solve_master
from hf_packing.strategies.optimal.knapsack import FloatArray

_ROUNDED_UP = 0.5
"""Fractions from here on become one more pack if none of its slots would stay free."""


def dive(
    relaxation: Relaxation, demand: FloatArray, make_packs: Callable[[IntArray], Patterns], bound: int, deadline: float
) -> tuple[Patterns, bool]:
    """Return the best packs found on the way from fractions to whole packs.

    Args:
        relaxation: the solution in fractions.
        demand: float64 [slots]: documents that need each slot.
        make_packs: from whole packs of each column to packs for all documents, the rest packed best fit.
        bound: packs below which there is nothing to find.
        deadline: of `time.monotonic`.

    Returns:
        The packs, and whether the dive finished before the deadline.
    """
    columns, packs = relaxation.columns, relaxation.packs
    total, left = np.zeros(columns.shape[1], dtype=np.int64), np.rint(demand).astype(np.int64)
    best: Patterns | None = None
    while True:
        whole = np.floor(packs + ROUNDING).astype(np.int64)
        if best is not None:
            wanted = _pass_down(left - columns @ whole)
            whole += _round_up(packs - whole, columns, wanted, at_least_one=not whole.any())
        total += whole
        left = _pass_down(left - columns @ whole)
        made = make_packs(total)
        best = made if best is None or made.num_packs < best.num_packs else best
        if not left.any() or best.num_packs <= bound:
            return best, True
        solved = solve_master(columns, left.astype(np.float64), deadline)
        if solved is None:
            return best, False
        packs = solved[0]


def _round_up(fraction: FloatArray, columns: IntArray, left: IntArray, at_least_one: bool) -> IntArray:
    """Choose one more pack of each column with a large fraction, if it wastes no slot."""
    more = np.zeros(len(fraction), dtype=np.int64)
    left = left.copy()
    order = np.argsort(-fraction, kind="stable")
    for column in order[fraction[order] >= _ROUNDED_UP].tolist():
        if (columns[:, column] <= left).all():
            left -= columns[:, column]
            more[column] = 1
    if at_least_one and not more.any():
        more[order[0]] = 1
    return more


def _pass_down(left: IntArray) -> IntArray:
    """Return the slots that are wanted after spare ones, which are negative, have served shorter documents."""
    wanted, spare = left.tolist(), 0
    for slot in range(len(wanted) - 1, -1, -1):
        spare -= min(wanted[slot], 0)
        served = min(spare, max(wanted[slot], 0))
        wanted[slot] = max(wanted[slot], 0) - served
        spare -= served
    return np.array(wanted, dtype=np.int64)
