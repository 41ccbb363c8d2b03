"""The state that `attach` gives a trainer: the decisions, the data loaders, and checks for changes after attach."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer

from hf_packing.attention import ProveInTraining, inner_model
from hf_packing.batch.collate import PackingCollator
from hf_packing.errors import PackingError
from hf_packing.rows.changes import LabelCounts
from hf_packing.sampling.batching import Batching, Shapes
from hf_packing.sampling.evaluation import InOrder
from hf_packing.sampling.rows import SampledRows, TreesOfDocuments, kept_labels
from hf_packing.sampling.sampler import RankBatchSampler
from hf_packing.sampling.sizes import RowSizes, sizes_of
from hf_packing.training.attach_decisions import AttachDecisions
from hf_packing.training.checks import (
    applies_masks,
    check_accelerator,
    check_arguments,
    check_labels_are_hidden,
    check_loss_masks,
    check_masks,
    check_methods,
    check_not_dispatched,
    ignored_masks,
    masks_tokens,
)
from hf_packing.training.first_batch import FirstBatchProof
from hf_packing.training.loader import rows_loader
from hf_packing.training.losses import Loss
from hf_packing.training.max_length import refuse_cut_documents
from hf_packing.training.model_loss import check_loss_of_model, collator_for
from hf_packing.training.passed_on import passed_on, taken_by_trainer
from hf_packing.training.ranks import (
    CollectiveCall,
    PlannedFrom,
    Predictions,
    StepCounts,
    data_rank,
    micro_batch_counts,
    on_all_ranks,
)
from hf_packing.training.router_padding import refuse_padding_in_router_loss
from hf_packing.training.token_losses import TokenLosses, TokenMean
from hf_packing.training.train_on_trees import check_takes_trees, check_takes_trees_as, trees_to_train
from hf_packing.training.trainer_loss import loss_of_trainer, loss_settings, refuse_changed_settings
from hf_packing.training.unpad_models import patch_models

Check = Callable[[Trainer], None]


class _KnownSizes(NamedTuple):
    """Cached sizes of a dataset's rows."""

    dataset: Any
    state: Any
    """The dataset's number of rows and format; the sizes are read again if this state changes."""
    sizes: RowSizes


