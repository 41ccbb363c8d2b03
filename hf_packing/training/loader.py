"""Loaders of one rank: a DataLoader for a sampler's micro-batches, and PackedLoader for your own training loop."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState
from accelerate.utils import send_to_device
from torch import nn
from torch.utils.data import DataLoader

from hf_packing.attention import inner_model
from hf_packing.columns import TOKEN_TYPE_IDS
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import check_whole_number
from hf_packing.sampling.epoch_plan import EpochPlan
from hf_packing.sampling.sampled_rows import SampledRows
from hf_packing.sampling.sampler import RankBatchSampler
from hf_packing.training.checks import check_accelerator
from hf_packing.training.losses import Loss, collator_for, exact_type, items_in, with_share
from hf_packing.training.ranks import LOSS, PlannedFrom, check_same_loss, on_all_ranks

Batch = dict[str, Any]

_OF_DATALOADER = ("sampler", "batch_sampler", "batch_size", "drop_last", "collate_fn")
"""Attributes of a DataLoader from which accelerate's skip_first_batches and prepare_data_loader build a new loader."""


def rows_loader(
    dataset: Any,
    sampler: RankBatchSampler,
    model: nn.Module | None = None,
    *,
    unread: Sequence[str] = (),
    apply_masks: bool = True,
    **options: Any,
) -> DataLoader[Batch]:
    """Return a DataLoader of the sampler's micro-batches.

    Args:
        dataset: the map-style dataset that the sampler was made for.
        sampler: the sampler of this rank.
        model: the model that will run the batches, or None.
        unread: names of columns to leave out of the rows.
        apply_masks: whether to make labels from loss masks for rows without labels.
        options: further arguments of DataLoader; collate_fn defaults to `collator_for(model)`. Worker seeds come from a
            separate generator, since drawing the seeds from the global generator would change dropout after a resume.
    """
    has_token_types = model is None or bool(getattr(inner_model(model).config, "type_vocab_size", 0))
    unread = [*unread, *([] if has_token_types else [TOKEN_TYPE_IDS])]  # other models use this column differently
    return DataLoader(
        SampledRows(dataset, sampler, unread, apply_masks),
        batch_sampler=sampler,
        **{"collate_fn": collator_for(model), "generator": torch.Generator(), **options},
    )


