"""The strategy NonNegativeLeastSquares: non-negative least squares histogram packing (NNLSHP, arXiv 2107.02027).

A column is one way to fill a pack exactly with at most max_documents documents. Non-negative least squares finds how
many packs to make of each column, so that the number of documents of each length in these packs is as close as possible
to the given number. The shortest lengths have less weight, since an empty place for a short document adds little
padding.

The problem is convex, so the solver does not need all columns at once. Each round adds columns that would improve the
solution, and removes columns that the solution does not use. When no column would improve the solution, the solution is
optimal over all columns.
"""

from dataclasses import dataclass, field

import numpy as np

from hf_packing.checks import check_whole_number
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray, indices_in_ranges
from hf_packing.strategies.base import OneCapacity, Solution, load_scipy_optimize, register_strategy
from hf_packing.strategies.column_generation import fill_columns

_SHORT, _WEIGHT_OF_SHORT = 8, 0.09
"""Lengths of at most 8 tokens have a weight of 0.09 in the least squares, as in the paper's code."""
_MAX_FULL_PACKS = 1 << 23
_FEWEST_TRIED, _SHARE_TRIED = 256, 0.5
"""Maximum number of columns added in one round: 256, or half the number of lengths if that is more."""
_GAIN_TOLERANCE = 1e-9


@register_strategy
@dataclass(frozen=True)
class NonNegativeLeastSquares(OneCapacity):
    """A strategy that chooses among all ways to fill a pack exactly with few documents, by non-negative least squares.

    The paper (arXiv 2107.02027) calls this strategy NNLSHP. The strategy suits large corpora with documents of every
    length and 2 or 3 documents in a pack. With few distinct lengths, few packs can be filled exactly, and BestFit needs
    fewer packs. `Optimal` usually needs fewer packs and is faster. Planning takes seconds at max_length=512 and minutes
    at max_length=2048. The strategy needs scipy: `pip install "hf-packing[optimal]"`.

    Many solutions are equally good, and rounding errors decide which of them scipy finds. They are not the same on all
    kinds of processors, so plans may differ by a few packs between machines. Plan once, and save the plan.

    Args:
        max_length: capacity of each pack in tokens, at least 1.
        overflow: treatment of documents longer than max_length. "split" cuts such a document into chunks of max_length
            tokens and a remainder, "truncate" keeps the first max_length tokens, "drop" leaves the document out, and
            "error" raises PackingError.
        max_documents: maximum number of segments in a pack, at least 1. The paper calls this number depth. With
            share_prefixes, it is the maximum number of trees in a pack.
        seed: seed for shuffling the packs, the segments in each pack, and documents of equal length; None for no
            shuffling.

    Raises:
        PackingError: an argument does not match its description above. Planning raises this error if there are more
            than 2**23 ways to fill a pack exactly, or if max_length is above 2**23.
        MissingDependencyError: scipy is not installed. The error is raised when planning.

    Example:
        >>> import hf_packing as hfp
        >>> hfp.plan_packing([5, 3, 6, 2, 4, 4], hfp.NonNegativeLeastSquares(8))
        PackingPlan(6 documents, 6 segments, 3 packs, efficiency 1.0000)
    """

    max_documents: int = field(default=3, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole_number("max_documents", self.max_documents)

    def solve(self, counts: IntArray) -> Solution:
        capacity, max_documents = self.max_length, self.max_documents
        load_scipy_optimize("NonNegativeLeastSquares")  # an error before the search, which may take long
        ways = _full_packs(capacity, max_documents)
        demand = np.zeros(capacity + 1)
        demand[: len(counts)] = counts
        used, packs = _least_squares(demand, ways)
        slots = np.arange(1, capacity + 1)
        columns = _number_of_each_length(used, capacity)
        number = np.rint(packs).astype(np.int64)
        # the rest goes best-fit into free room or new packs; in the paper, each such document gets a pack of its own
        return Solution(fill_columns(number, columns[1:], slots, counts, capacity, max_documents))

    def check_packs_trees(self) -> None:
        """All arguments suit trees: max_documents limits the search, and then counts trees."""


def _least_squares(demand: IntArray, ways: IntArray) -> tuple[IntArray, IntArray]:
    """Solve the least-squares problem, and return the ways to fill a pack that the solution uses.

    Args:
        demand: float64 [capacity + 1]: demand[n] is the number of documents of n tokens.
        ways: int32 [ways, documents]: the document lengths in each way to fill a pack, padded with zeros.

    Returns:
        int32 [used, documents]: the rows of `ways` that the solution uses; float64 [used]: number of packs to make of
        each row, not yet rounded.
    """
    nnls = load_scipy_optimize("NonNegativeLeastSquares").nnls
    weight = np.ones(len(demand))
    weight[: _SHORT + 1] = _WEIGHT_OF_SHORT
    weight[0] = 0
    at_once = max(_FEWEST_TRIED, int(_SHARE_TRIED * len(demand)))
    tolerance = _GAIN_TOLERANCE * max(demand.max(), 1)
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
        columns = _number_of_each_length(ways[chosen], len(demand) - 1)
        packs, _ = nnls(columns * weight[:, None], demand * weight, maxiter=100 * len(chosen))
        short_of = demand - columns @ packs


def _number_of_each_length(ways: IntArray, capacity: int) -> IntArray:
    """Return the number of documents of each length in each way to fill a pack, int64 [capacity + 1, ways]."""
    number = np.zeros((capacity + 1, len(ways)), dtype=np.int64)
    np.add.at(number, (ways.T, np.arange(len(ways))), 1)
    number[0] = 0
    return number


def _full_packs(capacity: int, max_documents: int) -> IntArray:
    """Return all ways to fill a pack exactly: every multiset of at most max_documents lengths with sum `capacity`.

    Args:
        capacity: capacity of a pack in tokens, at least 1.
        max_documents: maximum number of lengths in a multiset, at least 1.

    Returns:
        int32 [multisets, min(max_documents, capacity)]: the lengths of each multiset, descending, padded with zeros.

    Raises:
        PackingError: the capacity or the number of multisets is above 2**23.

    Example:
        >>> _full_packs(4, 3).tolist()
        [[2, 1, 1], [2, 2, 0], [3, 1, 0], [4, 0, 0]]
    """
    chosen = np.zeros((1, 0), dtype=np.int32)
    rest = largest = np.array([capacity], dtype=np.int32)
    for places in range(min(max_documents, capacity), 0, -1):
        least = -(-rest // places)  # a smaller largest length could not fill the pack
        choices = np.minimum(rest, largest) - least + 1
        if capacity > _MAX_FULL_PACKS or choices.sum(dtype=np.int64) > _MAX_FULL_PACKS:
            raise PackingError(
                "max_length and max_documents: expected at most 2**23 tokens in a pack and at most 2**23 ways to fill "
                f"a pack exactly, got max_length={capacity} and max_documents={max_documents}; use lower values, or "
                "the strategy Optimal"
            )
        of = np.repeat(np.arange(len(rest)), choices)
        length = indices_in_ranges(least, choices).astype(np.int32)
        chosen = np.column_stack([chosen[of], length])
        rest, largest = rest[of] - length, length
    return chosen
