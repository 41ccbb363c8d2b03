"""What attach keeps for a trainer: its batching, and the loaders that come of it."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer

from hf_packing.attention import inner_model
from hf_packing.collate import PackingCollator
from hf_packing.errors import PackingError
from hf_packing.sampling.bucket_batches import BucketBatches
from hf_packing.sampling.epoch_plan import Batching
from hf_packing.sampling.row_sizes import RowSizes, sizes_of
from hf_packing.sampling.sampler import InOrder, RankBatchSampler
from hf_packing.sampling.token_budget import TokenBudget
from hf_packing.training.agreement import Appointment, PlannedFrom, on_all_ranks
from hf_packing.training.evaluation import TokenMean
from hf_packing.training.loss_masks import applies_masks, check_loss_masks, masks_left_alone
from hf_packing.training.loss_of_model import OwnLoss
from hf_packing.training.losses import Loss
from hf_packing.training.ranks import data_rank
from hf_packing.training.rows_loader import rows_loader
from hf_packing.training.seen_labels import check_labels
from hf_packing.training.settled import check_settings, check_settings_of_training, loss_settings, settle_model
from hf_packing.training.step_facts import StepFacts
from hf_packing.training.trainer_loss import refuse_undivided


class KnownSizes(NamedTuple):
    """Of a dataset that was looked at."""

    dataset: Any
    state: Any
    """What is seen to be different, without reading rows, when rows were added or a transform was set."""
    sizes: RowSizes


@dataclass
class PlannedBatches:
    """Of one trainer."""

    batching: Batching
    loss: Loss
    trainer_has_own: bool
    """Whether the trainer makes its own loss, whatever that of its model is."""
    sums_log_probs: bool
    """Whether that is SFTTrainer's, whose evaluation can be summed exactly."""
    prove: bool
    scaled: bool
    """Whether the trainer's class says that its loss is right for accumulated batches."""
    loss_function: Any = None
    """The trainer's compute_loss_func."""
    loss_of_trainer: bool = False
    """Whether the trainer's own compute_loss stays, and is only told what to divide by."""
    divided: bool = True
    """Whether the loss is divided by what is in a whole step of the optimiser."""
    own_loss: OwnLoss | None = None
    """The model's own, when that was settled."""
    settled_for: Callable[[], PreTrainedModel | None] = lambda: None
    """The model for which it was settled who makes the loss."""
    trained: Callable[[], PreTrainedModel | None] = lambda: None
    """The model that the trainer had when attach was called."""
    loss_settings: dict[str, Any] = field(default_factory=dict)
    """What decides the trainer's loss, when that was settled."""
    collator: PackingCollator = field(default_factory=PackingCollator)
    evaluated: TokenMean | None = None
    """The mean of the evaluation that is running."""
    facts: StepFacts = field(default_factory=StepFacts)
    """Of the steps since the trainer last logged."""
    accumulation: int = 1
    """Micro-batches that a step of the optimiser was planned to have on each rank."""
    known_sizes: dict[int, KnownSizes] = field(default_factory=dict)
    """By identity of the dataset."""
    appointment: Appointment = field(default_factory=Appointment)
    """With the other ranks, to plan at the same time."""

    @property
    def budget(self) -> int:
        """Tokens that a micro-batch may have."""
        of_batching = self.batching
        assert isinstance(of_batching, (TokenBudget, BucketBatches))
        return of_batching.max_tokens if isinstance(of_batching, TokenBudget) else of_batching.tokens_per_batch

    def remember(self, trainer: Trainer) -> None:
        """For which model and settings it was settled who makes the loss."""
        self.settled_for = weakref.ref(inner_model(trainer.model))
        self.loss_settings = loss_settings(trainer)

    def sizes(self, dataset: Any) -> RowSizes:
        """Sizes of the rows of a dataset, which is looked at once, and again when rows were added or removed."""
        state = (len(dataset) if hasattr(dataset, "__len__") else None, getattr(dataset, "format", None))
        known = self.known_sizes.get(id(dataset))
        if known is None or known.state != state:
            known = self.known_sizes[id(dataset)] = KnownSizes(dataset, state, sizes_of(dataset))
        return known.sizes

    def sampler(self, trainer: Trainer, planned_from: PlannedFrom) -> RankBatchSampler:
        """The batches of this rank."""
        if trainer.train_dataset is None:
            raise PackingError("train_dataset: expected one, the trainer has none")
        rank, world_size = data_rank(trainer.accelerator)
        accumulation = trainer.args.gradient_accumulation_steps
        planned_from.note_settings(batching=self.batching, gradient_accumulation_steps=accumulation, loss=self.loss)
        sizes = self.sizes(trainer.train_dataset)
        planned_from.note_data("train_dataset", trainer.train_dataset, sizes)
        check_loss_masks(trainer, trainer.train_dataset)
        return RankBatchSampler(self.batching, sizes, world_size, rank, accumulation)

    def sampler_in_order(
        self, trainer: Trainer, name: str, dataset: Any, planned_from: PlannedFrom
    ) -> RankBatchSampler:
        """The batches of this rank for evaluation."""
        rank, world_size = data_rank(trainer.accelerator)
        rows_per_batch = trainer.args.per_device_eval_batch_size
        planned_from.note_settings(per_device_eval_batch_size=rows_per_batch)
        sizes = self.sizes(dataset)
        planned_from.note_data(name, dataset, sizes)
        check_loss_masks(trainer, dataset)
        return RankBatchSampler(InOrder(rows_per_batch), sizes, world_size, rank)

    @contextmanager
    def planned_on_all_ranks(
        self, trainer: Trainer, check: Callable[[Trainer, "PlannedBatches"], None]
    ) -> Iterator[None]:
        """Within it, all ranks plan once, from the same data; before it, all have checked the trainer."""
        on_all_ranks(lambda _: check(trainer, self))
        with self.appointment.made():
            yield

    def training_loader(self, trainer: Trainer) -> DataLoader[Any]:
        def plan(planned_from: PlannedFrom) -> RankBatchSampler:
            check_settings_of_training(trainer, self)
            return self.sampler(trainer, planned_from)

        def settle(_: PlannedFrom) -> None:
            settle_model(trainer, self)
            check_labels(trainer.train_dataset, self.sizes(trainer.train_dataset), trainer.model)
            refuse_undivided(trainer, self.divided or self.scaled)

        run = self.appointment.keep()
        sampler = run(plan)
        run(settle)
        self.accumulation = sampler.accumulation
        return self.loader(trainer, trainer.train_dataset, sampler)

    def loader_in_order(self, trainer: Trainer, name: str, dataset: Any) -> DataLoader[Any]:
        def plan(planned_from: PlannedFrom) -> RankBatchSampler:
            check_settings(trainer, self)
            return self.sampler_in_order(trainer, name, dataset, planned_from)

        def settle(_: PlannedFrom) -> None:
            settle_model(trainer, self)
            check_labels(dataset, self.sizes(dataset), trainer.model)

        run = self.appointment.keep()
        sampler = run(plan)
        run(settle)
        return self.loader(trainer, dataset, sampler)

    def loader(self, trainer: Trainer, dataset: Any, sampler: RankBatchSampler) -> DataLoader[Any]:
        """Batches on the trainer's device."""
        args = trainer.args
        loader = rows_loader(
            dataset,
            sampler,
            trainer.model,
            unread=masks_left_alone(trainer),
            apply_masks=applies_masks(trainer),
            collate_fn=self.collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and trainer.accelerator.device.type != "cpu",
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=getattr(args, "dataloader_multiprocessing_context", None),
        )
        # one process, as accelerate sees it: the sampler knows the ranks
        prepared: DataLoader[Any] = prepare_data_loader(
            loader,
            trainer.accelerator.device,
            num_processes=1,
            process_index=0,
            put_on_device=True,
            non_blocking=trainer.accelerator.non_blocking,
        )
        return prepared
