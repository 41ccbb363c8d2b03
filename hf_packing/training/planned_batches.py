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
from hf_packing.sampling.in_order import InOrder
from hf_packing.sampling.sampler import RankBatchSampler
from hf_packing.sampling.sizes import RowSizes, sizes_of
from hf_packing.training.evaluation import TokenMean
from hf_packing.training.losses import Loss
from hf_packing.training.ranks import data_rank
from hf_packing.training.rows_loader import rows_loader


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
    collator: PackingCollator = field(default_factory=PackingCollator)
    evaluated: TokenMean | None = None
    """The mean of the evaluation that is running."""
    known_sizes: tuple[Any, RowSizes] | None = None
    """The training dataset that was looked at, and its sizes."""

    def sampler(self, trainer: Trainer) -> RankBatchSampler:
        """The batches of this rank."""
        dataset = trainer.train_dataset
        if dataset is None:
            raise PackingError("train_dataset: expected one, the trainer has none")
        if self.known_sizes is None or self.known_sizes[0] is not dataset:
            self.known_sizes = dataset, sizes_of(dataset)
        rank, world_size = data_rank(trainer.accelerator)
        return RankBatchSampler(
            self.batching, self.known_sizes[1], world_size, rank, trainer.args.gradient_accumulation_steps
        )

    def training_loader(self, trainer: Trainer) -> DataLoader[Any]:
        return self.loader(trainer, trainer.train_dataset, self.sampler(trainer))

    def loader_in_order(self, trainer: Trainer, dataset: Any) -> DataLoader[Any]:
        rank, world_size = data_rank(trainer.accelerator)
        batching = InOrder(trainer.args.per_device_eval_batch_size)
        return self.loader(trainer, dataset, RankBatchSampler(batching, sizes_of(dataset), world_size, rank))

    def loader(self, trainer: Trainer, dataset: Any, sampler: RankBatchSampler) -> DataLoader[Any]:
        """Batches on the trainer's device; by now its model may be another one, which is patched, too.

        Raises:
            PackingError: the collator is not the one that attach has set.
            ModelNotSupportedError: the model cannot be shown to keep documents apart.
        """
        if trainer.data_collator is not self.collator:
            raise PackingError(
                f"data_collator: expected the one that attach has set, got {type(trainer.data_collator).__name__}, "
                "which would not keep the documents of planned batches apart"
            )
        patch_model(trainer.model, prove=self.prove)
        args = trainer.args
        loader = rows_loader(
            dataset,
            sampler,
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
