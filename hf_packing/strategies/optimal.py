"""The strategy Optimal, which searches for the fewest packs within a time limit and proves a lower bound on packs."""

import math
import time
import warnings
from dataclasses import KW_ONLY, dataclass

import numpy as np

from hf_packing.checks import check_real, set_fields
from hf_packing.planning.best_fit import best_fit_patterns
from hf_packing.planning.lengths import IntArray
from hf_packing.planning.metrics import pack_lower_bound
from hf_packing.planning.patterns import Patterns
from hf_packing.strategies.base import OneCapacity, Solution, load_scipy_optimize, register_strategy
from hf_packing.strategies.column_generation import (
    LEAST_GAIN,
    ROUNDING,
    Duals,
    Problem,
    columns_of,
    dive,
    fill_columns,
    generate_columns,
)

_SHARE_FOR_FRACTIONS = 0.6
"""Share of the time limit that column generation may use. The remaining time is for rounding to whole packs."""


@register_strategy
@dataclass(frozen=True)
class Optimal(OneCapacity):
    """A strategy that searches for the fewest packs by column generation, and proves a lower bound on packs.

    Optimal never needs more packs than BestFit. It is worth the time if BestFit needs many more packs than the lower
    bound. This is common if lengths lie in a narrow range, as in most fine-tuning data. Packs are the fewest if they
    are as many as the lower bound. For up to eight documents, they are at most one more than the fewest, and that in
    about 1 of 500 cases.

    The plan's `note` reports how the plan was found, and `metrics().lower_bound` is the lower bound. The search uses at
    most about 1,000 distinct lengths, or fewer if `max_documents` is set and packs are long. If the documents have more
    distinct lengths, the lengths are rounded up for the search. If max_length is above 131,072, the search measures
    lengths in units of several tokens. The same input gives the same plan unless the time runs out. If several
    processes need the same plan, compute the plan in one process. Optimal needs scipy:
    `pip install "hf-packing[optimal]"`.

    Args:
        max_length: capacity of each pack in tokens, at least 1.
        overflow: treatment of documents longer than max_length. "split" cuts such a document into chunks of max_length
            tokens and a remainder, "truncate" keeps the first max_length tokens, "drop" leaves the document out, and
            "error" raises PackingError.
        max_documents: maximum number of segments in a pack; None for no limit.
        time_limit: maximum time for planning in seconds, at least 0. If the time is too short for a first solution, or
            if planning with `max_documents` needs too much time or memory, the result is the plan of BestFit, and a
            warning is given.
        seed: seed for shuffling the packs, the segments in each pack, and documents of equal length; None for no
            shuffling.

    Raises:
        PackingError: an argument does not match its description above.
        MissingDependencyError: scipy is not installed. The error is raised when planning.

    Example:
        >>> import hf_packing as hfp
        >>> lengths = [14, 14, 14, 9, 8, 8, 8, 4, 3, 3, 3, 2]
        >>> hfp.plan_packing(lengths, hfp.BestFit(30)).num_packs, hfp.plan_packing(lengths, hfp.Optimal(30)).num_packs
        (4, 3)
    """

    _: KW_ONLY
    time_limit: float = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        seconds = check_real("time_limit", self.time_limit, 0, math.inf, "a number of seconds, at least 0")
        set_fields(self, time_limit=seconds)

    def solve(self, counts: IntArray) -> Solution:
        began = time.monotonic()
        load_scipy_optimize("Optimal")
        capacity, max_documents = self.max_length, self.max_documents
        best_fit = best_fit_patterns(counts, capacity, max_documents)
        bound = pack_lower_bound(counts, capacity)
        if max_documents is not None:
            bound = max(bound, -(-int(counts.sum()) // max_documents))
        if best_fit.num_packs <= bound:
            return Solution(best_fit, bound, "best fit, since no plan can have fewer packs")
        slots, problem = slots_wanted(counts, capacity, max_documents)
        how = f"column generation on {len(slots)} lengths"
        if problem.grouped:
            how += f", to which {np.count_nonzero(counts)} were rounded up"
        least_of_slots = np.ceil(problem.demand @ problem.slots / problem.capacity - ROUNDING)
        if least_of_slots >= best_fit.num_packs:
            return Solution(best_fit, bound, f"best fit, since fewer packs are impossible with {how}")
        layers = (problem.max_documents or 0) * problem.capacity  # of a knapsack problem with a limit on documents
        if layers > _TOO_LARGE or layers * len(slots) > _TOO_MUCH:
            note = f"best fit, since max_documents={max_documents} needs too much time or memory for {how}"
            return self._warn(Solution(best_fit, bound, note))
        grouped_counts = np.zeros(int(slots[-1]) + 1, dtype=np.int64)
        grouped_counts[slots] = problem.demand.astype(np.int64)
        start = columns_of(best_fit_patterns(grouped_counts, capacity, max_documents), slots)
        relaxation, duals = generate_columns(problem, start, began + _SHARE_FOR_FRACTIONS * self.time_limit)
        bound = max(bound, _proven_bound(counts, slots, problem, duals))
        if relaxation is None:
            note = f"best fit, since the time limit of {self.time_limit:g} s was too short for {how}"
            return self._warn(Solution(best_fit, bound, note))

        def make_packs(packs: IntArray) -> Patterns:
            return fill_columns(packs, relaxation.columns, slots, counts, capacity, max_documents)

        found, to_its_end = dive(relaxation, problem.demand, make_packs, bound, began + self.time_limit)
        how += f", {relaxation.rounds} round{'s' if relaxation.rounds > 1 else ''}"
        if not (relaxation.finished and to_its_end):
            how += f", stopped by the time limit of {self.time_limit:g} s"
        if found.num_packs >= best_fit.num_packs:
            return Solution(best_fit, bound, f"best fit, since no fewer packs were found with {how}")
        return Solution(found, bound, how)

    def _warn(self, found: Solution) -> Solution:
        """Warn that the search hit a limit, and return the packs of the simpler strategy that were found instead."""
        warnings.warn(f"{self!r} used the packs of a simpler strategy: {found.note}", stacklevel=3)
        return found


def _proven_bound(counts: IntArray, slots: IntArray, problem: Problem, duals: Duals) -> int:
    """Return a lower bound on the number of packs that the documents need, proven by the slot values in `duals`.

    If document lengths are rounded up to slot lengths, each document has the value of the longest slot that is not
    longer than the document. The possible rounding errors of the knapsack problem are subtracted; they are proportional
    to its capacity.
    """
    bound = duals.bound
    if problem.grouped:
        lengths = np.flatnonzero(counts)
        value = np.append(0.0, duals.value)[np.searchsorted(slots, lengths, side="right")]
        bound = float(counts[lengths] @ value)
    return int(np.ceil(bound * (1 - LEAST_GAIN * (problem.capacity + 1)) - ROUNDING))


_MAX_SLOTS = 1000
_MAX_UNITS = 1 << 17
"""Largest capacity that is measured in tokens. A larger capacity is measured in units of several tokens."""
_MAX_WORK = 1 << 28
"""Largest product (number of slots) x capacity x max_documents. Larger problems get fewer slots to save time."""
_FEWEST_SLOTS = 50
_TOO_MUCH = 1 << 30
"""Product (number of slots) x capacity x max_documents above which solving one knapsack problem takes too long."""
_TOO_LARGE = 1 << 25
"""Product capacity x max_documents above which the 16-byte entries of one knapsack problem need too much memory."""


def slots_wanted(counts: IntArray, capacity: int, max_documents: int | None) -> tuple[IntArray, Problem]:
    """Choose slot lengths for counted segments, and return the slot lengths and the packing problem with these slots.

    Args:
        counts: int64 [longest + 1]: counts[n] is the number of segments of n tokens; counts[0] is 0, and there is at
            least one segment.
        capacity: capacity of each pack, in tokens.
        max_documents: maximum number of segments in a pack; None for no limit.

    Returns:
        int64 [slots]: slot lengths in tokens, ascending; and the Problem, which measures the slot lengths and the
        capacity in units of one or more tokens.
    """
    lengths = np.flatnonzero(counts)
    if max_documents is not None:
        shortest = np.repeat(lengths, np.minimum(counts[lengths], max_documents + 1))[: max_documents + 1]
        if len(shortest) <= max_documents or shortest.sum() > capacity:
            max_documents = None  # more documents would not fit in a pack anyway
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


def _spread_slots(counts: IntArray, most: int) -> IntArray:
    """Return about `most` slot lengths, chosen so that rounding document lengths up to slot lengths adds few tokens.

    If neighboring slot lengths differ by w tokens, rounding up adds about w / 2 tokens per document. The total number
    of added tokens is smallest if w is proportional to 1 / sqrt(density), where density is the smoothed number of
    documents of each length. The integral of sqrt(density) is then the same between all neighboring slot lengths.

    Args:
        counts: int64 [longest + 1]: counts[n] is the number of documents of n tokens.
        most: number of slot lengths to choose.

    Returns:
        int64 [slots]: slot lengths in tokens, ascending. The last slot length is the longest document length.
    """
    lengths = np.flatnonzero(counts)
    window = max(3, 4 * int(lengths[-1] - lengths[0]) // most)
    density = np.convolve(counts, np.full(window, 1 / window), mode="same")[: len(counts)]
    density[: lengths[0]] = 0
    share = np.cumsum(np.sqrt(density))
    borders = np.searchsorted(share, share[-1] * np.arange(1, most + 1) / most)
    below = np.searchsorted(lengths, borders, side="right") - 1
    return np.unique(np.append(lengths[np.maximum(below, 0)], lengths[-1]))
