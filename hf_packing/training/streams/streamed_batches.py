"""The state that `attach` gives a trainer whose training dataset is a stream."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import datasets
import torch
from accelerate import Accelerator
from torch import nn
from transformers import Trainer, TrainingArguments

from hf_packing.attention import inner_model
from hf_packing.batch.collate import is_tree_batch
from hf_packing.columns import COMPLETION_MASK, LABELS, SOURCE
from hf_packing.errors import PackingError
from hf_packing.training.checks import ignored_masks
from hf_packing.training.max_length import refuse_cut_documents
from hf_packing.training.model_loss import predicts_next
from hf_packing.training.passed_on import passed_on_in_stream, taken_by_trainer
from hf_packing.training.planned_batches import PlannedBatches
from hf_packing.training.ranks import PlannedFrom, check_same_loss, data_rank
from hf_packing.training.streams.source_logs import SourceLogs, check_names, source_of_tokens
from hf_packing.training.streams.stream_loader import StreamLoader
from hf_packing.training.streams.training_stream import (
    TrainingStream,
    check_labels_of_stream,
    is_packed_stream,
    is_stream,
    shares_prefixes,
    training_stream,
    with_rows_joined,
)
from hf_packing.training.token_losses import TokenLosses
from hf_packing.training.train_on_trees import check_takes_trees, check_takes_trees_as


class StreamedBatches(PlannedBatches):
    """Loads batches of streams; a dataset that is not a stream, such as an evaluation dataset, is loaded as before."""

    loader: StreamLoader | None = None
    """The loader of the training that runs, or has run last."""
    _state: dict[str, Any] | None = None
    """The state at which the training begins; None once its loader has begun there."""
    _trains = False
    _skips = False
    """The user's value of ignore_data_skip, while a training runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.source_logs = SourceLogs()
        """What the training that runs, or has run last, logs of the sources of a mixture."""

    def add_sources(self, batches: Sequence[dict[str, Any]], device: torch.device) -> None:
        """Add the source of each token to the micro-batches of an optimizer step, for `losses_of_sources`.

        Rows of trees get none: what a token of a tree adds to the loss may belong to several documents.
        """
        if self.loader is None:
            return
        for batch, documents in zip(batches, self.loader.documents, strict=True):
            if documents is not None and not is_tree_batch(batch):
                batch[SOURCE] = source_of_tokens(documents, batch[LABELS].shape[1]).to(device)

    @contextmanager
    def losses_of_sources(self, model: nn.Module, batch: dict[str, Any]) -> Iterator[None]:
        """Context manager for a step of training on a micro-batch: sum the losses of each source, for the logs.

        Args:
            model: the model that is trained.
            batch: the micro-batch, from which the sources are removed, since no model takes them.
        """
        source = batch.pop(SOURCE, None)
        if source is None or self.loader is None:
            yield
            return
        losses = self.token_losses = TokenLosses(batch[LABELS], predicts_next(model))
        try:
            yield
        finally:
            self.token_losses = None
        if losses.are_known:
            self.source_logs.add_losses(batch[LABELS], source, len(self.loader.counts.names), losses)

    def gather_source_logs(self, accelerator: Accelerator) -> None:
        """Sum what is logged of the sources of a mixture over all ranks, which call this together."""
        if self.loader is not None and self.loader.counts.names:
            self.source_logs.gather(self.loader.counts, accelerator)

    def counts_of(self, batches: Sequence[dict[str, Any]]) -> torch.Tensor:
        counts = super().counts_of(batches)
        assert self.loader is not None
        if is_tree_batch(batches[0]):  # other batches tell by themselves that they have nothing of the stream
            counts[torch.tensor(self.loader.without_rows)] = 0
        return counts

    @contextmanager
    def resumed_from(self, trainer: Trainer, state: dict[str, Any] | None) -> Iterator[None]:
        """Context manager for train(): the stream goes on at a saved state, and no row before is read again.

        Args:
            trainer: the attached trainer.
            state: the state of a StreamLoader; None to start with the first row.
        """
        self._skips, self._state = trainer.args.ignore_data_skip, state
        self.loader, self._trains, self.source_logs = None, True, SourceLogs()
        trainer.args.ignore_data_skip = True  # otherwise, Trainer would read and drop all batches before
        try:
            yield
        finally:
            trainer.args.ignore_data_skip, self._state, self._trains = self._skips, None, False

    @contextmanager
    def arguments_as_given(self, args: TrainingArguments) -> Iterator[None]:
        """Context manager, in which training arguments are the user's, to be saved with a checkpoint."""
        now = args.ignore_data_skip
        args.ignore_data_skip = self._skips if self._trains else now
        try:
            yield
        finally:
            args.ignore_data_skip = now

    def check_training(self, trainer: Trainer) -> None:
        super().check_training(trainer)
        if getattr(trainer.args, "enable_jit_checkpoint", False):
            raise PackingError(
                "enable_jit_checkpoint: expected False for a stream, got True, which saves checkpoints before an "
                "optimizer step whose rows were already read; use save_steps"
            )

    def training_loader(self, trainer: Trainer) -> Any:
        def plan(planned_from: PlannedFrom) -> TrainingStream:
            self.check_training(trainer)
            return self.training_stream(trainer, planned_from)

        def settle(_: PlannedFrom) -> None:
            self._settle_again(trainer)
            self.check_labels(trainer, trainer.train_dataset)

        run = self._collective.runner()
        stream = run(plan)
        run(settle)
        self.accumulation = trainer.args.gradient_accumulation_steps
        loader = self._stream_loader(trainer, stream, accumulation=self.accumulation)
        if self._trains and self.loader is None:  # otherwise a callback asks for a loader of its own
            self.loader = loader
            if self._state is not None:
                check_same_loss(self._state, self.decided.loss)
                loader.load_state_dict(self._state)
        return loader

    def training_stream(self, trainer: Trainer, planned_from: PlannedFrom) -> TrainingStream:
        """Return the logical streams of the training dataset."""
        planned_from.note_settings(
            batching=self.decided.batching,
            gradient_accumulation_steps=trainer.args.gradient_accumulation_steps,
            loss=self.decided.loss,
            tokens=self.decided.shapes[0],
            max_segments=self.decided.shapes[1],
        )
        stream = self._open(trainer, "train_dataset", trainer.train_dataset, planned_from)
        check_names(stream.sources)
        return stream

    def loader_in_order(self, trainer: Trainer, name: str, dataset: Any, prepared: bool = False) -> Any:
        if not is_stream(dataset):
            return super().loader_in_order(trainer, name, dataset, prepared)

        def plan(planned_from: PlannedFrom) -> TrainingStream:
            self.check(trainer)
            if prepared:
                refuse_cut_documents(trainer, name, dataset)
            return self.evaluation_stream(trainer, name, dataset, planned_from)

        def settle(_: PlannedFrom) -> None:
            self._settle_again(trainer)
            self.check_labels(trainer, dataset)

        run = self._collective.runner()
        stream = run(plan)
        run(settle)
        return self._stream_loader(trainer, stream, restarts=True)

    def evaluation_stream(
        self, trainer: Trainer, name: str, dataset: datasets.IterableDataset, planned_from: PlannedFrom
    ) -> TrainingStream:
        """Return the logical streams of an evaluation dataset."""
        stream = self._open(trainer, name, dataset, planned_from, any_capacity=True)
        if self.decided.shapes != (None, None):
            return stream
        return with_rows_joined(stream, trainer.args.per_device_eval_batch_size)

    def check_labels(self, trainer: Trainer, dataset: Any) -> None:
        if not is_stream(dataset):
            super().check_labels(trainer, dataset)
        elif shares_prefixes(dataset, self.decided.batching):
            check_takes_trees(trainer.model, self.decided.batching, self.decided.shapes)
            check_takes_trees_as(self.trainer_loss, self._masks)
        else:
            check_labels_of_stream(dataset, trainer.model)

    def _open(
        self,
        trainer: Trainer,
        name: str,
        dataset: datasets.IterableDataset,
        planned_from: PlannedFrom,
        any_capacity: bool = False,
    ) -> TrainingStream:
        """Return the logical streams of a dataset; with `any_capacity`, packed rows of any capacity are accepted."""
        if self._masks is not None:
            raise PackingError(
                f"data_collator: expected a collator that does not mask tokens for a stream, got "
                f"{type(self._masks).__name__} with mlm=True; mask the tokens of the documents by map, before packing"
            )
        ranks = data_rank(trainer.accelerator).world_size
        batching = None if any_capacity and is_packed_stream(dataset) else self.decided.batching
        stream = training_stream(name, dataset, batching, ranks, ignored_masks(trainer))
        asked = getattr(trainer.args, "completion_only_loss", None)
        if asked is False and COMPLETION_MASK in stream.streams.packing.schema.names:
            raise PackingError(
                f"{name}: expected a stream without {COMPLETION_MASK!r}, since completion_only_loss=False asks for "
                "training on all tokens, but pack has applied the mask to the labels; remove the column before pack"
            )
        planned_from.note_settings(**{name: stream})
        return stream

    def _stream_loader(self, trainer: Trainer, stream: TrainingStream, **settings: Any) -> StreamLoader:
        args = trainer.args
        return StreamLoader(
            stream,
            trainer.accelerator,
            self.collator,
            token_types=bool(getattr(inner_model(trainer.model).config, "type_vocab_size", 0)),
            more=passed_on_in_stream(stream.streams.features, taken_by_trainer(trainer)),
            workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and trainer.accelerator.device.type != "cpu",
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=getattr(args, "dataloader_multiprocessing_context", None),
            **settings,
        )
