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
from hf_packing.training.evaluation import TokenMean, summed_loss
from hf_packing.training.loss_of_model import predicts_next, router_loss, without_router_loss
from hf_packing.training.losses import ITEMS, items_in, weighted_loss, weights_of
from hf_packing.training.planned_batches import PlannedBatches
from hf_packing.training.ranks import data_rank
from hf_packing.training.settled import check_accumulation, check_settings, check_settings_of_training
from hf_packing.training.step_facts import ITEMS_COUNTED, facts_of
from hf_packing.training.trl_head import summed_log_probs, weighed


class PackedTrainer(Trainer):  # type: ignore[misc]  # transformers has no types
    """A trainer with planned batches; `attach` makes one of a Trainer."""

    planned_batches: PlannedBatches
    loss_is_scaled_for_ga = True

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        with self.planned_batches.planned_on_all_ranks(self, check_settings_of_training):
            return super().train(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with self.planned_batches.planned_on_all_ranks(self, check_settings):
            metrics: dict[str, float] = super().evaluate(*args, **kwargs)
            return metrics

    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        with self.planned_batches.planned_on_all_ranks(self, check_settings):
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
        planned = self.planned_batches
        check_accumulation(self, planned)
        batches = list(islice(epoch_iterator, num_batches))
        if not batches:
            return batches, None
        share_rows = self.accelerator.num_processes // data_rank(self.accelerator).world_size
        facts = facts_of(batches, planned.loss).to(device)
        everywhere = self.accelerator.gather(facts[None])[::share_rows]
        planned.facts.add(everywhere)
        return batches, everywhere[..., ITEMS_COUNTED].sum().clamp(min=1)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """With what packing does beside the training loss, to wherever the trainer reports."""
        if "loss" in logs:
            logs = {**logs, **self.planned_batches.facts.take(self.planned_batches.budget)}
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
        if planned.evaluated is not None or (num_items_in_batch is None and not self.model.training):
            return self.compute_loss_of_evaluation(model, inputs, return_outputs)
        if planned.loss_of_trainer:
            with weighed(model, inputs) if planned.loss == "sequence" else nullcontext():
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch, **others)
        outputs = model(**without_labels(inputs))
        if num_items_in_batch is None:  # outside of train(), a batch on its own
            items = items_in(inputs, planned.loss).clamp(min=1)
        else:
            items = num_items_in_batch / data_rank(self.accelerator).world_size
        weights = weights_of(inputs, planned.loss) / items
        loss = weighted_loss(outputs.logits, inputs["labels"], weights, predicts_next(model))
        if (routers := router_loss(outputs, model)) is not None:
            loss = loss + routers / self.current_gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss

    def compute_loss_of_evaluation(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> Any:
        """The mean over the batch's tokens; its sum is kept for the mean over all batches."""
        planned = self.planned_batches
        if planned.loss_of_trainer:
            tokens, outputs = items_in(inputs, "token"), None
            divided = {}
            if planned.loss_function is not None:  # is called with None only where labels are missing
                divided = {ITEMS: tokens.clamp(min=1) * data_rank(self.accelerator).world_size}
            with summed_log_probs(model) as summed, without_router_loss(model):
                loss = super().compute_loss(model, inputs, return_outputs, **divided)
            if return_outputs:
                loss, outputs = loss
            total = loss * tokens if tokens else torch.zeros_like(loss)
            if summed and planned.sums_log_probs:
                total = -summed[0]
        else:
            outputs = model(**without_labels(inputs))
            total, tokens = summed_loss(outputs.logits, inputs, predicts_next(model))
            loss = total / tokens.clamp(min=1)
        if planned.evaluated is not None:
            planned.evaluated.add(total, tokens)
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
        planned.evaluated = TokenMean(self.args.device)
        try:
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
            if (name := f"{metric_key_prefix}_loss") in output.metrics:
                if not planned.evaluated.batches:
                    raise PackingError(
                        f"prediction_step: expected one that calls compute_loss, that of {type(self).__name__} does not"
                    )
                summed, tokens = planned.evaluated.over_ranks(self.accelerator)
                output.metrics[name] = summed / tokens if tokens else math.nan
        finally:
            planned.evaluated = None
        return output


def without_labels(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if name != "labels"}
