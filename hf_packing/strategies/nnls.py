"""The strategy NonNegativeLeastSquares: non-negative least squares histogram packing (NNLSHP, arXiv 2107.02027).

A column is one way to fill a pack exactly with at most max_documents documents, of lengths that occur. Non-negative
least squares finds how many packs to make of each column, so that the number of documents of each length in these packs
is as close as possible to the given number. The shortest lengths have less weight, since an empty place for a short
document adds little padding.

The problem is convex, so the solver does not need all columns at once. Each round adds columns that would improve the
solution, and removes columns that the solution does not use. When no column would improve the solution, the solution is
optimal over all columns.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Any

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
    length and 2 or 3 documents in a pack. Documents that fill no pack exactly are packed best-fit, as all are if few
    lengths occur. `Optimal` usually needs fewer packs and is faster. Planning takes seconds for 500 distinct lengths
    and minutes for 2,000. The strategy needs scipy: `pip install "hf-packing[optimal]"`.

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
            than 2**23 ways to fill a pack exactly, or to begin one.
        MissingDependencyError: scipy is not installed. The error is raised when planning.

    Example:
        >>> import hf_packing as hfp
        >>> hfp.plan_packing([5, 3, 6, 2, 4, 4], hfp.NonNegativeLeastSquares(8))
        PackingPlan(6 documents, 6 segments, 3 packs, efficiency 1.0000)
    """

    _: KW_ONLY
    max_documents: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole_number("max_documents", self.max_documents)

    def solve(self, counts: IntArray) -> Solution:
        nnls = load_scipy_optimize("NonNegativeLeastSquares").nnls  # an error before the search, which may take long
        lengths = np.flatnonzero(counts)
        ways = _full_packs(lengths, self.max_length, self.max_documents)
        weight = np.append(0, np.where(lengths > _SHORT, 1, _WEIGHT_OF_SHORT))
        columns, packs = _least_squares(np.append(0, counts[lengths]), weight, ways, nnls)
        number = np.rint(packs).astype(np.int64)
        # the rest goes best-fit into free room or new packs; in the paper, each such document gets a pack of its own
        return Solution(fill_columns(number, columns[1:], lengths, counts, self.max_length, self.max_documents))

    def check_packs_trees(self) -> None:
        """All arguments suit trees: max_documents limits the search, and then counts trees."""


def _least_squares(demand: IntArray, weight: IntArray, ways: IntArray, nnls: Any) -> tuple[IntArray, IntArray]:
    """Solve the least-squares problem, and return the columns that the solution uses.

    Args:
        demand: int64 [lengths + 1]: 0, and the number of documents of each length.
        weight: float64 [lengths + 1]: 0, and the weight of each length.
        ways: int32 [ways, documents]: the ways to fill a pack, as `_full_packs` returns them.
        nnls: the solver of scipy.

    Returns:
        int64 [lengths + 1, used]: 0, and the number of documents of each length, in each way that the solution uses;
        float64 [used]: number of packs to make of each, not yet rounded.
    """
    at_once = max(_FEWEST_TRIED, int(_SHARE_TRIED * len(demand)))
    tolerance = _GAIN_TOLERANCE * max(demand.max(), 1)
    chosen = np.zeros(0, dtype=np.int64)
    columns, packs = np.zeros((len(demand), 0), dtype=np.int64), np.zeros(0)
    while True:
        gain = (weight**2 * (demand - columns @ packs))[ways].sum(axis=1)
        gain[chosen] = 0
        better = np.flatnonzero(gain > tolerance)
        if not len(better):
            return columns, packs
        new = better[np.argsort(-gain[better], kind="stable")[:at_once]]
        chosen = np.concatenate([chosen[packs > 0], new])
        columns = np.zeros((len(demand), len(chosen)), dtype=np.int64)
        np.add.at(columns, (ways[chosen].T, np.arange(len(chosen))), 1)
        columns[0] = 0
        packs, _ = nnls(columns * weight[:, None], demand * weight, maxiter=100 * len(chosen))


def _full_packs(lengths: IntArray, capacity: int, max_documents: int) -> IntArray:
    """Return all ways to fill a pack exactly: every multiset of at most max_documents of the lengths with that sum.

    Args:
        lengths: int64 [lengths]: the lengths that occur, at least 1, ascending.
        capacity: capacity of a pack in tokens, at least 1.
        max_documents: maximum number of documents in a pack, at least 1.

    Returns:
        int32 [ways, documents]: the numbers of the lengths in each way, from 1, descending, padded with zeros.

    Raises:
        PackingError: the number of ways, or of ways to begin, is above 2**23.

    Example:
        >>> _full_packs(np.array([10, 20, 40]), 40, 3).tolist()
        [[2, 1, 1], [2, 2, 0], [3, 0, 0]]
    """
    slots = np.append(0, lengths)
    chosen = np.zeros((1, 0), dtype=np.int32)
    rest, last = np.array([capacity]), np.array([len(lengths)])
    for places in range(min(max_documents, capacity // int(lengths.min(initial=capacity))), 0, -1):
        least = np.searchsorted(slots, -(-rest // places))  # a smaller largest length could not fill the pack
        most = np.minimum(np.searchsorted(slots, rest, side="right") - 1, last)
        choices = np.maximum(most - least + 1, 0)
        if choices.sum() > _MAX_FULL_PACKS:
            raise PackingError(
                "max_length and max_documents: expected at most 2**23 ways to fill a pack exactly, or to begin one, "
                f"got max_length={capacity} and max_documents={max_documents} for {len(lengths)} lengths; use lower "
                "values, or the strategy Optimal"
            )
        of = np.repeat(np.arange(len(rest)), choices)
        last = indices_in_ranges(least, choices)
        chosen = np.column_stack([chosen[of], last.astype(np.int32)])
        rest = rest[of] - slots[last]
    return chosen
