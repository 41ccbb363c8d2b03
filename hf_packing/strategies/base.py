"""Base classes of strategies, the registry of all strategies, and the functions `plan_packing` and `plan_counts`."""

import importlib
import pkgutil
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import hf_packing
from hf_packing.data.map_batch import pack_batch
from hf_packing.errors import MissingDependencyError, PackingError
from hf_packing.planning.lengths import (
    IntArray,
    LengthCounts,
    Overflow,
    check_counts,
    check_fitting,
    check_lengths,
    check_overflow,
    check_whole_number,
    count_lengths,
    counts_of_histogram,
)
from hf_packing.planning.pattern_table import PatternTable
from hf_packing.planning.patterns import Patterns, cut_by_overflow
from hf_packing.planning.permutation import check_seed
from hf_packing.planning.plan import PackingPlan


def _package_version() -> str:
    return hf_packing.__version__


@dataclass(frozen=True)
class Strategy(ABC):
    """Base class of strategies. A strategy decides which documents share a pack, and packs a batch of rows when called.

    In `datasets.map(strategy, batched=True)`, the batch is a dict of lists, a dict of arrays, a pyarrow Table or a data
    frame. The call returns one row for each pack, with `input_ids`, `labels`, `position_ids` and `seq_lengths` as
    int32, and with `bucket` if the strategy has buckets. The rows are returned as a Table if the call comes from
    `Dataset.map` or if the batch is a Table or a data frame, and otherwise as a dict like the batch. Each batch is
    planned separately, so large batches pack better; `hf_packing.pack` plans over the whole dataset.
    """

    package_version: str = field(default_factory=_package_version, init=False, repr=False)
    """Version of hf_packing, part of the hash that `datasets` caches by. The hash does not cover a strategy's code."""

    has_buckets: ClassVar[bool] = False
    """Whether packs have several capacities. If so, a column `bucket` has the capacity of each row's pack."""

    @abstractmethod
    def plan_lengths(self, lengths: IntArray) -> PackingPlan:
        """Return a plan for lengths that were already checked."""

    def __call__(self, batch: Any, *others: Any, **options: Any) -> Any:
        if others or options:
            given = ", ".join([*(type(other).__name__ for other in others), *options])
            raise PackingError(
                f"batch: expected no arguments besides the batch, got {given}; call map without with_indices, "
                "with_rank, input_columns and fn_kwargs"
            )
        return pack_batch(batch, self.plan_lengths, bucket=self.has_buckets)

    def set_fields(self, **values: Any) -> None:
        """Set fields of the frozen instance to checked values; called by `__post_init__`."""
        for name, value in values.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class CountingStrategy(Strategy):
    """Base class of strategies that need only the number of documents of each length."""

    @abstractmethod
    def plan_counts(self, counts: LengthCounts) -> PatternTable:
        """Return a table of packs for the counted documents."""

    def plan_lengths(self, lengths: IntArray) -> PackingPlan:
        return self.plan_counts(count_lengths(lengths)).plan(lengths)


@dataclass(frozen=True)
class Solution:
    """Packs for counted segments, and facts about the search for these packs."""

    patterns: Patterns
    lower_bound: int = 0
    """Lower bound on the number of packs, proven by the search under the strategy's limits; 0 if no bound is proven."""
    note: str = ""
    """Remark on how the search went; empty if there is nothing to report."""
    gave_up: bool = False
    """Whether the search hit a limit and returned the packs of a simpler strategy."""


