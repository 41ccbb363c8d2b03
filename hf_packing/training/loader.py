"""Load the micro-batches of one rank: `rows_loader` makes a DataLoader; PackedLoader is for your own training loop."""

from collections.abc import Callable, Iterator, Sequence
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
from hf_packing.batch.segments import with_segments_cut
from hf_packing.checks import check_whole_number
from hf_packing.columns import TOKEN_TYPE_IDS
from hf_packing.errors import PackingError
from hf_packing.rows.changes import LabelCounts
from hf_packing.sampling.batching import EpochPlan
from hf_packing.sampling.rows import SampledRows
from hf_packing.sampling.sampler import EpochSummary, RankBatchSampler
from hf_packing.sampling.token_budget import longest_segment
from hf_packing.training.checks import check_accelerator, check_not_dispatched
from hf_packing.training.first_batch import FirstBatchProof, prepared_model
from hf_packing.training.losses import Loss, exact_type, items_in, with_share
from hf_packing.training.model_loss import collator_for
from hf_packing.training.ranks import LOSS, PlannedFrom, check_same_loss, on_all_ranks

Batch = dict[str, Any]

_OF_DATALOADER = ("sampler", "batch_sampler", "batch_size", "drop_last", "collate_fn")
"""Attributes of DataLoader that PackedLoader lacks, and that accelerate reads to build a new loader from a loader."""


def rows_loader(
    dataset: Any,
    sampler: RankBatchSampler,
    model: nn.Module | None = None,
    *,
    unread: Sequence[str] = (),
    apply_masks: bool = True,
    rows_of: Callable[..., SampledRows] = SampledRows,
    more: Sequence[str] = (),
    **options: Any,
) -> DataLoader[Batch]:
    """Return a DataLoader of the sampler's micro-batches.

    Args:
        dataset: the map-style dataset that the sampler was made for.
        sampler: the sampler of this rank.
        model: the model that will run the batches; None stands for any model that predicts the next token.
        unread: names of columns to leave out of the rows.
        apply_masks: True to make labels from loss masks for rows without labels; if False, the collator refuses such
            rows.
        rows_of: the class of the rows.
        more: names of further columns with one number for each token to read.
        options: further arguments of DataLoader. The default of collate_fn is `collator_for(model)`. The default of
            generator is a new generator for the seeds of workers: if seeds were drawn from torch's global generator, a
            resumed run would have different dropout than an uninterrupted run.
    """
    has_token_types = model is None or bool(getattr(inner_model(model).config, "type_vocab_size", 0))
    unread = [*unread, *([] if has_token_types else [TOKEN_TYPE_IDS])]  # some models give this column another meaning
    options = {"collate_fn": collator_for(model), "generator": torch.Generator(), **options}
    rows = rows_of(dataset, sampler, unread, apply_masks, more)
    return DataLoader(rows, batch_sampler=rows.batches, **options)


