"""Column generation: minimize packs in a linear program, prove a lower bound on packs, and round to whole packs.

A slot is a place for one document in a pack. A column is a combination of slots that fits in a pack. Each round of
column generation has two steps. (1) The master problem, a linear program solved by HiGHS, chooses how many packs to
make of each known column, so that every document gets a slot and the total number of packs is smallest. Numbers of
packs may be fractions. The duals of the master problem are used as values of the slots. (2) Pricing, a knapsack
problem, finds new columns whose slots have a total value above 1, the cost of a pack. If there is no such column, the
solution is optimal over all columns (Gilmore and Gomory, "A linear programming approach to the cutting-stock problem",
Operations Research 1961).

Three ideas make the method fast. First, a slot may hold a document that is shorter than the slot (Valerio de Carvalho,
"Using extra dual cuts to accelerate column generation", INFORMS Journal on Computing 2005). For this reason, similar
lengths can also be rounded up to one slot length. Second, pricing uses a weighted mean of the master's duals and of the
slot values that gave the best bound so far (du Merle et al., "Stabilized column generation", Discrete Mathematics
1999). Third, the search starts with the columns of the best-fit plan and with columns that pricing finds for several
guesses at the duals.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_packing.planning.best_fit import OpenPacks, fill_best_fit
from hf_packing.planning.lengths import IntArray, offsets_of
from hf_packing.planning.patterns import Patterns
from hf_packing.strategies.base import load_scipy_optimize

ROUNDING = 1e-6
"""Differences up to this value between numbers of packs are treated as rounding errors."""
_GUESSES = 5
_NOISE = 0.02
"""Standard deviation of the relative noise in guessed duals. Different guesses then find different packs."""
_TOWARDS_BEST = 0.3
"""Weight of the slot values with the best bound in the mean that pricing uses; the master's duals have the rest."""
_WORTH_ADDING = 1e-7
_WORTH_KEEPING = 0.01
"""Unused columns with this reduced cost or a higher reduced cost are removed from a large master problem."""
_LEAST_PROGRESS = 1e-9
"""Relative decreases of the objective up to this value are treated as rounding errors."""
_SCALE = 1000.0
"""Total demand of the scaled master problem. The demand is scaled since the tolerances of HiGHS are absolute."""
_CLOSE_ENOUGH = 5e-5
"""If lengths are grouped, the search stops at this relative gap, since the bound is then only approximate."""


@dataclass(frozen=True)
class Problem:
    """The packing problem: slot lengths, the number of documents for each slot length, and the limits on each pack."""

    slots: IntArray
    """int64 [slots]: slot lengths, ascending, in units of one or more tokens."""
    demand: FloatArray
    """float64 [slots]: demand[i] is the number of documents for which slot i is the shortest slot that fits."""
    capacity: int
    """The capacity of a pack, in the same unit as the slot lengths."""
    max_documents: int | None
    grouped: bool
    """True if documents of several lengths are rounded up to one slot length.

    A lower bound for the slots is then not a lower bound for the documents.
    """


@dataclass
class Duals:
    """The best lower bound on packs so far, and the slot values that prove this bound.

    A slot is a place in a pack for a segment of one length. The slot values are scaled so that the slots of one pack
    have a total value of at most 1.
    """

    value: FloatArray
    bound: float = 0.0


@dataclass(frozen=True)
class Relaxation:
    """A solution of the packing problem in which numbers of packs may be fractions (linear relaxation)."""

    columns: IntArray
    """int32 [slots, columns]: number of slots of each length in each column."""
    packs: FloatArray
    """float64 [columns]: number of packs of each column."""
    rounds: int
    finished: bool
    """True if the solution is optimal or close to optimal; False if the time ran out."""


