"""The methods of a trainer after `attach`: it trains, evaluates and predicts on the batches of a source.

The trainer's class becomes a subclass of its own class and of PackedTrainer, StreamTrainer or WholeRowTrainer.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, TrainOutput

from hf_packing.attention import borders_required
from hf_packing.batch.collate import is_tree_batch
from hf_packing.batch.segments import with_segments_cut
from hf_packing.columns import LABELS
from hf_packing.errors import PackingError
from hf_packing.sampling.token_budget import longest_segment
from hf_packing.training.losses import ITEMS, TokenMean
from hf_packing.training.ranks import data_rank, on_all_ranks
from hf_packing.training.state import TEST_DATASET, Attached, AttachedPacks, AttachedRows
from hf_packing.training.step_counts import Predictions, StepCounts, items_counted
from hf_packing.training.tree_batch import labels_key
from hf_packing.training.whole_rows import COUNTS


class AttachedTrainer(Trainer):  # type: ignore[misc]  # transformers has no types
    """A Trainer that trains on the batches that `attach` has planned."""

    attached: Attached

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        on_all_ranks(lambda _: self.attached.check(self))
        self.attached.step_counts = StepCounts(self.attached.source.sources)
        return super().train(*args, **kwargs)

    def get_train_dataloader(self) -> DataLoader[Any]:
        return self.attached.training_loader(self)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Return this rank's micro-batches of a step, and the number of items in the step on all ranks: trainable
        tokens, documents, or what else the loss is a mean of."""
        state = self.attached
        state.check(self)  # a callback may have changed an argument
        batches = list(islice(epoch_iterator, num_batches))
        if not batches:
            return batches, None
        processes_per_rank = self.accelerator.num_processes // data_rank(self.accelerator).world_size
        as_run = [self.cut_for_this_step(batch) for batch in batches]
        counts = state.source.counts_of(as_run, state.loss, self.callback_handler.train_dataloader).to(device)
        everywhere = self.accelerator.gather(counts[None])[::processes_per_rank]
        state.step_counts.add(everywhere)
        return batches, items_counted(everywhere)

    def cut_for_this_step(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch with the extra borders that the length_schedule of the batching asks for in this step."""
        return with_segments_cut(batch, longest_segment(self.attached.batching, self.state.global_step))

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log packing metrics together with the training loss."""
        counts = self.attached.step_counts
        if "loss" in logs:
            logs = {**logs, **counts.take(self.attached.max_tokens)}
        counts.correct_speed(logs)
        super().log(logs, *args, **kwargs)


class PackedTrainer(AttachedTrainer):
    """A Trainer that trains, evaluates and predicts on packed batches."""

    attached: AttachedPacks
    gather_function: Any

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with self.attached.on_all_ranks(self):
            metrics: dict[str, float] = super().evaluate(*args, **kwargs)
            return metrics

    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        with self.attached.on_all_ranks(self):
            return super().predict(*args, **kwargs)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        dataset = self.eval_dataset[dataset] if isinstance(dataset, str) else dataset
        return self.attached.loader_in_order(self, "eval_dataset", dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        return self.attached.loader_in_order(self, TEST_DATASET, test_dataset)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
        **others: Any,
    ) -> Any:
        state, evaluation = self.attached, self.attached.evaluation
        trains = evaluation is None and num_items_in_batch is not None
        if state.prove == "first batch":
            batch = {**inputs, ITEMS: num_items_in_batch} if trains else inputs
            state.first_batch_proof.check(model, batch, "training" if model.training else "evaluation")
        loss = state.loss if trains or model.training else "token"
        if trains:  # after isolation was proven on whole documents
            inputs = self.cut_for_this_step(inputs)
        # settings are passed on as Trainer passes them
        of_model = state.trainer_loss.is_of_model(inputs, loss)
        own = partial(Trainer.compute_loss, self) if of_model else super().compute_loss
        compute = partial(own, model, **({"return_outputs": True} if return_outputs else {}), **others)
        items = num_items_in_batch if trains else None
        found, counted = state.trainer_loss.of_micro_batch(self, model, inputs, compute, loss, items)
        if evaluation is not None:
            mean = found[0] if isinstance(found, tuple) else found
            evaluation.add(mean * counted, counted)
        return found

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with borders_required():
            loss: torch.Tensor = super().training_step(*args, **kwargs)
            return loss

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Give a batch of trees labels, since Trainer computes a loss only of batches with labels."""
        self.attached.predictions.begin(inputs)
        if is_tree_batch(inputs):
            inputs = {**inputs, LABELS: inputs[labels_key(inputs)]}
        with borders_required():
            return super().prediction_step(model, inputs, *args, **kwargs)

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        state = self.attached
        state.evaluation, state.predictions = TokenMean(self.args.device), Predictions(self.accelerator)
        self.gather_function = partial(state.predictions.gathered, self.gather_function)
        rows = self.args.per_device_eval_batch_size
        self.args.per_device_eval_batch_size = 1  # a batch is one row of predictions, for which metrics get one loss
        try:
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
            if (name := f"{metric_key_prefix}_loss") in output.metrics and state.evaluation.batches:
                summed, tokens = state.evaluation.over_ranks(self.accelerator)
                output.metrics[name] = summed / tokens if tokens else math.nan
        finally:
            state.evaluation, self.args.per_device_eval_batch_size = None, rows
        return output._replace(num_samples=state.predictions.documents)


class WholeRowTrainer(AttachedTrainer):
    """A Trainer with its own collator, loss and evaluation, which trains on micro-batches of whole rows."""

    attached: AttachedRows

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
        **others: Any,
    ) -> Any:
        inputs = dict(inputs)
        counts = inputs.pop(COUNTS, None)
        with _gathering_uneven_tensors(self.accelerator):
            found = super().compute_loss(model, inputs, return_outputs, **others)
        if num_items_in_batch is None or (counts is None and not model.training):  # not a step of training
            return found
        if counts is None:
            raise PackingError(
                f"trainer: expected the batches of the collator in compute_loss, but {self.attached.kind.__name__} "
                f"makes others in training_step, without {COUNTS!r}. attach(trainer, None) keeps its batches"
            )
        self.current_gradient_accumulation_steps = 1  # training_step may divide by it, but the share is of a step
        loss, *outputs = found if return_outputs else (found,)
        units = counts[-1]
        share = units.to(loss.device).double() / num_items_in_batch * data_rank(self.accelerator).world_size
        loss = loss * share if units else torch.nan_to_num(loss * 0)  # the mean over no labels is not a number
        return (loss, *outputs) if return_outputs else loss


@contextmanager
def _gathering_uneven_tensors(accelerator: Accelerator) -> Iterator[None]:
    """Context manager: within the block, `accelerator.gather` and `gather_for_metrics` take tensors of any length.

    Trainers of TRL gather metrics of the rows of a batch. Under a token budget, ranks have different numbers of rows.
    """
    if accelerator.num_processes == 1:
        yield
        return
    gather = accelerator.gather

    def gather_uneven(values: Any) -> Any:
        if not isinstance(values, Tensor) or not values.ndim:
            return gather(values)
        lengths = gather(torch.tensor([len(values)], device=values.device)).tolist()
        most = max(lengths)
        filled = F.pad(values, [0, 0] * (values.ndim - 1) + [0, most - len(values)])
        parts = gather(filled.contiguous()).split(most) if most else [values]
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=False)])

    accelerator.gather = gather_uneven
    try:
        yield
    finally:
        del accelerator.gather
