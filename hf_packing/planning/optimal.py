"""The fewest packs that can be found in a given time, and a bound that proves how few are possible at all."""

import time
from collections.abc import Callable

import numpy as np

from hf_packing.planning.best_fit import best_fit_patterns
from hf_packing.planning.bounds import pack_lower_bound
from hf_packing.planning.column_generation import Duals, Problem, columns_of, generate_columns
from hf_packing.planning.columns import fill_columns
from hf_packing.planning.dive import dive
from hf_packing.planning.few_documents import FEW_SEGMENTS, fewest_packs_of_few
from hf_packing.planning.grouped_lengths import slots_wanted, too_much_work
from hf_packing.planning.knapsack import LEAST_GAIN, fill_rooms
from hf_packing.planning.lengths import IntArray
from hf_packing.planning.optional import load_scipy_optimize
from hf_packing.planning.patterns import Patterns, Solution

SHARE_FOR_FRACTIONS = 0.6
"""Of the time, for the solution in fractions; the rest is for making whole packs of it."""
ROUNDING = 1e-6
MAX_WORK_FOR_BOUND = 1 << 29
"""Lengths times capacity: up to here the duals of grouped lengths are priced on all lengths, for a better bound."""


def optimal_packs(
    counts: IntArray,
    capacity: int,
    max_documents: int | None,
    time_limit: float,
    progress: Callable[[str], None],
) -> Solution:
    """The fewest packs found within a time limit; never more than best fit needs.

    Args:
        counts: int64 [longest + 1]: how many segments there are of each length; none is empty.
        capacity: tokens a pack holds.
        max_documents: most segments in one pack; None for no limit.
        time_limit: seconds.
        progress: called with a line of words now and then.

    Raises:
        MissingDependencyError: scipy is not installed.
    """
    began = time.monotonic()
    load_scipy_optimize("Optimal")
    deadline = began + time_limit
    best_fit = best_fit_patterns(counts, capacity, max_documents)
    bound = pack_lower_bound(counts, capacity)
    if max_documents is not None:
        bound = max(bound, -(-int(counts.sum()) // max_documents))
    if best_fit.num_packs <= bound:
        return Solution(best_fit, bound, "best fit, which no plan can beat")
    if time.monotonic() >= deadline:
        note = f"best fit: a time limit of {time_limit:g} s left no time for more"
        return Solution(best_fit, bound, note, gave_up=True)
    slots, problem = slots_wanted(counts, capacity, max_documents)
    how = f"column generation on {len(slots)} lengths"
    if problem.grouped:
        how += f", to which {np.count_nonzero(counts)} were rounded up"
    if least_packs_of_slots(problem) >= best_fit.num_packs:
        return Solution(best_fit, bound, f"best fit: {how}, cannot find fewer packs")
    if too_much_work(problem):
        note = f"best fit: {how}, is too much work with max_documents={max_documents}"
        return Solution(best_fit, bound, note, gave_up=True)
    grouped_counts = np.zeros(int(slots[-1]) + 1, dtype=np.int64)
    grouped_counts[slots] = problem.demand.astype(np.int64)
    start = columns_of(best_fit_patterns(grouped_counts, capacity, max_documents), slots)
    until = began + SHARE_FOR_FRACTIONS * time_limit
    relaxation, duals = generate_columns(problem, start, until, progress)
    bound = max(bound, proven_bound(counts, capacity, slots, problem, duals, until))
    if relaxation is None:
        note = f"best fit: a time limit of {time_limit:g} s was too short for {how}"
        return Solution(best_fit, bound, note, gave_up=True)

    def realise(packs: IntArray) -> Patterns:
        return fill_columns(packs, relaxation.columns, slots, counts, capacity, max_documents)

    progress(f"whole packs, at least {bound:,}")
    found, to_its_end = dive(relaxation, problem.demand, realise, bound, deadline)
    how += f", {relaxation.rounds} round{'s' if relaxation.rounds > 1 else ''}"
    if not (relaxation.finished and to_its_end):
        how += f", stopped by the time limit of {time_limit:g} s"
    segments = int(counts.sum())
    if min(found.num_packs, best_fit.num_packs) > bound and segments <= FEW_SEGMENTS:
        exact = fewest_packs_of_few(counts, capacity, max_documents, deadline)
        if exact is not None:
            return Solution(exact, exact.num_packs, "all ways to fill a pack, solved exactly")
    if found.num_packs >= best_fit.num_packs:
        return Solution(best_fit, bound, f"best fit: {how}, found no fewer packs")
    return Solution(found, bound, how)


def least_packs_of_slots(problem: Problem) -> int:
    """By volume: what rounding lengths up costs at least."""
    return int(np.ceil(problem.demand @ problem.slots / problem.capacity - ROUNDING))


def proven_bound(
    counts: IntArray, capacity: int, slots: IntArray, problem: Problem, duals: Duals, deadline: float
) -> int:
    """Packs that the documents need, by what the duals say their slots are worth.

    Where lengths are grouped, a document is worth at least what the next shorter slot is. Better, it is worth what lies
    on the line between the slots around it, if the most valuable pack of such documents is found anew.
    """
    if not problem.grouped:
        return whole_packs(duals.bound, problem.capacity)
    lengths = np.flatnonzero(counts)
    shorter = np.concatenate([[0.0], duals.value])[np.searchsorted(slots, lengths, side="right")]
    bound = float(counts[lengths] @ shorter)
    work = len(lengths) * capacity
    if problem.max_documents is None and work <= MAX_WORK_FOR_BOUND and time.monotonic() < deadline and duals.bound:
        between = np.interp(lengths, np.append(0, slots), np.append(0.0, duals.value))
        most = fill_rooms(between, lengths, capacity).value[-1]
        bound = max(bound, float(counts[lengths] @ between) / most)
    return whole_packs(bound, capacity)


def whole_packs(bound: float, steps: int) -> int:
    """The whole packs that a bound proves, with allowance for what a knapsack of so many steps may lose to rounding."""
    return int(np.ceil(bound * (1 - LEAST_GAIN * (steps + 1)) - ROUNDING))
