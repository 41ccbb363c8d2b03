"""What a strategy is, the registry of all strategies, and planning with one: `plan_packing` and `plan_counts`."""

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
    """How documents become packs. Call it on a batch of rows to pack them.

    As a transform it takes what `datasets.map(..., batched=True)` passes: a dict of lists, a dict of arrays, a pyarrow
    Table or a data frame. It returns one row for each pack, with `input_ids`, `labels`, `position_ids` and
    `seq_lengths` as int32, and `bucket` if the strategy has buckets: a Table for `Dataset.map`, otherwise the same form
    as the batch. Each batch is planned by itself, so large batches pack better; `pack` plans over the whole dataset.
    """

    package_version: str = field(default_factory=_package_version, init=False, repr=False)
    """Part of the hash that `datasets` caches by. It sees only the name of a class, so a new version must change it."""

    has_buckets: ClassVar[bool] = False
    """Whether packs have several capacities; if so, a column `bucket` has that of each row."""

    @abstractmethod
    def plan_lengths(self, lengths: IntArray) -> PackingPlan:
        """Plan for checked lengths."""

    def __call__(self, batch: Any, *others: Any, **options: Any) -> Any:
        if others or options:
            given = ", ".join([*(type(other).__name__ for other in others), *options])
            raise PackingError(
                f"batch: expected no other arguments, got {given}; call map without with_indices, with_rank, "
                "input_columns and fn_kwargs"
            )
        return pack_batch(batch, self.plan_lengths, bucket=self.has_buckets)

    def set_fields(self, **values: Any) -> None:
        """Set fields of the frozen instance to their checked values, in `__post_init__`."""
        for name, value in values.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class CountingStrategy(Strategy):
    """A strategy that needs only the number of documents of each length."""

    @abstractmethod
    def plan_counts(self, counts: LengthCounts) -> PatternTable:
        """Plan for documents of these lengths."""

    def plan_lengths(self, lengths: IntArray) -> PackingPlan:
        return self.plan_counts(count_lengths(lengths)).plan(lengths)


@dataclass(frozen=True)
class Solution:
    """Packs for counted segments, and how the search for them went."""

    patterns: Patterns
    lower_bound: int = 0
    """Lower bound on the number of packs that the search has proven under the strategy's limits; 0 for none."""
    note: str = ""
    """How the search went, if there is something to report."""
    gave_up: bool = False
    """Whether the search hit a limit and returned the packs of a simpler strategy."""


@dataclass(frozen=True)
class OneCapacity(CountingStrategy):
    """A counting strategy whose packs all hold max_length tokens, so that only longer documents are cut."""

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
        """Return packs for counts[n] pieces of n tokens, none longer than max_length."""

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
    """Return a seed as an int, or None, or raise PackingError."""
    return None if seed is None else check_seed(seed)


def check_max_documents(max_documents: Any) -> int | None:
    """Return a limit on documents per pack as an int, or None for no limit, or raise PackingError."""
    return None if max_documents is None else check_whole_number("max_documents", max_documents)


def check_strategy(strategy: Any) -> Strategy:
    """Return a strategy, or raise PackingError if it is something else."""
    if not isinstance(strategy, Strategy):
        hint = f"; did you forget its arguments, as in {strategy.__name__}(2048)?" if isinstance(strategy, type) else ""
        raise PackingError(f"strategy: expected a strategy such as BestFit(2048), got {strategy!r}{hint}")
    return strategy


def load_scipy_optimize(strategy: str) -> Any:
    """Return `scipy.optimize`, or raise MissingDependencyError with the line that installs it."""
    try:
        import scipy.optimize
        import scipy.sparse
    except ImportError as error:
        raise MissingDependencyError(f'{strategy} needs scipy: pip install "hf-packing[optimal]"') from error
    return scipy.optimize


_REGISTERED: dict[str, type[Strategy]] = {}
_S = TypeVar("_S", bound=Strategy)


def register_strategy(strategy: type[_S]) -> type[_S]:
    """Class decorator: add a strategy to the registry under its name in snake case, such as "best_fit"."""
    _REGISTERED[re.sub(r"(?<!^)(?=[A-Z])", "_", strategy.__name__).lower()] = strategy
    return strategy


def registered_strategies() -> dict[str, type[Strategy]]:
    """Return the strategies of hf_packing by name, sorted.

    Example:
        >>> list(registered_strategies())[:3]
        ['best_fit', 'bucket', 'bucket_by_length']
    """
    for module in pkgutil.walk_packages([str(Path(__file__).parent)], "hf_packing.strategies."):
        importlib.import_module(module.name)
    return dict(sorted(_REGISTERED.items()))


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
    """Check lengths. A lazy column of `datasets` is read at once; NumPy would read it row by row."""
    if type(lengths).__module__.partition(".")[0] == "datasets":
        lengths = lengths[:]
    return check_lengths(lengths)


def plan_counts(counts: Any, strategy: Strategy) -> PatternTable:
    """Plan packs from a histogram of lengths alone, for more documents than fit in memory, or for many workers.

    Args:
        counts: 1-d integers [longest + 1]: counts[n] is the number of documents of n tokens, as `np.bincount` returns.
        strategy: one that needs only counts, such as BestFit, Optimal or Bucket.

    Returns:
        PatternTable; its `deal` assigns documents shard by shard, as `plan_packing` over all of them would.

    Raises:
        PackingError: counts that are negative, not integers or not 1-d; a strategy that needs documents in order.

    Example:
        >>> import hf_packing as hfp
        >>> hfp.plan_counts([0, 0, 1, 1, 0, 1, 0, 1], hfp.BestFit(8)).num_packs
        3
    """
    check_strategy(strategy)
    if not isinstance(strategy, CountingStrategy):
        counting = [each.__name__ for each in registered_strategies().values() if issubclass(each, CountingStrategy)]
        raise PackingError(
            f"strategy: expected one that needs only counts ({', '.join(counting)}), got {strategy!r}, which needs the "
            "documents in order"
        )
    return strategy.plan_counts(counts_of_histogram(check_counts(counts)))