class PlannedBatches:
    """The state that `attach` stores as `trainer.planned_batches`, with methods that check and load batches."""

    collator: PackingCollator

    def __init__(
        self, trainer: Trainer, batching: Batching, loss: Loss, prove: ProveInTraining, shapes: Shapes = (None, None)
    ) -> None:
        model = weakref.ref(inner_model(trainer.model))
        self.decided = AttachDecisions(batching, loss, prove, shapes, model)
        self.trainer_loss = loss_of_trainer(trainer)
        self.evaluation: TokenMean | None = None
        """The mean loss of the evaluation that is running, or None if no evaluation is running."""
        self.token_losses: TokenLosses | None = None
        """Where the losses of all labels are kept during a step of training; None to keep none."""
        self.step_counts = StepCounts()
        """Counts of tokens and documents in the optimizer steps since the trainer last logged."""
        self.predictions = Predictions(trainer.accelerator, "")
        """What was predicted in the evaluation that is running, or was the last."""
        self.accumulation = 1
        """The value of gradient_accumulation_steps for which the training batches were planned."""
        self._loss_settings: dict[str, Any] = {}
        """The settings that decide the trainer's loss, by name, with the values that `check` expects."""
        self._trees: TreesOfDocuments | None = None
        """The trees of the training dataset; None if they were not yet found, or if documents share no prefixes."""
        self._known_sizes: dict[int, _KnownSizes] = {}
        """The cached sizes of each dataset; the key is id(dataset)."""
        self._known_labels: tuple[RowSizes, LabelCounts | None] | None = None
        """The sizes of the training dataset for which labels were counted, and the counts."""
        self._collective = CollectiveCall()
        self.first_batch_proof = FirstBatchProof()
        self._masks = trainer.data_collator if masks_tokens(trainer.data_collator) else None

    @contextmanager
    def on_all_ranks(self, trainer: Trainer, check: Check) -> Iterator[None]:
        """Context manager for a method that all ranks call at the same time, such as train().

        First, all ranks call `check`. When the first loader is made in the block, the ranks compare data and settings.
        """
        on_all_ranks(lambda _: check(trainer))
        with self._collective.active():
            yield

    def check(self, trainer: Trainer) -> None:
        """Refuse changes, made to the trainer after attach, that do not work with planned batches.

        Raises:
            PackingError: the collator, a method, an argument or a setting that decides the loss has changed.
        """
        if trainer.data_collator is not self.collator:
            raise PackingError(
                f"data_collator: expected the collator set by attach, got {type(trainer.data_collator).__name__}, "
                "which would not isolate the documents of planned batches"
            )
        check_methods(trainer)
        check_arguments(trainer, self.decided.loss)
        refuse_changed_settings(self._loss_settings, trainer)

    def check_training(self, trainer: Trainer) -> None:
        """Refuse changes, made to the trainer after attach, that do not work with training on planned batches.

        Raises:
            PackingError: `check` refuses a change; the accelerator does not work with planned batches; or the model was
                replaced after attach, in a trainer without model_init.
        """
        self.check(trainer)
        check_accelerator(trainer.accelerator)
        if trainer.model_init is None and self.decided.model() is not inner_model(trainer.model):
            raise PackingError(
                "model: expected the model that the trainer had when attach was called, got a different "
                f"{type(inner_model(trainer.model)).__name__}. The trainer's optimizer may still update the first "
                "model; make a new Trainer with the new model, and call attach on the new Trainer"
            )

    def sampler(self, trainer: Trainer, planned_from: PlannedFrom) -> RankBatchSampler:
        """Return a sampler that plans this rank's micro-batches for training."""
        if trainer.train_dataset is None:
            raise PackingError("train_dataset: expected a dataset, but the trainer has none")
        check_not_dispatched(trainer.accelerator)
        batching, accumulation = self.decided.batching, trainer.args.gradient_accumulation_steps
        planned_from.note_settings(batching=batching, gradient_accumulation_steps=accumulation, loss=self.decided.loss)
        planned_from.note_settings(tokens=self.decided.shapes[0], max_segments=self.decided.shapes[1])
        check_loss_masks(trainer, trainer.train_dataset)
        rows = self._rows_to_train(trainer)
        return self._sampler(trainer, "train_dataset", rows, planned_from, batching, accumulation)

    def sampler_in_order(
        self, trainer: Trainer, name: str, dataset: Any, planned_from: PlannedFrom
    ) -> RankBatchSampler:
        """Return a sampler of this rank's micro-batches for evaluation or prediction, in the order of the dataset."""
        rows_per_batch = trainer.args.per_device_eval_batch_size
        planned_from.note_settings(per_device_eval_batch_size=rows_per_batch)
        tokens, max_segments = self.decided.shapes
        batching: Batching = InOrder(rows_per_batch)
        if tokens is not None and max_segments is not None:
            batching = InOrder(max_tokens=tokens, max_documents=max_segments - 1)
        return self._sampler(trainer, name, dataset, planned_from, batching)

    def settle(self, trainer: Trainer) -> None:
        """Patch the trainer's models, check the loss, and choose the collator.

        Raises:
            PackingError: the model's loss is not supported.
            ModelNotSupportedError: it cannot be verified that the model isolates documents.
        """
        patch_models(trainer, self.decided.prove)
        if self.decided.shapes != (None, None):
            refuse_padding_in_router_loss(trainer.model)
        collator = collator_for(trainer.model, *self.decided.shapes)
        check_masks(self._masks, trainer.model, collator)
        if not self.trainer_loss.is_its_own:
            check_loss_of_model(trainer.model, self.decided.loss)
        self._settled, self.trainer_loss.is_divided = weakref.ref(inner_model(trainer.model)), None
        self.collator = collator

    def counts_of(self, batches: Sequence[dict[str, Any]]) -> Tensor:
        """Return the counts of this rank's micro-batches; see `micro_batch_counts`."""
        return micro_batch_counts(batches, self.decided.loss)

    def prove_on_first_batch(self, model: nn.Module, batch: dict[str, Any]) -> None:
        """Prove isolation on the first batch in each mode, if the caller of attach has asked for it."""
        if self.decided.prove == "first batch":
            self.first_batch_proof.check(model, batch, "training" if model.training else "evaluation")

    def check_labels(self, trainer: Trainer, dataset: Any) -> None:
        """Refuse labels that only repeat the input tokens; see `check_labels_are_hidden`."""
        sizes = self._sizes(self._rows_to_train(trainer) if dataset is trainer.train_dataset else dataset)
        if sizes.trees is not None:
            check_takes_trees(trainer.model, self.decided.loss, self.decided.batching, self.decided.shapes)
            check_takes_trees_as(self.trainer_loss, trainer, self._masks)
            return
        check_labels_are_hidden(dataset, sizes, trainer.model, self._rows_of(trainer))

    def kept_labels(self, trainer: Trainer, sampler: RankBatchSampler) -> LabelCounts | None:
        """Count the labels that are left in the training dataset; None if they are not known before training.

        Raises:
            PackingError: the dataset has labels, but none are left.
        """
        if self._masks is not None:  # it draws the labels
            return None
        known = self._known_labels
        if known is None or known[0] is not sampler.sizes:
            counts = kept_labels(
                self._rows_to_train(trainer),
                sampler,
                ignored_masks(trainer),
                applies_masks(trainer),
                self.collator.keep_first_labels,
            )
            known = self._known_labels = sampler.sizes, counts
        if known[1] is not None:
            known[1].check_some_left("batching", sampler.batching)
        return known[1]

    def remember_settings(self, trainer: Trainer) -> None:
        """Store the settings that decide the trainer's loss, so that `check` notices changes."""
        self._loss_settings = loss_settings(trainer)

    def training_loader(self, trainer: Trainer) -> DataLoader[Any]:
        """Return a loader of planned batches for the trainer's current training dataset."""

        def plan(planned_from: PlannedFrom) -> RankBatchSampler:
            self.check_training(trainer)
            return self.sampler(trainer, planned_from)

        def settle(_: PlannedFrom) -> None:
            self._settle_again(trainer)
            self.check_labels(trainer, trainer.train_dataset)
            self.kept_labels(trainer, sampler)

        run = self._collective.runner()
        sampler = run(plan)
        run(settle)
        self.accumulation = sampler.accumulation
        return self._loader(trainer, self._rows_to_train(trainer), sampler)

    def loader_in_order(self, trainer: Trainer, name: str, dataset: Any, prepared: bool = False) -> DataLoader[Any]:
        """Return a loader for evaluation or prediction, with rows in the order of the dataset.

        Args:
            trainer: the attached trainer.
            name: the name of the dataset in error messages.
            dataset: a map-style dataset of packed rows or documents.
            prepared: whether the dataset is one that SFTTrainer prepares.
        """

        def plan(planned_from: PlannedFrom) -> RankBatchSampler:
            self.check(trainer)
            if prepared:
                refuse_cut_documents(trainer, name, dataset)
            return self.sampler_in_order(trainer, name, dataset, planned_from)

        def settle(_: PlannedFrom) -> None:
            self._settle_again(trainer)
            self.check_labels(trainer, dataset)

        run = self._collective.runner()
        sampler = run(plan)
        run(settle)
        return self._loader(trainer, dataset, sampler)

    def _rows_to_train(self, trainer: Trainer) -> Any:
        """Return the training dataset, or the trees of its documents if the batching shares prefixes."""
        dataset, batching = trainer.train_dataset, self.decided.batching
        if batching.fewest_shared is None:
            return dataset
        if self._trees is None or self._trees.documents is not dataset:
            more = passed_on(dataset, taken_by_trainer(trainer))
            self._trees = trees_to_train(dataset, batching, ignored_masks(trainer), trainer.model, more)
        return self._trees

    def _settle_again(self, trainer: Trainer) -> None:
        """Patch the trainer's models again if needed, and settle again if the trainer has another model."""
        if self._settled() is inner_model(trainer.model):
            patch_models(trainer, self.decided.prove)
            return
        self.settle(trainer)
        trainer.data_collator = self.collator
        self.remember_settings(trainer)

    def _sampler(
        self,
        trainer: Trainer,
        name: str,
        dataset: Any,
        planned_from: PlannedFrom,
        batching: Batching,
        accumulation: int = 1,
    ) -> RankBatchSampler:
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise PackingError(
                f"{name}: expected a map-style dataset, with a length and numbered rows, got {type(dataset).__name__}. "
                "Make one of its first rows, by datasets.Dataset.from_list(list(stream.take(1000)))"
            )
        sizes = self._sizes(dataset)
        planned_from.note_data(name, dataset, sizes)
        self._rows_of(trainer, planned_from)
        check_loss_masks(trainer, dataset)
        rank, world_size = data_rank(trainer.accelerator)
        return RankBatchSampler(batching, sizes, world_size, rank, accumulation)

    def _rows_of(self, trainer: Trainer, planned_from: PlannedFrom | None = None) -> Callable[..., SampledRows]:
        """Return the class of the rows: SampledRows, or rows that the trainer's collator masks."""
        if self._masks is None:
            return SampledRows
        from hf_packing.training.masked_documents import masked_rows

        return masked_rows(self._masks, trainer.args, planned_from)

    def _sizes(self, dataset: Any) -> RowSizes:
        """Return the sizes of a dataset's rows; the dataset is read again only if its state has changed."""
        state = (len(dataset) if hasattr(dataset, "__len__") else None, getattr(dataset, "format", None))
        known = self._known_sizes.get(id(dataset))
        if known is None or known.state != state:
            known = self._known_sizes[id(dataset)] = _KnownSizes(dataset, state, sizes_of(dataset))
        return known.sizes

    def _loader(self, trainer: Trainer, dataset: Any, sampler: RankBatchSampler) -> DataLoader[Any]:
        """Return a loader of the sampler's micro-batches that puts them on the trainer's device."""
        args = trainer.args
        loader = rows_loader(
            dataset,
            sampler,
            trainer.model,
            unread=ignored_masks(trainer),
            apply_masks=applies_masks(trainer),
            rows_of=self._rows_of(trainer),
            more=passed_on(dataset, taken_by_trainer(trainer)),
            collate_fn=self.collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and trainer.accelerator.device.type != "cpu",
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=getattr(args, "dataloader_multiprocessing_context", None),
        )
        # tell accelerate that there is one process, since the sampler already divides rows among ranks
        prepared: DataLoader[Any] = prepare_data_loader(
            loader,
            trainer.accelerator.device,
            num_processes=1,
            process_index=0,
            put_on_device=True,
            non_blocking=trainer.accelerator.non_blocking,
        )
        return prepared


def evaluation_datasets(trainer: Trainer) -> dict[str, Any]:
    """Return the trainer's evaluation datasets as a dict, whose keys name the datasets in error messages."""
    dataset = trainer.eval_dataset
    if isinstance(dataset, dict):
        return {f"eval_dataset[{name!r}]": each for name, each in dataset.items()}
    return {} if dataset is None else {"eval_dataset": dataset}
