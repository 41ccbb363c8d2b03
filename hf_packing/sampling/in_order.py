"""Rows in the order of the dataset, so many to a micro-batch: for evaluation."""

from dataclasses import dataclass

import numpy as np

from hf_packing.planning.lengths import check_whole_number
from hf_packing.sampling.batching import Batching
from hf_packing.sampling.epoch_plan import EpochPlan, as_copies
from hf_packing.sampling.pieces import Cut, whole_rows
from hf_packing.sampling.sizes import RowSizes


@dataclass(frozen=True)
class InOrder(Batching):
    """Micro-batches of rows_per_batch rows, dealt to the ranks in turn; what is missing are copies with masked labels.

    Args:
        rows_per_batch: rows of a micro-batch.

    Example:
        >>> import numpy as np
        >>> from hf_packing.sampling.sizes import sizes_of_documents
        >>> plan = InOrder(2).plan_epoch(sizes_of_documents(np.array([5, 3, 2])), world_size=2)
        >>> plan.micro_batch(step=0, rank=1), plan.num_copies
        ([2, -1], 1)
    """

    rows_per_batch: int

    def __post_init__(self) -> None:
        self.settle(rows_per_batch=check_whole_number("rows_per_batch", self.rows_per_batch))

    def cut(self, sizes: RowSizes) -> Cut:
        return whole_rows(sizes, sizes.tokens > 0)

    def check_enough_rows(self, cut: Cut, world_size: int) -> None:  # noqa: ARG002
        """One row is enough, of which other ranks have copies."""
        super().check_enough_rows(cut, world_size=1)

    def steps_per_epoch(self, cut: Cut, world_size: int, accumulation: int) -> int:  # noqa: ARG002
        return -(-len(cut.kept) // (self.rows_per_batch * world_size))

    def plan_cut(
        self,
        cut: Cut,
        steps: int,
        epoch: int,  # noqa: ARG002
        world_size: int,
        accumulation: int,  # noqa: ARG002
    ) -> EpochPlan:
        rows = steps * world_size * self.rows_per_batch
        missing = as_copies(np.resize(cut.kept, rows - len(cut.kept)))
        return EpochPlan(
            world_size,
            np.concatenate([cut.kept, missing]),
            np.arange(0, rows + 1, self.rows_per_batch),
            cut.left_out,
        )
