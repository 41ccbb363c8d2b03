"""What TokenBudget and BucketBatches have in common: a pure function from sizes to the micro-batches of an epoch."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from hf_packing.errors import PackingError
from hf_packing.planning.lengths import check_whole_number
from hf_packing.planning.permutation import derive_key
from hf_packing.sampling.epoch_plan import EpochPlan
from hf_packing.sampling.pieces import Cut
from hf_packing.sampling.sizes import RowSizes

MAX_RANKS = 2**20


@dataclass(frozen=True)
class Batching(ABC):
    """How rows share micro-batches."""

    seed: int = field(default=0, kw_only=True)

    @abstractmethod
    def cut(self, sizes: RowSizes) -> Cut:
        """Rows as this batching takes them, what is longer than a micro-batch cut."""

    @abstractmethod
    def steps_per_epoch(self, cut: Cut, world_size: int, accumulation: int) -> int:
        """Micro-batches of every rank, the same in every epoch."""

    @abstractmethod
    def plan_cut(self, cut: Cut, steps: int, epoch: int, world_size: int, accumulation: int) -> EpochPlan:
        """The micro-batches for rows that were cut to fit; steps as steps_per_epoch returns them."""

    def plan_epoch(self, sizes: RowSizes, *, epoch: int = 0, world_size: int = 1, accumulation: int = 1) -> EpochPlan:
        """The micro-batches of all ranks in one epoch.

        Args:
            sizes: of all rows, as `sizes_of(dataset)` returns them.
            epoch: from 0.
            world_size: ranks.
            accumulation: steps between two updates of the optimiser.

        Returns:
            EpochPlan; for the same arguments always the same, on any machine.

        Raises:
            PackingError: fewer rows than ranks, a row longer than a micro-batch, or no buckets where there must be.
        """
        epoch = check_whole_number("epoch", epoch, minimum=0)
        world_size = check_whole_number("world_size", world_size, maximum=MAX_RANKS)
        accumulation = check_whole_number("accumulation", accumulation)
        cut = self.cut(check_sizes(sizes))
        self.check_enough_rows(cut, world_size)
        steps = self.steps_per_epoch(cut, world_size, accumulation)
        return self.plan_cut(cut, steps, epoch, world_size, accumulation)

    def check_enough_rows(self, cut: Cut, world_size: int) -> None:
        """Refuse where some rank would have nothing to do."""
        if len(cut.kept) >= world_size:
            return
        without = f"; {len(cut.left_out)} are empty or dropped" if len(cut.left_out) else ""
        raise PackingError(
            f"dataset: expected at least one row for each of {world_size} ranks, got {len(cut.kept)} rows{without}"
        )

    def settle(self, **values: Any) -> None:
        """Set fields of the frozen instance to their checked values."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def epoch_seed(self, epoch: int) -> int:
        """A seed for each epoch."""
        return int(derive_key(self.seed, f"epoch {epoch}")) >> 1


def check_sizes(sizes: Any) -> RowSizes:
    if not isinstance(sizes, RowSizes):
        raise PackingError(f"sizes: expected RowSizes, as sizes_of(dataset) returns, got {type(sizes).__name__}")
    return sizes


def check_batching(batching: Any) -> Batching:
    if not isinstance(batching, Batching):
        hint = (
            f"; did you forget its arguments, as in {batching.__name__}(16384)?" if isinstance(batching, type) else ""
        )
        raise PackingError(f"batching: expected TokenBudget(...) or BucketBatches(...), got {batching!r}{hint}")
    return batching
