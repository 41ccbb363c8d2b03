"""The interface of batchings: rows fitted to micro-batches, and the plan of an epoch for all ranks.

A batching first fits the rows, once: it cuts or drops rows longer than a micro-batch. It then plans each epoch
as a pure function of the fitted rows, its seed and the `Epoch`, so every rank computes the plan of all ranks by itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray, Pieces, check_whole_number
from hf_packing.planning.permutation import derive_key
from hf_packing.sampling.row_sizes import RowSizes

MAX_RANKS = 2**20

BoolArray = npt.NDArray[np.bool_]
SampledRow = tuple[int, bool]
"""A row number, and whether the row is a copy, whose labels are masked."""


@dataclass(frozen=True)
class Epoch:
    """Which epoch to plan, for how many ranks and micro-batches per optimizer step.

    Args:
        number: from 0.
        world_size: ranks, each with one micro-batch at a time.
        accumulation: micro-batches of each rank in one optimizer step.

    Raises:
        PackingError: a bad argument; the message names it.
    """

    number: int = 0
    world_size: int = 1
    accumulation: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", check_whole_number("epoch", self.number, minimum=0))
        object.__setattr__(self, "world_size", check_whole_number("world_size", self.world_size, maximum=MAX_RANKS))
        object.__setattr__(self, "accumulation", check_whole_number("accumulation", self.accumulation))

    @property
    def slots(self) -> int:
        """Micro-batches of one optimizer step, over all ranks."""
        return self.world_size * self.accumulation


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """Which rows each rank takes in each of its micro-batches.

    All ranks have the same number of micro-batches, and run micro-batches with the same number at the same time. If
    rows do not divide evenly, copies of rows with masked labels fill the gaps, so that no row is trained on twice. If a
    batching cuts long documents, its rows are the pieces.
    """

    world_size: int
    rows: IntArray
    """int64 [rows and copies]: row numbers, ordered by micro-batch, then by rank."""
    is_copy: BoolArray
    """bool [rows and copies]: whether the row is a copy, whose labels are masked."""
    offsets: IntArray
    """int64 [num_micro_batches * world_size + 1]: where each micro-batch begins in `rows`, in the same order."""
    left_out: IntArray
    """int64 [rows of the dataset in no micro-batch]: row numbers; empty rows, and long ones where they are dropped."""
    bucket: IntArray | None = None
    """int64 [num_micro_batches], tokens: the bucket of all ranks; None where rows have no bucket."""

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of each rank."""
        return (len(self.offsets) - 1) // self.world_size

    @property
    def num_copies(self) -> int:
        """Rows that are copies with masked labels."""
        return int(self.is_copy.sum())

    def micro_batch(self, number: int, rank: int) -> list[SampledRow]:
        """Return the rows of one micro-batch, as (row number, whether it is a copy)."""
        place = number * self.world_size + rank
        rows = slice(self.offsets[place], self.offsets[place + 1])
        return list(zip(self.rows[rows].tolist(), self.is_copy[rows].tolist(), strict=True))

    def micro_batches(self, rank: int, first: int = 0) -> Iterator[list[SampledRow]]:
        """Yield the micro-batches of a rank, from number `first` on."""
        return (self.micro_batch(number, rank) for number in range(first, self.num_micro_batches))

    def per_micro_batch(self, of_row: IntArray, counted: BoolArray | Literal[True] = True) -> npt.NDArray[np.int64]:
        """Return the sum over the rows of every micro-batch, int64 [num_micro_batches, world_size].

        Args:
            of_row: integers [rows].
            counted: bool [rows and copies]: which of them to add up.
        """
        total = np.concatenate([[0], np.cumsum(of_row[self.rows] * counted, dtype=np.int64)])
        return np.diff(total[self.offsets]).reshape(-1, self.world_size)

    def utilization(self, of_row: IntArray) -> float:
        """Return how busy the ranks are: 1 if no rank waits for another.

        This is the mean over ranks divided by the maximum over ranks, averaged over an epoch. Copies count as time, but
        not as work.

        Args:
            of_row: integers [rows]: tokens, or attention cost.
        """
        time = self.per_micro_batch(of_row)
        wasted = self.per_micro_batch(of_row, self.is_copy)
        return float(((time - wasted).mean(axis=1) / time.max(axis=1)).mean())

    def largest_micro_batch(self, sizes: RowSizes) -> int:
        """Return the tokens of the largest micro-batch."""
        return int(self.per_micro_batch(sizes.tokens).max())


