"""The methods of a trainer after `attach`: it trains, evaluates and predicts on planned batches."""

import math
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, TrainOutput

from hf_packing.attention import borders_required
from hf_packing.batch.collate import is_tree_batch
from hf_packing.batch.segments import with_segments_cut
from hf_packing.columns import ATTENTION_MASK, LABELS
from hf_packing.errors import PackingError
from hf_packing.sampling.token_budget import longest_segment
from hf_packing.training.losses import ITEMS, Loss
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
from hf_packing.training.token_losses import TokenMean
from hf_packing.training.tree_batch import labels_key


class PackedTrainer(Trainer):  # type: ignore[misc]  # transformers has no types
    """A Trainer that trains, evaluates and predicts on packed batches, which `attach` planned."""

    planned_batches: PlannedBatches
    gather_function: Any

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        planned = self.planned_batches
        planned.step_counts = StepCounts()
        with planned.on_all_ranks(self, planned.check_training):
            return super().train(*args, **kwargs)

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
        return self.planned_batches.loader_in_order(self, name, dataset, prepared=True)

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
        items = None if planned.evaluation is not None else num_items_in_batch  # prediction_step counts all labels
        planned.prove_on_first_batch(model, inputs if items is None else {**inputs, ITEMS: items})
        evaluates = items is None and not self.model.training
        loss: Loss = "token" if evaluates else planned.decided.loss
        is_of_model = planned.trainer_loss.is_of_model(inputs, loss)
        # settings are passed on as Trainer passes them
        own = partial(Trainer.compute_loss, self) if is_of_model else super().compute_loss
        compute = partial(own, model, **({"return_outputs": True} if return_outputs else {}), **others)
        if items is not None:  # in train(), after isolation was proven on whole documents
            inputs = self._cut_for_this_step(inputs)
        result, counted = planned.trainer_loss.of_micro_batch(self, model, inputs, compute, loss, items)
        if planned.evaluation is not None:
            mean = result[0] if isinstance(result, tuple) else result
            planned.evaluation.add(mean * counted, counted)
        return result

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with borders_required():
            loss: torch.Tensor = super().training_step(*args, **kwargs)
            return loss

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Give a batch of trees labels, since Trainer computes a loss only of batches with labels."""
        self.planned_batches.predictions.begin(inputs)
        if is_tree_batch(inputs):
            inputs = {**inputs, LABELS: inputs[labels_key(inputs)]}
        with borders_required():
            return super().prediction_step(model, inputs, *args, **kwargs)

    def _cut_for_this_step(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch with the extra borders that the length_schedule of the batching asks for in this step."""
        return with_segments_cut(batch, longest_segment(self.planned_batches.decided.batching, self.state.global_step))

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
                        f"{planned.trainer_loss.kind.__name__}.prediction_step did not call compute_loss"
                    )
                summed, tokens = planned.evaluation.over_ranks(self.accelerator)
                output.metrics[name] = summed / tokens if tokens else math.nan
        finally:
            planned.evaluation = None
            self.args.per_device_eval_batch_size = rows
        return output._replace(num_samples=planned.predictions.documents)
