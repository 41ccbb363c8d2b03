"""Optimal: the fewest packs that can be found in a given time, and a proven lower bound."""

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from tqdm import tqdm

from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray, is_real
from hf_packing.planning.metrics import pack_lower_bound
from hf_packing.planning.open_packs import best_fit_patterns
from hf_packing.planning.patterns import Patterns
from hf_packing.strategies.base import OneCapacity, Solution, load_scipy_optimize, register_strategy
from hf_packing.strategies.fill_columns import fill_columns
from hf_packing.strategies.optimal.column_generation import ROUNDING, Duals, Problem, columns_of, dive, generate_columns
from hf_packing.strategies.optimal.knapsack import LEAST_GAIN, fill_rooms
from hf_packing.strategies.optimal.slots import slots_wanted, too_much_work

_SHARE_FOR_FRACTIONS = 0.6
"""Share of the time limit for the solution in fractions; the rest is for turning it into whole packs."""
_FEW_SEGMENTS = 64
"""Up to this many segments, the problem may also be solved exactly."""
_MAX_WORK_FOR_BOUND = 1 << 29
"""Lengths times capacity up to which duals of grouped lengths are priced on all lengths, for a better bound."""


@register_strategy
@dataclass(frozen=True)
class Optimal(OneCapacity):
    """The fewest packs that column generation finds, with a proven lower bound.

    Never more packs than BestFit. Worth its time if best fit is far from the bound: with lengths in a narrow range, as
    in most fine-tuning data. More than 1,000 distinct lengths are rounded up to 1,000 while planning, or to fewer with
    `max_documents` and long packs; packs of more than 131,072 tokens are measured in units of several tokens. The
    plan's `note` says what was done, its `metrics().lower_bound` is the bound. The same input gives the same plan
    unless the time runs out; if several processes need it, let one of them plan. Needs scipy:
    `pip install "hf-packing[optimal]"`.

    Args:
        max_length: tokens that a pack holds, at least 1.
        overflow: what happens to a longer document: "split", "truncate", "drop" or "error".
        max_documents: most segments in a pack; None for no limit.
        time_limit: seconds for planning, 0 or more; if that is too short for a first solution, or max_documents makes
            it too much work, the plan is that of BestFit, with a warning.
        seed: of the random order of packs, of the documents in them, and of documents of equal length; None leaves
            them sorted.

    Raises:
        PackingError: an argument that is not as above.
        MissingDependencyError: when planning, scipy is not installed.

    Example:
        >>> import hf_packing as hfp
        >>> lengths = [14, 14, 14, 9, 8, 8, 8, 4, 3, 3, 3, 2]
        >>> hfp.plan_packing(lengths, hfp.BestFit(30)).num_packs, hfp.plan_packing(lengths, hfp.Optimal(30)).num_packs
        (4, 3)
    """

    time_limit: float = field(default=60.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.set_fields(time_limit=_check_seconds("time_limit", self.time_limit))

    def solve(self, counts: IntArray) -> Solution:
        with tqdm(
            desc="Optimal", bar_format="{desc}: {postfix} [{elapsed}]", delay=1, leave=False, disable=None
        ) as bar:
            found = _optimal_packs(counts, self.max_length, self.max_documents, self.time_limit, bar.set_postfix_str)
        if found.gave_up:
            warnings.warn(f"{self!r} returns {found.note}", stacklevel=2)
        return found


def _check_seconds(name: str, value: Any) -> float:
    """Return `value` as seconds, at least 0, or raise PackingError."""
    if not is_real(value) or not value >= 0:
        raise PackingError(f"{name}: expected seconds, 0 or more, got {value!r}")
    return float(value)


def _optimal_packs(
    counts: IntArray,
    capacity: int,
    max_documents: int | None,
    time_limit: float,
    progress: Callable[[str], None],
) -> Solution:
    """Return the fewest packs found within a time limit, never more than best fit needs.

    Args:
        counts: int64 [longest + 1]: how many segments there are of each length; none is empty.
        capacity: tokens that a pack holds.
        max_documents: most segments in one pack; None for no limit.
        time_limit: seconds.
        progress: called with a line of text now and then.

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
    if _least_packs_of_slots(problem) >= best_fit.num_packs:
        return Solution(best_fit, bound, f"best fit: {how}, cannot find fewer packs")
    if too_much_work(problem):
        note = f"best fit: {how}, is too much work with max_documents={max_documents}"
        return Solution(best_fit, bound, note, gave_up=True)
    grouped_counts = np.zeros(int(slots[-1]) + 1, dtype=np.int64)
    grouped_counts[slots] = problem.demand.astype(np.int64)
    start = columns_of(best_fit_patterns(grouped_counts, capacity, max_documents), slots)
    until = began + _SHARE_FOR_FRACTIONS * time_limit
    relaxation, duals = generate_columns(problem, start, until, progress)
    bound = max(bound, _proven_bound(counts, capacity, slots, problem, duals, until))
    if relaxation is None:
        note = f"best fit: a time limit of {time_limit:g} s was too short for {how}"
        return Solution(best_fit, bound, note, gave_up=True)

    def make_packs(packs: IntArray) -> Patterns:
        return fill_columns(packs, relaxation.columns, slots, counts, capacity, max_documents)

    progress(f"whole packs, at least {bound:,}")
    found, to_its_end = dive(relaxation, problem.demand, make_packs, bound, deadline)
    how += f", {relaxation.rounds} round{'s' if relaxation.rounds > 1 else ''}"
    if not (relaxation.finished and to_its_end):
        how += f", stopped by the time limit of {time_limit:g} s"
    if min(found.num_packs, best_fit.num_packs) > bound and int(counts.sum()) <= _FEW_SEGMENTS:
        exact = fewest_packs_of_few(counts, capacity, max_documents, deadline)
        if exact is not None:
            return Solution(exact, exact.num_packs, "all ways to fill a pack, solved exactly")
    if found.num_packs >= best_fit.num_packs:
        return Solution(best_fit, bound, f"best fit: {how}, found no fewer packs")
    return Solution(found, bound, how)


def _least_packs_of_slots(problem: Problem) -> int:
    """Return the packs that the slots need by volume: no plan with rounded-up lengths has fewer."""
    return int(np.ceil(problem.demand @ problem.slots / problem.capacity - ROUNDING))


def _proven_bound(
    counts: IntArray, capacity: int, slots: IntArray, problem: Problem, duals: Duals, deadline: float
) -> int:
    """Return a lower bound on packs, from the values that the duals give to slots.

    If lengths are grouped, a document is worth at least as much as the next shorter slot. Interpolating
    between the slots around it gives a better value, but then the most valuable pack has to be found again.
    """
    if not problem.grouped:
        return _whole_packs(duals.bound, problem.capacity)
    lengths = np.flatnonzero(counts)
    shorter = np.concatenate([[0.0], duals.value])[np.searchsorted(slots, lengths, side="right")]
    bound = float(counts[lengths] @ shorter)
    work = len(lengths) * capacity
    if problem.max_documents is None and work <= _MAX_WORK_FOR_BOUND and time.monotonic() < deadline and duals.bound:
        between = np.interp(lengths, np.append(0, slots), np.append(0.0, duals.value))
        most = fill_rooms(between, lengths, capacity).value[-1]
        bound = max(bound, float(counts[lengths] @ between) / most)
    return _whole_packs(bound, capacity)


def _whole_packs(bound: float, rooms: int) -> int:
    """Return the whole packs that a bound proves, allowing for the rounding errors of a knapsack over `rooms`."""
    return int(np.ceil(bound * (1 - LEAST_GAIN * (rooms + 1)) - ROUNDING))


_MOST_WAYS = 1 << 14


def fewest_packs_of_few(counts: IntArray, capacity: int, max_documents: int | None, deadline: float) -> Patterns | None:
    """Return the fewest packs possible; None if there are too many ways to fill a pack, or the time runs out.

    Args:
        counts: int64 [longest + 1]: how many segments there are of each length; none is empty.
        capacity: tokens that a pack holds.
        max_documents: most segments in one pack; None for no limit.
        deadline: seconds, on the clock of `time.monotonic`.
    """
    lengths = np.flatnonzero(counts)
    demand = counts[lengths]
    ways = list(islice(_ways_to_fill(lengths.tolist(), demand.tolist(), capacity, max_documents), _MOST_WAYS + 1))
    seconds = deadline - time.monotonic()
    if len(ways) > _MOST_WAYS or seconds <= 0:
        return None
    optimize: Any = load_scipy_optimize("Optimal")
    columns = np.array(ways, dtype=np.int64).T
    options = {"time_limit": seconds} if np.isfinite(seconds) else {}
    result = optimize.milp(
        np.ones(len(ways)),
        integrality=np.ones(len(ways)),
        constraints=optimize.LinearConstraint(columns, lb=demand),
        options=options,
    )
    if result.status != 0:
        return None
    packs = np.rint(result.x).astype(np.int64)
    return fill_columns(packs, columns, lengths, counts, capacity, max_documents)


def _ways_to_fill(
    lengths: list[int], left: list[int], room: int, max_documents: int | None
) -> Iterator[tuple[int, ...]]:
    """Yield the copies of each length, in every way that fits and is not empty."""
    limit = sum(left) if max_documents is None else max_documents

    def extend(number: int, room: int, limit: int) -> Iterator[tuple[int, ...]]:
        if number == len(lengths):
            yield ()
            return
        for copies in range(min(left[number], room // lengths[number], limit) + 1):
            for rest in extend(number + 1, room - copies * lengths[number], limit - copies):
                yield (copies, *rest)

    return (way for way in extend(0, room, limit) if any(way))
