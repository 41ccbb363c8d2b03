"""Define `attach`, a function that makes a Trainer train, evaluate and predict on packed batches.

`attach` checks the arguments, plans the batches, patches the model and decides whether attach or the trainer computes
the loss. If all of this succeeds, `attach` replaces the trainer's class by a subclass with methods of `PackedTrainer`.
"""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, overload

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, TrainOutput

from hf_packing.attention import ProveInTraining, inner_model
from hf_packing.collate import PackingCollator
from hf_packing.errors import PackingError
from hf_packing.sampling.epoch_plan import Batching, check_batching
from hf_packing.sampling.sampler import EpochSummary, summary_of
from hf_packing.sampling.token_budget import with_documents_per_step, with_linear_cost
from hf_packing.sampling.within_limits import Shapes, within_shapes
from hf_packing.training.checks import check_trainer
from hf_packing.training.losses import (
    ITEMS,
    Loss,
    TokenMean,
    check_loss,
    items_in,
    router_loss,
    weights_of,
    without_router_loss,
)
from hf_packing.training.planned_batches import PlannedBatches, evaluation_datasets
from hf_packing.training.ranks import (
    BatchesOfCheckpoint,
    PlannedFrom,
    data_rank,
    items_counted,
    micro_batch_counts,
    on_all_ranks,
)
from hf_packing.training.run_with_loss import run_with_loss
from hf_packing.training.trainer_loss import as_it_was_on_error, keeps_rows_whole, summed_log_probs, weighted_log_probs
from hf_packing.training.unpad_models import UnpaddedModels, unpad_models
from hf_packing.training.whole_row_trainer import attach_whole_rows


@overload
def attach(trainer: Any, batching: None, *, prove: ProveInTraining = ...) -> UnpaddedModels: ...
@overload
def attach(
    trainer: Any,
    batching: Batching,
    *,
    loss: Loss | None = ...,
    match_documents_per_step: int | None = ...,
    prove: ProveInTraining = ...,
    tokens: int | None = ...,
    max_segments: int | None = ...,
) -> EpochSummary: ...
def attach(
    trainer: Any,
    batching: Batching | None,
    *,
    loss: Loss | None = None,
    match_documents_per_step: int | None = None,
    prove: ProveInTraining = "first batch",
    tokens: int | None = None,
    max_segments: int | None = None,
) -> EpochSummary | UnpaddedModels:
    """Make a Trainer or an SFTTrainer train, evaluate and predict on packed batches, or any trainer without padding.

    Call `attach` once, before `train()`, on all ranks at the same time. `attach` patches the model on its current
    device, so that documents in a batch do not attend to each other. The argument `batching` then decides which rows
    share a micro-batch; per_device_train_batch_size, seed, data_seed and dataloader_drop_last no longer do. All ranks
    and epochs have equally many micro-batches, in an order that changes every epoch. A resumed run continues exactly
    with the next micro-batch. The gradient does not depend on how an optimizer step is split into ranks and
    micro-batches. Labels and loss masks are used as without attach. A collator that masks tokens masks each document by
    itself, anew in every epoch. The evaluation loss is the mean over all labels other than -100. An evaluation batch
    joins per_device_eval_batch_size rows into one flat row, and predictions have the same flat shape. If you change a
    dataset or an argument, the next train(), evaluate() or predict() uses the new value or raises an error.

    Models with other heads, and DPOTrainer and RewardTrainer, keep their collator, loss and metrics. A TokenBudget only
    forms their batches, whose padding is not computed. With `batching=None`, any trainer keeps its own batches too.

    Args:
        trainer: a Trainer, an SFTTrainer of TRL, or an instance of a subclass that does not make its own batches; any
            trainer if `batching` is None, such as TRL's DPOTrainer, RewardTrainer, GRPOTrainer or KTOTrainer.
        batching: a TokenBudget or a BucketBatches; None to keep the trainer's own batches.
        loss: "token", the default, for the mean over all trainable tokens of an optimizer step; "sequence" to average
            first within each document of the step, then over documents.
        match_documents_per_step: mean number of documents in an optimizer step, over all ranks. Pass the number of a
            run without packing to get as many steps per epoch. With None, the batching decides.
        prove: "first batch" to prove isolation on the first batch, before the first optimizer step; the route of a
            large model is then found on a small copy. "model" or "small" to prove isolation now, as `patch_model` does.
        tokens: number of tokens in every batch, for torch.compile; see `PackingCollator`. Evaluation batches are then
            filled with as many rows as fit. None for batches of any shape, or to use the trainer's PackingCollator.
        max_segments: number of segments in every batch. The batching gets max_documents=max_segments - 1.

    Returns:
        EpochSummary: numbers of steps, micro-batches, documents and tokens in the first epoch; `print` shows them. If
        `batching` is None, UnpaddedModels: how each model runs padded batches.

    Raises:
        PackingError: the trainer, an argument or a dataset is not supported; data or arguments differ between ranks
            (raised on all ranks); or a masked language model gets data without labels, or labels that only repeat the
            input tokens, and no collator that masks tokens.
        ModelNotSupportedError: it cannot be verified that the model isolates documents. If the first batch shows a
            leak, `train` raises this error on all ranks, with the name of the module in which the leak begins.

    Example:
        >>> import datasets, hf_packing as hfp, tempfile, transformers
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> documents = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5], [6, 7, 8, 9]]})
        >>> trainer = transformers.Trainer(
        ...     transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=99, **sizes)),
        ...     transformers.TrainingArguments(tempfile.mkdtemp(), use_cpu=True, report_to="none"),
        ...     train_dataset=documents,
        ... )
        >>> hfp.attach(trainer, hfp.TokenBudget(5)).num_micro_batches
        2
    """
    if batching is None:
        unused = {"loss": loss, "match_documents_per_step": match_documents_per_step}
        return unpad_models(trainer, prove, unused | {"tokens": tokens, "max_segments": max_segments})
    if keeps_rows_whole(trainer):
        unused = {"loss": loss, "tokens": tokens, "max_segments": max_segments}
        return attach_whole_rows(trainer, batching, prove, match_documents_per_step, unused)
    check_and_plan = partial(_check_and_plan, trainer, batching, loss=loss or "token", prove=prove)
    shapes, documents = (tokens, max_segments), match_documents_per_step
    planned = on_all_ranks(partial(check_and_plan, documents_per_step=documents, shapes=shapes))
    with as_it_was_on_error(trainer):
        on_all_ranks(partial(_isolate_and_settle, trainer, planned.batches))
    _install(trainer, planned)
    return planned.summary


