"""Batching, the base class of objects that decide which rows share a micro-batch, and EpochPlan, their result.

`Batching.fit` first returns the rows that fit into micro-batches; rows that are too long may be cut or dropped. Every
epoch is then a pure function of these rows, the seed and the `Epoch`. So every rank computes the same plan, which
covers all ranks. The rows of an optimizer step depend on the number of its micro-batches (`Epoch.slots`), not on how
many ranks run them, so that training can go on with the same steps on another number of ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from hf_packing.batch.segments import check_shapes
from hf_packing.checks import (
    check_optional_number,
    check_seed,
    check_type,
    check_whole_number,
    expect,
    set_fields,
)
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import (
    BoolArray,
    Int64Array,
    IntArray,
    Overflow,
    Pieces,
    cut_to_pieces,
    sums_of,
    total_of,
)
from hf_packing.planning.permutation import derive_seed
from hf_packing.sampling.fill import mean_over_max
from hf_packing.sampling.sizes import RowSizes, sizes_of_documents

SampledRow = tuple[int, bool]
"""A pair: a row number, and True if the row is a copy with masked labels."""
Shapes = tuple[int | None, int | None]
"""The numbers of tokens and segments in every batch of fixed shapes; (None, None) for batches of any shape."""


@dataclass(frozen=True)
class Epoch:
    """The number of an epoch, the number of ranks, and the number of micro-batches per optimizer step."""

    number: int = 0
    """Number of the epoch, from 0."""
    world_size: int = 1
    """Number of ranks. All ranks run one micro-batch each at the same time."""
    accumulation: int = 1
    """Number of micro-batches of each rank in one optimizer step."""

    @property
    def slots(self) -> int:
        """Number of micro-batches in one optimizer step, over all ranks."""
        return self.world_size * self.accumulation


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """The rows of every micro-batch of every rank in one epoch.

    All ranks have the same number of micro-batches, and run their i-th micro-batches at the same time. If rows are too
    few for all micro-batches, copies of rows are added. The labels of copies are masked, so that no row is trained on
    twice. If the batching cuts long documents, the rows of the plan are the pieces of documents.
    """

    world_size: int
    rows: IntArray
    """int64 [rows and copies]: row numbers, ordered by micro-batch, then by rank."""
    is_copy: BoolArray
    """bool [rows and copies]: True for each copy with masked labels."""
    offsets: IntArray
    """int64 [num_micro_batches * world_size + 1]: micro-batch n of rank r is rows[offsets[i]:offsets[i + 1]], where i
    is n * world_size + r."""
    left_out: IntArray
    """int64 [left-out rows]: numbers of the dataset's rows that are in no micro-batch: empty rows and dropped rows."""
    bucket: IntArray | None = None
    """int64 [num_micro_batches], tokens: the bucket that all ranks use; None for a batching without buckets."""

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of each rank."""
        return (len(self.offsets) - 1) // self.world_size

    @property
    def num_copies(self) -> int:
        """Number of rows that are copies with masked labels."""
        return total_of(self.is_copy)

    def micro_batch(self, number: int, rank: int) -> list[SampledRow]:
        """Return the rows of micro-batch `number` of a rank, as pairs (row number, True if the row is a copy)."""
        place = number * self.world_size + rank
        rows = slice(self.offsets[place], self.offsets[place + 1])
        return list(zip(self.rows[rows].tolist(), self.is_copy[rows].tolist(), strict=True))

    def micro_batches(self, rank: int, first: int = 0) -> Iterator[list[SampledRow]]:
        """Yield the micro-batches of a rank in order, as `micro_batch` returns them, from number `first` on."""
        return (self.micro_batch(number, rank) for number in range(first, self.num_micro_batches))

    def per_micro_batch(self, of_row: IntArray, counted: BoolArray | bool = True) -> Int64Array:
        """Return the sum of a value over the rows of each micro-batch, int64 [num_micro_batches, world_size].

        Args:
            of_row: integers [rows]: the value of each row, such as its number of tokens.
            counted: bool [rows and copies]: True for each row or copy to count; a single True to count all.
        """
        return sums_of(of_row[self.rows] * counted, self.offsets).reshape(-1, self.world_size)

    def utilization(self, of_row: IntArray) -> float:
        """Return the mean utilization of the ranks, from 0 to 1. The value 1 means that they never wait.

        For micro-batches that run at the same time, utilization is the mean work over ranks, divided by the maximum
        work over ranks. The result is the average over the epoch. Copies of rows count in the maximum, since copies
        take time, but not in the mean, since nothing is learned from copies.

        Args:
            of_row: integers [rows]: the work for each row, either tokens or attention cost.
        """
        return mean_over_max(self.per_micro_batch(of_row, ~self.is_copy), self.per_micro_batch(of_row))


CUT_WHEN_PACKED = "for packed rows, whose documents are cut by the max_length of the strategy when they are packed"
"""Why packed rows take no max_length."""


@dataclass(frozen=True, eq=False)
class FittedRows:
    """The rows of a dataset that fit into micro-batches: whole rows, or pieces of rows that were too long."""

    sizes: RowSizes
    """Sizes of the pieces, or of the dataset's rows if no row is cut."""
    pieces: Pieces | None
    """The row that each piece comes from, and the slice of that row; None if no row is cut."""
    kept: IntArray
    """int64 [kept pieces]: numbers of the pieces (rows, if no row is cut) that micro-batches are made of."""
    left_out: IntArray
    """int64 [left-out rows]: numbers of the dataset's rows that are in no micro-batch: empty rows and dropped rows."""
    lost_tokens: int
    """Number of tokens in no micro-batch: all tokens of dropped rows, and the cut-off ends of truncated rows."""
    fewest_micro_batches: int | None = None
    """Number of micro-batches, over all ranks, that is enough for all kept pieces; None if there is no token budget."""


