"""`attach` for a trainer whose training dataset is a stream: its batches, its checkpoints and its summary.

The stream's state is saved in the folder of every checkpoint, once for the logical streams of all ranks. So a run can
go on with another number of ranks.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import TrainOutput, get_last_checkpoint

from hf_packing.attention import ProveInTraining, inner_model
from hf_packing.batch.collate import PackingCollator
from hf_packing.errors import PackingError
from hf_packing.planning.length_schedule import LengthSchedule
from hf_packing.sampling.batching import Batching, Shapes
from hf_packing.sampling.token_budget import with_linear_cost
from hf_packing.training.checks import check_trainer
from hf_packing.training.first_batch import FirstBatchProof, isolation_in_summary
from hf_packing.training.losses import Loss, check_loss
from hf_packing.training.max_length import refuse_cut_documents
from hf_packing.training.trainer import PackedTrainer
from hf_packing.training.passed_on import check_columns, taken_by_trainer
from hf_packing.training.state import evaluation_datasets
from hf_packing.training.ranks import LOSS, PlannedFrom, data_rank, on_all_ranks
from hf_packing.training.streams.stream_loader import StreamLoader
from hf_packing.training.streams.streamed_batches import StreamedBatches
from hf_packing.training.streams.training_stream import TrainingStream, is_stream
from hf_packing.training.trainer_loss import subclass_with
from hf_packing.training.unpad import models_unpatched_on_error

STATE_FILE = "packed_stream.pt"
"""The file in the folder of a checkpoint with the state of the training's stream."""


@dataclass(frozen=True)
class StreamSummary:
    """The plan of `attach` for a trainer on a stream, which `print` shows."""

    stream: TrainingStream
    ranks: int
    accumulation: int
    isolation: FirstBatchProof | str
    length_schedule: LengthSchedule | None = None

    @property
    def rows_per_step(self) -> int:
        """The number of packed rows in an optimizer step, over all ranks."""
        return self.ranks * self.accumulation * self.stream.rows_per_batch

    def __str__(self) -> str:
        streams = self.stream.streams
        lines = [
            f"stream: {streams.streams} logical streams, {streams.streams // self.ranks} on each of {self.ranks} ranks",
            f"rows: {streams.packing}",
            f"step: {self.rows_per_step} rows, in {self.accumulation} micro-batches of {self.stream.rows_per_batch} "
            f"rows on each rank, of at most {self.stream.max_tokens:,} tokens",
        ]
        if self.length_schedule is not None:
            lines.append(f"length of segments: {self.length_schedule}")
        return "\n".join([*lines, str(self.isolation)])


class StreamTrainer(PackedTrainer):
    """A Trainer that trains on a stream, and saves with every checkpoint how far the stream has come."""

    planned_batches: StreamedBatches

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        state = _saved_state(self, resume_from_checkpoint)
        with self.planned_batches.resumed_from(self, state):
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        with self.planned_batches.arguments_as_given(self.args):
            super().save_model(output_dir, _internal_call)
        loader = self.planned_batches.loader
        if not _internal_call or output_dir is None or loader is None:  # not a checkpoint
            return
        state = {**loader.state_dict(), LOSS: self.planned_batches.decided.loss}
        if self.args.should_save:
            file = Path(output_dir) / STATE_FILE
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(_with_tensors(state), file.with_suffix(".tmp"))
            os.replace(file.with_suffix(".tmp"), file)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if batches:
            self.planned_batches.add_sources(batches, device)
        return batches, items

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        with self.planned_batches.losses_of_sources(model, inputs):
            loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
            return loss

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Before all ranks log, sum what is logged of the sources of a mixture over the ranks.

        A call of `log` is not such a place, since a callback may call it on one rank only.
        """
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            self.planned_batches.gather_source_logs(self.accelerator)
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log what was read of each source of a mixture, together with the training loss."""
        if "loss" in logs:
            logs = {**logs, **self.planned_batches.source_logs.take()}
        super().log(logs, *args, **kwargs)


