"""Define `attach`, a function that makes a Trainer train, evaluate and predict on packed batches.

`attach` checks the arguments, plans the batches and patches the model. If all of this succeeds, `attach` replaces the
trainer's class by a subclass with methods of `PackedTrainer`. Losses stay those of the trainer and the model.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, overload

import datasets
from transformers import Trainer

from hf_packing.attention import ProveInTraining, inner_model
from hf_packing.batch.collate import PackingCollator
from hf_packing.checks import refuse_older
from hf_packing.errors import PackingError
from hf_packing.rows.changes import LabelCounts
from hf_packing.sampling.batching import Batching, Shapes, check_batching
from hf_packing.sampling.sampler import EpochSummary, RankBatchSampler
from hf_packing.sampling.token_budget import with_documents_per_step, with_linear_cost
from hf_packing.training.checks import check_trainer
from hf_packing.training.first_batch import isolation_in_summary
from hf_packing.training.losses import Loss, check_loss
from hf_packing.training.max_length import refuse_cut_documents
from hf_packing.training.trainer import PackedTrainer
from hf_packing.training.passed_on import check_columns, taken_by_trainer
from hf_packing.training.state import PlannedBatches, evaluation_datasets
from hf_packing.training.ranks import (
    BatchesOfCheckpoint,
    PlannedFrom,
    data_rank,
    on_all_ranks,
)
from hf_packing.training.trainer_loss import subclass_with
from hf_packing.training.unpad import UnpaddedModels, models_unpatched_on_error, unpad_models
from hf_packing.training.whole_row_trainer import attach_whole_rows, keeps_rows_whole
from hf_packing.trees.forest import check_fewest_shared


@overload
def attach(
    trainer: Any, batching: None, *, prove: ProveInTraining = ..., share_prefixes: bool | int = ...
) -> UnpaddedModels: ...
@overload
def attach(
    trainer: Any,
    batching: Batching,
    *,
    loss: Loss | None = ...,
    loss_unit: str | None = ...,
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
    loss_unit: str | None = None,
    match_documents_per_step: int | None = None,
    prove: ProveInTraining = "first batch",
    tokens: int | None = None,
    max_segments: int | None = None,
    share_prefixes: bool | int = False,
) -> Any:
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

    A training dataset may be a stream, an IterableDataset: either documents, which a TokenBudget packs in windows, or
    the result of `pack(stream, strategy, streams=...)`. Pass max_steps to TrainingArguments. Ranks read different
    logical streams, and run the same steps until the last one has ended. A run may be resumed on another number of
    ranks with as many rows in a step, and does not train again on documents on which it was trained.

    Models with other heads, and DPOTrainer and RewardTrainer, keep their collator, loss and metrics. A TokenBudget only
    forms their batches, whose padding is not computed. With `batching=None`, any trainer keeps its own batches too.

    Args:
        trainer: a Trainer, an SFTTrainer of TRL, or an instance of a subclass that does not make its own batches; any
            trainer if `batching` is None, such as TRL's DPOTrainer, RewardTrainer, GRPOTrainer or KTOTrainer.
        batching: a TokenBudget or a BucketBatches; None to keep the trainer's own batches.
        loss: "token", the default, for the mean over all trainable tokens of an optimizer step; "sequence" to average
            first within each document of the step, then over documents.
        loss_unit: what the trainer's own loss is a mean of, where rows stay whole and the loss is not one of TRL or
            transformers, as with `compute_loss_func`: "rows", "labeled rows", "labeled tokens", "labeled tokens but the
            first", "completion tokens" or "tokens of chosen completions". It is checked on a few rows. None for a known
            loss.
        match_documents_per_step: mean number of documents in an optimizer step, over all ranks. Pass the number of a
            run without packing to get as many steps per epoch. With None, the batching decides.
        prove: "first batch" to prove isolation on the first batch, before the first optimizer step, and print a line
            that says so; the route of a large model is then found on a small copy. "model" or "small" to prove
            isolation now, as `patch_model` does.
        tokens: number of tokens in every batch, for torch.compile; see `PackingCollator`. Evaluation batches are then
            filled with as many rows as fit. None for batches of any shape, or to use the trainer's PackingCollator.
        max_segments: number of segments in every batch. The batching gets max_documents=max_segments - 1.
        share_prefixes: if `batching` is None, whether prefixes that rows of a batch share, such as the prompt of
            several answers, are computed once. An integer is the fewest tokens to share; True means 16. For other
            batchings, see TokenBudget.

    Returns:
        EpochSummary: numbers of steps, micro-batches, documents and tokens in the first epoch; `print` shows them. For
        a stream, StreamSummary: the numbers of logical streams, ranks and rows in a step. If `batching` is None,
        UnpaddedModels: how each model runs padded batches.

    Raises:
        PackingError: the trainer, an argument or a dataset is not supported; SFTTrainer has cut documents to its
            max_length; the training dataset has labels, but none are left after its documents were cut or dropped;
            data or arguments differ between ranks (raised on all ranks); or a masked language model gets data without
            labels, or labels that only repeat the input tokens, and no collator that masks tokens.
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
    if any(kind.__module__.startswith("trl.") for kind in type(trainer).__mro__):
        refuse_older("trl")
    if batching is None:
        unused = {"loss": loss, "loss_unit": loss_unit, "match_documents_per_step": match_documents_per_step}
        unused |= {"tokens": tokens, "max_segments": max_segments}
        return unpad_models(trainer, prove, unused, check_fewest_shared(share_prefixes))
    if share_prefixes is not False:
        raise PackingError(
            f"share_prefixes: expected no such argument beside a batching, got {share_prefixes!r}; pass it to "
            "TokenBudget"
        )
    if keeps_rows_whole(trainer):
        unused = {"loss": loss, "tokens": tokens, "max_segments": max_segments}
        return attach_whole_rows(trainer, batching, prove, match_documents_per_step, loss_unit, unused)
    if loss_unit is not None:
        raise PackingError(
            f"loss_unit: expected no such argument for a language model, whose loss is a mean over labeled tokens, got "
            f"{loss_unit!r}; pass loss='token' or loss='sequence'"
        )
    if isinstance(getattr(trainer, "train_dataset", None), datasets.IterableDataset):
        from hf_packing.training.streams.attach_stream import attach_stream

        settings = {"match_documents_per_step": match_documents_per_step}
        return attach_stream(trainer, batching, loss or "token", prove, (tokens, max_segments), settings)
    check_and_plan = partial(_check_and_plan, trainer, batching, loss=loss or "token", prove=prove)
    shapes, documents = (tokens, max_segments), match_documents_per_step
    planned = on_all_ranks(partial(check_and_plan, documents_per_step=documents, shapes=shapes))
    with models_unpatched_on_error(trainer):
        labels = on_all_ranks(partial(_isolate_and_settle, trainer, planned))
    _install(trainer, planned)
    return replace(planned.summary, labels=labels)


class _Planned(NamedTuple):
    """The results of planning: the trainer's planned batches and new class, and the summary that attach returns."""

    batches: PlannedBatches
    sampler: RankBatchSampler
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
    known = {"train_dataset": trainer.train_dataset, **evaluation_datasets(trainer)}
    for name, dataset in known.items():
        refuse_cut_documents(trainer, name, dataset)
    if documents_per_step is not None:
        batching = with_documents_per_step(batching, documents_per_step)
    if shapes == (None, None) and isinstance(trainer.data_collator, PackingCollator):
        shapes = trainer.data_collator.tokens, trainer.data_collator.max_segments
    if shapes != (None, None):
        batching = batching.within(shapes)
    config = None if trainer.model is None else inner_model(trainer.model).config
    batches = PlannedBatches(trainer, with_linear_cost(batching, config), loss, prove, shapes)
    sampler = batches.sampler(trainer, planned_from)
    for name, dataset in evaluation_datasets(trainer).items():
        batches.sampler_in_order(trainer, name, dataset, planned_from)
    check_columns("attach", list(known.values()), taken_by_trainer(trainer))
    unpacked = trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps
    isolation = isolation_in_summary(prove, batches.first_batch_proof)
    summary = sampler.summary(unpacked * data_rank(trainer.accelerator).world_size, isolation)
    return _Planned(batches, sampler, subclass_with(PackedTrainer, type(trainer), "Packed"), summary)


def _isolate_and_settle(trainer: Trainer, planned: _Planned, _: PlannedFrom) -> LabelCounts | None:
    """Patch the trainer's models, check the loss, and count the labels."""
    batches = planned.batches
    batches.settle(trainer)
    for dataset in (trainer.train_dataset, *evaluation_datasets(trainer).values()):
        batches.check_labels(trainer, dataset)
    return batches.kept_labels(trainer, planned.sampler)


def _install(trainer: Trainer, planned: _Planned) -> None:
    """Set the trainer's planned batches, collator, callback and class; none of these assignments can fail."""
    trainer.planned_batches, trainer.data_collator = planned.batches, planned.batches.collator
    trainer.add_callback(BatchesOfCheckpoint(planned.batches.decided.loss))
    trainer.__class__ = planned.kind
    planned.batches.remember_settings(trainer)
