"""Base classes of strategies, the strategy registry, and the functions `plan_packing` and `plan_counts`."""

import importlib
import pkgutil
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

import hf_packing
from hf_packing.checks import (
    SEED_MAX,
    check_choice,
    check_optional_number,
    check_whole_number,
    expect,
    set_fields,
)
from hf_packing.columns import INPUT_IDS, check_are_documents
from hf_packing.errors import MissingDependencyError, PackingError
from hf_packing.planning.lengths import (
    IntArray,
    LengthCounts,
    Overflow,
    check_counts,
    check_fitting,
    check_lengths,
    count_lengths,
    counts_of_histogram,
)
from hf_packing.planning.patterns import Patterns, cut_by_overflow
from hf_packing.planning.permutation import derive_seed
from hf_packing.planning.plan import PackingPlan
from hf_packing.planning.table import PatternTable
from hf_packing.planning.windows import WindowPlan, packs_with_room

_S = TypeVar("_S", bound="Strategy")
_ROWS_AT_ONCE = 10_000
"""Rows of a dataset whose lengths are read at once."""


def _check_bucket_lengths(bucket_lengths: Any) -> tuple[int, ...]:
    """Return the bucket lengths as a tuple of ints, if they are ascending."""
    if isinstance(bucket_lengths, (str, bytes)) or not isinstance(bucket_lengths, (Sequence, np.ndarray)):
        raise PackingError(f"bucket_lengths: expected a sequence of integers, got {bucket_lengths!r}")
    lengths = tuple(check_whole_number("bucket_lengths", length) for length in bucket_lengths)
    if not lengths or any(shorter >= longer for shorter, longer in pairwise(lengths)):
        raise PackingError(
            f"bucket_lengths: expected at least one length, ascending without repeats, got {bucket_lengths!r}"
        )
    return lengths


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "max_length": partial(check_whole_number, "max_length"),
    "bucket_lengths": _check_bucket_lengths,
    "overflow": partial(check_choice, "overflow", choices=Overflow),
    "max_documents": partial(check_optional_number, "max_documents"),
    "seed": partial(check_optional_number, "seed", minimum=0, maximum=SEED_MAX),
}
"""The arguments that several strategies have, and how they are checked."""


class _Arguments:
    """Arguments that only some strategies have, with the values that stand for those of all others."""

    max_length: int
    bucket_lengths: Sequence[int]
    overflow: Overflow = "split"
    max_documents: int | None = None
    seed: int | None = None