@dataclass(frozen=True, eq=False)
class FittedRows:
    """Rows that fit into the micro-batches of a batching: whole rows, or pieces of rows that were too long."""

    sizes: RowSizes
    """Sizes of the pieces; of the dataset's rows where none is cut."""
    pieces: Pieces | None
    """Which slice of which row each piece is; None where no row is cut."""
    kept: IntArray
    """int64 [pieces in micro-batches]: numbers of the pieces that have a token and fit."""
    left_out: IntArray
    """int64 [rows of the dataset in no micro-batch]: numbers of the rows that are empty or dropped."""
    lost_tokens: int
    """Tokens of dropped and truncated documents."""
    fewest_micro_batches: int | None = None
    """How many micro-batches, over all ranks, hold the kept pieces; None for a batching without a token budget."""


def keep_rows(sizes: RowSizes, keep: BoolArray) -> FittedRows:
    """Return the rows to keep, whole.

    Args:
        sizes: of the dataset's rows.
        keep: bool [rows].
    """
    return FittedRows(sizes, None, np.flatnonzero(keep), np.flatnonzero(~keep), int(sizes.tokens[~keep].sum()))


@dataclass(frozen=True)
class Batching(ABC):
    """How rows share micro-batches: what TokenBudget, BucketBatches and InOrder have in common."""

    needs_row_per_rank: ClassVar[bool] = True
    """Whether a dataset with fewer rows than ranks is refused."""

    seed: int = field(default=0, kw_only=True)

    @abstractmethod
    def fit(self, sizes: RowSizes) -> FittedRows:
        """Fit the rows into micro-batches; raise PackingError if they do not fit."""

    @abstractmethod
    def num_micro_batches(self, rows: FittedRows, epoch: Epoch) -> int:
        """Return the number of micro-batches of each rank, which is the same in every epoch."""

    @abstractmethod
    def plan_fitted(self, rows: FittedRows, epoch: Epoch) -> EpochPlan:
        """Return the micro-batches of all ranks in one epoch, from rows that `fit` returned."""

    def plan(self, sizes: RowSizes, epoch: Epoch | None = None) -> EpochPlan:
        """Plan the micro-batches of all ranks in one epoch.

        Args:
            sizes: of all rows, as `sizes_of(dataset)` returns them.
            epoch: which one, and on how many ranks; None for the first epoch on one rank.

        Returns:
            EpochPlan: the same for the same arguments, on any machine.

        Raises:
            PackingError: a bad argument, fewer rows than ranks, a row longer than a micro-batch, or rows without a
                bucket where the batching needs one.
        """
        epoch = Epoch() if epoch is None else epoch
        if not isinstance(epoch, Epoch):
            raise PackingError(f"epoch: expected Epoch(number, world_size, accumulation), got {epoch!r}")
        rows = self.fit(check_sizes(sizes))
        self.check_enough_rows(rows, epoch)
        return self.plan_fitted(rows, epoch)

    def check_enough_rows(self, rows: FittedRows, epoch: Epoch) -> None:
        """Raise PackingError where some rank would have no row."""
        ranks = epoch.world_size if self.needs_row_per_rank else 1
        if len(rows.kept) < ranks:
            without = f"; {len(rows.left_out)} are empty or dropped" if len(rows.left_out) else ""
            raise PackingError(
                f"dataset: expected at least one row for each of {ranks} ranks, got {len(rows.kept)} rows{without}"
            )

    def epoch_seed(self, epoch: Epoch) -> int:
        """Return the seed of an epoch."""
        return int(derive_key(self.seed, f"epoch {epoch.number}")) >> 1

    def _set_checked(self, **values: Any) -> None:
        """Set fields of the frozen instance to their checked values."""
        for name, value in values.items():
            object.__setattr__(self, name, value)


def check_sizes(sizes: Any) -> RowSizes:
    """Return `sizes`, or raise PackingError."""
    if not isinstance(sizes, RowSizes):
        raise PackingError(f"sizes: expected RowSizes, as sizes_of(dataset) returns, got {type(sizes).__name__}")
    return sizes


def check_batching(batching: Any) -> Batching:
    """Return `batching`, or raise PackingError."""
    if not isinstance(batching, Batching):
        hint = (
            f"; did you forget its arguments, as in {batching.__name__}(16384)?" if isinstance(batching, type) else ""
        )
        raise PackingError(f"batching: expected TokenBudget(...) or BucketBatches(...), got {batching!r}{hint}")
    return batching