class PackedTrainer(Trainer):  # type: ignore[misc]  # transformers has no types
    """A Trainer that trains, evaluates and predicts on packed batches, which `attach` planned."""

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
        """Log packing metrics together with the training loss."""
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
        planned.prove_on_first_batch(model, inputs)
        if planned.evaluation is not None or (num_items_in_batch is None and not self.model.training):
            return self._compute_evaluation_loss(model, inputs, return_outputs)
        loss_kind = planned.decided.loss
        if planned.settled.by_trainer:
            with weighted_log_probs(model, inputs) if loss_kind == "sequence" else nullcontext():
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch, **others)
        if num_items_in_batch is None:  # a single batch, outside of train()
            items = items_in(inputs, loss_kind).clamp(min=1)
        else:
            items = num_items_in_batch / data_rank(self.accelerator).world_size
        weights = weights_of(inputs, loss_kind) / items
        loss, outputs = run_with_loss(model, inputs, inputs["labels"], weights, keep_logits=return_outputs)
        if (routers := router_loss(outputs, model)) is not None:
            loss = loss + routers / self.current_gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss

    def _compute_evaluation_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> Any:
        """Return a batch's mean loss over trainable tokens; in an evaluation, also add it to the overall mean."""
        planned = self.planned_batches
        if planned.settled.by_trainer:
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
            total, outputs = run_with_loss(model, inputs, inputs["labels"], weights, keep_logits=keep_logits)
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
        return output


def packed_class(kind: type[Trainer]) -> type[PackedTrainer]:
    """Return the class that a trainer of class `kind` has after attach.

    Methods of PackedTrainer run first, and call the methods of `kind` through super().

    Raises:
        TypeError: `kind` cannot be subclassed.
    """
    if kind is Trainer:
        return PackedTrainer
    return type(f"Packed{kind.__name__}", (PackedTrainer, kind), {"__module__": __name__})


class _Planned(NamedTuple):
    """The results of planning: the trainer's planned batches and new class, and the summary that attach returns."""

    batches: PlannedBatches
    kind: type[PackedTrainer]
    summary: EpochSummary


def _check_and_plan(
    trainer: Any,
    batching: Batching,
    planned_from: PlannedFrom,
    *,
    loss: Loss,
    documents_per_step: int | None,
    prove: ProveInTraining,
    shapes: Shapes,
) -> _Planned:
    """Check the arguments and datasets of `attach`, and plan the first epoch. The trainer does not change."""
    if isinstance(trainer, PackedTrainer):
        raise PackingError("trainer: expected a trainer not yet attached, got an attached trainer; call attach once")
    check_loss(loss)
    check_batching(batching)
    check_trainer(trainer, loss)
    if documents_per_step is not None:
        batching = with_documents_per_step(batching, documents_per_step)
    if shapes == (None, None) and isinstance(trainer.data_collator, PackingCollator):
        shapes = trainer.data_collator.tokens, trainer.data_collator.max_segments
    if shapes != (None, None):
        batching = within_shapes(batching, *shapes)
    config = None if trainer.model is None else inner_model(trainer.model).config
    batches = PlannedBatches(trainer, with_linear_cost(batching, config), loss, prove, shapes)
    sampler = batches.sampler(trainer, planned_from)
    for name, dataset in evaluation_datasets(trainer).items():
        batches.sampler_in_order(trainer, name, dataset, planned_from)
    unpacked = trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps
    isolation = batches.first_batch_proof if prove == "first batch" else None
    summary = summary_of(sampler, unpacked * data_rank(trainer.accelerator).world_size, isolation)
    return _Planned(batches, packed_class(type(trainer)), summary)


def _isolate_and_settle(trainer: Trainer, batches: PlannedBatches, _: PlannedFrom) -> None:
    """Patch the trainer's model, decide whether attach or the trainer computes the loss, and check the labels."""
    batches.settle(trainer)
    for dataset in (trainer.train_dataset, *evaluation_datasets(trainer).values()):
        batches.check_labels(trainer, dataset)
    batches.check_divided(trainer)


def _install(trainer: Trainer, planned: _Planned) -> None:
    """Set the trainer's planned batches, collator, callback and class; none of these assignments can fail."""
    trainer.planned_batches, trainer.data_collator = planned.batches, planned.batches.collator
    trainer.add_callback(BatchesOfCheckpoint(planned.batches.decided.loss))
    trainer.__class__ = planned.kind
    trainer.loss_is_scaled_for_ga = True
    planned.batches.remember_settings(trainer)
