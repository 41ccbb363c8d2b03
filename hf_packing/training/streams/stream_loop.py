"""`prepare_dataloader` and `evaluation_loss` for streams, in your own training loop."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from accelerate import Accelerator
from torch import nn

from hf_packing.attention import (
    ProveInTraining,
    check_patched,
    inner_model,
    patch_for_training,
    unpatched_on_error,
)
from hf_packing.batch.segments import with_segments_cut
from hf_packing.errors import PackingError
from hf_packing.sampling.batching import Batching, Shapes
from hf_packing.sampling.token_budget import longest_segment, with_linear_cost
from hf_packing.training.checks import check_accelerator
from hf_packing.training.first_batch import FirstBatchProof, prepared_model
from hf_packing.training.loader import items_of_step
from hf_packing.training.losses import Loss, check_loss, with_share
from hf_packing.training.model_loss import collator_for
from hf_packing.training.passed_on import check_columns, passed_on_in_stream, taken_by_model
from hf_packing.training.ranks import LOSS, PlannedFrom, check_same_loss, data_rank, on_all_ranks
from hf_packing.training.streams.stream_loader import Batch, StreamLoader
from hf_packing.training.streams.training_stream import (
    TrainingStream,
    check_labels_of_stream,
    shares_prefixes,
    training_stream,
    with_rows_joined,
)
from hf_packing.training.train_on_trees import check_takes_trees


class StreamLoopLoader(StreamLoader):
    """The loader that `prepare_dataloader` returns for a stream.

    Each iteration goes on where the last one has stopped, up to the end of the epoch. `accelerator.save_state` saves
    how far the stream is on all ranks. The state can be loaded on another number of ranks.
    """

    def __init__(
        self,
        *arguments: Any,
        batching: Batching,
        loss: Loss,
        keep_labels: bool,
        prove_on: nn.Module | None,
        **options: Any,
    ):
        super().__init__(*arguments, **options)
        self._batching, self._loss, self._keep_labels, self._prove_on = batching, loss, keep_labels, prove_on
        self.first_batch_proof = FirstBatchProof()
        """What was proven on the first batch; `print` shows it."""

    def __iter__(self) -> Iterator[Batch]:
        on_all_ranks(self._check_nothing_changed)
        if self.gradient_state.active_dataloader is None:  # otherwise another loader is in the middle of a step
            self._accelerator.step = 0
        return super().__iter__()

    def prepared(self, batches: list[Batch]) -> list[Batch]:
        if self._prove_on is not None:
            model = prepared_model(self._accelerator, self._prove_on)
            for batch in batches:
                with self._accelerator.autocast():
                    self.first_batch_proof.check(model, batch, "training")
        longest = longest_segment(self._batching, self.optimizer_steps)
        batches = [with_segments_cut(batch, longest) for batch in batches]
        items = items_of_step(self._accelerator, batches, self._loss)
        return [with_share(batch, self._loss, items, self._keep_labels) for batch in batches]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), LOSS: self._loss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_same_loss(state, self._loss)
        super().load_state_dict(state)

    def _check_nothing_changed(self, _: PlannedFrom) -> None:
        check_accelerator(self._accelerator)
        if (accumulation := self._accelerator.gradient_accumulation_steps) != self.accumulation:
            raise PackingError(
                f"gradient_accumulation_steps: expected {self.accumulation}, as when prepare_dataloader was called, "
                f"got {accumulation}, which DeepSpeed may have set; set the same value for Accelerator and DeepSpeed"
            )


def prepare_stream_loader(
    accelerator: Accelerator,
    dataset: Any,
    batching: Batching,
    loss: Loss,
    model: nn.Module | None,
    prove: ProveInTraining,
    shapes: Shapes,
    keeps_labels: Callable[[], bool],
    options: dict[str, Any],
) -> StreamLoopLoader:
    """Return a loader of this rank's batches of a stream; `prepare_dataloader` describes the arguments."""
    stream = on_all_ranks(partial(_open, accelerator, dataset, batching, loss, model, shapes))
    check_columns("prepare_dataloader", [dataset], taken_by_model(model))
    collator = collator_for(model, *shapes)
    if model is not None:
        with unpatched_on_error(model):
            on_all_ranks(partial(_isolate_and_check, accelerator, dataset, batching, model, prove, shapes))
    pinned = {"pin_memory": accelerator.device.type == "cuda"} | options
    loader = StreamLoopLoader(
        stream,
        accelerator,
        collator,
        accumulation=accelerator.gradient_accumulation_steps,
        token_types=model is None or bool(getattr(inner_model(model).config, "type_vocab_size", 0)),
        more=passed_on_in_stream(stream.streams.features, taken_by_model(model)),
        workers=pinned.pop("num_workers", 0),
        batching=batching,
        loss=loss,
        keep_labels=keeps_labels(),
        prove_on=model if prove == "first batch" else None,
        **pinned,
    )
    accelerator.register_for_checkpointing(loader)
    return loader


def evaluation_loader(accelerator: Accelerator, model: nn.Module, dataset: Any, rows_per_batch: int) -> StreamLoader:
    """Return a loader of all rows of a packed stream, in lockstep on all ranks."""

    def open_stream(planned_from: PlannedFrom) -> TrainingStream:
        check_accelerator(accelerator)
        check_patched(model)
        stream = training_stream("dataset", dataset, None, data_rank(accelerator).world_size)
        planned_from.note_settings(rows_per_batch=rows_per_batch, dataset=stream)
        if not shares_prefixes(dataset, None):
            check_labels_of_stream(dataset, model)
        return with_rows_joined(stream, rows_per_batch)

    stream = on_all_ranks(open_stream)
    return StreamLoader(
        stream,
        accelerator,
        collator_for(model),
        token_types=bool(getattr(inner_model(model).config, "type_vocab_size", 0)),
        more=passed_on_in_stream(stream.streams.features, taken_by_model(model)),
        restarts=True,
    )


def _open(
    accelerator: Accelerator,
    dataset: Any,
    batching: Batching,
    loss: Loss,
    model: nn.Module | None,
    shapes: Shapes,
    planned_from: PlannedFrom,
) -> TrainingStream:
    check_accelerator(accelerator)
    balanced = with_linear_cost(batching, None if model is None else inner_model(model).config)
    if shapes != (None, None):
        balanced = balanced.within(shapes)
    stream = training_stream("dataset", dataset, balanced, data_rank(accelerator).world_size)
    planned_from.note_settings(
        dataset=stream,
        gradient_accumulation_steps=accelerator.gradient_accumulation_steps,
        loss=check_loss(loss),
        tokens=shapes[0],
        max_segments=shapes[1],
    )
    return stream


def _isolate_and_check(
    accelerator: Accelerator,
    dataset: Any,
    batching: Batching,
    model: nn.Module,
    prove: ProveInTraining,
    shapes: Shapes,
    _: PlannedFrom,
) -> None:
    patch_for_training(model, accelerator, prove)
    if shares_prefixes(dataset, batching):
        check_takes_trees(model, batching, shapes)
        return
    check_labels_of_stream(dataset, model)