@dataclass(frozen=True)
class Strategy(_Arguments, ABC):
    """Base class of strategies. A strategy decides which documents share a pack, and packs a batch of rows when called.

    Use a strategy as in `dataset.map(strategy, batched=True)`, or call the strategy with a batch of rows: a dict of
    lists or of arrays, or a pyarrow Table. The call returns one row for each pack, with the int32 columns `input_ids`,
    `labels`, `position_ids` and `seq_lengths`. If packs have several capacities, a column `bucket` has the capacity of
    each pack. The rows are returned as a Table if the call comes from `Dataset.map` or if the batch is a Table, and
    otherwise as a dict of lists. Each batch is planned separately, so larger batches need less padding;
    `hf_packing.pack` plans over the whole dataset. With `drop_last_batch=True`, `map` leaves the documents of the last
    batch out, which the strategy cannot see, nor warn about.
    """

    package_version: str = field(default_factory=lambda: hf_packing.__version__, init=False, repr=False)
    """The version of hf_packing.

    `datasets` hashes the fields of a strategy, but not the strategy's code, to find cached results of `map`. Because of
    this field, a new version of hf_packing does not reuse results of an old version.
    """

    has_buckets: ClassVar[bool] = False
    """True if packs have several capacities. Packed rows then have a column `bucket` with the capacity of the pack."""
    keeps_fitting_documents_whole: ClassVar[bool] = False
    """True if documents that fit in a pack are never cut, for some arguments. Trees of documents need this."""
    fills_one_pack_at_a_time: ClassVar[bool] = False
    """True if documents go into packs in their order. In a stream, the last pack then waits until it is full."""

    def __post_init__(self) -> None:
        given = vars(self)
        set_fields(self, **{name: check(given[name]) for name, check in _CHECKS.items() if name in given})

    @abstractmethod
    def plan_lengths(self, lengths: IntArray) -> PackingPlan:
        """Return a plan for documents of the given lengths. The lengths must be a result of `check_lengths`."""

    @property
    def largest_capacity(self) -> int:
        """The largest capacity of a pack, in tokens."""
        return int(self.bucket_lengths[-1] if self.has_buckets else self.max_length)

    def check_packs_trees(self) -> None:
        """Raise PackingError if the strategy, or one of its arguments, does not suit documents that share prefixes."""
        if not self.keeps_fitting_documents_whole:
            raise PackingError(
                "strategy: expected a strategy that cuts no document that fits in a pack, such as BestFit, with "
                f"share_prefixes, since a tree of documents can be cut only between documents, got {self!r}"
            )
        unknown = "with share_prefixes, since strategies do not know how many documents a tree has"
        expect(None, unknown, max_documents=self.max_documents)

    def plan_window(self, lengths: IntArray, number: int) -> WindowPlan:
        """Plan one window of a stream, with a seed of its own.

        Args:
            lengths: lengths of the window's documents, as for `plan_lengths`. Documents and parts of documents that
                have waited since the last window come first.
            number: number of the window in the stream, from 0.

        Returns:
            WindowPlan: the plan, and the packs that documents of the next window could fill.
        """
        plan = self.with_seed_for(f"window {number}").plan_lengths(lengths)
        if self.fills_one_pack_at_a_time:
            return WindowPlan(plan, packs_with_room(plan, share=0.0), all_wait=True)
        return WindowPlan(plan, packs_with_room(plan, self.max_documents))

    def with_seed_for(self: _S, purpose: str) -> _S:
        """Return the strategy with a seed of its own for a purpose, such as a window of a stream, if it has a seed."""
        return self if self.seed is None else replace(self, seed=derive_seed(self.seed, purpose))  # type: ignore[call-arg]

    def __call__(self, batch: Any, *, keep_first_labels: bool = False) -> Any:
        from hf_packing.rows.map_batch import pack_batch  # imported here, since planning needs no datasets

        return pack_batch(batch, self, keep_first_labels)


@dataclass(frozen=True)
class CountingStrategy(Strategy):
    """Base class of strategies that need only the number of documents of each length."""

    @abstractmethod
    def plan_counts(self, counts: LengthCounts) -> PatternTable:
        """Return a plan for the counted documents, as a PatternTable."""

    def plan_lengths(self, lengths: IntArray) -> PackingPlan:
        return self.plan_counts(count_lengths(lengths)).plan_checked(lengths)


@dataclass(frozen=True)
class Solution:
    """The result of `OneCapacity.solve`: packs, a lower bound on packs, and a note on how the packs were found."""

    patterns: Patterns
    lower_bound: int = 0
    """A lower bound on the number of packs that the segments need under the limits `max_length` and `max_documents`.

    0 if the search has proven no bound.
    """
    note: str = ""
    """A remark on how the packs were found; empty if there is nothing to report."""


@dataclass(frozen=True)
class OneCapacity(CountingStrategy):
    """Base class of counting strategies (CountingStrategy) whose packs all have the capacity max_length.

    A document of at most max_length tokens is never cut.
    """

    keeps_fitting_documents_whole: ClassVar[bool] = True

    max_length: int
    _: KW_ONLY
    overflow: Overflow = "split"
    max_documents: int | None = None
    seed: int | None = 0

    @abstractmethod
    def solve(self, counts: IntArray) -> Solution:
        """Return packs for the counted segments, as a Solution. No segment is longer than max_length.

        Args:
            counts: int64 [longest + 1]: counts[n] is the number of segments of n tokens; counts[0] is 0.
        """

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


def check_strategy(strategy: Any) -> Strategy:
    """Return `strategy` unchanged, or raise PackingError if `strategy` is not an instance of Strategy."""
    if not isinstance(strategy, Strategy):
        raise PackingError(f"strategy: expected a strategy such as BestFit(2048), got {strategy!r}")
    return strategy


def load_scipy_optimize(strategy: str) -> Any:
    """Return the module `scipy.optimize`.

    If scipy is not installed, raise MissingDependencyError with the name of the strategy and the command that installs
    scipy.
    """
    try:
        import scipy.optimize
        import scipy.sparse
    except ImportError as error:
        raise MissingDependencyError(
            f'{strategy} needs scipy, which is not installed; run pip install "hf-packing[optimal]"'
        ) from error
    return scipy.optimize


