"""The batches of one rank in a loop of one's own, with their share in the loss of a whole step."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader

from hf_packing.errors import PackingError
from hf_packing.planning.lengths import check_whole_number
from hf_packing.sampling.epoch_plan import EpochPlan
from hf_packing.sampling.sampled_rows import SampledRows
from hf_packing.sampling.sampler import RankBatchSampler
from hf_packing.training.agreement import PlannedFrom, on_all_ranks
from hf_packing.training.losses import Loss, exact_type, items_in, with_share
from hf_packing.training.progress import LOSS, check_same_loss
from hf_packing.training.ranks import check_accelerator

Batch = dict[str, Any]

OF_DATALOADER = ("sampler", "batch_sampler", "batch_size", "drop_last", "collate_fn")
"""What accelerate's skip_first_batches and prepare_data_loader ask of a DataLoader, to make another one of it."""


class NotADataLoaderError(PackingError, AttributeError):
    """So that hasattr says no, and everything else why."""


class PackedLoader(DataLoaderStateMixin):  # type: ignore[misc]  # accelerate has no types
    """Batches of one rank, on its device; made by `prepare_dataloader`.

    Iterating over it is one epoch, and the next iteration the next one. Its state is (epoch, step):
    `accelerator.save_state` saves it, and after `accelerator.load_state` the next iteration goes on at that step,
    without reading what comes before.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        loader: DataLoader[Batch],
        sampler: RankBatchSampler,
        loss: Loss,
        keep_labels: bool,
    ) -> None:
        self.accelerator = accelerator
        self.loader = loader
        assert isinstance(loader.dataset, SampledRows)
        self.dataset = loader.dataset
        self.batches = sampler
        self.loss = loss
        self.keep_labels = keep_labels
        self.gradient_state = GradientState()
        self.epoch = 0
        """Which epoch the next iteration is about."""
        self.step = 0
        """Batches of this epoch that were yielded."""
        self.begin_at = 0

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def plan(self) -> EpochPlan:
        """The batches of all ranks in this epoch."""
        self.batches.set_epoch(self.epoch)
        return self.batches.plan

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; without it the loader counts them itself."""
        if epoch != self.epoch:
            self.epoch, self.step, self.begin_at = check_whole_number("epoch", epoch, minimum=0), 0, 0

    def skip_first_batches(self, batches: int) -> None:
        """Begin the next iteration at this batch of the epoch; after `accelerator.load_state` that needs no telling.

        Args:
            batches: of this rank, from the beginning of the epoch, whole steps of the optimiser.

        Raises:
            PackingError: more than an epoch has, or a part of a step.
        """
        batches = check_whole_number("batches", batches, minimum=0, maximum=len(self))
        if batches % self.batches.accumulation and batches < len(self):
            raise PackingError(
                f"batches: expected a multiple of the {self.batches.accumulation} that a step of the optimiser "
                f"accumulates, got {batches}"
            )
        self.step = self.begin_at = batches

    def __getattr__(self, name: str) -> Any:
        if name not in OF_DATALOADER:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise NotADataLoaderError(
            f"{name}: expected a DataLoader of torch, got a PackedLoader, which has its own batches, ready on every "
            "rank. Iterate over it as it is, without accelerate's prepare_data_loader. After accelerator.load_state it "
            "goes on where it was; loader.skip_first_batches(n) begins elsewhere, in place of accelerate's"
        )

    def __iter__(self) -> Iterator[Batch]:
        on_all_ranks(self.check_nothing_changed)
        if self.gradient_state.active_dataloader is None:  # else another loader is in the middle of its steps
            self.accelerator.step = 0
        self.batches.set_epoch(self.epoch)
        self.batches.first_micro_batch = self.step = self.begin_at
        self.begin_at = 0
        self.begin()
        try:
            self.loader.generator.manual_seed(self.epoch)
            batches = iter(self.loader)
            while together := list(islice(batches, self.left_of_update())):
                together = [send_to_device(batch, self.accelerator.device) for batch in together]
                items = self.items(together)
                for batch in together:
                    self.step += 1
                    self.end_of_dataloader = self.step == len(self)
                    yield with_share(batch, self.loss, items, self.keep_labels)
        finally:
            if self.step == len(self):
                self.epoch, self.step = self.epoch + 1, 0
            self.batches.first_micro_batch = 0
            self.end()

    def check_nothing_changed(self, _: PlannedFrom) -> None:
        """Steps of the optimiser have as many batches as were planned for them, and the dataset as many rows.

        Raises:
            PackingError: accelerate accumulates another number of batches now, or would cut batches; rows came or went.
        """
        check_accelerator(self.accelerator)
        self.dataset.check_num_rows()
        accumulated = self.accelerator.gradient_accumulation_steps
        if accumulated != self.batches.accumulation:
            raise PackingError(
                f"gradient_accumulation_steps: expected {self.batches.accumulation}, as when prepare_dataloader was "
                f"called, got {accumulated}, which DeepSpeed may have set; give Accelerator the same"
            )

    def left_of_update(self) -> int:
        """Batches until the next update of the optimiser."""
        return self.batches.accumulation - self.step % self.batches.accumulation

    def items(self, batches: list[Batch]) -> torch.Tensor:
        """What the losses of these batches are divided by, so that accelerate's averages make them a mean of all."""
        here = torch.stack([items_in(batch, self.loss) for batch in batches]).sum()
        everywhere = self.accelerator.reduce(here, reduction="sum").clamp(min=1)
        averaged_over = self.accelerator.num_processes * self.accelerator.gradient_accumulation_steps
        share: torch.Tensor = everywhere.to(exact_type(everywhere.device)) / averaged_over
        return share

    def state_dict(self) -> dict[str, Any]:
        """Where it is: the epoch, the batches yielded of it, and what decides which batches those are.

        Raises:
            PackingError: between two updates of the optimiser, where no checkpoint has the gradients of the first.
        """
        if self.step % self.batches.accumulation and self.step != len(self) and not self.accelerator.sync_gradients:
            raise PackingError(
                f"step: expected a checkpoint after {self.batches.accumulation} accumulated batches, got one after "
                f"{self.step % self.batches.accumulation}"
            )
        done = self.step == len(self)
        return {
            "epoch": self.epoch + done,
            "step": 0 if done else self.step,
            **self.batches.plan_inputs(),
            LOSS: self.loss,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state.

        Raises:
            PackingError: the state of other batches: another dataset, batching or loss, or in the middle of an epoch
                another accumulation or number of ranks.
        """
        if missing := {"epoch", "step"} - state.keys():
            raise PackingError(f"state: expected one that state_dict returned, it has no {min(missing)!r}")
        self.batches.check_can_resume(state, whole_epochs=not state["step"])
        check_same_loss(state, self.loss)
        self.epoch, self.step, self.begin_at = state["epoch"], state["step"], state["step"]
