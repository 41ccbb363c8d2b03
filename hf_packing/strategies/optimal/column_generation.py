"""Column generation: find the fewest packs if fractions of packs are allowed, and prove a lower bound on packs.

A slot is a place for one document in a pack, and a column is a pattern of slots that fit in a pack. The master problem,
a linear program solved by HiGHS, finds how many packs of each known column are needed to give all documents a slot; the
duals of the master problem are values of the slots. Pricing, a knapsack problem, finds packs whose slots have a total
value above 1, the cost of a pack. These packs are new columns. If no such pack exists, no other column would improve
the solution (Gilmore and Gomory, "A linear programming approach to the cutting-stock problem", Operations Research
1961).

Three ideas make the method fast. First, a slot may hold a document that is shorter than the slot (Valerio de Carvalho,
"Using extra dual cuts to accelerate column generation", INFORMS Journal on Computing 2005); this rule also allows
lengths to be grouped. Second, pricing uses slot values between the master's duals and the duals with the best bound so
far (du Merle et al., "Stabilized column generation", Discrete Mathematics 1999). Third, the search starts with the
columns of best fit and of several guesses at the duals.
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
"""Largest difference between numbers of packs that may be a rounding error."""
_GUESSES = 5
_NOISE = 0.02
"""Relative noise in each guess at the duals, so that different guesses find different packs of equal value."""
_TOWARDS_BEST = 0.3
"""Weight of the duals with the best bound in the slot values that pricing uses; the rest is the master's duals."""
_WORTH_ADDING = 1e-7
_WORTH_KEEPING = 0.01
"""Largest reduced cost of a column that stays in a large master problem."""
_LEAST_PROGRESS = 1e-9
"""Relative decrease of the objective below which a decrease may be a rounding error."""
_SCALE = 1000.0
"""Total number of documents to which the demand is scaled, since HiGHS has absolute tolerances."""
_CLOSE_ENOUGH = 5e-5
"""Relative gap at which to stop if lengths are grouped, since the bound is then only approximate."""


@dataclass(frozen=True)
class Problem:
    """The packing problem: slot lengths, and the number of documents that need a slot of each length."""

    slots: IntArray
    """int64 [slots]: slot lengths, ascending, in units of one or more tokens."""
    demand: FloatArray
    """float64 [slots]: number of documents for which this slot is the shortest slot that fits."""
    capacity: int
    """Capacity of a pack, in the same unit."""
    max_documents: int | None
    grouped: bool
    """Whether documents of several lengths share a slot, so that a bound for slots is no bound for documents."""


@dataclass
class Duals:
    """The best bound so far, and the slot values that prove this bound, scaled so that no pack is worth more than 1."""

    value: FloatArray
    bound: float = 0.0


@dataclass(frozen=True)
class Relaxation:
    """A solution in fractions of packs."""

    columns: IntArray
    """int32 [slots, columns]: number of slots of each length in each column."""
    packs: FloatArray
    """float64 [columns]: number of packs of each column."""
    objective: float
    """Total number of packs."""
    rounds: int
    finished: bool
    """Whether the solution is optimal or close to optimal; False if the time ran out."""


