"""Plan a dataset whose documents share prefixes, with any strategy that can pack trees."""

from typing import Any, NamedTuple, Protocol, runtime_checkable

from hf_packing.columns import INPUT_IDS
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray, check_lengths, cut_to_pieces
from hf_packing.planning.plan import PackingPlan
from hf_packing.planning.tree_plan import TreeLimits, check_fewest_shared, plan_forest
from hf_packing.rows.token_columns import TokenColumns
from hf_packing.trees.find_trees import find_trees


@runtime_checkable
class PlansTrees(Protocol):
    """A strategy that can pack trees of documents as if they were documents."""

    def tree_limits(self) -> TreeLimits:
        """Return the size of the largest tree, and the treatment of longer documents.

        Raises:
            PackingError: the strategy, or one of its arguments, cannot be used with trees.
        """
        ...

    def plan_lengths(self, sizes: IntArray) -> PackingPlan:
        """Return the plan for trees of these sizes. No tree is cut."""
        ...


class TreesPlan(NamedTuple):
    """The plan of documents that share prefixes."""

    plan: PackingPlan
    splits: dict[str, int]
    """By the name of a column: how many shared prefixes ended early because values in this column differ."""


def check_share_prefixes(share_prefixes: Any, strategy: Any) -> int | None:
    """Return the fewest tokens that documents share, or None if no prefixes are shared.

    Args:
        share_prefixes: the argument of `pack`.
        strategy: the strategy, which must be able to pack trees.

    Raises:
        PackingError: share_prefixes is neither a bool nor an integer of at least 1, or the strategy cannot pack trees.
    """
    fewest = check_fewest_shared(share_prefixes)
    if fewest is None:
        return None
    if not isinstance(strategy, PlansTrees):
        raise PackingError(
            "strategy: expected a strategy with a method tree_limits, such as BestFit(8192), with share_prefixes, got "
            f"{strategy!r}"
        )
    strategy.tree_limits()
    return fewest


def plan_trees(columns: TokenColumns, strategy: PlansTrees, fewest: int) -> TreesPlan:
    """Find the prefixes that documents share, and plan the documents.

    Args:
        columns: the token columns of the documents.
        strategy: the strategy.
        fewest: the fewest tokens that documents share.
    """
    capacity, overflow = strategy.tree_limits()
    lengths = check_lengths(columns[INPUT_IDS].length)
    pieces = cut_to_pieces(lengths, capacity, overflow)
    found = find_trees(columns, pieces, fewest)
    return TreesPlan(plan_forest(found.forest, pieces, lengths, capacity, strategy.plan_lengths), found.splits)
