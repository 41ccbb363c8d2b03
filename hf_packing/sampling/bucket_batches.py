"""BucketBatches, a batching in which all ranks use rows of the same bucket at the same time."""

from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Literal, NamedTuple

import numpy as np

from hf_packing.checks import check_choice, check_whole_number, set_fields
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray, indices_in_ranges
from hf_packing.planning.permutation import random_order
from hf_packing.sampling.batching import Batching, Epoch, EpochPlan, FittedRows, keep_rows
from hf_packing.sampling.fill import (
    MicroBatches,
    assign_ranks,
    flatten,
    group_by_cost,
    jitter_attention,
    rounds_of_steps,
    sum_rows,
)
from hf_packing.sampling.sizes import RowSizes

BucketOrder = Literal["random", "short_to_long"]

_Units = list[list[int]]
"""The rows of each unit, which take the space of one row of a bucket: a row of this bucket, or leftovers of smaller
buckets. A copy of a row with masked labels has the number of the row plus the number of rows in the dataset."""


class _Bucket(NamedTuple):
    """A bucket that has rows, and how its units make micro-batches."""

    capacity: int
    """The most tokens that a row of the bucket may hold."""
    rows_each: int
    """Number of units in each micro-batch."""
    joined: int
    """Number of leftover units that are joined to make one unit of the next larger bucket; 1 in the largest."""


