"""What attach puts before a trainer's own methods: where batches come from, and what losses are divided by."""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, TrainOutput

from hf_packing.errors import PackingError
from hf_packing.training.losses import ITEMS, TokenMean, items_in, summed_loss, weighted_loss, weights_of
from hf_packing.training.model_loss import predicts_next, router_loss, without_router_loss
from hf_packing.training.planned_batches import PlannedBatches
from hf_packing.training.ranks import data_rank
from hf_packing.training.summary import items_counted, micro_batch_counts
from hf_packing.training.trainer_loss import summed_log_probs, weighted_log_probs


class PackedTrainer(Trainer):  # type: ignore[misc]  # transformers has no types
    """A trainer with planned batches."""

    planned_batches: PlannedBatches
    loss_is_scaled_for_ga = True

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        with self.planned_batches.on_all_ranks(self, self.planned_batches.check_training):
            return super().train(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with self.planned_batches.on_all_ranks(self, self.planned_batches.check):
            metrics: dict[str, float] = super().evaluate(*args, **kwargs)
            return metrics

    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        with self.planned_batches.on_all_ranks(self, self.planned_batches.check):
            return super().predict(*args, **kwargs)

    def get_train_dataloader(self) -> DataLoader[Any]:
        return self.planned_batches.training_loader(self)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        name = "eval_dataset"
        if isinstance(eval_dataset, str):
            known = self.eval_dataset if isinstance(self.eval_dataset, dict) else {}
            if eval_dataset not in known:
                raise PackingError(f"eval_dataset: expected one of {', '.join(known) or 'none'}, got {eval_dataset!r}")
            name, eval_dataset = f"eval_dataset[{eval_dataset!r}]", known[eval_dataset]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        return self.planned_batches.loader_in_order(self, name, dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        return self.planned_batches.loader_in_order(self, "test_dataset", test_dataset)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Return the micro-batches of an optimizer step, and the items of the loss in them on all ranks."""
        planned = self.planned_batches
        planned.check_accumulation(self)
        batches = list(islice(epoch_iterator, num_batches))
        if not batches:
            return batches, None
        processes_per_rank = self.accelerator.num_processes // data_rank(self.accelerator).world_size
        counts = micro_batch_counts(batches, planned.decided.loss).to(device)
        everywhere = self.accelerator.gather(counts[None])[::processes_per_rank]
        planned.step_counts.add(everywhere)
        return batches, items_counted(everywhere)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log packing figures beside the training loss."""
        if "loss" in logs:
            logs = {**logs, **self.planned_batches.step_counts.take(self.planned_batches.decided.max_tokens)}
        super().log(logs, *args, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
        **others: Any,
    ) -> Any:
        planned = self.planned_batches
        if planned.evaluation is not None or (num_items_in_batch is None and not self.model.training):
            return self._compute_evaluation_loss(model, inputs, return_outputs)
        loss_kind = planned.decided.loss
        if planned.settled.by_trainer:
            with weighted_log_probs(model, inputs) if loss_kind == "sequence" else nullcontext():
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch, **others)
        outputs = model(**_without_labels(inputs))
        if num_items_in_batch is None:  # a batch on its own, outside of train()
            items = items_in(inputs, loss_kind).clamp(min=1)
        else:
            items = num_items_in_batch / data_rank(self.accelerator).world_size
        weights = weights_of(inputs, loss_kind) / items
        loss = weighted_loss(outputs.logits, inputs["labels"], weights, predicts_next(model))
        if (routers := router_loss(outputs, model)) is not None:
            loss = loss + routers / self.current_gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss

    def _compute_evaluation_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> Any:
        """Return the mean over the batch's tokens, and add their sum to the mean over all batches."""
        planned = self.planned_batches
        if planned.settled.by_trainer:
            tokens, outputs = items_in(inputs, "token"), None
            divided = {}
            if self.compute_loss_func is not None:  # Trainer passes it None where labels are missing
                divided = {ITEMS: tokens.clamp(min=1) * data_rank(self.accelerator).world_size}
            with summed_log_probs(model) as summed, without_router_loss(model):
                loss = super().compute_loss(model, inputs, return_outputs, **divided)
            if return_outputs:
                loss, outputs = loss
            total = loss * tokens if tokens else torch.zeros_like(loss)
            if summed and planned.decided.trainer_loss.sums_log_probs:
                total = -summed[0]
        else:
            outputs = model(**_without_labels(inputs))
            total, tokens = summed_loss(outputs.logits, inputs, predicts_next(model))
            loss = total / tokens.clamp(min=1)
        if planned.evaluation is not None:
            planned.evaluation.add(total, tokens)
        return (loss, outputs) if return_outputs else loss

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        planned = self.planned_batches
        planned.evaluation = TokenMean(self.args.device)
        try:
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
            if (name := f"{metric_key_prefix}_loss") in output.metrics:
                if not planned.evaluation.batches:
                    raise PackingError(
                        f"prediction_step: expected one that calls compute_loss, that of "
                        f"{planned.decided.trainer_loss.kind.__name__} does not"
                    )
                summed, tokens = planned.evaluation.over_ranks(self.accelerator)
                output.metrics[name] = summed / tokens if tokens else math.nan
        finally:
            planned.evaluation = None
        return output


def packed_class(kind: type[Trainer]) -> type[PackedTrainer]:
    """Return the class that a trainer of a class gets when it is attached.

    A trainer exists before it is attached, so its class changes: `trainer.__class__ = packed_class(type(trainer))`. For
    a plain Trainer that is PackedTrainer. For any other class it is a subclass, in which the methods of PackedTrainer
    come first and call those of the class by super().

    Raises:
        TypeError: the class cannot be subclassed.
    """
    if kind is Trainer:
        return PackedTrainer
    return type(f"Packed{kind.__name__}", (PackedTrainer, kind), {"__module__": __name__})


def _without_labels(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if name != "labels"}
