"""Every rank in the same bucket at the same step, with as many rows as make the tokens of a step constant."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import numpy as np

from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray, check_whole_number
from hf_packing.planning.permutation import check_seed, random_order
from hf_packing.sampling.batching import Batching
from hf_packing.sampling.epoch_plan import EpochPlan, as_copies, plan_of, rows_of
from hf_packing.sampling.level import level, nearly
from hf_packing.sampling.pieces import Cut, whole_rows
from hf_packing.sampling.sizes import RowSizes

BucketOrder = Literal["random", "short_to_long"]


class BucketSteps(NamedTuple):
    """How the rows of a bucket, and what smaller ones left over, become steps."""

    capacity: int
    """tokens a row of the bucket may hold."""
    rows_each: int
    """Rows of a micro-batch."""
    rows: int
    """Of the bucket itself."""
    taken_over: int
    """As many more as the leftovers of the next smaller bucket make."""
    steps: int
    left: int
    """Rows left over, for the next larger bucket."""
    joined: int
    """How many rows left over make one row of the next larger bucket."""


@dataclass(frozen=True)
class BucketBatches(Batching):
    """Micro-batches whose rows are of one bucket, the same on every rank, with the same tokens at every step.

    A micro-batch has tokens_per_batch // bucket rows. Rows of a bucket that make no whole step move to the next larger
    one, joined to rows of its size. Copies with masked labels complete what they are joined to, and the last step of
    the largest bucket; where all rows together make no whole step, that one is as small as they are.

    Args:
        tokens_per_batch: tokens of a micro-batch; at least the largest bucket, best a multiple of all of them.
        order: of the buckets: "random", step by step, or "short_to_long".
        cycles: how often the way from short to long is gone in an epoch.
        seed: with the epoch it decides the order.

    Raises:
        PackingError: a bad argument, which is named.

    Source:
        The sampler of arXiv 2407.07495; short to long in cycles: Dataset Decomposition, arXiv 2405.13226.

    Example:
        >>> import numpy as np
        >>> from hf_packing.sampling.sizes import sizes_of_packs
        >>> sizes = sizes_of_packs(np.array([4, 4, 4, 3, 8]), np.arange(6), bucket=np.array([4, 4, 4, 4, 8]))
        >>> plan = BucketBatches(8).plan_epoch(sizes)
        >>> sorted(map(sorted, plan.micro_batches(rank=0)))[-1], plan.num_steps
        ([4], 3)
    """

    tokens_per_batch: int
    order: BucketOrder = field(default="random", kw_only=True)
    cycles: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        if self.order not in get_args(BucketOrder):
            raise PackingError(f"order: expected one of {', '.join(get_args(BucketOrder))}, got {self.order!r}")
        self.settle(
            tokens_per_batch=check_whole_number("tokens_per_batch", self.tokens_per_batch),
            cycles=check_whole_number("cycles", self.cycles),
            seed=check_seed(self.seed),
        )
        if self.cycles > 1 and self.order == "random":
            raise PackingError(
                f"cycles: expected 1 with order='random', got {self.cycles}; order='short_to_long' has cycles"
            )

    def cut(self, sizes: RowSizes) -> Cut:
        if sizes.bucket is None:
            raise PackingError(
                "dataset: expected a column 'bucket', as rows have that were packed with Bucket or BucketByLength; "
                "TokenBudget takes rows without"
            )
        if (sizes.tokens > sizes.bucket).any():
            row = int((sizes.tokens > sizes.bucket).argmax())
            raise PackingError(
                f"column 'bucket': expected at least the tokens of its row, row {row} has {sizes.tokens[row]} in a "
                f"bucket of {sizes.bucket[row]}"
            )
        if (largest := int(sizes.bucket.max(initial=0))) > self.tokens_per_batch:
            raise PackingError(
                f"tokens_per_batch: expected at least the largest bucket, {largest} tokens, got {self.tokens_per_batch}"
            )
        return whole_rows(sizes, sizes.tokens > 0)

    def steps_per_epoch(self, cut: Cut, world_size: int, accumulation: int) -> int:  # noqa: ARG002
        return sum(bucket.steps for bucket in self.buckets(cut, world_size))

    def buckets(self, cut: Cut, world_size: int) -> list[BucketSteps]:
        """The buckets, the smallest first; how many rows go where depends on no seed."""
        assert cut.sizes.bucket is not None
        capacities, counts = np.unique(cut.sizes.bucket[cut.kept], return_counts=True)
        buckets: list[BucketSteps] = []
        taken_over = 0
        for number, (capacity, rows) in enumerate(zip(capacities.tolist(), counts.tolist(), strict=True)):
            rows_each = self.tokens_per_batch // capacity
            per_step = rows_each * world_size
            steps, left = divmod(rows + taken_over, per_step)
            joined = 1
            if number == len(capacities) - 1:
                if not steps and not any(bucket.steps for bucket in buckets):
                    rows_each = -(-left // world_size)
                steps, left = steps + (left > 0), 0
            else:
                joined = int(capacities[number + 1]) // capacity
            buckets.append(BucketSteps(capacity, rows_each, rows, taken_over, steps, left, joined))
            taken_over = -(-left // joined)
        return buckets

    def plan_cut(
        self,
        cut: Cut,
        steps: int,  # noqa: ARG002
        epoch: int,
        world_size: int,
        accumulation: int,  # noqa: ARG002
    ) -> EpochPlan:
        seed = self.epoch_seed(epoch)
        by_bucket = [list(of_bucket) for of_bucket in self.steps_of_buckets(cut, world_size, seed)]
        capacities = [bucket.capacity for bucket in self.buckets(cut, world_size)]
        in_bucket = np.repeat(np.arange(len(by_bucket)), [len(of_bucket) for of_bucket in by_bucket])
        order = self.order_of_steps(in_bucket, seed)
        all_steps = [step for of_bucket in by_bucket for step in of_bucket]
        micro_batches = [rows for number in order.tolist() for rows in all_steps[number]]
        rows, offsets = np.concatenate(micro_batches), np.cumsum([0, *map(len, micro_batches)])
        in_order = np.arange(len(micro_batches))
        return plan_of(rows, offsets, in_order, world_size, cut.left_out, np.array(capacities)[in_bucket[order]])

    def order_of_steps(self, in_bucket: IntArray, seed: int) -> IntArray:
        """int64 [steps]: the order of steps that are in these buckets, counted from the smallest."""
        if self.order == "random":
            return random_order(len(in_bucket), seed, "order of steps")
        steps = np.bincount(in_bucket)
        number = np.arange(len(in_bucket)) - np.repeat(np.cumsum(steps) - steps, steps)
        return np.lexsort((in_bucket, number * self.cycles // steps[in_bucket]))

    def steps_of_buckets(self, cut: Cut, world_size: int, seed: int) -> Iterator[Iterator[list[IntArray]]]:
        """For each bucket its steps, each a list of the rows of every rank."""
        assert cut.sizes.bucket is not None
        taken_over: list[IntArray] = []
        for bucket in self.buckets(cut, world_size):
            own = cut.kept[cut.sizes.bucket[cut.kept] == bucket.capacity]
            own = own[random_order(len(own), seed, f"rows of {bucket.capacity}")]
            units = [*taken_over, *own[:, None]]
            wanted = bucket.steps * bucket.rows_each * world_size
            joined = [units[first : first + bucket.joined] for first in range(wanted, len(units), bucket.joined)]
            taken_over = [np.concatenate(completed(unit, bucket.joined, units)) for unit in joined]
            yield dealt(completed(units[:wanted], wanted, units), bucket, world_size, cut.sizes, seed)


def completed(units: list[IntArray], number: int, others: list[IntArray]) -> list[IntArray]:
    """As many units as wanted, the missing ones copies of others."""
    return units + [as_copies(others[place % len(others)]) for place in range(number - len(units))]


def dealt(
    units: list[IntArray], bucket: BucketSteps, world_size: int, sizes: RowSizes, seed: int
) -> Iterator[list[IntArray]]:
    """The steps of a bucket: attention levelled across ranks."""
    if not units:
        return
    squares = np.array([sizes.squares[rows_of(unit)].sum() for unit in units])
    cost = nearly(squares, seed)
    places = level(cost, world_size, bucket.rows_each, seed).reshape(bucket.steps, bucket.rows_each, world_size)
    for step in places:
        yield [np.concatenate([units[place] for place in step[:, rank]]) for rank in range(world_size)]