def generate_columns(problem: Problem, start: IntArray, deadline: float) -> tuple[Relaxation | None, Duals]:
    """Solve the packing problem by column generation, where numbers of packs may be fractions.

    Args:
        problem: the packing problem.
        start: integers [slots, columns]: columns to start with. Each slot must occur in at least one of these columns.
        deadline: value of `time.monotonic()` at which the search stops, in seconds.

    Returns:
        The last solution, or None if the time was too short for a solution; and the best lower bound on packs, with the
        slot values that prove the bound.
    """
    duals = Duals(np.zeros(len(problem.slots)))
    columns = np.hstack([start, *_guessed_columns(problem, duals, deadline)]).astype(np.int32)
    solution: Relaxation | None = None
    rounds, pruned_at = 0, np.inf
    scale = _SCALE / problem.demand.sum()
    while time.monotonic() < deadline:
        solved = solve_master(columns, problem.demand * scale, deadline)
        if solved is None:
            break
        packs, value, objective = solved
        rounds += 1
        packs, objective = packs / scale, objective / scale
        solution = Relaxation(columns, packs, rounds, finished=True)
        gap = _CLOSE_ENOUGH * objective if problem.grouped else 0
        if np.ceil(duals.bound - ROUNDING) >= np.ceil(objective - ROUNDING) - gap:
            return solution, duals
        new = _improving_columns(problem, duals, value, deadline)
        # pricing may find a known column again, since the duals are accurate only up to a tolerance
        known = {column.tobytes() for column in np.ascontiguousarray(columns.T)}
        new = new[:, [column.tobytes() not in known for column in np.ascontiguousarray(new.T)]]
        if not new.shape[1] and time.monotonic() < deadline:
            return solution, duals
        # columns are removed only if the objective has decreased since the last removal; otherwise the same columns
        # could be removed and added forever
        if columns.shape[1] > 2 * len(problem.slots) and objective < pruned_at * (1 - _LEAST_PROGRESS):
            columns = columns[:, (packs > 0) | (1 - value @ columns < _WORTH_KEEPING)]
            pruned_at = objective
        columns = np.hstack([columns, new])
    if solution is not None:
        solution = replace(solution, finished=False)
    return solution, duals


def _try_prices(problem: Problem, duals: Duals, value: FloatArray) -> IntArray:
    """Return the most valuable columns for the slot values `value`.

    If these slot values prove a better lower bound on packs, `duals` is updated. For any slot values, the total value
    of the slots of all documents, divided by the value of the most valuable pack, is a lower bound on the number of
    packs (Farley, "A note on bounding a class of linear programming problems", Operations Research 1990).
    """
    most, columns = most_valuable_packs(value, problem.slots, problem.capacity, problem.max_documents)
    if most > 0 and (bound := float(problem.demand @ value) / most) > duals.bound:
        duals.bound, duals.value = bound, value / most
    return columns


