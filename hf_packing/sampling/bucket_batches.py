"""BucketBatches, a batching in which all ranks use rows of the same bucket at the same time."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, NamedTuple, get_args

import numpy as np

from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray, check_whole_number
from hf_packing.planning.permutation import check_seed, random_order
from hf_packing.sampling.epoch_plan import (
    Batching,
    Epoch,
    EpochPlan,
    FittedRows,
    RowSizes,
    SampledRow,
    keep_rows,
    sum_rows,
)
from hf_packing.sampling.fill import balance, jitter_attention

BucketOrder = Literal["random", "short_to_long"]

_Unit = list[SampledRow]
"""Rows that take the space of one row of a bucket: a row of this bucket, or leftover rows of smaller buckets."""
_Round = list[list[SampledRow]]
"""The micro-batches that all ranks run at the same time, one for each rank."""


class _BucketCounts(NamedTuple):
    """The numbers of rows, units and rounds of one bucket in an epoch.

    A unit is one row of the bucket, or leftover rows of smaller buckets, which together take the space of one row. In
    a round, every rank runs one micro-batch of the bucket.
    """

    capacity: int
    """The most tokens that a row of the bucket may hold."""
    rows_each: int
    """Number of units in each micro-batch."""
    rows: int
    """Number of the dataset's rows in this bucket."""
    taken_over: int
    """Number of units made from leftover rows of smaller buckets."""
    rounds: int
    left: int
    """Number of units that are too few for another round of this bucket. They move to the next larger bucket."""
    joined: int
    """Number of leftover units that are joined to make one unit of the next larger bucket."""