def generate_columns(
    problem: Problem, start: IntArray, deadline: float, progress: Callable[[str], None]
) -> tuple[Relaxation | None, Duals]:
    """Solve the problem in fractions of packs over all possible columns, or stop when the time runs out.

    Args:
        problem: number of slots that are needed of each length.
        start: integers [slots, columns]: columns to start with, which together contain all slots.
        deadline: time to stop, in seconds on the clock of `time.monotonic`.
        progress: function that is called with a line of text in each round.

    Returns:
        The last solution, or None if the time was too short for a solution; and the duals with the best bound.
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
        progress(f"round {rounds}: at most {objective:,.0f} and at least {duals.bound:,.0f} fractional packs")
        gap = _CLOSE_ENOUGH * objective if problem.grouped else 0
        if np.ceil(duals.bound - ROUNDING) >= np.ceil(objective - ROUNDING) - gap:
            return solution, duals
        new = _without_known(_improving_columns(problem, duals, value, deadline), columns)
        if not new.shape[1] and time.monotonic() < deadline:
            return solution, duals
        # columns are removed only if the objective has decreased since the last removal; otherwise the same columns
        # could be removed and added forever
        if columns.shape[1] > 2 * len(problem.slots) and objective < pruned_at * (1 - _LEAST_PROGRESS):
            columns = columns[:, (packs > 0) | (1 - value @ columns < _WORTH_KEEPING)]
            pruned_at = objective
        columns = np.hstack([columns, new])
    if solution is not None:
        solution = Relaxation(solution.columns, solution.packs, solution.objective, rounds, finished=False)
    return solution, duals


def _try_prices(problem: Problem, duals: Duals, value: FloatArray) -> IntArray:
    """Return the most valuable columns for some slot values. If the values prove a better bound, update `duals`.

    For any slot values, the total value of all documents, divided by the value of the most valuable pack, is a lower
    bound on the number of packs (Farley, "A note on bounding a class of linear programming problems", Operations
    Research 1990). The stored values are scaled so that no pack is worth more than 1.
    """
    best = most_valuable_packs(value, problem.slots, problem.capacity, problem.max_documents)
    if best.most > 0 and (bound := float(problem.demand @ value) / best.most) > duals.bound:
        duals.bound, duals.value = bound, value / best.most
    return best.columns


def _guessed_columns(problem: Problem, duals: Duals, deadline: float) -> list[IntArray]:
    """Return columns for guessed slot values.

    The first guesses mix two kinds of slot values: values proportional to slot lengths, and equal values for all slots.
    The columns of these first guesses are not kept; the guesses only improve `duals`, which are the best known slot
    values. The returned columns are the most valuable columns for noisy copies of these slot values.
    """
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
    """Return columns worth more than 1 at the master's duals `value`; search near the best duals first."""
    weight = _TOWARDS_BEST
    while True:
        columns = _try_prices(problem, duals, weight * duals.value + (1 - weight) * value)
        better = value @ columns > 1 + _WORTH_ADDING
        if better.any() or weight == 0 or time.monotonic() > deadline:
            return np.unique(columns[:, better], axis=1)
        weight = weight / 2 if weight > 0.1 else 0


def _without_known(new: IntArray, columns: IntArray) -> IntArray:
    """Return the new columns that are not known yet.

    A known column may look worth adding again, because of the solver's tolerance.
    """
    known = {column.tobytes() for column in np.ascontiguousarray(columns.T)}
    fresh = [column.tobytes() not in known for column in np.ascontiguousarray(new.T)]
    return new[:, fresh]


def solve_master(columns: IntArray, demand: FloatArray, deadline: float) -> tuple[FloatArray, FloatArray, float] | None:
    """Find the fewest packs, fractions of packs allowed, that give every document a slot, with known columns only.

    Args:
        columns: integers [slots, columns]: number of slots of each length in each column.
        demand: float64 [slots]: number of documents for which this slot is the shortest slot that fits.
        deadline: time to stop, in seconds on the clock of `time.monotonic`.

    Returns:
        float64 [columns]: packs of each column; float64 [slots]: dual of each slot; total number of packs. None if the
        time ran out.
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
    """Return the distinct patterns as columns, int32 [slots, columns]. Every segment length must be a slot length."""
    columns = np.zeros((len(slots), len(patterns.packs)), dtype=np.int32)
    entry_slot = np.searchsorted(slots, patterns.entry_length)
    np.add.at(columns, (entry_slot, patterns.entry_pattern), patterns.entry_copies)
    return np.unique(columns, axis=1)


_ROUNDED_UP = 0.5
"""Smallest fraction of a pack that is rounded up to a pack, if that pack would have no unused slot."""


def dive(
    relaxation: Relaxation, demand: FloatArray, make_packs: Callable[[IntArray], Patterns], bound: int, deadline: float
) -> tuple[Patterns, bool]:
    """Round a solution in fractions of packs to whole packs, step by step, and return the best packs found.

    Args:
        relaxation: solution in fractions of packs.
        demand: float64 [slots]: number of documents for which this slot is the shortest slot that fits.
        make_packs: function that turns a number of packs for each column into packs of all documents, best-fit where
            documents get no slot.
        bound: lower bound on the number of packs, at which to stop.
        deadline: time to stop, in seconds on the clock of `time.monotonic`.

    Returns:
        The packs, and whether rounding finished before the deadline.
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
    """Choose the columns that get one more pack each.

    Columns with a large fraction of a pack come first; a column is chosen if every slot of the added pack is needed. If
    no column is chosen and `at_least_one` is True, the column with the largest fraction is chosen anyway.

    Returns:
        int64 [columns]: 1 for each chosen column, and 0 for all other columns.
    """
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
    """Return the number of slots of each length that are still needed after spare slots have served shorter documents.

    A negative number in `left` is a number of spare slots.
    """
    wanted, spare = left.tolist(), 0
    for slot in range(len(wanted) - 1, -1, -1):
        spare -= min(wanted[slot], 0)
        served = min(spare, max(wanted[slot], 0))
        wanted[slot] = max(wanted[slot], 0) - served
        spare -= served
    return np.array(wanted, dtype=np.int64)
