"""What all strategies have in common: how documents become packs, and how a strategy packs a batch of rows."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

import hf_packing
from hf_packing.data.map_batch import pack_batch
from hf_packing.errors import PackingError
from hf_packing.planning.counts import LengthCounts, count_lengths
from hf_packing.planning.cuts import cut_by_overflow
from hf_packing.planning.deal import deal_all
from hf_packing.planning.lengths import INT32_MAX, IntArray, check_whole_number
from hf_packing.planning.overflow import Overflow, check_fitting, check_overflow
from hf_packing.planning.patterns import Solution
from hf_packing.planning.plan import PackingPlan
from hf_packing.planning.shuffle import check_seed
from hf_packing.planning.table import PatternTable


def package_version() -> str:
    return hf_packing.__version__


@dataclass(frozen=True)
class Strategy(ABC):
    """How documents become packs; call it on a batch of rows to pack them.

    As a transform it takes what `datasets.map(..., batched=True)` hands out: a dict of lists, a dict of arrays, a
    pyarrow Table or a data frame. It returns one row for each pack, with `input_ids`, `labels`, `position_ids` and
    `seq_lengths`, as int32, and with buckets `bucket`: to `Dataset.map` a Table, else the kind it was given. Each batch
    is planned by itself, so large batches pack better; `pack` plans over the whole dataset.
    """

    package_version: str = field(default_factory=package_version, init=False, repr=False)
    """In the hash that `datasets` caches by, which knows a class by its name alone: a new version packs anew."""

    has_buckets: ClassVar[bool] = False
    """Whether packs have several capacities; rows then carry theirs as a column `bucket`."""

    @abstractmethod
    def plan_lengths(self, lengths: IntArray) -> PackingPlan:
        """The plan for checked lengths."""

    def __call__(self, batch: Any, *others: Any, **options: Any) -> Any:
        if others or options:
            given = ", ".join([*(type(other).__name__ for other in others), *options])
            raise PackingError(
                f"batch: expected nothing beside it, got {given}; call map without with_indices, with_rank, "
                "input_columns and fn_kwargs"
            )
        return pack_batch(batch, self.plan_lengths, bucket=self.has_buckets)

    def settle(self, **values: Any) -> None:
        """Set fields of the frozen instance to their checked values."""
        for name, value in values.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class CountingStrategy(Strategy):
    """A strategy that looks at nothing but how many documents there are of each length."""

    @abstractmethod
    def plan_counts(self, counts: LengthCounts) -> PatternTable:
        """The packs for documents of these lengths."""

    def plan_lengths(self, lengths: IntArray) -> PackingPlan:
        return deal_all(self.plan_counts(count_lengths(lengths)), lengths)


@dataclass(frozen=True)
class OneCapacity(CountingStrategy):
    """A counting strategy whose packs all hold max_length tokens, so that only longer documents are cut."""

    max_length: int
    overflow: Overflow = field(default="split", kw_only=True)
    max_documents: int | None = field(default=None, kw_only=True)
    seed: int | None = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_overflow(self.overflow)
        self.settle(
            max_length=check_whole_number("max_length", self.max_length),
            max_documents=check_max_documents(self.max_documents),
            seed=check_optional_seed(self.seed),
        )

    @abstractmethod
    def solve(self, counts: IntArray) -> Solution:
        """The packs for counts[n] pieces of n tokens, none longer than max_length."""

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
    return None if seed is None else check_seed(seed)


def check_max_documents(max_documents: Any) -> int | None:
    return None if max_documents is None else check_whole_number("max_documents", max_documents)


def check_bucket_lengths(bucket_lengths: Any) -> tuple[int, ...]:
    """Ascending capacities, or an error that names the first that is not."""
    if isinstance(bucket_lengths, (str, bytes)) or not isinstance(bucket_lengths, (Sequence, np.ndarray)):
        raise PackingError(f"bucket_lengths: expected a sequence of integers, got {bucket_lengths!r}")
    if not len(bucket_lengths):
        raise PackingError("bucket_lengths: expected at least one length, got none")
    lengths = tuple(check_whole_number("bucket_lengths", length, maximum=INT32_MAX) for length in bucket_lengths)
    for shorter, longer in pairwise(lengths):
        if shorter >= longer:
            raise PackingError(
                f"bucket_lengths: expected ascending lengths without repeats, got {longer} after {shorter}"
            )
    return lengths


def check_strategy(strategy: Any) -> Strategy:
    if not isinstance(strategy, Strategy):
        hint = f"; did you forget its arguments, as in {strategy.__name__}(2048)?" if isinstance(strategy, type) else ""
        raise PackingError(f"strategy: expected a strategy such as BestFit(2048), got {strategy!r}{hint}")
    return strategy