_REGISTERED: dict[str, type[Strategy]] = {}


def register_strategy(strategy: type[_S]) -> type[_S]:
    """Add a strategy class to the registry, and return the class; used as a class decorator.

    The key in the registry is the class name in snake case, such as "best_fit" for BestFit.
    """
    _REGISTERED[re.sub(r"(?<!^)(?=[A-Z])", "_", strategy.__name__).lower()] = strategy
    return strategy


def registered_strategies() -> dict[str, type[Strategy]]:
    """Return all registered strategy classes, as a dict from snake-case names to classes, sorted by name.

    Example:
        >>> list(registered_strategies())[:3]
        ['best_fit', 'bucket', 'bucket_by_length']
    """
    for module in pkgutil.walk_packages([str(Path(__file__).parent)], "hf_packing.strategies."):
        importlib.import_module(module.name)
    return dict(sorted(_REGISTERED.items()))


def plan_packing(lengths: Any, strategy: Strategy) -> PackingPlan:
    """Plan packs from document lengths, without a dataset.

    Args:
        lengths: 1-d integers [documents]: document lengths in tokens, as a list or an array; or a Dataset of documents
            with `input_ids`. Documents of length 0 are not packed, but the plan's metrics count them.
        strategy: strategy to plan with, such as BestFit(2048).

    Returns:
        PackingPlan: the assignment of documents to packs.

    Raises:
        PackingError: `lengths` are negative, not integers or not 1-d, `strategy` is not an instance of Strategy, or the
            strategy has overflow="error" and a document is too long.
        MissingDependencyError: the strategy needs scipy, but scipy is not installed.

    Example:
        >>> import hf_packing as hfp
        >>> hfp.plan_packing([14, 7, 5, 2, 3], hfp.BestFit(8)).metrics().num_cut_documents
        1
    """
    return check_strategy(strategy).plan_lengths(read_lengths(lengths))


def read_lengths(lengths: Any) -> IntArray:
    """Check document lengths with `check_lengths`, and return the lengths as an int32 or int64 array [documents].

    Args:
        lengths: as for `plan_packing`. A lazy column of `datasets` is read whole, since NumPy would read it by row.
    """
    if names := getattr(lengths, "column_names", None):
        check_are_documents(names)
        tables = lengths.select_columns(INPUT_IDS).with_format("arrow").iter(_ROWS_AT_ONCE)
        chunks = (chunk for table in tables for chunk in table[INPUT_IDS].chunks)
        found = [chunk.value_lengths().to_numpy(zero_copy_only=False) for chunk in chunks]
        lengths = np.concatenate([np.zeros(0, dtype=np.int32), *found])
    elif isinstance(lengths, Sequence):
        lengths = lengths[:]
    return check_lengths(lengths)


def plan_counts(counts: Any, strategy: Strategy) -> PatternTable:
    """Plan packs from a histogram of document lengths, without assigning documents to the packs yet.

    Use this function to compare strategies, or to see what packing gains, where the lengths of all documents do not fit
    in memory.

    Args:
        counts: 1-d integers [longest + 1]: counts[n] is the number of documents of n tokens, as returned by
            `np.bincount(lengths)`.
        strategy: strategy that needs only counts of lengths, such as BestFit, Optimal or Bucket.

    Returns:
        PatternTable: the packs to make, and their metrics. `plan_packing` makes the same packs of the lengths.

    Raises:
        PackingError: `counts` are negative, not integers or not 1-d, `strategy` is not a strategy that needs only
            counts of lengths, or the strategy has overflow="error" and a document is too long.
        MissingDependencyError: the strategy needs scipy, but scipy is not installed.

    Example:
        >>> import hf_packing as hfp
        >>> hfp.plan_counts([0, 0, 1, 1, 0, 1, 0, 1], hfp.BestFit(8)).num_packs
        3
    """
    check_strategy(strategy)
    if not isinstance(strategy, CountingStrategy):
        raise PackingError(
            "strategy: expected a strategy that needs only counts of lengths, such as BestFit, Optimal or Bucket, got "
            f"{strategy!r}; use plan_packing with this strategy"
        )
    return strategy.plan_counts(counts_of_histogram(check_counts(counts)))
