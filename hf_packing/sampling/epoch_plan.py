"""The interface of batchings, which fit rows to micro-batches and plan every epoch for all ranks.

First, a batching fits the rows, once; rows longer than a micro-batch may be cut or dropped. The batching then
plans every epoch as a pure function of the fitted rows, the seed and the `Epoch`. So every rank computes the same plan
of all ranks, without communication.
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
"""A row number, and whether the row is a copy with masked labels."""


@dataclass(frozen=True)
class Epoch:
    """The number of an epoch, with the number of ranks and the number of micro-batches per optimizer step.

    Args:
        number: number of the epoch, from 0.
        world_size: number of ranks. All ranks run one micro-batch each at the same time.
        accumulation: number of micro-batches of each rank in one optimizer step.

    Raises:
        PackingError: a bad argument, which the message names.
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
        """Number of micro-batches in one optimizer step, over all ranks."""
        return self.world_size * self.accumulation


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """The rows of every micro-batch of every rank in one epoch.

    All ranks have the same number of micro-batches, and run micro-batches with the same number at the same time. If the
    rows do not divide evenly, copies of rows with masked labels fill the gaps, so that no row is trained on twice. If a
    batching cuts long documents, the rows of the plan are the pieces.
    """

    world_size: int
    rows: IntArray
    """int64 [rows and copies]: row numbers, ordered by micro-batch, then by rank."""
    is_copy: BoolArray
    """bool [rows and copies]: whether the row is a copy with masked labels."""
    offsets: IntArray
    """int64 [num_micro_batches * world_size + 1]: the i-th micro-batch, over all ranks, is rows[offsets[i]:offsets[i +
    1]]."""
    left_out: IntArray
    """int64 [rows of the dataset in no micro-batch]: numbers of the rows that are empty, or too long and dropped."""
    bucket: IntArray | None = None
    """int64 [num_micro_batches], tokens: the bucket of all ranks; None for a batching without buckets."""

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of each rank."""
        return (len(self.offsets) - 1) // self.world_size

    @property
    def num_copies(self) -> int:
        """Number of rows that are copies with masked labels."""
        return int(self.is_copy.sum())

    def micro_batch(self, number: int, rank: int) -> list[SampledRow]:
        """Return the rows of one micro-batch, as (row number, whether the row is a copy)."""
        place = number * self.world_size + rank
        rows = slice(self.offsets[place], self.offsets[place + 1])
        return list(zip(self.rows[rows].tolist(), self.is_copy[rows].tolist(), strict=True))

    def micro_batches(self, rank: int, first: int = 0) -> Iterator[list[SampledRow]]:
        """Yield the micro-batches of a rank, beginning with micro-batch number `first`."""
        return (self.micro_batch(number, rank) for number in range(first, self.num_micro_batches))

    def per_micro_batch(self, of_row: IntArray, counted: BoolArray | Literal[True] = True) -> npt.NDArray[np.int64]:
        """Return the sum of `of_row` over the rows of each micro-batch, int64 [num_micro_batches, world_size].

        Args:
            of_row: integers [rows]: the number to add up for each row.
            counted: bool [rows and copies]: which rows and copies to count; True to count all.
        """
        total = np.concatenate([[0], np.cumsum(of_row[self.rows] * counted, dtype=np.int64)])
        return np.diff(total[self.offsets]).reshape(-1, self.world_size)

    def utilization(self, of_row: IntArray) -> float:
        """Return how busy the ranks are, from 0 to 1; 1 if no rank waits for another rank.

        For micro-batches that run at the same time, utilization is the mean over ranks divided by the maximum over
        ranks. The result is averaged over the epoch. Copies count in the maximum, since copies take time, but not in
        the mean, since nothing is learned from copies.

        Args:
            of_row: integers [rows]: the work for each row, either tokens or attention cost.
        """
        time = self.per_micro_batch(of_row)
        wasted = self.per_micro_batch(of_row, self.is_copy)
        return float(((time - wasted).mean(axis=1) / time.max(axis=1)).mean())

    def largest_micro_batch(self, sizes: RowSizes) -> int:
        """Return the number of tokens in the largest micro-batch."""
        return int(self.per_micro_batch(sizes.tokens).max())


@dataclass(frozen=True, eq=False)
class FittedRows:
    """Rows that fit into the micro-batches of a batching: whole rows, or pieces of rows that were too long."""

    sizes: RowSizes
    """Sizes of the pieces, or of the dataset's rows if no row is cut."""
    pieces: Pieces | None
    """The row that each piece comes from, and the slice of that row; None if no row is cut."""
    kept: IntArray
    """int64 [pieces in micro-batches]: numbers of the pieces (or of the uncut rows) that have a token and fit."""
    left_out: IntArray
    """int64 [rows of the dataset in no micro-batch]: numbers of the rows that are empty or dropped."""
    lost_tokens: int
    """Number of tokens in no micro-batch: all tokens of dropped rows, and the cut-off ends of truncated rows."""
    fewest_micro_batches: int | None = None
    """Number of micro-batches, over all ranks, that hold the kept pieces; None if the batching has no token budget."""


