"""Loaders of one rank: a DataLoader for the micro-batches of a sampler, and PackedLoader for a loop of your own."""

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
"""Attributes of a DataLoader that accelerate's skip_first_batches and prepare_data_loader read to build a new one."""


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
        dataset: map-style, the rows the sampler was made for.
        sampler: of this rank.
        model: the model that the batches are for.
        unread: columns that are left out of rows.
        apply_masks: whether loss masks make the labels of rows without any.
        options: further arguments of DataLoader; collate_fn defaults to `collator_for(model)`. Worker seeds come from
            their own generator: drawn from the global one, they would change dropout after a resume.
    """
    has_token_types = model is None or bool(getattr(inner_model(model).config, "type_vocab_size", 0))
    unread = [*unread, *([] if has_token_types else [TOKEN_TYPE_IDS])]  # other models give them another meaning
    return DataLoader(
        SampledRows(dataset, sampler, unread, apply_masks),
        batch_sampler=sampler,
        **{"collate_fn": collator_for(model), "generator": torch.Generator(), **options},
    )


class PackedLoader(DataLoaderStateMixin):  # type: ignore[misc]  # accelerate has no types
    """The micro-batches of one rank, on its device; made by `prepare_dataloader`.

    Each iteration over the loader is one epoch. Its state is the epoch and the position within the epoch, which
    `accelerator.save_state` saves. After `accelerator.load_state`, the next iteration continues at that position
    without reading earlier rows.
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
        """How many micro-batches of this epoch have been yielded."""
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
        """The micro-batches of all ranks in this epoch."""
        self._sampler.set_epoch(self.epoch)
        return self._sampler.plan

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; without this call, the loader counts epochs itself."""
        if epoch != self.epoch:
            self.epoch = check_whole_number("epoch", epoch, minimum=0)
            self.micro_batches_done = self._begin_at = 0

    def skip_first_batches(self, batches: int) -> None:
        """Begin the next iteration at a later micro-batch of the epoch; not needed after `accelerator.load_state`.

        Args:
            batches: micro-batches of this rank from the beginning of the epoch, in whole optimizer steps.

        Raises:
            PackingError: more than an epoch has, or a part of an optimizer step.
        """
        batches = check_whole_number("batches", batches, minimum=0, maximum=len(self))
        if batches % self._sampler.accumulation and batches < len(self):
            raise PackingError(
                f"batches: expected a multiple of the {self._sampler.accumulation} that an optimizer step accumulates, "
                f"got {batches}"
            )
        self.micro_batches_done = self._begin_at = batches

    def __getattr__(self, name: str) -> Any:
        if name not in _OF_DATALOADER:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise _NotADataLoaderError(
            f"{name}: expected a DataLoader of torch, got a PackedLoader, whose batches are ready on every rank. "
            "Iterate over it directly, without accelerate's prepare_data_loader. After accelerator.load_state it "
            "continues where it was; to begin elsewhere, use loader.skip_first_batches(n) instead of accelerate's"
        )

    def __iter__(self) -> Iterator[Batch]:
        on_all_ranks(self._check_nothing_changed)
        if self.gradient_state.active_dataloader is None:  # else another loader is in the middle of a step
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
        """Return the epoch, the number of its micro-batches already yielded, and the inputs of its plan.

        Raises:
            PackingError: in the middle of an optimizer step, since a checkpoint does not hold accumulated gradients.
        """
        accumulation, done = self._sampler.accumulation, self.micro_batches_done == len(self)
        if self.micro_batches_done % accumulation and not done and not self._accelerator.sync_gradients:
            raise PackingError(
                f"state: expected a checkpoint after {accumulation} accumulated micro-batches, got one after "
                f"{self.micro_batches_done % accumulation}"
            )
        return {
            "epoch": self.epoch + done,
            "step": 0 if done else self.micro_batches_done,
            **self._sampler.plan_inputs(),
            LOSS: self._loss,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state.

        Raises:
            PackingError: a state with different micro-batches: a different dataset, batching or loss, or, in the middle
                of an epoch, a different accumulation or number of ranks.
        """
        if missing := {"epoch", "step"} - state.keys():
            raise PackingError(f"state: expected one that state_dict returned, it has no {min(missing)!r}")
        self._sampler.check_can_resume(state, whole_epochs=not state["step"])
        check_same_loss(state, self._loss)
        self.epoch = state["epoch"]
        self.micro_batches_done = self._begin_at = state["step"]

    def _check_nothing_changed(self, _: PlannedFrom) -> None:
        """Check that accumulation and the number of rows are still the same as when batches were planned.

        Raises:
            PackingError: a different accumulation or number of rows, or settings by which accelerate would cut batches.
        """
        check_accelerator(self._accelerator)
        self.dataset.check_num_rows()
        accumulation = self._accelerator.gradient_accumulation_steps
        if accumulation != self._sampler.accumulation:
            raise PackingError(
                f"gradient_accumulation_steps: expected {self._sampler.accumulation}, as when prepare_dataloader was "
                f"called, got {accumulation}, which DeepSpeed may have set; give Accelerator the same value"
            )

    def _left_of_step(self) -> int:
        """Return the number of micro-batches until the next optimizer step."""
        return self._sampler.accumulation - self.micro_batches_done % self._sampler.accumulation

    def _items(self, batches: list[Batch]) -> torch.Tensor:
        """Return the divisor of summed losses by which accelerate's averages become the mean over a whole step."""
        here = torch.stack([items_in(batch, self._loss) for batch in batches]).sum()
        everywhere = self._accelerator.reduce(here, reduction="sum").clamp(min=1)
        averaged_over = self._accelerator.num_processes * self._accelerator.gradient_accumulation_steps
        share: torch.Tensor = everywhere.to(exact_type(everywhere.device)) / averaged_over
        return share


class _NotADataLoaderError(PackingError, AttributeError):
    """Raised for attributes of a DataLoader: hasattr() returns False, and other access shows the reason."""
