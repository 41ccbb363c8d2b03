"""BucketBatches, a batching in which all ranks use rows of the same bucket at the same time."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from itertools import chain, cycle, islice
from typing import Literal

import numpy as np

from hf_packing.checks import check_choice, check_whole_number, expect, set_fields
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
    order_in_steps,
    sum_rows,
)
from hf_packing.sampling.sizes import RowSizes

BucketOrder = Literal["random", "short_to_long"]

_Step = tuple[int, MicroBatches]
"""The bucket of an optimizer step, and its micro-batches, which are made of units. A unit takes the space of one row of
the bucket: a row of this bucket, or leftovers of smaller buckets. A copy of a row with masked labels has the number of
the row plus the number of rows in the dataset."""


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
        align_tokens: a multiple that micro-batches are filled up to; see TokenBudget.
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
    _: KW_ONLY
    order: BucketOrder = "random"
    cycles: int = 1

    @property
    def most_tokens(self) -> int:
        return self.aligned("tokens_per_batch")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("order", self.order, BucketOrder)
        set_fields(
            self,
            tokens_per_batch=check_whole_number("tokens_per_batch", self.tokens_per_batch),
            cycles=check_whole_number("cycles", self.cycles),
        )
        self.aligned("tokens_per_batch")
        if self.order == "random":
            expect(1, "with order='random', since several cycles need order='short_to_long'", cycles=self.cycles)

    def fit(self, sizes: RowSizes) -> FittedRows:
        if sizes.bucket is None:
            raise PackingError(
                "dataset: expected a column 'bucket', got none; pack the dataset with Bucket or BucketByLength, which "
                "write this column, or use TokenBudget, which does not need this column"
            )
        too_long = sizes.tokens > sizes.bucket
        if too_long.any():
            row = int(too_long.argmax())
            raise PackingError(
                f"column 'bucket': expected at least the number of tokens in the row, but row {row} has "
                f"{sizes.tokens[row]} tokens and a bucket of {sizes.bucket[row]} tokens"
            )
        largest = int(sizes.bucket.max(initial=0))
        self.check_holds("tokens_per_batch", largest, "the capacity of the largest bucket")
        rows = keep_rows(sizes, sizes.tokens > 0)
        if self.max_documents is not None and (most := self._most_documents(rows)) > self.max_documents:
            raise PackingError(
                f"max_documents: expected at least {most}, the most documents that a micro-batch of "
                f"{self.tokens_per_batch} tokens may get from this dataset, got {self.max_documents}"
            )
        return rows

    def _most_documents(self, rows: FittedRows) -> int:
        """Return the number of documents that no micro-batch of any epoch exceeds."""
        most = in_unit = 0
        for capacity, joined, own in _buckets(rows):
            in_unit = max(in_unit, int(rows.sizes.segments[own].max()))
            most = max(most, self.most_tokens // capacity * in_unit)
            in_unit *= joined
        return most

    def plan_fitted(self, rows: FittedRows, epoch: Epoch) -> EpochPlan:
        seed = self.epoch_seed(epoch)
        steps, last_step = self._steps(rows, epoch, seed)
        order = self._order_of_steps(np.array([capacity for capacity, _ in steps], dtype=np.int64), seed)
        capacities, micro_batches = zip(*(steps[number] for number in order.tolist()), *last_step, strict=True)
        planned, offsets = flatten([*chain.from_iterable(micro_batches)])
        return EpochPlan(
            epoch.world_size,
            rows=planned % len(rows.sizes),
            is_copy=planned >= len(rows.sizes),
            offsets=offsets,
            left_out=rows.left_out,
            bucket=np.repeat(capacities, [len(of_step) // epoch.world_size for of_step in micro_batches]),
        )

    def _steps(self, rows: FittedRows, epoch: Epoch, seed: int) -> tuple[list[_Step], list[_Step]]:
        """Return the full optimizer steps, smallest bucket first, and a list of the last step, if there is one.

        The micro-batches of a step are ordered by round, then by rank.
        """
        squared_lengths = np.tile(rows.sizes.squared_lengths, 2)
        steps: list[_Step] = []
        left: MicroBatches = []
        for capacity, joined, own in _buckets(rows):
            units = left + own[random_order(len(own), seed, f"rows of {capacity}")][:, None].tolist()
            rows_each = self.most_tokens // capacity
            full = len(units) - len(units) % (rows_each * epoch.slots)
            if full:
                balanced = _balance(units[:full], rows_each, epoch.slots, squared_lengths, seed)
                cost = sum_rows(balanced, squared_lengths).astype(np.float64)
                of_steps = np.arange(len(balanced)).reshape(-1, epoch.slots)
                order = order_in_steps(of_steps, cost, len(balanced), epoch.world_size, seed)
                by_step = order.reshape(-1, epoch.slots).tolist()
                steps += [(capacity, [balanced[number] for number in of_step]) for of_step in by_step]
            rest = _fill_up(units[full:], joined, units, len(rows.sizes))
            left = [list(chain(*rest[first : first + joined])) for first in range(0, len(rest), joined)]
        if not left:
            return steps, []
        if not steps:
            rows_each = min(rows_each, -(-len(left) // epoch.world_size))
        filled_up = _fill_up(left, rows_each * epoch.world_size, units, len(rows.sizes))
        return steps, [(capacity, _balance(filled_up, rows_each, epoch.world_size, squared_lengths, seed))]

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


def _buckets(rows: FittedRows) -> Iterator[tuple[int, int, IntArray]]:
    """Yield the capacity and the rows of each bucket, smallest bucket first.

    Between them is the number of leftover units that are joined to take the space of one row of the next larger bucket;
    1 for the largest bucket.
    """
    assert rows.sizes.bucket is not None
    bucket = rows.sizes.bucket[rows.kept]
    capacities = np.unique(bucket).tolist()
    for capacity, larger in zip(capacities, [*capacities[1:], capacities[-1]], strict=True):
        yield capacity, larger // capacity, rows.kept[bucket == capacity]


def _fill_up(units: MicroBatches, multiple: int, others: MicroBatches, num_rows: int) -> MicroBatches:
    """Add copies of units in `others`, with masked labels, until the number of units is a multiple of `multiple`."""
    copied = islice(cycle(others), -len(units) % multiple)
    return units + [[row % num_rows + num_rows for row in unit] for unit in copied]


def _balance(units: MicroBatches, rows_each: int, group: int, squared_lengths: IntArray, seed: int) -> MicroBatches:
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