class PackedLoader(DataLoaderStateMixin):  # type: ignore[misc]  # accelerate has no types
    """The loader that `prepare_dataloader` returns: it yields the micro-batches of one rank, on the rank's device.

    Each iteration over the loader is one epoch. `accelerator.save_state` saves the epoch and the position within the
    epoch. After `accelerator.load_state`, the next iteration continues at the saved position without reading earlier
    rows.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        loader: DataLoader[Batch],
        sampler: RankBatchSampler,
        loss: Loss,
        keep_labels: bool,
        prove_on: nn.Module | None = None,
        labels: LabelCounts | None = None,
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
        self._prove_on, self._labels = prove_on, labels
        self.first_batch_proof = FirstBatchProof()
        """What was proven on the first batch; `print` shows it."""

    @property
    def summary(self) -> EpochSummary:
        """The numbers of steps, micro-batches, documents, tokens and labels in the epoch; `print` shows them."""
        self._sampler.set_epoch(self.epoch)
        isolation = None if self._prove_on is None else self.first_batch_proof
        return self._sampler.summary(isolation=isolation, labels=self._labels)

    def __len__(self) -> int:
        self._sampler.set_epoch(self.epoch)
        return len(self._sampler)

    @property
    def optimizer_steps(self) -> int:
        """The number of optimizer steps since the beginning of the training whose micro-batches were all yielded."""
        steps, of_step = divmod(self.micro_batches_done, self._sampler.accumulation)
        ended = of_step > 0 and self.micro_batches_done == len(self)
        return self.epoch * self._sampler.optimizer_steps + steps + ended

    @property
    def plan(self) -> EpochPlan:
        """The plan of the current epoch: the rows of every micro-batch, on all ranks."""
        self._sampler.set_epoch(self.epoch)
        return self._sampler.plan

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of epoch number `epoch`, unless the loader is already in that epoch.

        A loop does not need to call this method: after each complete iteration, the loader goes to the next epoch.
        """
        if epoch != self.epoch:
            self.epoch = check_whole_number("epoch", epoch, minimum=0)
            self._sampler.set_epoch(self.epoch)
            self.micro_batches_done = self._begin_at = 0

    def skip_first_batches(self, batches: int) -> None:
        """Make the next iteration begin at a later micro-batch of the epoch.

        This call is not needed after `accelerator.load_state`, which restores the saved position.

        Args:
            batches: number of this rank's micro-batches to skip, from the beginning of the epoch: a multiple of
                gradient_accumulation_steps, or all micro-batches of the epoch.

        Raises:
            PackingError: `batches` is larger than the number of micro-batches, or would skip a part of an optimizer
                step.
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
            f"{name}: expected a DataLoader of torch, got a PackedLoader, which has no such attribute. Iterate over a "
            "PackedLoader directly, without accelerate's prepare_data_loader: each rank already gets its own batches, "
            "on its device. After accelerator.load_state, the loader continues at the saved position. To begin at "
            "another position, use loader.skip_first_batches(n) instead of accelerate's skip_first_batches"
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
                longest = longest_segment(self._sampler.batching, self.optimizer_steps)
                whole = [send_to_device(batch, self._accelerator.device) for batch in together]
                together = [with_segments_cut(batch, longest) for batch in whole]
                items = items_of_step(self._accelerator, together, self._loss)
                for uncut, batch in zip(whole, together, strict=True):
                    self._prove_isolation(uncut)
                    self.micro_batches_done += 1
                    self.end_of_dataloader = self.micro_batches_done == len(self)
                    yield with_share(batch, self._loss, items, self._keep_labels)
        finally:
            if self.micro_batches_done == len(self):
                self.epoch, self.micro_batches_done = self.epoch + 1, 0
            self._sampler.first_micro_batch = 0
            self.end()

    def _prove_isolation(self, batch: Batch) -> None:
        """Prove on the first batch that the model isolates documents, unless prepare_dataloader has proven it."""
        if self._prove_on is not None:
            prepared = prepared_model(self._accelerator, self._prove_on)
            with self._accelerator.autocast():
                self.first_batch_proof.check(prepared, batch, "training")

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the number of micro-batches yielded in the epoch, and the settings that decide the batches.

        Raises:
            PackingError: the loader is in the middle of an optimizer step, so a checkpoint would lack the gradients
                that were accumulated so far.
        """
        accumulation, done = self._sampler.accumulation, self.micro_batches_done == len(self)
        if self.micro_batches_done % accumulation and not done and not self._accelerator.sync_gradients:
            raise PackingError(
                f"state: expected a checkpoint after an optimizer step of {accumulation} micro-batches, got a "
                f"checkpoint after {self.micro_batches_done % accumulation} micro-batches of a step, which would lack "
                "the accumulated gradients"
            )
        return {
            "epoch": self.epoch + done,
            "step": 0 if done else self.micro_batches_done,
            "accumulation": accumulation,
            **self._sampler.plan_inputs(),
            LOSS: self._loss,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration continue from a state that `state_dict` returned, with the same optimizer steps.

        Raises:
            PackingError: the state is incomplete; the state was saved with a different dataset, batching, loss or
                product of ranks and gradient_accumulation_steps; or the state was saved in the middle of an optimizer
                step, with a different gradient_accumulation_steps.
        """
        if missing := {"epoch", "step", "accumulation"} - state.keys():
            raise PackingError(f"state: expected a state that state_dict returned, got one without {min(missing)!r}")
        self._sampler.check_can_resume(state)
        check_same_loss(state, self._loss)
        accumulation = self._sampler.accumulation
        steps, of_step = divmod(state["step"], state["accumulation"])
        if of_step and state["accumulation"] != accumulation:
            raise PackingError(
                f"gradient_accumulation_steps: expected {state['accumulation']}, as when the checkpoint was saved, "
                f"{of_step} micro-batches into an optimizer step, got {accumulation}"
            )
        self.set_epoch(state["epoch"])
        self.micro_batches_done = self._begin_at = steps * accumulation + of_step

    def _check_nothing_changed(self, _: PlannedFrom) -> None:
        """Check that settings and the number of rows have not changed since `prepare_dataloader` was called.

        Raises:
            PackingError: gradient_accumulation_steps or the number of rows has changed, or a setting of the accelerator
                no longer works with planned batches.
        """
        check_accelerator(self._accelerator)
        check_not_dispatched(self._accelerator)
        self.dataset.check_num_rows()
        accumulation = self._accelerator.gradient_accumulation_steps
        if accumulation != self._sampler.accumulation:
            raise PackingError(
                f"gradient_accumulation_steps: expected {self._sampler.accumulation}, as when prepare_dataloader was "
                f"called, got {accumulation}, which DeepSpeed may have set; set the same value for Accelerator and "
                "DeepSpeed"
            )

    def _left_of_step(self) -> int:
        """Return the number of micro-batches that are left in the current optimizer step."""
        return self._sampler.accumulation - self.micro_batches_done % self._sampler.accumulation


def items_of_step(accelerator: Accelerator, batches: Sequence[Batch], loss: Loss) -> torch.Tensor:
    """Return the float scalar by which the summed loss of each micro-batch in an optimizer step is divided.

    Accelerate averages gradients over processes and accumulated micro-batches. Thanks to this divisor, the average is
    the gradient of the mean loss over the whole optimizer step.

    Args:
        accelerator: the accelerator of the loop.
        batches: all micro-batches of this rank in the optimizer step.
        loss: "token" or "sequence".
    """
    here = torch.stack([items_in(batch, loss) for batch in batches]).sum()
    everywhere = accelerator.reduce(here, reduction="sum").clamp(min=1)
    averaged_over = accelerator.num_processes * accelerator.gradient_accumulation_steps
    share: torch.Tensor = everywhere.to(exact_type(everywhere.device)) / averaged_over
    return share


class _NotADataLoaderError(PackingError, AttributeError):
    """The error for access to a DataLoader attribute that PackedLoader lacks; hasattr() then returns False."""