class _EpochOfStream(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Sets the epoch in the logs, which a resumed Trainer would count from 0 again."""

    def on_step_end(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **known: Any,
    ) -> None:
        loader = known["train_dataloader"]
        if isinstance(loader, StreamLoader):
            state.epoch = loader.epoch + loader.steps_done / state.max_steps


def attach_stream(
    trainer: Trainer,
    batching: Batching,
    loss: Loss,
    prove: ProveInTraining,
    shapes: Shapes,
    settings: dict[str, Any],
) -> StreamSummary:
    """Make a trainer train on a stream; `hf_packing.attach` describes the arguments.

    Args:
        trainer: the trainer.
        batching: a TokenBudget.
        loss: "token" or "sequence".
        prove: when isolation is proven.
        shapes: the fixed shapes of batches.
        settings: other arguments of attach by name, which have to be None.
    """
    for name, value in settings.items():
        if value is not None:
            raise PackingError(f"{name}: expected None for a stream, whose number of documents is unknown, got {value}")
    batches, summary = on_all_ranks(partial(_check, trainer, batching, loss, prove, shapes))
    with models_unpatched_on_error(trainer):
        on_all_ranks(partial(_isolate_and_settle, trainer, batches))
    trainer.planned_batches, trainer.data_collator = batches, batches.collator
    trainer.add_callback(_EpochOfStream)
    trainer.__class__ = subclass_with(StreamTrainer, type(trainer), "Packed")
    batches.remember_settings(trainer)
    return summary


def _check(
    trainer: Trainer,
    batching: Batching,
    loss: Loss,
    prove: ProveInTraining,
    shapes: Shapes,
    planned_from: PlannedFrom,
) -> tuple[StreamedBatches, StreamSummary]:
    """Check the arguments and datasets, and divide the stream. The trainer does not change."""
    if isinstance(trainer, PackedTrainer):
        raise PackingError("trainer: expected a trainer not yet attached, got an attached trainer; call attach once")
    check_trainer(trainer, check_loss(loss))
    known = {"train_dataset": trainer.train_dataset, **evaluation_datasets(trainer)}
    for name, dataset in known.items():
        refuse_cut_documents(trainer, name, dataset)
    if shapes == (None, None) and isinstance(trainer.data_collator, PackingCollator):
        shapes = trainer.data_collator.tokens, trainer.data_collator.max_segments
    if shapes != (None, None):
        batching = batching.within(shapes)
    config = None if trainer.model is None else inner_model(trainer.model).config
    batches = StreamedBatches(trainer, with_linear_cost(batching, config), loss, prove, shapes)
    stream = batches.training_stream(trainer, planned_from)
    for name, dataset in evaluation_datasets(trainer).items():
        if is_stream(dataset):
            batches.evaluation_stream(trainer, name, dataset, planned_from)
        else:
            batches.sampler_in_order(trainer, name, dataset, planned_from)
    check_columns("attach", list(known.values()), taken_by_trainer(trainer))
    isolation = isolation_in_summary(prove, batches.first_batch_proof)
    ranks = data_rank(trainer.accelerator).world_size
    schedule = getattr(batching, "length_schedule", None)
    return batches, StreamSummary(stream, ranks, trainer.args.gradient_accumulation_steps, isolation, schedule)


def _isolate_and_settle(trainer: Trainer, batches: StreamedBatches, _: PlannedFrom) -> None:
    """Patch the trainer's models, and check the loss and the labels."""
    batches.settle(trainer)
    for dataset in (trainer.train_dataset, *evaluation_datasets(trainer).values()):
        batches.check_labels(trainer, dataset)


def _saved_state(trainer: Trainer, resume_from_checkpoint: str | bool | None) -> dict[str, Any] | None:
    """Return the state of the stream in a checkpoint; None to begin with the first row.

    Raises:
        PackingError: the checkpoint has no state of a stream.
    """
    folder = resume_from_checkpoint
    if folder is True:
        folder = get_last_checkpoint(trainer.args.output_dir)
    if not folder or trainer.args.ignore_data_skip:
        return None
    file = Path(folder) / STATE_FILE
    if not file.is_file():
        raise PackingError(
            f"resume_from_checkpoint: expected a checkpoint of a trainer attached to a stream, got {folder} without "
            f"{STATE_FILE}; to begin with the first row of the stream instead, set ignore_data_skip=True"
        )
    state: dict[str, Any] = _without_tensors(torch.load(file, weights_only=True))
    return state


def _with_tensors(state: Any) -> Any:
    """Return a state in which bytes are tensors, since torch loads no bytes unless it may run any code of the file."""
    if isinstance(state, bytes):
        return torch.frombuffer(bytearray(state), dtype=torch.uint8) if state else torch.zeros(0, dtype=torch.uint8)
    return _for_each(_with_tensors, state)


def _without_tensors(state: Any) -> Any:
    """Return a state in which tensors are bytes again."""
    return state.numpy().tobytes() if isinstance(state, torch.Tensor) else _for_each(_without_tensors, state)


def _for_each(change: Callable[[Any], Any], state: Any) -> Any:
    if isinstance(state, dict):
        return {name: change(value) for name, value in state.items()}
    return type(state)(map(change, state)) if isinstance(state, (list, tuple)) else state