def keep_rows(sizes: RowSizes, keep: BoolArray) -> FittedRows:
    """Return FittedRows that keep some rows of a dataset and leave out all other rows; no row is cut.

    Args:
        sizes: sizes of the dataset's rows.
        keep: bool [rows]: whether to keep the row.
    """
    return FittedRows(sizes, None, np.flatnonzero(keep), np.flatnonzero(~keep), int(sizes.tokens[~keep].sum()))


@dataclass(frozen=True)
class Batching(ABC):
    """Base class of TokenBudget, BucketBatches and InOrder, which decide which rows share a micro-batch."""

    needs_row_per_rank: ClassVar[bool] = True
    """Whether a dataset with fewer rows than ranks is refused."""

    seed: int = field(default=0, kw_only=True)

    @abstractmethod
    def fit(self, sizes: RowSizes) -> FittedRows:
        """Return the rows that micro-batches are made of, cut if needed; raise PackingError if the rows do not fit."""

    @abstractmethod
    def num_micro_batches(self, rows: FittedRows, epoch: Epoch) -> int:
        """Return the number of micro-batches of each rank, which is the same in every epoch."""

    @abstractmethod
    def plan_fitted(self, rows: FittedRows, epoch: Epoch) -> EpochPlan:
        """Return the plan of one epoch for all ranks, from rows that `fit` returned."""

    def plan(self, sizes: RowSizes, epoch: Epoch | None = None) -> EpochPlan:
        """Plan the micro-batches of all ranks in one epoch.

        Args:
            sizes: sizes of all rows, as `sizes_of(dataset)` returns them.
            epoch: the epoch to plan, with the number of ranks; None for the first epoch on one rank.

        Returns:
            EpochPlan. The same arguments give the same plan, on any machine.

        Raises:
            PackingError: a bad argument, fewer rows than ranks, a row longer than a micro-batch, or rows without a
                bucket if the batching needs buckets.
        """
        epoch = Epoch() if epoch is None else epoch
        if not isinstance(epoch, Epoch):
            raise PackingError(f"epoch: expected Epoch(number, world_size, accumulation), got {epoch!r}")
        rows = self.fit(check_sizes(sizes))
        self.check_enough_rows(rows, epoch)
        return self.plan_fitted(rows, epoch)

    def check_enough_rows(self, rows: FittedRows, epoch: Epoch) -> None:
        """Raise PackingError if a rank would have no row."""
        ranks = epoch.world_size if self.needs_row_per_rank else 1
        if len(rows.kept) < ranks:
            without = f", besides {len(rows.left_out)} empty or dropped rows" if len(rows.left_out) else ""
            raise PackingError(
                f"dataset: expected at least one row for each of {ranks} ranks, got {len(rows.kept)} rows{without}"
            )

    def epoch_seed(self, epoch: Epoch) -> int:
        """Return the seed of an epoch, derived from the batching's seed and the epoch's number."""
        return int(derive_key(self.seed, f"epoch {epoch.number}")) >> 1

    def _set_checked(self, **values: Any) -> None:
        """Set fields of the frozen instance to their checked values."""
        for name, value in values.items():
            object.__setattr__(self, name, value)


def check_sizes(sizes: Any) -> RowSizes:
    """Return `sizes`; raise PackingError if the argument is not a RowSizes."""
    if not isinstance(sizes, RowSizes):
        raise PackingError(f"sizes: expected the RowSizes that sizes_of(dataset) returns, got {type(sizes).__name__}")
    return sizes


def check_batching(batching: Any) -> Batching:
    """Return `batching`; raise PackingError if the argument is not a Batching."""
    if not isinstance(batching, Batching):
        hint = (
            f"; pass an instance of the class, such as {batching.__name__}(16384)" if isinstance(batching, type) else ""
        )
        raise PackingError(f"batching: expected TokenBudget(...) or BucketBatches(...), got {batching!r}{hint}")
    return batching