class PackedLoader(DataLoaderStateMixin):  # type: ignore[misc]  # accelerate has no types
    """An iterable over the micro-batches of one rank, on the rank's device; `prepare_dataloader` returns this loader.

    Each iteration over the loader is one epoch. `accelerator.save_state` saves the loader's state, which is the epoch
    and the position within the epoch. After `accelerator.load_state`, the next iteration continues at the saved
    position without reading earlier rows.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        loader: DataLoader[Batch],
        sampler: RankBatchSampler,
        loss: Loss,
        keep_labels: bool,
    ) -> None:
        assert isinstance(loader.dataset, SampledRows)
        self.dataset = loader.dataset
        self.gradient_state = GradientState()
        self.epoch = 0
        """The epoch of the next iteration."""
        self.micro_batches_done = 0
        """The number of micro-batches of this epoch that were yielded or skipped."""
        self._begin_at = 0
        self._accelerator = accelerator
        self._loader = loader
        self._sampler = sampler
        self._loss = loss
        self._keep_labels = keep_labels

    def __len__(self) -> int:
        return len(self._sampler)

    @property
    def plan(self) -> EpochPlan:
        """The plan of the loader's epoch, with the micro-batches of all ranks."""
        self._sampler.set_epoch(self.epoch)
        return self._sampler.plan

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of `epoch`, unless the loader is already in that epoch.

        Without this call, the loader goes to the next epoch after each complete iteration.
        """
        if epoch != self.epoch:
            self.epoch = check_whole_number("epoch", epoch, minimum=0)
            self.micro_batches_done = self._begin_at = 0

    def skip_first_batches(self, batches: int) -> None:
        """Make the next iteration begin at a later micro-batch of the epoch; not needed after `accelerator.load_state`.

        Args:
            batches: number of this rank's micro-batches to skip, from the beginning of the epoch; the skipped
                micro-batches must make up whole optimizer steps.

        Raises:
            PackingError: `batches` is larger than the epoch, or includes a part of an optimizer step.
        """
        batches = check_whole_number("batches", batches, minimum=0, maximum=len(self))
        if batches % self._sampler.accumulation and batches < len(self):
            raise PackingError(
                f"batches: expected a multiple of {self._sampler.accumulation}, the number of micro-batches in an "
                f"optimizer step, got {batches}"
            )
        self.micro_batches_done = self._begin_at = batches

    def __getattr__(self, name: str) -> Any:
        if name not in _OF_DATALOADER:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise _NotADataLoaderError(
            f"{name}: expected a DataLoader of torch, got a PackedLoader, whose batches are ready on every rank. "
            "Iterate over the loader directly, without accelerate's prepare_data_loader. After accelerator.load_state, "
            "the loader continues at the saved position. To begin at another position, use "
            "loader.skip_first_batches(n) instead of accelerate's skip_first_batches"
        )

    def __iter__(self) -> Iterator[Batch]:
        on_all_ranks(self._check_nothing_changed)
        if self.gradient_state.active_dataloader is None:  # otherwise another loader is in the middle of a step
            self._accelerator.step = 0
        self._sampler.set_epoch(self.epoch)
        self._sampler.first_micro_batch = self.micro_batches_done = self._begin_at
        self._begin_at = 0
        self.begin()
        try:
            self._loader.generator.manual_seed(self.epoch)
            batches = iter(self._loader)
            while together := list(islice(batches, self._left_of_step())):
                together = [send_to_device(batch, self._accelerator.device) for batch in together]
                items = self._items(together)
                for batch in together:
                    self.micro_batches_done += 1
                    self.end_of_dataloader = self.micro_batches_done == len(self)
                    yield with_share(batch, self._loss, items, self._keep_labels)
        finally:
            if self.micro_batches_done == len(self):
                self.epoch, self.micro_batches_done = self.epoch + 1, 0
            self._sampler.first_micro_batch = 0
            self.end()

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the number of micro-batches already yielded in the epoch, and the inputs of the plan.

        Raises:
            PackingError: the loader is in the middle of an optimizer step; a checkpoint would lack the accumulated
                gradients.
        """
        accumulation, done = self._sampler.accumulation, self.micro_batches_done == len(self)
        if self.micro_batches_done % accumulation and not done and not self._accelerator.sync_gradients:
            raise PackingError(
                f"state: expected a checkpoint after an optimizer step of {accumulation} micro-batches, got a "
                f"checkpoint after {self.micro_batches_done % accumulation} micro-batches of a step"
            )
        return {
            "epoch": self.epoch + done,
            "step": 0 if done else self.micro_batches_done,
            **self._sampler.plan_inputs(),
            LOSS: self._loss,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration continue from a state that `state_dict` returned.

        Raises:
            PackingError: the state was saved with a different dataset, batching or loss or, in the middle of an epoch,
                with a different accumulation or number of ranks.
        """
        if missing := {"epoch", "step"} - state.keys():
            raise PackingError(f"state: expected a state that state_dict returned, got one without {min(missing)!r}")
        self._sampler.check_can_resume(state, whole_epochs=not state["step"])
        check_same_loss(state, self._loss)
        self.epoch = state["epoch"]
        self.micro_batches_done = self._begin_at = state["step"]

    def _check_nothing_changed(self, _: PlannedFrom) -> None:
        """Check that the accumulation and the number of rows have not changed since batches were planned.

        Raises:
            PackingError: the accumulation or the number of rows has changed, or accelerate would split batches.
        """
        check_accelerator(self._accelerator)
        self.dataset.check_num_rows()
        accumulation = self._accelerator.gradient_accumulation_steps
        if accumulation != self._sampler.accumulation:
            raise PackingError(
                f"gradient_accumulation_steps: expected {self._sampler.accumulation}, as when prepare_dataloader was "
                f"called, got {accumulation}, which DeepSpeed may have set; give Accelerator and DeepSpeed equal values"
            )

    def _left_of_step(self) -> int:
        """Return the number of micro-batches that are left until the next optimizer step."""
        return self._sampler.accumulation - self.micro_batches_done % self._sampler.accumulation

    def _items(self, batches: list[Batch]) -> torch.Tensor:
        """Return the number that each micro-batch's summed loss is divided by.

        Accelerate averages over processes and accumulated micro-batches. With this divisor, the average is the mean
        loss of the whole optimizer step.
        """
        here = torch.stack([items_in(batch, self._loss) for batch in batches]).sum()
        everywhere = self._accelerator.reduce(here, reduction="sum").clamp(min=1)
        averaged_over = self._accelerator.num_processes * self._accelerator.gradient_accumulation_steps
        share: torch.Tensor = everywhere.to(exact_type(everywhere.device)) / averaged_over
        return share


class _NotADataLoaderError(PackingError, AttributeError):
    """Raised when code reads a DataLoader attribute that PackedLoader does not have; hasattr() then returns False."""