@dataclass(frozen=True)
class OneCapacity(CountingStrategy):
    """Base class of counting strategies whose packs all have the capacity max_length.

    Only documents longer than max_length are cut.
    """

    max_length: int
    overflow: Overflow = field(default="split", kw_only=True)
    max_documents: int | None = field(default=None, kw_only=True)
    seed: int | None = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_overflow(self.overflow)
        self.set_fields(
            max_length=check_whole_number("max_length", self.max_length),
            max_documents=check_max_documents(self.max_documents),
            seed=check_optional_seed(self.seed),
        )

    @abstractmethod
    def solve(self, counts: IntArray) -> Solution:
        """Return packs for pieces of at most max_length tokens; counts[n] is the number of pieces of n tokens."""

    def plan_counts(self, counts: LengthCounts) -> PatternTable:
        cuts = cut_by_overflow(counts, self.max_length, self.overflow)
        solution = self.solve(cuts.counts())
        segments = int(cuts.documents @ cuts.pieces_each)
        by_limit = -(-segments // self.max_documents) if self.max_documents else 0
        return PatternTable(
            patterns=solution.patterns,
            cuts=cuts,
            seed=self.seed,
            proven_lower_bound=max(solution.lower_bound, by_limit),
            note=solution.note,
        )

    def plan_lengths(self, lengths: IntArray) -> PackingPlan:
        check_fitting(lengths, self.max_length, self.overflow)
        return super().plan_lengths(lengths)


def check_optional_seed(seed: Any) -> int | None:
    """Return None, or a seed as an int; raise PackingError if the seed is invalid."""
    return None if seed is None else check_seed(seed)


def check_max_documents(max_documents: Any) -> int | None:
    """Return None, or a limit on documents per pack as an int; raise PackingError if the limit is invalid."""
    return None if max_documents is None else check_whole_number("max_documents", max_documents)


def check_strategy(strategy: Any) -> Strategy:
    """Return `strategy` unchanged, or raise PackingError if `strategy` is not an instance of Strategy."""
    if not isinstance(strategy, Strategy):
        hint = (
            f"; pass an instance of the class, such as {strategy.__name__}(2048)" if isinstance(strategy, type) else ""
        )
        raise PackingError(f"strategy: expected a strategy such as BestFit(2048), got {strategy!r}{hint}")
    return strategy


def load_scipy_optimize(strategy: str) -> Any:
    """Return `scipy.optimize`, or raise MissingDependencyError with the command that installs scipy."""
    try:
        import scipy.optimize
        import scipy.sparse
    except ImportError as error:
        raise MissingDependencyError(f'{strategy} needs scipy; run pip install "hf-packing[optimal]"') from error
    return scipy.optimize


_REGISTERED: dict[str, type[Strategy]] = {}
_S = TypeVar("_S", bound=Strategy)


def register_strategy(strategy: type[_S]) -> type[_S]:
    """Add a strategy class to the registry under its name in snake case, such as "best_fit"; used as a decorator."""
    _REGISTERED[re.sub(r"(?<!^)(?=[A-Z])", "_", strategy.__name__).lower()] = strategy
    return strategy


def registered_strategies() -> dict[str, type[Strategy]]:
    """Return the classes of all strategies in hf_packing by name, sorted by name.

    Example:
        >>> list(registered_strategies())[:3]
        ['best_fit', 'bucket', 'bucket_by_length']
    """
    for module in pkgutil.walk_packages([str(Path(__file__).parent)], "hf_packing.strategies."):
        importlib.import_module(module.name)
    return dict(sorted(_REGISTERED.items()))


def plan_packing(lengths: Any, strategy: Strategy) -> PackingPlan:
    """Plan packs from document lengths alone.

    Args:
        lengths: 1-d integers [documents]: document lengths in tokens, as a list or an array. Empty documents are put in
            no pack, but counted in the plan's metrics.
        strategy: strategy to plan with, such as BestFit(2048).

    Returns:
        PackingPlan.

    Raises:
        PackingError: `lengths` are negative, not integers or not 1-d, `strategy` is not a strategy, or the strategy has
            overflow="error" and a document is too long.

    Example:
        >>> import hf_packing as hfp
        >>> hfp.plan_packing([14, 7, 5, 2, 3], hfp.BestFit(8)).metrics().num_cut_documents
        1
    """
    return check_strategy(strategy).plan_lengths(read_lengths(lengths))


def read_lengths(lengths: Any) -> IntArray:
    """Return checked lengths as an integer array.

    A lazy column of `datasets` is read in one piece, since NumPy would read the column row by row.
    """
    if type(lengths).__module__.partition(".")[0] == "datasets":
        lengths = lengths[:]
    return check_lengths(lengths)


def plan_counts(counts: Any, strategy: Strategy) -> PatternTable:
    """Plan packs from a histogram of document lengths alone.

    Use this function for more documents than fit in memory, or for many workers.

    Args:
        counts: 1-d integers [longest + 1]: counts[n] is the number of documents of n tokens, as `np.bincount` returns.
        strategy: strategy that needs only counts, such as BestFit, Optimal or Bucket.

    Returns:
        PatternTable. The table's method `deal` assigns documents shard by shard, with the same result as `plan_packing`
        for all documents.

    Raises:
        PackingError: `counts` are negative, not integers or not 1-d, `strategy` needs the documents in order, or the
            strategy has overflow="error" and a document is too long.

    Example:
        >>> import hf_packing as hfp
        >>> hfp.plan_counts([0, 0, 1, 1, 0, 1, 0, 1], hfp.BestFit(8)).num_packs
        3
    """
    check_strategy(strategy)
    if not isinstance(strategy, CountingStrategy):
        counting = [each.__name__ for each in registered_strategies().values() if issubclass(each, CountingStrategy)]
        raise PackingError(
            f"strategy: expected a strategy that needs only counts ({', '.join(counting)}), got {strategy!r}, which "
            "needs the documents in order"
        )
    return strategy.plan_counts(counts_of_histogram(check_counts(counts)))
