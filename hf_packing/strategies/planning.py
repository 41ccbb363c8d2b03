"""`plan_packing` and `plan_counts`: a strategy applied to lengths, or to a histogram of them."""

from typing import Any

from hf_packing.errors import PackingError
from hf_packing.planning.counts import check_counts, of_histogram
from hf_packing.planning.lengths import IntArray, check_lengths
from hf_packing.planning.plan import PackingPlan
from hf_packing.planning.table import PatternTable
from hf_packing.strategies.base import CountingStrategy, Strategy, check_strategy


def plan_packing(lengths: Any, strategy: Strategy) -> PackingPlan:
    """Plan packs from lengths alone.

    Args:
        lengths: 1-d integers [documents], tokens; a list or an array. Empty documents are skipped and counted.
        strategy: such as BestFit(2048).

    Returns:
        PackingPlan.

    Raises:
        PackingError: lengths that are negative, not integers or not 1-d; something that is not a strategy.

    Example:
        >>> import hf_packing as hfp
        >>> hfp.plan_packing([14, 7, 5, 2, 3], hfp.BestFit(8)).metrics().num_cut_documents
        1
    """
    return check_strategy(strategy).plan_lengths(read_lengths(lengths))


def read_lengths(lengths: Any) -> IntArray:
    """Checked lengths, also of a lazy column of `datasets`, which NumPy would read row by row."""
    if type(lengths).__module__.partition(".")[0] == "datasets":
        lengths = lengths[:]
    return check_lengths(lengths)


def plan_counts(counts: Any, strategy: Strategy) -> PatternTable:
    """Plan packs from a histogram of lengths alone, for more documents than fit in memory, or for many workers.

    Args:
        counts: 1-d integers [longest + 1]: counts[n] is the number of documents of n tokens, as `np.bincount` gives.
        strategy: one that looks at counts alone: BestFit, ShortestPackFirst, NonNegativeLeastSquares, Optimal, Bucket.

    Returns:
        PatternTable; its `deal` places the documents, shard by shard, where `plan_packing` over all of them would.

    Raises:
        PackingError: counts that are negative, not integers or not 1-d; a strategy that needs documents in order.

    Example:
        >>> import hf_packing as hfp
        >>> hfp.plan_counts([0, 0, 1, 1, 0, 1, 0, 1], hfp.BestFit(8)).num_packs
        3
    """
    if not isinstance(strategy, CountingStrategy):
        check_strategy(strategy)
        raise PackingError(
            "strategy: expected one that looks at counts alone (BestFit, ShortestPackFirst, NonNegativeLeastSquares, "
            f"Optimal, Bucket), got {strategy!r}, which needs the documents in their order"
        )
    return strategy.plan_counts(of_histogram(check_counts(counts)))
