"""The methods of a trainer after `attach`: it trains, evaluates and predicts on planned batches."""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, TrainOutput

from hf_packing.collate import is_tree_batch
from hf_packing.columns import ATTENTION_MASK, LABELS
from hf_packing.cut_batch import with_segments_cut
from hf_packing.errors import PackingError
from hf_packing.sampling.token_budget import longest_segment
from hf_packing.training.losses import ITEMS, items_in, router_loss, weights_of, without_router_loss
from hf_packing.training.planned_batches import PlannedBatches
from hf_packing.training.ranks import (
    Predictions,
    StepCounts,
    check_accumulation,
    data_rank,
    fillers_counted,
    items_counted,
    own_tokens,
)
from hf_packing.training.resumed_steps import ResumedSteps
from hf_packing.training.run_with_loss import run_with_loss
from hf_packing.training.token_losses import TokenMean
from hf_packing.training.trainer_loss import summed_log_probs, weighted_log_probs
from hf_packing.training.tree_batch import labels_key


class PackedTrainer(Trainer):  # type: ignore[misc]  # transformers has no types
    """A Trainer that trains, evaluates and predicts on packed batches, which `attach` planned."""

    planned_batches: PlannedBatches
    gather_function: Any
    loss_is_scaled_for_ga = True

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        planned = self.planned_batches
        planned.resumed = ResumedSteps(kwargs.get("resume_from_checkpoint", args[0] if args else None))
        planned.step_counts = StepCounts()
        try:
            with planned.on_all_ranks(self, planned.check_training):
                return super().train(*args, **kwargs)
        finally:
            planned.resumed = None

    def set_initial_training_values(self, args: Any, dataloader: DataLoader[Any]) -> tuple[Any, ...]:
        values: tuple[Any, ...] = super().set_initial_training_values(args, dataloader)
        resumed = self.planned_batches.resumed
        return values if resumed is None else resumed.initial_values(args, values)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Return the epoch in which training begins, and the number of its micro-batches that Trainer skips."""
        found: tuple[int, int] = super()._init_training_state(*args, **kwargs)
        resumed = self.planned_batches.resumed
        epoch = None if resumed is None else resumed.begin()
        return found if epoch is None else (epoch, 0)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with self.planned_batches.on_all_ranks(self, self.planned_batches.check):
            metrics: dict[str, float] = super().evaluate(*args, **kwargs)
            return metrics

    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        planned = self.planned_batches
        with planned.on_all_ranks(self, planned.check):
            output = super().predict(*args, **kwargs)
        planned.predictions.correct_speed(output.metrics)
        return output

    def get_train_dataloader(self) -> DataLoader[Any]:
        return self.planned_batches.training_loader(self)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        name = "eval_dataset"
        if isinstance(eval_dataset, str):
            known = self.eval_dataset if isinstance(self.eval_dataset, dict) else {}
            if eval_dataset not in known:
                raise PackingError(
                    f"eval_dataset: expected a dataset or a key of trainer.eval_dataset ({', '.join(known) or 'none'}),"
                    f" got {eval_dataset!r}"
                )
            name, eval_dataset = f"eval_dataset[{eval_dataset!r}]", known[eval_dataset]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        return self.planned_batches.loader_in_order(self, name, dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        return self.planned_batches.loader_in_order(self, "test_dataset", test_dataset)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Return this rank's micro-batches of a step, and the number of trainable tokens or documents on all ranks."""
        planned = self.planned_batches
        check_accumulation(self, planned.accumulation)
        batches = list(islice(epoch_iterator, num_batches))
        if not batches:
            return batches, None
        processes_per_rank = self.accelerator.num_processes // data_rank(self.accelerator).world_size
        counts = planned.counts_of([self._cut_for_this_step(batch) for batch in batches]).to(device)
        everywhere = self.accelerator.gather(counts[None])[::processes_per_rank]
        planned.step_counts.add(everywhere)
        if hasattr(self, "_total_train_tokens"):  # SFTTrainer is about to add all tokens of these batches
            self._total_train_tokens -= fillers_counted(everywhere)
        return batches, items_counted(everywhere)

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Tell Trainer which tokens are padding, since it would count pad tokens, which documents may end with."""
        super()._track_num_input_tokens({**inputs, ATTENTION_MASK: own_tokens(inputs)})

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log packing metrics together with the training loss."""
        if "loss" in logs:
            logs = {**logs, **self.planned_batches.step_counts.take(self.planned_batches.decided.max_tokens)}
        self.planned_batches.step_counts.correct_speed(logs)
        self.planned_batches.predictions.correct_speed(logs)
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
        planned.prove_on_first_batch(model, inputs)
        if planned.evaluation is not None or (num_items_in_batch is None and not self.model.training):
            return self._compute_evaluation_loss(model, inputs, return_outputs)
        loss_kind = planned.decided.loss
        if num_items_in_batch is not None:  # in train(), after isolation was proven on whole documents
            inputs = self._cut_for_this_step(inputs)
        if planned.settled.by_trainer and not is_tree_batch(inputs):
            with weighted_log_probs(model, inputs) if loss_kind == "sequence" else nullcontext():
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch, **others)
        if num_items_in_batch is None:  # a single batch, outside of train()
            items = items_in(inputs, loss_kind).clamp(min=1)
        else:
            items = num_items_in_batch / data_rank(self.accelerator).world_size
        weights = weights_of(inputs, loss_kind) / items
        loss, outputs = run_with_loss(
            model,
            inputs,
            inputs[labels_key(inputs)],
            weights,
            keep_logits=return_outputs,
            token_losses=planned.token_losses,
        )
        if (routers := router_loss(outputs, model)) is not None:
            loss = loss + routers / self.current_gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Give a batch of trees labels, since Trainer computes a loss only of batches with labels."""
        self.planned_batches.predictions.begin(inputs)
        if is_tree_batch(inputs):
            inputs = {**inputs, LABELS: inputs[labels_key(inputs)]}
        return super().prediction_step(model, inputs, *args, **kwargs)

    def _cut_for_this_step(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch with the extra borders that the length_schedule of the batching asks for in this step."""
        return with_segments_cut(batch, longest_segment(self.planned_batches.decided.batching, self.state.global_step))

    def _compute_evaluation_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> Any:
        """Return a batch's mean loss over trainable tokens; in an evaluation, also add it to the overall mean."""
        planned = self.planned_batches
        if planned.settled.by_trainer and not is_tree_batch(inputs):
            tokens, outputs = items_in(inputs, "token"), None
            divided = {}
            if self.compute_loss_func is not None:  # otherwise the function would get num_items_in_batch=None
                divided = {ITEMS: tokens.clamp(min=1) * data_rank(self.accelerator).world_size}
            with summed_log_probs(model) as summed, without_router_loss(model):
                loss = super().compute_loss(model, inputs, return_outputs, **divided)
            if return_outputs:
                loss, outputs = loss
            total = loss * tokens if tokens else torch.zeros_like(loss)
            if summed and planned.decided.trainer_loss.sums_log_probs:
                total = -summed[0]
        else:
            weights, keep_logits = weights_of(inputs, "token"), return_outputs and not planned.only_evaluates_loss
            total, outputs = run_with_loss(model, inputs, inputs[labels_key(inputs)], weights, keep_logits=keep_logits)
            tokens = items_in(inputs, "token")
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
        only_loss = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        stock = planned.decided.trainer_loss.kind.prediction_step is Trainer.prediction_step
        planned.only_evaluates_loss = only_loss and stock
        planned.predictions = Predictions(self.accelerator, metric_key_prefix)
        self.gather_function = partial(planned.predictions.gathered, self.gather_function)
        rows = self.args.per_device_eval_batch_size
        self.args.per_device_eval_batch_size = 1  # a batch is one row of predictions, for which metrics get one loss
        try:
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
            if (name := f"{metric_key_prefix}_loss") in output.metrics:
                if not planned.evaluation.batches:
                    raise PackingError(
                        "prediction_step: expected a method that calls self.compute_loss, but "
                        f"{planned.decided.trainer_loss.kind.__name__}.prediction_step did not call compute_loss"
                    )
                summed, tokens = planned.evaluation.over_ranks(self.accelerator)
                output.metrics[name] = summed / tokens if tokens else math.nan
        finally:
            planned.evaluation, planned.only_evaluates_loss = None, False
            self.args.per_device_eval_batch_size = rows
        return output._replace(num_samples=planned.predictions.documents)
