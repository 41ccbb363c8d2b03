"""Load the micro-batches of one rank: a DataLoader for a Trainer, a PackedLoader for your own training loop."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin, prepare_data_loader
from accelerate.state import GradientState
from accelerate.utils import send_to_device
from torch import nn
from torch.utils.data import DataLoader

from hf_packing.batch.segments import with_segments_cut
from hf_packing.checks import check_whole_number
from hf_packing.errors import PackingError
from hf_packing.rows.changes import LabelCounts
from hf_packing.sampling.batching import Batching, EpochPlan
from hf_packing.sampling.rows import SampledRows
from hf_packing.sampling.sampler import EpochSummary
from hf_packing.sampling.token_budget import longest_segment
from hf_packing.training.first_batch import FirstBatchProof
from hf_packing.training.kinds import labels_of, refuse_zero
from hf_packing.training.losses import Batch, Loss, positive
from hf_packing.training.models import has_own_code, prepared_model
from hf_packing.training.ranks import PlannedFrom, on_all_ranks
from hf_packing.training.step import StepCase
from hf_packing.training.step_counts import micro_batch_counts


def batches_loader(rows: Any, collate: Any, **options: Any) -> DataLoader[Any]:
    """Return a DataLoader of the micro-batches of rows that have a sampler.

    The seeds of its workers are not drawn from torch's global generator: otherwise a resumed run would have different
    dropout than an uninterrupted run.
    """
    return DataLoader(rows, batch_sampler=rows.sampler, collate_fn=collate, generator=torch.Generator(), **options)


def on_device(loader: DataLoader[Any], accelerator: Accelerator) -> Any:
    """Return a loader that puts the batches of a loader on the device of the accelerator.

    Accelerate is told that there is one process, since samplers already divide rows among ranks.
    """
    return prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=1,
        process_index=0,
        put_on_device=True,
        non_blocking=accelerator.non_blocking,
    )


@dataclass(frozen=True)
class LoopSteps:
    """The needs of your own training loop beside batches: a proof of isolation, and each batch's share of the loss.

    Attributes:
        keep_labels: whether labels stay in batches, so that the model can compute the loss itself.
        prove_on: the model to prove isolation of on the first batch; None if it is proven.
    """

    accelerator: Accelerator
    batching: Batching
    loss: Loss
    keep_labels: bool
    prove_on: nn.Module | None
    step_case: Callable[[nn.Module, Batch], StepCase]
    """Makes the case of a proof of the step, of the model with its wrappers and a batch."""
    proof: FirstBatchProof = field(default_factory=FirstBatchProof)

    def prepared(self, batches: Sequence[Batch], step: int) -> list[Batch]:
        """Return this rank's micro-batches of an optimizer step, ready for the loop; all ranks call this together.

        Args:
            batches: the micro-batches.
            step: the number of optimizer steps before this one.
        """
        for batch in batches:
            self._prove_on(batch, step)
        longest = longest_segment(self.batching, step)
        batches = [with_segments_cut(batch, longest) for batch in batches]
        # accelerate averages gradients over processes and accumulated micro-batches: with this divisor, the average is
        # the gradient of the mean loss over the whole optimizer step
        here = micro_batch_counts(batches, self.loss)[:, -1].sum()
        everywhere = self.accelerator.reduce(here, reduction="sum")
        refuse_zero(batches, everywhere)
        averaged_over = self.accelerator.num_processes * self.accelerator.gradient_accumulation_steps
        items = positive(everywhere) / averaged_over
        return [labels_of(batch).with_share(self.loss, items, self.keep_labels) for batch in batches]

    def _prove_on(self, batch: Batch, step: int) -> None:
        if self.prove_on is not None:
            model = prepared_model(self.accelerator, self.prove_on)
            with self.accelerator.autocast():
                is_own = partial(has_own_code, model)
                self.proof.check(model, batch, "training", lambda _: self.step_case(model, batch), step, is_own)


class StepLoader(DataLoaderStateMixin, ABC):  # type: ignore[misc]  # accelerate has no types
    """The micro-batches of one rank, on the rank's device, in whole optimizer steps.

    Args:
        accelerator: the accelerator, which knows the rank and the device.
        accumulation: number of micro-batches of this rank in an optimizer step.
        loop: what your own training loop needs; None for a Trainer, and for evaluation.
    """

    def __init__(self, accelerator: Accelerator, accumulation: int, loop: LoopSteps | None) -> None:
        self.gradient_state = GradientState()
        self.accumulation = accumulation
        self.epoch = 0
        """The epoch of the next micro-batch, from 0."""
        self.micro_batches_done = 0
        """The number of micro-batches of this epoch that were yielded or skipped."""
        self.optimizer_steps = 0
        """The number of optimizer steps since the beginning of the training whose micro-batches were all yielded."""
        self.first_batch_proof = loop.proof if loop is not None and loop.prove_on is not None else None
        """What was proven on the first batch; `print` shows it. None if isolation was proven before."""
        self._accelerator, self._loop = accelerator, loop

    def __iter__(self) -> Iterator[Batch]:
        if self._loop is not None:
            on_all_ranks(self._check_nothing_changed)
            if self.gradient_state.active_dataloader is None:  # otherwise another loader is in the middle of a step
                self._accelerator.step = 0
        self.begin()
        try:
            for batches in self._steps():
                batches = [send_to_device(batch, self._accelerator.device) for batch in batches]
                if self._loop is not None:
                    batches = self._loop.prepared(batches, self.optimizer_steps)
                for number, batch in enumerate(batches, start=1):
                    self.micro_batches_done += 1
                    if number == len(batches):
                        self._end_step()  # before the last batch, since a state is saved after it
                    yield batch
        finally:
            self.end()

    @property
    def steps_done(self) -> int:
        """The number of optimizer steps of this epoch whose micro-batches were all yielded or skipped."""
        return self.micro_batches_done // self.accumulation

    @abstractmethod
    def _steps(self) -> Iterator[list[Batch]]:
        """Yield the micro-batches of optimizer steps, up to the end of the epoch."""

    def _end_step(self) -> None:
        """Note that the last micro-batch of a step is about to be yielded."""
        self.optimizer_steps += 1

    def _check_nothing_changed(self, _: PlannedFrom) -> None:
        """Raise PackingError if gradient_accumulation_steps has changed since `prepare_dataloader` was called."""
        if (accumulation := self._accelerator.gradient_accumulation_steps) != self.accumulation:
            raise PackingError(
                f"gradient_accumulation_steps: expected {self.accumulation}, as when prepare_dataloader was called, "
                f"got {accumulation}, which DeepSpeed may have set; set the same value for Accelerator and DeepSpeed"
            )

    def _check_between_steps(self) -> None:
        """Refuse a state in the middle of an optimizer step, which would lack accumulated gradients."""
        if (of_step := self.micro_batches_done % self.accumulation) and not self._accelerator.sync_gradients:
            raise PackingError(
                f"state: expected a checkpoint after an optimizer step of {self.accumulation} micro-batches, got a "
                f"checkpoint after {of_step} micro-batches of a step, which would lack the accumulated gradients"
            )


class PackedLoader(StepLoader):
    """The loader of a map-style dataset: it yields the micro-batches of one rank, on the rank's device.

    Each iteration over the loader is one epoch. `accelerator.save_state` saves the epoch and the position within the
    epoch. After `accelerator.load_state`, the next iteration continues at the saved position without reading earlier
    rows.
    """

    def __init__(self, loader: DataLoader[Batch], loop: LoopSteps, labels: LabelCounts | None) -> None:
        assert isinstance(loader.dataset, SampledRows)
        self.dataset, self._sampler = loader.dataset, loader.dataset.sampler
        super().__init__(loop.accelerator, self._sampler.epoch.accumulation, loop)
        self._first_step = 0
        self._loader, self._labels = loader, labels

    @property
    def summary(self) -> EpochSummary:
        """The numbers of steps, micro-batches, documents, tokens and labels in the epoch; `print` shows them."""
        return self._sampler.summary(isolation=self.first_batch_proof, labels=self._labels)

    def __len__(self) -> int:
        return len(self._sampler)

    @property
    def plan(self) -> EpochPlan:
        """The plan of the current epoch: the rows of every micro-batch, on all ranks."""
        return self._sampler.plan

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of epoch number `epoch`, unless the loader is already in that epoch.

        A loop does not need to call this method: after each complete iteration, the loader goes to the next epoch.
        """
        if epoch != self.epoch:
            self.epoch = check_whole_number("epoch", epoch, minimum=0)
            self._begin_at_step(0)

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
        if batches % self.accumulation and batches < len(self):
            raise PackingError(
                f"batches: expected a multiple of {self.accumulation}, the number of micro-batches in an optimizer "
                f"step, got {batches}"
            )
        self._begin_at_step(-(-batches // self.accumulation))

    def _begin_at_step(self, step: int) -> None:
        self._sampler.set_epoch(self.epoch)
        self._first_step = step
        self.optimizer_steps = self.epoch * self._sampler.optimizer_steps + step
        self.micro_batches_done = min(step * self.accumulation, len(self))

    def _steps(self) -> Iterator[list[Batch]]:
        self._begin_at_step(self._first_step)
        self._sampler.first_micro_batch, self._first_step = self.micro_batches_done, 0
        try:
            self._loader.generator.manual_seed(self.epoch)
            batches = iter(self._loader)
            while step := list(islice(batches, self.accumulation)):
                yield step
        finally:
            self._sampler.first_micro_batch = 0
            if self.micro_batches_done == len(self):
                self.epoch += 1
                self._begin_at_step(0)

    def _end_step(self) -> None:
        super()._end_step()
        self.end_of_dataloader = self.micro_batches_done == len(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the number of its optimizer steps that are done, and what decides the batches.

        Raises:
            PackingError: the loader is in the middle of an optimizer step, so a checkpoint would lack the gradients
                that were accumulated so far.
        """
        self._check_between_steps()
        ended = self.micro_batches_done == len(self)
        steps = 0 if ended else self.steps_done
        return {"epoch": self.epoch + ended, "steps": steps, **self._sampler.plan_inputs()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration continue from a state that `state_dict` returned, with the same optimizer steps.

        Raises:
            PackingError: the state is of another version, or was saved with a different dataset, batching, loss or
                product of ranks and gradient_accumulation_steps.
        """
        self._sampler.check_can_resume(state)
        self.epoch = state["epoch"]
        self._begin_at_step(state["steps"])

    def _check_nothing_changed(self, planned_from: PlannedFrom) -> None:
        super()._check_nothing_changed(planned_from)
        self.dataset.check_num_rows()
