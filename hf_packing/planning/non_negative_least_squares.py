"""Non-negative least squares histogram packing (NNLSHP, arXiv 2107.02027).

Every way to fill a pack exactly with few documents is a column; non-negative least squares finds how many packs of each
come closest to the counts. Padding is allowed where it is cheap: the shortest lengths weigh less.

The problem is convex, so it is solved on the columns that matter: those in use, and those that would improve on them.
When none would, the solution is that of all columns.
"""

import numpy as np

from hf_packing.errors import PackingError
from hf_packing.planning.columns import fill_columns
from hf_packing.planning.full_packs import full_packs, number_of_full_packs
from hf_packing.planning.lengths import IntArray
from hf_packing.planning.optional import load_scipy_optimize
from hf_packing.planning.patterns import Patterns

SHORT, WEIGHT_OF_SHORT = 8, 0.09
"""Lengths up to 8 are cheap to pad, as in the paper's code."""
MAX_FULL_PACKS = 1 << 23
FEWEST_TRIED, SHARE_TRIED = 256, 0.5
"""Columns that are added at once: so many, or so many for each length."""
TOLERANCE = 1e-9


def non_negative_least_squares_patterns(counts: IntArray, capacity: int, max_documents: int) -> Patterns:
    """The packs of non-negative least squares.

    Rounding leaves some documents without a slot, and some slots without a document. The former are packed best fit
    into the room of the latter and into new packs, where the paper gives each a pack of its own.

    Args:
        counts: int64 [longest + 1]: how many segments there are of each length; none is empty.
        capacity: tokens a pack holds.
        max_documents: most segments in one pack.

    Returns:
        Patterns with exactly the counted segments.

    Raises:
        PackingError: more than 2**23 ways to fill a pack.
        MissingDependencyError: scipy is not installed.
    """
    load_scipy_optimize("NonNegativeLeastSquares")
    if capacity > MAX_FULL_PACKS or number_of_full_packs(capacity, max_documents, MAX_FULL_PACKS) > MAX_FULL_PACKS:
        raise PackingError(
            f"max_documents: expected at most 2**23 ways to fill a pack, {max_documents} documents of together "
            f"max_length={capacity} tokens have more; Optimal makes only the ways it needs"
        )
    demand = np.zeros(capacity + 1)
    demand[: len(counts)] = counts
    used, packs = least_squares(demand, full_packs(capacity, max_documents))
    slots = np.arange(1, capacity + 1)
    columns = number_of_each_length(used, capacity)
    return fill_columns(np.rint(packs).astype(np.int64), columns[1:], slots, counts, capacity, max_documents)


def least_squares(demand: IntArray, ways: IntArray) -> tuple[IntArray, IntArray]:
    """The ways to fill a pack that are used, and how many packs of each, not rounded.

    Args:
        demand: float64 [capacity + 1]: documents of each length.
        ways: int32 [ways, documents]: lengths, filled up with zeros.

    Returns:
        int32 [used, documents] and float64 [used].
    """
    nnls = load_scipy_optimize("NonNegativeLeastSquares").nnls
    weight = np.ones(len(demand))
    weight[: SHORT + 1] = WEIGHT_OF_SHORT
    weight[0] = 0
    at_once = max(FEWEST_TRIED, int(SHARE_TRIED * len(demand)))
    tolerance = TOLERANCE * max(demand.max(), 1)
    chosen = np.zeros(0, dtype=np.int64)
    packs = np.zeros(0)
    short_of = demand
    while True:
        gain = (weight**2 * short_of)[ways].sum(axis=1)
        gain[chosen] = 0
        better = np.flatnonzero(gain > tolerance)
        if not len(better):
            return ways[chosen], packs
        new = better[np.argsort(-gain[better], kind="stable")[:at_once]]
        chosen = np.concatenate([chosen[packs > 0], new])
        columns = number_of_each_length(ways[chosen], len(demand) - 1)
        packs, _ = nnls(columns * weight[:, None], demand * weight, maxiter=100 * len(chosen))
        short_of = demand - columns @ packs


def number_of_each_length(ways: IntArray, capacity: int) -> IntArray:
    """int64 [capacity + 1, ways]: how often each length is in each way."""
    number = np.zeros((capacity + 1, len(ways)), dtype=np.int64)
    np.add.at(number, (ways.T, np.arange(len(ways))), 1)
    number[0] = 0
    return number