@dataclass(frozen=True)
class BucketBatches(Batching):
    """A batching for rows of several lengths, in which all ranks use rows of the same bucket at the same time.

    A bucket is a pack capacity in tokens. A micro-batch has tokens_per_batch // bucket rows of one bucket. The last
    rows of a bucket, if too few for one more micro-batch on every rank, move to the next larger bucket. There, several
    of these leftover rows are joined to take the space of one row. If too few are left for the last joined row, or if
    the largest bucket has too few rows for its last micro-batches, copies of rows with masked labels are added. If all
    rows together do not fill one micro-batch on every rank, the micro-batches are smaller.

    Args:
        tokens_per_batch: tokens of a micro-batch; at least the largest bucket, ideally a multiple of every bucket.
        max_documents: the most documents that a micro-batch may have; None for no limit. Every segment of a packed row
            counts as a document. If any epoch could have more in a micro-batch, the dataset is refused.
        order: the order in which buckets are used: "random" or "short_to_long".
        cycles: number of times that an epoch goes from the smallest bucket to the largest; must be 1 for a "random"
            order.
        seed: seed that decides, together with the epoch, the random order and which rows share a micro-batch.

    Raises:
        PackingError: a bad argument, which the message names.

    Source:
        The batching follows arXiv 2407.07495. The cycles from short to long follow Dataset Decomposition, arXiv
        2405.13226.

    Example:
        >>> import numpy as np
        >>> from hf_packing.sampling.row_sizes import sizes_of_packs
        >>> sizes = sizes_of_packs(np.array([4, 4, 4, 3, 8]), np.arange(6), bucket=np.array([4, 4, 4, 4, 8]))
        >>> plan = BucketBatches(8).plan(sizes)
        >>> sorted(map(sorted, plan.micro_batches(rank=0)))[-1], plan.num_micro_batches
        ([(4, False)], 3)
    """

    tokens_per_batch: int
    max_documents: int | None = field(default=None, kw_only=True)
    order: BucketOrder = field(default="random", kw_only=True)
    cycles: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        if self.order not in get_args(BucketOrder):
            raise PackingError(f"order: expected one of {', '.join(get_args(BucketOrder))}, got {self.order!r}")
        self._set_checked(
            tokens_per_batch=check_whole_number("tokens_per_batch", self.tokens_per_batch),
            cycles=check_whole_number("cycles", self.cycles),
            seed=check_seed(self.seed),
        )
        if self.max_documents is not None:
            self._set_checked(max_documents=check_whole_number("max_documents", self.max_documents))
        if self.cycles > 1 and self.order == "random":
            raise PackingError(
                f"cycles: expected 1 with order='random', got {self.cycles}; several cycles need order='short_to_long'"
            )

    def fit(self, sizes: RowSizes) -> FittedRows:
        if sizes.bucket is None:
            raise PackingError(
                "dataset: expected a column 'bucket', got none; pack the dataset with Bucket or BucketByLength, which "
                "write this column, or use TokenBudget, which does not need this column"
            )
        if (sizes.tokens > sizes.bucket).any():
            row = int((sizes.tokens > sizes.bucket).argmax())
            raise PackingError(
                f"column 'bucket': expected at least the number of tokens in the row, but row {row} has "
                f"{sizes.tokens[row]} tokens and a bucket of {sizes.bucket[row]} tokens"
            )
        if (largest := int(sizes.bucket.max(initial=0))) > self.tokens_per_batch:
            raise PackingError(
                f"tokens_per_batch: expected at least {largest}, the capacity of the largest bucket, got "
                f"{self.tokens_per_batch}"
            )
        rows = keep_rows(sizes, sizes.tokens > 0)
        if self.max_documents is not None and (most := self._most_documents(rows)) > self.max_documents:
            raise PackingError(
                f"max_documents: expected at least {most}, the most documents that a micro-batch of "
                f"{self.tokens_per_batch} tokens may get from this dataset, got {self.max_documents}"
            )
        return rows

    def _most_documents(self, rows: FittedRows) -> int:
        """Return the number of documents that no micro-batch of any epoch exceeds."""
        assert rows.sizes.bucket is not None
        bucket_of_row, documents = rows.sizes.bucket[rows.kept], rows.sizes.segments[rows.kept]
        most = in_unit = 0
        for bucket in self._count_buckets(rows, world_size=1):
            in_row = int(documents[bucket_of_row == bucket.capacity].max())
            in_unit = max(in_row, in_unit)
            most = max(most, bucket.rows_each * in_unit)
            in_unit *= bucket.joined
        return most

    def num_micro_batches(self, rows: FittedRows, epoch: Epoch) -> int:
        return sum(bucket.rounds for bucket in self._count_buckets(rows, epoch.world_size))

    def plan_fitted(self, rows: FittedRows, epoch: Epoch) -> EpochPlan:
        seed = self.epoch_seed(epoch)
        buckets = self._count_buckets(rows, epoch.world_size)
        bucket_of_round = np.repeat(np.arange(len(buckets)), [bucket.rounds for bucket in buckets])
        rounds = list(chain.from_iterable(_fill_buckets(rows, buckets, epoch.world_size, seed)))
        order = self._order_of_rounds(bucket_of_round, seed)
        micro_batches = list(chain.from_iterable(rounds[number] for number in order.tolist()))
        sampled = np.array(list(chain.from_iterable(micro_batches)), dtype=np.int64).reshape(-1, 2)
        return EpochPlan(
            epoch.world_size,
            rows=sampled[:, 0].copy(),
            is_copy=sampled[:, 1].astype(bool),
            offsets=np.cumsum([0, *map(len, micro_batches)]),
            left_out=rows.left_out,
            bucket=np.array([bucket.capacity for bucket in buckets])[bucket_of_round[order]],
        )

    def _count_buckets(self, rows: FittedRows, world_size: int) -> list[_BucketCounts]:
        """Return the numbers of rows, units and rounds of every bucket, smallest bucket first."""
        assert rows.sizes.bucket is not None
        capacities, counts = np.unique(rows.sizes.bucket[rows.kept], return_counts=True)
        buckets: list[_BucketCounts] = []
        taken_over = 0
        for number, (capacity, own) in enumerate(zip(capacities.tolist(), counts.tolist(), strict=True)):
            rows_each = self.tokens_per_batch // capacity
            rounds, left = divmod(own + taken_over, rows_each * world_size)
            joined = 1
            if number == len(capacities) - 1:
                if not rounds and not any(bucket.rounds for bucket in buckets):
                    rows_each = -(-left // world_size)
                rounds, left = rounds + (left > 0), 0
            else:
                joined = int(capacities[number + 1]) // capacity
            buckets.append(_BucketCounts(capacity, rows_each, own, taken_over, rounds, left, joined))
            taken_over = -(-left // joined)
        return buckets

    def _order_of_rounds(self, bucket_of_round: IntArray, seed: int) -> IntArray:
        """Return the indices of all rounds in the order in which the rounds run, int64 [rounds].

        In a round, every rank runs one micro-batch.

        Args:
            bucket_of_round: int64 [rounds], ascending: the index of every round's bucket; 0 is the smallest bucket.
            seed: seed of the random order.
        """
        if self.order == "random":
            return random_order(len(bucket_of_round), seed, "order of steps")
        rounds = np.bincount(bucket_of_round)
        number = np.arange(len(bucket_of_round)) - np.repeat(np.cumsum(rounds) - rounds, rounds)
        return np.lexsort((bucket_of_round, number * self.cycles // rounds[bucket_of_round]))


def _fill_buckets(
    rows: FittedRows, buckets: list[_BucketCounts], world_size: int, seed: int
) -> Iterator[Iterator[_Round]]:
    """Yield, for every bucket, an iterator over the bucket's rounds. The smallest bucket comes first.

    A round is a list of micro-batches, one for each rank.
    """
    bucket_of_row = rows.sizes.bucket
    assert bucket_of_row is not None
    taken_over: list[_Unit] = []
    for bucket in buckets:
        own = rows.kept[bucket_of_row[rows.kept] == bucket.capacity]
        own = own[random_order(len(own), seed, f"rows of {bucket.capacity}")]
        units = taken_over + [[(row, False)] for row in own.tolist()]
        wanted = bucket.rounds * bucket.rows_each * world_size
        leftovers = [units[first : first + bucket.joined] for first in range(wanted, len(units), bucket.joined)]
        taken_over = [list(chain.from_iterable(_complete(left, bucket.joined, units))) for left in leftovers]
        yield _balance_ranks(_complete(units[:wanted], wanted, units), bucket, world_size, rows.sizes, seed)


def _complete(units: list[_Unit], number: int, others: list[_Unit]) -> list[_Unit]:
    """Return `number` units: the given units first, and then copies of units in `others`, with masked labels."""
    copied = (others[place % len(others)] for place in range(number - len(units)))
    return units + [[(row, True) for row, _ in unit] for unit in copied]


def _balance_ranks(
    units: list[_Unit], bucket: _BucketCounts, world_size: int, sizes: RowSizes, seed: int
) -> Iterator[_Round]:
    """Yield the rounds of one bucket. In a round, the micro-batches of all ranks have about equal attention cost."""
    if not units:
        return
    squared_lengths = sum_rows([[row for row, _ in unit] for unit in units], sizes.squared_lengths)
    cost = jitter_attention(squared_lengths, seed)
    # `balance` gets units in place of micro-batches, and the units of one micro-batch in place of an optimizer step
    places = balance(cost, world_size, bucket.rows_each, seed).reshape(bucket.rounds, bucket.rows_each, world_size)
    for of_round in places.transpose(0, 2, 1).tolist():
        yield [list(chain.from_iterable(units[place] for place in of_rank)) for of_rank in of_round]