@dataclass(frozen=True)
class BucketBatches(Batching):
    """A batching for rows of several lengths, in which all ranks use rows of the same bucket at the same time.

    A bucket is a pack capacity in tokens. A micro-batch has tokens_per_batch // bucket rows of one bucket. All
    micro-batches of an optimizer step have the same bucket, on all ranks and in all accumulated rounds. The last rows
    of a bucket, if too few for one more step, move to the next larger bucket. There, several of these leftover rows are
    joined to take the space of one row. The last rows of the largest bucket are the last step of the epoch, with fewer
    micro-batches. If too few are left for the last joined row or for the last micro-batches, copies of rows with masked
    labels are added. If all rows together do not fill one micro-batch on every rank, the micro-batches are smaller.

    The documents of an optimizer step depend on the product of ranks and accumulation, but not on these two numbers.

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
        >>> from hf_packing.sampling.sizes import sizes_of_packs
        >>> sizes = sizes_of_packs(np.array([4, 4, 4, 3, 8]), np.arange(6), bucket=np.array([4, 4, 4, 4, 8]))
        >>> plan = BucketBatches(8).plan(sizes)
        >>> sorted(map(sorted, plan.micro_batches(rank=0)))[-1], plan.num_micro_batches
        ([(4, False)], 3)
    """

    tokens_per_batch: int
    order: BucketOrder = field(default="random", kw_only=True)
    cycles: int = field(default=1, kw_only=True)

    @property
    def most_tokens(self) -> int:
        return self.tokens_per_batch

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("order", self.order, BucketOrder)
        set_fields(
            self,
            tokens_per_batch=check_whole_number("tokens_per_batch", self.tokens_per_batch),
            cycles=check_whole_number("cycles", self.cycles),
        )
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
        for bucket in self._buckets(rows):
            in_row = int(documents[bucket_of_row == bucket.capacity].max())
            in_unit = max(in_row, in_unit)
            most = max(most, bucket.rows_each * in_unit)
            in_unit *= bucket.joined
        return most

    def plan_fitted(self, rows: FittedRows, epoch: Epoch) -> EpochPlan:
        seed = self.epoch_seed(epoch)
        buckets = self._buckets(rows)
        steps, capacities, last_step = _fill_buckets(rows, buckets, epoch, seed)
        capacity = np.array(capacities, dtype=np.int64)
        order = self._order_of_steps(capacity, seed)
        planned, offsets = flatten([*chain.from_iterable(steps[number] for number in order.tolist()), *last_step])
        in_last_step = [buckets[-1].capacity] * (len(last_step) // epoch.world_size)
        return EpochPlan(
            epoch.world_size,
            rows=planned % len(rows.sizes),
            is_copy=planned >= len(rows.sizes),
            offsets=offsets,
            left_out=rows.left_out,
            bucket=np.append(np.repeat(capacity[order], epoch.accumulation), in_last_step).astype(np.int64),
        )

    def _buckets(self, rows: FittedRows) -> list[_Bucket]:
        """Return the buckets that have rows, smallest bucket first."""
        assert rows.sizes.bucket is not None
        capacities = np.unique(rows.sizes.bucket[rows.kept]).tolist()
        return [
            _Bucket(capacity, self.tokens_per_batch // capacity, larger // capacity)
            for capacity, larger in pairwise([*capacities, *capacities[-1:]])
        ]

    def _order_of_steps(self, capacity: IntArray, seed: int) -> IntArray:
        """Return the indices of all full optimizer steps in the order in which they run, int64 [steps].

        Args:
            capacity: int64 [steps], ascending: the capacity of every step's bucket.
            seed: seed of the random order.
        """
        if self.order == "random":
            return random_order(len(capacity), seed, "order of steps")
        _, steps = np.unique(capacity, return_counts=True)
        return np.lexsort((capacity, indices_in_ranges(0, steps) * self.cycles // np.repeat(steps, steps)))


def _fill_buckets(
    rows: FittedRows, buckets: list[_Bucket], epoch: Epoch, seed: int
) -> tuple[list[MicroBatches], list[int], MicroBatches]:
    """Return the micro-batches of full optimizer steps, smallest bucket first, their buckets, and the last step.

    The micro-batches of a step are ordered by round, then by rank.
    """
    assert rows.sizes.bucket is not None
    bucket_of_row, squared_lengths = rows.sizes.bucket[rows.kept], np.tile(rows.sizes.squared_lengths, 2)
    steps: list[MicroBatches] = []
    capacities: list[int] = []
    units: _Units = []
    left: _Units = []
    for bucket in buckets:
        own = rows.kept[bucket_of_row == bucket.capacity]
        own = own[random_order(len(own), seed, f"rows of {bucket.capacity}")]
        units = left + own[:, None].tolist()
        full = len(units) - len(units) % (bucket.rows_each * epoch.slots)
        if full:
            balanced = _balance(units[:full], bucket.rows_each, epoch.slots, squared_lengths, seed)
            steps += _in_rounds(balanced, epoch, squared_lengths, seed)
            capacities += [bucket.capacity] * (len(steps) - len(capacities))
        joined = [units[first : first + bucket.joined] for first in range(full, len(units), bucket.joined)]
        left = [list(chain.from_iterable(_complete(each, bucket.joined, units, rows))) for each in joined]
    if not left:
        return steps, capacities, []
    rows_each = buckets[-1].rows_each
    if not steps:
        rows_each = min(rows_each, -(-len(left) // epoch.world_size))
    in_round = rows_each * epoch.world_size
    filled_up = _complete(left, -(-len(left) // in_round) * in_round, units, rows)
    return steps, capacities, _balance(filled_up, rows_each, epoch.world_size, squared_lengths, seed)


def _in_rounds(micro_batches: MicroBatches, epoch: Epoch, squared_lengths: IntArray, seed: int) -> list[MicroBatches]:
    """Return the micro-batches of full optimizer steps for each step, ordered by round, then by rank."""
    cost = sum_rows(micro_batches, squared_lengths).astype(np.float64)
    steps = np.arange(len(micro_batches)).reshape(-1, epoch.slots)
    rounds = rounds_of_steps(steps, cost, len(micro_batches), epoch.world_size)
    assigned = assign_ranks(cost, rounds, epoch.accumulation, seed).reshape(-1, epoch.slots)
    return [[micro_batches[number] for number in of_step] for of_step in assigned.tolist()]


def _complete(units: _Units, number: int, others: _Units, rows: FittedRows) -> _Units:
    """Return `number` units: the given units first, and then copies of units in `others`, with masked labels."""
    copied = (others[place % len(others)] for place in range(number - len(units)))
    return units + [[row % len(rows.sizes) + len(rows.sizes) for row in unit] for unit in copied]


def _balance(units: _Units, rows_each: int, group: int, squared_lengths: IntArray, seed: int) -> MicroBatches:
    """Put the units of one bucket into micro-batches; each `group` successive ones have about equal attention cost.

    Args:
        units: the units; their number is a multiple of rows_each * group.
        rows_each: number of units in each micro-batch.
        group: number of micro-batches in a step, or of those that run at the same time.
        squared_lengths: int64 [rows and copies]: the attention cost of each row, and again of its copy.
        seed: seed of the order, and of the choice among units of equal cost.
    """
    cost = jitter_attention(sum_rows(units, squared_lengths), seed)
    # units stand in place of micro-batches here, and the units of one micro-batch in place of an optimizer step
    places = assign_ranks(cost, group_by_cost(cost, group, seed), rows_each, seed).reshape(-1, rows_each, group)
    of_micro_batch = places.transpose(0, 2, 1).reshape(-1, rows_each).tolist()
    return [list(chain.from_iterable(units[place] for place in each)) for each in of_micro_batch]
