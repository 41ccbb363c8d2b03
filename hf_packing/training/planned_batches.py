"""What attach keeps for a trainer: its batching, and the loaders that come of it."""

from dataclasses import dataclass, field
from typing import Any

from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader
from transformers import Trainer

from hf_packing.attention.patch import patch_model
from hf_packing.collate import PackingCollator
from hf_packing.errors import PackingError
from hf_packing.sampling.batching import Batching
from hf_packing.sampling.bucket_batches import BucketBatches
from hf_packing.sampling.in_order import InOrder
from hf_packing.sampling.sampler import RankBatchSampler
from hf_packing.sampling.sizes import RowSizes, sizes_of
from hf_packing.sampling.token_budget import TokenBudget
from hf_packing.training.evaluation import TokenMean
from hf_packing.training.loss_of_model import own_loss
from hf_packing.training.losses import Loss
from hf_packing.training.ranks import data_rank
from hf_packing.training.rows_loader import rows_loader
from hf_packing.training.step_facts import StepFacts


@dataclass
class PlannedBatches:
    """Of one trainer."""

    batching: Batching
    loss: Loss
    loss_of_trainer: bool
    """Whether the trainer's own compute_loss stays, and is only told what to divide by."""
    sums_log_probs: bool
    """Whether that is SFTTrainer's, whose evaluation can be summed exactly."""
    prove: bool
    loss_function: Any = None
    """The trainer's compute_loss_func."""
    collator: PackingCollator = field(default_factory=PackingCollator)
    evaluated: TokenMean | None = None
    """The mean of the evaluation that is running."""
    facts: StepFacts = field(default_factory=StepFacts)
    """Of the steps since the trainer last logged."""
    known_sizes: dict[int, tuple[Any, RowSizes]] = field(default_factory=dict)
    """Datasets that were looked at, by identity, and their sizes."""

    @property
    def budget(self) -> int:
        """Tokens that a micro-batch may have."""
        of_batching = self.batching
        assert isinstance(of_batching, (TokenBudget, BucketBatches))
        return of_batching.max_tokens if isinstance(of_batching, TokenBudget) else of_batching.tokens_per_batch

    def sizes(self, dataset: Any) -> RowSizes:
        """Sizes of the rows of a dataset, which is looked at once."""
        if id(dataset) not in self.known_sizes:
            self.known_sizes[id(dataset)] = dataset, sizes_of(dataset)
        return self.known_sizes[id(dataset)][1]

    def sampler(self, trainer: Trainer) -> RankBatchSampler:
        """The batches of this rank."""
        if trainer.train_dataset is None:
            raise PackingError("train_dataset: expected one, the trainer has none")
        rank, world_size = data_rank(trainer.accelerator)
        sizes, accumulation = self.sizes(trainer.train_dataset), trainer.args.gradient_accumulation_steps
        return RankBatchSampler(self.batching, sizes, world_size, rank, accumulation)

    def training_loader(self, trainer: Trainer) -> DataLoader[Any]:
        return self.loader(trainer, trainer.train_dataset, self.sampler(trainer))

    def loader_in_order(self, trainer: Trainer, dataset: Any) -> DataLoader[Any]:
        rank, world_size = data_rank(trainer.accelerator)
        batching = InOrder(trainer.args.per_device_eval_batch_size)
        return self.loader(trainer, dataset, RankBatchSampler(batching, self.sizes(dataset), world_size, rank))

    def loader(self, trainer: Trainer, dataset: Any, sampler: RankBatchSampler) -> DataLoader[Any]:
        """Batches on the trainer's device; by now its model may be another one, which is patched, too.

        Raises:
            PackingError: the collator is not the one that attach has set, or the loss not the one it has seen.
            ModelNotSupportedError: the model cannot be shown to keep documents apart.
        """
        if trainer.data_collator is not self.collator:
            raise PackingError(
                f"data_collator: expected the one that attach has set, got {type(trainer.data_collator).__name__}, "
                "which would not keep the documents of planned batches apart"
            )
        if trainer.compute_loss_func is not self.loss_function:
            raise PackingError("compute_loss_func: expected the one that the trainer had when attach was called")
        patch_model(trainer.model, prove=self.prove)
        own_loss(trainer.model)  # asked now, not in the middle of a step
        args = trainer.args
        loader = rows_loader(
            dataset,
            sampler,
            trainer.model,
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