def keep_rows(sizes: RowSizes, keep: BoolArray) -> FittedRows:
    """Return FittedRows with some of a dataset's rows. All other rows are left out, and no row is cut.

    Args:
        sizes: sizes of the dataset's rows.
        keep: bool [rows]: True for each row to keep.
    """
    return FittedRows(sizes, None, np.flatnonzero(keep), np.flatnonzero(~keep), total_of(sizes.tokens[~keep]))


def cut_rows(sizes: RowSizes, max_length: int, overflow: Overflow) -> FittedRows:
    """Return FittedRows of documents, of which those with more than max_length tokens are treated as `overflow` says.

    Raises:
        PackingError: `overflow` is "error", and a document has more tokens.
    """
    if sizes.tokens.max(initial=0) <= max_length:
        return keep_rows(sizes, sizes.tokens > 0)
    pieces = cut_to_pieces(sizes.tokens, max_length, overflow)
    return FittedRows(
        sizes=sizes_of_documents(pieces.length),
        pieces=pieces,
        kept=np.arange(len(pieces.length)),
        left_out=np.setdiff1d(np.arange(len(sizes)), pieces.document),
        lost_tokens=int(sizes.tokens.sum() - pieces.length.sum()),
    )


@dataclass(frozen=True)
class Batching(ABC):
    """The base class of TokenBudget, BucketBatches and InOrder. A batching decides which rows share a micro-batch."""

    needs_row_per_rank: ClassVar[bool] = True
    """True if a dataset must have at least one row for every rank."""

    _: KW_ONLY
    seed: int = 0
    max_documents: int | None = None
    align_tokens: int = 1

    def __post_init__(self) -> None:
        check_whole_number("align_tokens", self.align_tokens)
        set_fields(
            self,
            seed=check_seed(self.seed),
            max_documents=check_optional_number("max_documents", self.max_documents),
        )

    def check_holds(self, name: str, tokens: int, what: str) -> None:
        """Raise PackingError unless rows of so many tokens, `what`, fit in the argument `name`, in multiples."""
        multiple, most = self.align_tokens, getattr(self, name)
        if (least := -(-tokens // multiple) * multiple) > most:
            how = f" in multiples of {multiple}" if multiple > 1 else ""
            raise PackingError(f"{name}: expected at least {least}, {what}{how}, got {most}")

    def aligned(self, name: str) -> int:
        """Return the largest multiple up to the number of tokens that is the value of the argument `name`.

        Raises:
            PackingError: it is 0.
        """
        tokens: int = getattr(self, name)
        if tokens < self.align_tokens:
            raise PackingError(f"{name}: expected at least align_tokens={self.align_tokens}, got {tokens}")
        return tokens - tokens % self.align_tokens

    @abstractmethod
    def fit(self, sizes: RowSizes) -> FittedRows:
        """Return the rows to make micro-batches of. Rows that are too long are cut, left out or refused."""

    @abstractmethod
    def plan_fitted(self, rows: FittedRows, epoch: Epoch) -> EpochPlan:
        """Return the plan of one epoch for all ranks, from rows that `fit` returned.

        Every epoch of the same rows has the same number of micro-batches.
        """

    @property
    def most_tokens(self) -> int | None:
        """The most tokens that a micro-batch may have; None if the batching does not limit them."""
        return None

    @property
    def fewest_shared(self) -> int | None:
        """The fewest tokens that documents share to be in one tree; None if they share no prefixes."""
        return None

    def within(self, shapes: Shapes) -> Self:
        """Return this batching for micro-batches that fit into fixed shapes. One segment is left for the padding.

        Raises:
            PackingError: the two numbers are not valid, or the batching allows more tokens or documents, or does not
                limit tokens.
        """
        tokens, max_segments = check_shapes(*shapes)
        if self.most_tokens is None or self.most_tokens > tokens:
            raise PackingError(
                f"tokens: expected at least {self.most_tokens}, the most of a micro-batch of {self!r}, got {tokens}"
            )
        if self.max_documents is not None and self.max_documents >= max_segments:
            raise PackingError(
                f"max_segments: expected more than {self.max_documents}, the max_documents of the batching, since one "
                f"segment is padding, got {max_segments}"
            )
        return replace(self, max_documents=self.max_documents or max_segments - 1)

    def plan(self, sizes: RowSizes, epoch: Epoch | None = None) -> EpochPlan:
        """Plan the micro-batches of all ranks in one epoch.

        Args:
            sizes: sizes of all rows, as `sizes_of(dataset)` returns them.
            epoch: the epoch to plan, with the number of ranks; None for the first epoch on one rank.

        Returns:
            EpochPlan. The same arguments give the same plan, on any machine whose NumPy shuffles in the same way.

        Raises:
            PackingError: a bad argument, fewer rows than ranks, a row longer than a micro-batch, or rows without a
                bucket if the batching needs buckets.
        """
        epoch = Epoch() if epoch is None else epoch
        return self.plan_fitted(self.fit_enough(sizes, epoch.world_size), epoch)

    def fit_enough(self, sizes: RowSizes, ranks: int) -> FittedRows:
        """Return the rows to make micro-batches of; raise PackingError if they are too few for all ranks, or are trees
        and would have to be aligned."""
        if sizes.trees is not None:  # whose micro-batches cannot be filled up
            expect(1, "for rows of trees", align_tokens=self.align_tokens)
        rows = self.fit(sizes)
        needed = ranks if self.needs_row_per_rank else 1
        if len(rows.kept) < needed:
            raise PackingError(
                f"dataset: expected at least one row for each of {needed} ranks or blocks of ranks, got "
                f"{len(rows.kept)} rows, not counting {len(rows.left_out)} empty or dropped rows"
            )
        return rows

    def epoch_seed(self, epoch: Epoch) -> int:
        """Return the seed of an epoch, derived from the batching's seed and the epoch's number."""
        return derive_seed(self.seed, f"epoch {epoch.number}")


def check_batching(batching: Any) -> Batching:
    """Return `batching`; raise PackingError if the argument is not a Batching."""
    accepted = "TokenBudget(...), which packs documents during training, or BucketBatches(...), but no strategy"
    check_type("batching", batching, Batching, accepted)
    checked: Batching = batching
    return checked
