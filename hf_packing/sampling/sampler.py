"""The micro-batches of one rank, epoch after epoch: what a DataLoader takes as its batch_sampler.

It is no subclass of torch's BatchSampler and has no batch_size: accelerate would take it for batches of one size, and
lose rows.
"""

from collections.abc import Iterator

from hf_packing.errors import PackingError
from hf_packing.planning.lengths import check_whole_number
from hf_packing.sampling.batching import MAX_RANKS, Batching, check_batching, check_sizes
from hf_packing.sampling.epoch_plan import EpochPlan
from hf_packing.sampling.sizes import RowSizes

PLANS = 2
"""Counted up whenever the same arguments begin to give other micro-batches, so that no old run goes on with them."""


class RankBatchSampler:
    """The micro-batches of one rank in the current epoch, as lists of rows; ~row for a copy whose labels are masked.

    Args:
        batching: TokenBudget or BucketBatches.
        sizes: of all rows of the dataset.
        world_size: ranks.
        rank: this one.
        accumulation: steps between two updates of the optimiser.

    Raises:
        PackingError: fewer rows than ranks, or a row longer than a micro-batch.

    Example:
        >>> import numpy as np
        >>> from hf_packing.sampling.sizes import sizes_of_documents
        >>> from hf_packing.sampling.token_budget import TokenBudget
        >>> sampler = RankBatchSampler(TokenBudget(8), sizes_of_documents(np.array([5, 3, 2, 6])), 2, 0)
        >>> len(sampler), len(list(sampler))
        (1, 1)
    """

    def __init__(
        self, batching: Batching, sizes: RowSizes, world_size: int = 1, rank: int = 0, accumulation: int = 1
    ) -> None:
        self.batching = check_batching(batching)
        self.sizes = check_sizes(sizes)
        self.world_size = check_whole_number("world_size", world_size, maximum=MAX_RANKS)
        self.rank = check_whole_number("rank", rank, minimum=0, maximum=self.world_size - 1)
        self.accumulation = check_whole_number("accumulation", accumulation)
        self.cut = batching.cut(sizes)
        batching.check_enough_rows(self.cut, self.world_size)
        self.steps = batching.steps_per_epoch(self.cut, self.world_size, self.accumulation)
        self.epoch = 0
        self.first_step = 0
        """Where the next iteration begins; what comes before is skipped without reading anything."""
        self.planned: tuple[int, EpochPlan] | None = None

    def __len__(self) -> int:
        return self.steps

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next iteration is about."""
        self.epoch = check_whole_number("epoch", epoch, minimum=0)

    @property
    def plan(self) -> EpochPlan:
        """Of all ranks in the current epoch."""
        if self.planned is None or self.planned[0] != self.epoch:
            plan = self.batching.plan_cut(self.cut, self.steps, self.epoch, self.world_size, self.accumulation)
            self.planned = self.epoch, plan
        return self.planned[1]

    def __iter__(self) -> Iterator[list[int]]:
        return self.plan.micro_batches(self.rank, self.first_step)

    def what_decides(self) -> dict[str, str | int]:
        """Everything that the micro-batches depend on, apart from the epoch."""
        return {
            "plans": PLANS,
            "batching": repr(self.batching),
            "dataset": self.sizes.fingerprint,
            "world_size": self.world_size,
            "accumulation": self.accumulation,
        }

    def check_same(self, saved: dict[str, str | int], whole_epochs: bool = False) -> None:
        """Refuse to go on from a state that other micro-batches led to.

        Args:
            saved: what `what_decides` returned when the state was saved.
            whole_epochs: whether all rows of an epoch were used, after which any number of ranks may take over.

        Raises:
            PackingError: naming what is different.
        """
        now = self.what_decides()
        free = {"world_size", "accumulation"} if whole_epochs else set()
        for name, value in now.items():
            if name not in free and saved.get(name) != value:
                raise PackingError(
                    f"{name}: expected {saved.get(name)!r}, as when the checkpoint was saved, got {value!r}; "
                    "otherwise some rows would be trained on twice and others not at all"
                )
