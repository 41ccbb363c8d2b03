"""What attach changes in a trainer: where batches come from, what losses are divided by, what evaluation means."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput

from hf_packing.collate import PackingCollator
from hf_packing.errors import PackingError
from hf_packing.sampling.batching import Batching
from hf_packing.sampling.in_order import InOrder
from hf_packing.sampling.sampler import RankBatchSampler
from hf_packing.sampling.sizes import sizes_of
from hf_packing.training.evaluation import TokenMean, summed_loss
from hf_packing.training.losses import Loss, items_in, predicts_next, router_loss, weighted_loss, weights_of
from hf_packing.training.ranks import data_rank
from hf_packing.training.rows_loader import rows_loader
from hf_packing.training.trl_head import summed_log_probs, weighed


@dataclass
class Attached:
    """What a trainer was given."""

    batching: Batching
    loss: Loss
    collator: PackingCollator
    loss_of_trainer: bool
    """Whether the trainer's own compute_loss stays, and is only told what to divide by."""
    loss_replaced: bool
    """Whether a compute_loss_func or label smoothing makes the loss."""
    evaluated: TokenMean | None = None
    """The mean of the evaluation that is running."""


class PackedTrainer(Trainer):  # type: ignore[misc]  # transformers has no types
    """What stands before a trainer's own methods once batches are attached."""

    attached: Attached

    def get_train_dataloader(self) -> DataLoader[Any]:
        if self.train_dataset is None:
            raise PackingError("train_dataset: expected one, the trainer has none")
        return self.loader_of(self.train_dataset, self.train_sampler())

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        return self.loader_in_order(self.eval_dataset if eval_dataset is None else eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        return self.loader_in_order(test_dataset)

    def train_sampler(self) -> RankBatchSampler:
        rank, world_size = data_rank(self.accelerator)
        accumulation = self.args.gradient_accumulation_steps
        return RankBatchSampler(self.attached.batching, sizes_of(self.train_dataset), world_size, rank, accumulation)

    def loader_in_order(self, dataset: Any) -> DataLoader[Any]:
        rank, world_size = data_rank(self.accelerator)
        batching = InOrder(self.args.per_device_eval_batch_size)
        return self.loader_of(dataset, RankBatchSampler(batching, sizes_of(dataset), world_size, rank))

    def loader_of(self, dataset: Any, sampler: RankBatchSampler) -> DataLoader[Any]:
        if self.data_collator is not self.attached.collator:
            raise PackingError(
                f"data_collator: expected the one that attach has set, got {type(self.data_collator).__name__}, which "
                "would not keep the documents of planned batches apart"
            )
        args = self.args
        loader = rows_loader(
            dataset,
            sampler,
            collate_fn=self.data_collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and self.accelerator.device.type == "cuda",
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
        )
        # one process, as accelerate sees it: the sampler knows the ranks
        prepared: DataLoader[Any] = prepare_data_loader(
            loader,
            self.accelerator.device,
            num_processes=1,
            process_index=0,
            put_on_device=True,
            non_blocking=self.accelerator.non_blocking,
        )
        return prepared

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        batches = list(islice(epoch_iterator, num_batches))
        if not batches:
            return batches, None
        items = torch.stack([items_in(batch, self.attached.loss) for batch in batches]).sum().to(device)
        everywhere = self.accelerator.reduce(items, reduction="sum").clamp(min=1)
        share_rows = self.accelerator.num_processes // data_rank(self.accelerator).world_size
        return batches, everywhere / share_rows

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
        **others: Any,
    ) -> Any:
        if not self.model.training:
            return self.loss_of_evaluation(model, inputs, return_outputs)
        if self.attached.loss_of_trainer:
            with weighed(model, inputs) if self.attached.loss == "sequence" else nullcontext():
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch, **others)
        outputs = model(**without_labels(inputs))
        items = num_items_in_batch / data_rank(self.accelerator).world_size
        weights = weights_of(inputs, self.attached.loss) / items
        loss = weighted_loss(outputs.logits, inputs["labels"], weights, predicts_next(model))
        if (auxiliary := router_loss(outputs, model)) is not None:
            loss = loss + auxiliary / self.current_gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss

    def loss_of_evaluation(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> Any:
        """The mean over the batch's tokens; its sum is kept for the mean over all batches."""
        outputs = None
        if self.attached.loss_of_trainer:
            tokens = items_in(inputs, "token")
            with summed_log_probs(model) as summed:
                loss = super().compute_loss(model, inputs, return_outputs)
            loss, outputs = loss if return_outputs else (loss, None)
            if summed and getattr(self.args, "loss_type", None) == "nll" and not self.attached.loss_replaced:
                total = -summed[0]
            else:
                total = loss * tokens if tokens else torch.zeros_like(loss)
        else:
            outputs = model(**without_labels(inputs))
            total, tokens = summed_loss(outputs.logits, inputs, predicts_next(model))
            loss = total / tokens.clamp(min=1)
        if self.attached.evaluated is not None:
            self.attached.evaluated.add(total, tokens)
        return (loss, outputs) if return_outputs else loss

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        self.attached.evaluated = TokenMean(self.args.device)
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        if (name := f"{metric_key_prefix}_loss") in output.metrics:
            output.metrics[name] = self.attached.evaluated.over_ranks(self.accelerator)
        self.attached.evaluated = None
        return output


def without_labels(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if name != "labels"}