def _guessed_columns(problem: Problem, duals: Duals, deadline: float) -> list[IntArray]:
    """Return columns to start with, found by pricing with guessed slot values.

    The first guesses are weighted means of two kinds of slot values: values proportional to the slot lengths, and the
    same value for all slots. These guesses only update `duals`, which then has the slot values with the best bound.
    Further guesses add random noise to the slot values in `duals`. The most valuable columns for these further guesses
    are returned.
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
    """Return new columns whose slots have a total value above 1, measured with the master's duals `value`.

    Pricing first uses a weighted mean of `value` and of the slot values that gave the best lower bound so far. If this
    finds no such column, the weight of `value` is increased step by step, up to 1.
    """
    weight = _TOWARDS_BEST
    while True:
        columns = _try_prices(problem, duals, weight * duals.value + (1 - weight) * value)
        better = value @ columns > 1 + _WORTH_ADDING
        if better.any() or weight == 0 or time.monotonic() > deadline:
            return np.unique(columns[:, better], axis=1)
        weight = weight / 2 if weight > 0.1 else 0


def solve_master(columns: IntArray, demand: FloatArray, deadline: float) -> tuple[FloatArray, FloatArray, float] | None:
    """Solve the master problem: give every document a slot in as few packs of known columns as possible.

    Numbers of packs may be fractions.

    Args:
        columns: integers [slots, columns]: number of slots of each length in each known column.
        demand: float64 [slots]: demand[i] is the number of documents for which slot i is the shortest slot that fits.
        deadline: value of `time.monotonic()` at which the solver stops, in seconds.

    Returns:
        float64 [columns]: number of packs of each column; float64 [slots]: dual value of each slot; and the total
        number of packs. None if the time ran out.
    """
    optimize: Any = load_scipy_optimize("Optimal")
    from scipy import sparse

    slots, number = columns.shape
    offsets = {"offsets": [0, -1], "shape": (slots, slots - 1)}
    serves_shorter = sparse.diags_array([np.ones(slots - 1), -np.ones(slots - 1)], **offsets)
    matrix = sparse.hstack([sparse.csc_array(columns.astype(np.float64)), serves_shorter], format="csc")
    cost = np.concatenate([np.ones(number), np.zeros(slots - 1)])
    options = {"time_limit": max(0.0, deadline - time.monotonic())}
    result = optimize.linprog(cost, A_ub=-matrix, b_ub=-demand, method="highs-ds", options=options)
    if result.status != 0:
        return None
    return np.maximum(result.x[:number], 0), np.maximum(-result.ineqlin.marginals, 0), float(result.fun)


def columns_of(patterns: Patterns, slots: IntArray) -> IntArray:
    """Return the distinct patterns as columns: how often each slot length occurs in each pattern.

    Args:
        patterns: patterns of packs. Every segment length in the patterns must be a slot length.
        slots: int64 [slots]: slot lengths, ascending.

    Returns:
        int32 [slots, columns]: number of slots of each length in each column.
    """
    columns = np.zeros((len(slots), len(patterns.packs)), dtype=np.int32)
    entry_slot = np.searchsorted(slots, patterns.entry_length)
    np.add.at(columns, (entry_slot, patterns.entry_pattern), patterns.entry_copies)
    return np.unique(columns, axis=1)


_ROUNDED_UP = 0.5
"""Smallest fraction of a pack that is rounded up to a whole pack, if all slots of that pack are needed."""


def dive(
    relaxation: Relaxation, demand: FloatArray, make_packs: Callable[[IntArray], Patterns], bound: int, deadline: float
) -> tuple[Patterns, bool]:
    """Round a solution with fractional numbers of packs to whole packs, step by step, and return the best result.

    Each step rounds the numbers of packs down or up, and then solves the master problem again for the slots that are
    still needed.

    Args:
        relaxation: solution with fractional numbers of packs.
        demand: float64 [slots]: demand[i] is the number of documents for which slot i is the shortest slot that fits.
        make_packs: function that packs all documents; its argument, int64 [columns], is the number of packs to
            fill like each column. Documents that get no slot in these packs are packed best-fit.
        bound: lower bound on the number of packs. Rounding stops when a result reaches the bound.
        deadline: value of `time.monotonic()` at which rounding stops, in seconds.

    Returns:
        Patterns of the fewest packs found; and True if rounding finished before the deadline.
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
    """Choose the columns whose number of packs is rounded up.

    Columns are tried from the largest fraction down to one half. A column is chosen if one more pack of this column has
    only slots that are still needed. If no column is chosen and `at_least_one` is True, the column with the largest
    fraction is chosen.

    Args:
        fraction: float64 [columns]: fractional part of the number of packs of each column.
        columns: integers [slots, columns]: number of slots of each length in each column.
        left: int64 [slots]: number of slots of each length that are still needed.
        at_least_one: True to choose at least one column.

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
    """Use spare slots for shorter documents, and return the number of slots of each length that are still needed.

    `left` and the result are int64 [slots], from the shortest slot to the longest. A positive number in `left` is a
    number of needed slots, and a negative number is a number of spare slots.
    """
    # from the longest slot down to any other, as many are needed as the largest sum of `left` on the way
    needed = np.maximum.accumulate(np.cumsum(left[::-1]).clip(0))
    return np.diff(needed, prepend=0)[::-1]


FloatArray = npt.NDArray[np.float64]

LEAST_GAIN = 1e-12
"""Differences in value up to this number are treated as rounding errors."""


def most_valuable_packs(
    value: FloatArray, slots: IntArray, capacity: int, max_documents: int | None
) -> tuple[float, IntArray]:
    """Return the value of the most valuable pack, and for each slot the most valuable pack that contains this slot.

    A slot is a place for one document in a pack. It has a fixed length, and may hold a shorter document.

    Args:
        value: float64 [slots]: value of each slot, at least 0.
        slots: int64 [slots]: slot lengths, ascending, at least 1.
        capacity: capacity of a pack, in the same unit as the slot lengths.
        max_documents: maximum number of slots in a pack; None for no limit.

    Returns:
        The value, and columns, int32 [slots, slots]: columns[j, i] is the number of slots j in the most valuable pack
        that contains slot i.
    """
    if max_documents is None:
        best, slot = _fill_rooms(value, slots, capacity)
        layers: Iterator[IntArray] = repeat(slot)
    else:
        best, slots_taken = _fill_rooms_with_limit(value, slots, capacity, max_documents)
        layers = reversed(slots_taken[:-1])
    # each pack begins with its own slot, and then takes one slot after the other of the best combination for its room
    columns = np.eye(len(slots), dtype=np.int32)
    pack, room = np.arange(len(slots)), capacity - slots
    for slot_of_room in layers:
        slot = slot_of_room[room]
        taken = slot >= 0
        if not taken.any():
            break
        pack, room, slot = pack[taken], room[taken], slot[taken]
        columns[slot, pack] += 1
        room = room - slots[slot]
    return float(best[capacity]), columns


def _fill_rooms(value: FloatArray, slots: IntArray, capacity: int) -> tuple[FloatArray, IntArray]:
    """Return the most valuable combination of slots for each amount of free room from 0 to the capacity.

    The number of slots is not limited. The best combination for a room is one slot, plus the best combination for the
    remaining room; all slots that fit are tried.

    Args:
        value: float64 [slots]: value of each slot, at least 0.
        slots: int64 [slots]: slot lengths, ascending, at least 1.
        capacity: capacity of a pack, in the same unit as the slot lengths.

    Returns:
        float64 [capacity + 1]: total value of the best combination; int64 [capacity + 1]: a slot of the best
        combination, or -1 if no slot adds value.
    """
    best, slot = np.zeros(capacity + 1), np.full(capacity + 1, -1)
    fitting = np.searchsorted(slots, np.arange(capacity + 1), side="right").tolist()
    for room in range(int(slots[0]), capacity + 1):
        count = fitting[room]
        totals = best[room - slots[:count]] + value[:count]
        top = totals.argmax()
        if totals[top] > best[room - 1] + LEAST_GAIN:
            best[room], slot[room] = totals[top], top
        else:
            best[room], slot[room] = best[room - 1], slot[room - 1]
    return best, slot


def _fill_rooms_with_limit(
    value: FloatArray, slots: IntArray, capacity: int, max_documents: int
) -> tuple[FloatArray, list[IntArray]]:
    """Return the most valuable combinations of at most `max_documents` slots, as `_fill_rooms` does.

    Element n of the returned list has a slot of the best combination of at most n slots, for n from 0 to max_documents.
    """
    best, slot = np.zeros(capacity + 1), np.full(capacity + 1, -1)
    layers = [slot]
    for _ in range(max_documents):
        fewer, best, slot = best, best.copy(), slot.copy()
        for number, (length, worth) in enumerate(zip(slots.tolist(), value.tolist(), strict=True)):
            totals = fewer[: capacity + 1 - length] + worth
            better = totals > best[length:] + LEAST_GAIN
            best[length:][better] = totals[better]
            slot[length:][better] = number
        layers.append(slot)
    return best, layers


def fill_columns(
    packs: IntArray, columns: IntArray, slots: IntArray, counts: IntArray, capacity: int, max_documents: int | None
) -> Patterns:
    """Build packs from columns, fill the slots with as many counted segments as possible, and pack the rest best-fit.

    First, slots of each length take documents that fit in such a slot but not in the next shorter slot. Then, slots
    that are still free take any documents that fit. In both steps, longer documents come first. The remaining documents
    are packed best-fit, into the free room of these packs or into new packs. Packs without any document are left out.

    Args:
        packs: int64 [columns]: number of packs to build from each column.
        columns: integers [slots, columns]: number of slots of each length in each column.
        slots: int64 [slots]: the distinct slot lengths in tokens, ascending.
        counts: int64 [longest + 1]: counts[n] is the number of segments of n tokens; counts[0] is 0.
        capacity: capacity of each pack, in tokens.
        max_documents: maximum number of segments in a pack; None for no limit.

    Returns:
        Patterns whose packs hold exactly the counted segments.
    """
    first = offsets_of(packs)
    made = OpenPacks(capacity, max_documents)
    made.num_packs = int(first[-1])
    left = counts.copy()

    def give(intervals: list[list[int]], lengths: IntArray) -> None:
        """Put documents into free slots, the longest first. Intervals are [first pack, packs, free slots in each]."""
        for length in lengths[::-1].tolist():
            documents = int(left[length])
            while documents and intervals:
                pack, number, copies = intervals.pop()
                put = min(copies, documents)
                filled = min(number, documents // put)
                made.runs.append((length, pack, filled, put))
                documents -= filled * put
                if filled < number:
                    intervals.append([pack + filled, number - filled, copies])
                if put < copies:  # one pack has more free slots than there are documents
                    intervals.append([pack, filled, copies - put])
            left[length] = documents
            if not intervals:
                break

    free = []
    lengths = np.flatnonzero(counts)
    slot_of_length = np.searchsorted(slots, lengths)
    for number in range(len(slots)):
        having = np.flatnonzero(packs * columns[number])
        free.append(np.column_stack([first[having], packs[having], columns[number, having]]).tolist())
        give(free[number], lengths[slot_of_length == number])
    for number in range(len(slots) - 1, -1, -1):
        if free[number]:
            give(free[number], np.flatnonzero(left[: slots[number] + 1]))
    # the rest goes best-fit into packs with free room, and into new packs
    patterns = made.patterns()
    room = patterns.capacity - patterns.tokens_per_pack()
    documents, first = patterns.segments_per_pack(), offsets_of(patterns.packs)
    useful = (documents > 0) & (documents < made.limit) & (room > 0)
    intervals = np.column_stack([room, first[:-1], patterns.packs, documents])[useful]
    for tokens, first_pack, number, segments in intervals.tolist():
        made.add(tokens, (first_pack, number, segments))
    fill_best_fit(made, left)
    return made.patterns().without_empty()
