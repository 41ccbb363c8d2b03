"""Column generation: the fewest packs if fractions of packs are allowed, and a bound that no plan can beat.

A column is a pattern of slots. The master problem, a linear program solved by HiGHS, finds how many packs to make of
each known column so that all documents get a slot; its duals say what each slot is worth. Pricing, a knapsack, finds
packs that are worth more than one pack: new columns. If there are none, no other column would help (Gilmore and Gomory,
"A linear programming approach to the cutting-stock problem", Operations Research 1961).

Three things make it fast. A slot may serve a shorter document (Valerio de Carvalho, "Using extra dual cuts to
accelerate column generation", INFORMS Journal on Computing 2005), which is also why lengths can be grouped. Prices are
taken between the master's duals and the duals with the best bound so far (du Merle et al., "Stabilized column
generation", Discrete Mathematics 1999). And the first columns are those of best fit and of several guesses at the
duals.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_packing.planning.lengths import IntArray
from hf_packing.planning.patterns import Patterns
from hf_packing.strategies.base import load_scipy_optimize
from hf_packing.strategies.optimal.knapsack import FloatArray, most_valuable_packs

ROUNDING = 1e-6
"""Differences in packs below this may be rounding."""
_GUESSES = 5
_NOISE = 0.02
"""Relative noise in each guess, so that packs of equal value come out differently every time."""
_TOWARDS_BEST = 0.3
"""Weight of the duals with the best bound when prices are taken."""
_WORTH_ADDING = 1e-7
_WORTH_KEEPING = 0.01
"""Columns that cost more than this at the duals are removed from a large master problem."""
_LEAST_PROGRESS = 1e-9
"""Relative; a smaller decrease of the objective may be rounding."""
_SCALE = 1000.0
"""HiGHS has absolute tolerances, so demand is scaled to this many documents in all."""
_CLOSE_ENOUGH = 5e-5
"""Relative gap at which to stop if lengths are grouped, where the bound is approximate anyway."""


@dataclass(frozen=True)
class Problem:
    """How many slots of which lengths are wanted."""

    slots: IntArray
    """int64 [slots], ascending, in some unit."""
    demand: FloatArray
    """float64 [slots]: documents that need a slot of this length or longer."""
    capacity: int
    """Room of a pack, in the same unit."""
    max_documents: int | None
    grouped: bool
    """Whether documents of several lengths share a slot, so that a proof for the slots does not hold for documents."""


@dataclass
class Duals:
    """The best bound so far, and what each slot is worth there: no pack is worth more than one."""

    value: FloatArray
    bound: float = 0.0


@dataclass(frozen=True)
class Relaxation:
    """A solution in fractions of packs."""

    columns: IntArray
    """int32 [slots, columns]: slots of each length in a pack."""
    packs: FloatArray
    """float64 [columns]: how many packs of each."""
    objective: float
    """Packs in all."""
    rounds: int
    finished: bool
    """Whether the solution is optimal, or close enough; otherwise the time ran out."""


def generate_columns(
    problem: Problem, start: IntArray, deadline: float, progress: Callable[[str], None]
) -> tuple[Relaxation | None, Duals]:
    """Solve the problem over all possible columns, or stop when the time runs out.

    Args:
        problem: what is wanted.
        start: integers [slots, columns]: columns to begin with, which cover all slots.
        deadline: seconds, on the clock of `time.monotonic`.
        progress: called with a line of text once a round.

    Returns:
        The last solution, or None if there was no time for one; the duals with the best bound.
    """
    duals = Duals(np.zeros(len(problem.slots)))
    columns = np.hstack([start, *_guessed_columns(problem, duals, deadline)]).astype(np.int32)
    solution: Relaxation | None = None
    rounds, pruned_at = 0, np.inf
    while time.monotonic() < deadline:
        solved = solve_master(columns, problem.demand * (_SCALE / problem.demand.sum()), deadline)
        if solved is None:
            break
        packs, value, objective = solved
        rounds += 1
        packs, objective = packs * problem.demand.sum() / _SCALE, objective * problem.demand.sum() / _SCALE
        solution = Relaxation(columns, packs, objective, rounds, finished=True)
        progress(f"at most {objective:,.0f}, at least {duals.bound:,.0f} packs in fractions, round {rounds}")
        gap = _CLOSE_ENOUGH * objective if problem.grouped else 0
        if np.ceil(duals.bound - ROUNDING) >= np.ceil(objective - ROUNDING) - gap:
            return solution, duals
        new = _without_known(_improving_columns(problem, duals, value, deadline), columns)
        if not new.shape[1] and time.monotonic() < deadline:
            return solution, duals
        # only if the objective has decreased since; otherwise the same columns could come and go forever
        if columns.shape[1] > 2 * len(problem.slots) and objective < pruned_at * (1 - _LEAST_PROGRESS):
            columns = columns[:, (packs > 0) | (1 - value @ columns < _WORTH_KEEPING)]
            pruned_at = objective
        columns = np.hstack([columns, new])
    if solution is not None:
        solution = Relaxation(solution.columns, solution.packs, solution.objective, rounds, finished=False)
    return solution, duals


def _try_prices(problem: Problem, duals: Duals, value: FloatArray) -> IntArray:
    """Return the best columns at these prices. Keep better duals, scaled so that no pack is worth more than one.

    For any prices, what all documents are worth divided by what a pack can be worth is a bound on the packs (Farley, "A
    note on bounding a class of linear programming problems", Operations Research 1990).
    """
    best = most_valuable_packs(value, problem.slots, problem.capacity, problem.max_documents)
    if best.most > 0 and (bound := float(problem.demand @ value) / best.most) > duals.bound:
        duals.bound, duals.value = bound, value / best.most
    return best.columns


def _guessed_columns(problem: Problem, duals: Duals, deadline: float) -> list[IntArray]:
    """Return columns for guessed prices: mixes of prices by length and by document, then the best with noise."""
    by_length = problem.slots / problem.capacity
    typical = problem.max_documents or max(2, int(problem.demand.sum() / (problem.demand @ by_length)))
    for share in np.linspace(1, 0, 6):
        if time.monotonic() < deadline:
            _try_prices(problem, duals, share * by_length + (1 - share) / typical)
    rng = np.random.default_rng(0)
    columns = []
    for _ in range(_GUESSES):
        if time.monotonic() < deadline:
            noise = 1 + _NOISE * rng.standard_normal(len(problem.slots))
            guess = np.sort(duals.value * noise).clip(0)
            columns.append(np.unique(_try_prices(problem, duals, guess), axis=1))
    return columns


def _improving_columns(problem: Problem, duals: Duals, value: FloatArray, deadline: float) -> IntArray:
    """Return columns that are worth more than a pack at the master's prices; look near the best duals first."""
    weight = _TOWARDS_BEST
    while True:
        columns = _try_prices(problem, duals, weight * duals.value + (1 - weight) * value)
        better = value @ columns > 1 + _WORTH_ADDING
        if better.any() or weight == 0 or time.monotonic() > deadline:
            return np.unique(columns[:, better], axis=1)
        weight = weight / 2 if weight > 0.1 else 0


def _without_known(new: IntArray, columns: IntArray) -> IntArray:
    """Leave out known columns, which may look worth adding within the solver's tolerance."""
    known = {column.tobytes() for column in np.ascontiguousarray(columns.T)}
    fresh = [column.tobytes() not in known for column in np.ascontiguousarray(new.T)]
    return new[:, fresh]


def solve_master(columns: IntArray, demand: FloatArray, deadline: float) -> tuple[FloatArray, FloatArray, float] | None:
    """Return the fewest packs of known columns, in fractions, that give every document a slot it fits in.

    Args:
        columns: integers [slots, columns].
        demand: float64 [slots].
        deadline: seconds, on the clock of `time.monotonic`.

    Returns:
        packs of each column, the dual of each slot, packs in all; None if the time ran out.
    """
    optimize: Any = load_scipy_optimize("Optimal")
    from scipy import sparse

    slots, number = columns.shape
    offsets = {"offsets": [0, -1], "shape": (slots, slots - 1)}
    serves_shorter = sparse.diags_array([np.ones(slots - 1), -np.ones(slots - 1)], **offsets)
    matrix = sparse.hstack([sparse.csc_array(columns.astype(np.float64)), serves_shorter], format="csc")
    cost = np.concatenate([np.ones(number), np.zeros(slots - 1)])
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        return None
    options = {"time_limit": seconds} if np.isfinite(seconds) else {}
    result = optimize.linprog(cost, A_ub=-matrix, b_ub=-demand, method="highs-ds", options=options)
    if result.status != 0:
        return None
    return np.maximum(result.x[:number], 0), np.maximum(-result.ineqlin.marginals, 0), float(result.fun)


def columns_of(patterns: Patterns, slots: IntArray) -> IntArray:
    """Return the distinct patterns as columns; each of their lengths is a slot."""
    columns = np.zeros((len(slots), len(patterns.packs)), dtype=np.int32)
    entry_slot = np.searchsorted(slots, patterns.entry_length)
    np.add.at(columns, (entry_slot, patterns.entry_pattern), patterns.entry_copies)
    return np.unique(columns, axis=1)


_ROUNDED_UP = 0.5
"""Fractions of at least this become one more pack if none of its slots would stay free."""


def dive(
    relaxation: Relaxation, demand: FloatArray, make_packs: Callable[[IntArray], Patterns], bound: int, deadline: float
) -> tuple[Patterns, bool]:
    """Return the best packs found on the way from fractions to whole packs.

    Args:
        relaxation: the solution in fractions.
        demand: float64 [slots]: documents that need each slot.
        make_packs: turns whole packs of each column into packs for all documents; packs the rest best-fit.
        bound: lower bound on packs, at which to stop.
        deadline: seconds, on the clock of `time.monotonic`.

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
    """Return the slots still wanted once spare slots (negative numbers) have served shorter documents."""
    wanted, spare = left.tolist(), 0
    for slot in range(len(wanted) - 1, -1, -1):
        spare -= min(wanted[slot], 0)
        served = min(spare, max(wanted[slot], 0))
        wanted[slot] = max(wanted[slot], 0) - served
        spare -= served
    return np.array(wanted, dtype=np.int64)
