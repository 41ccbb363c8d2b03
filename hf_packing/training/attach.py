"""Define `attach`, a function that makes a Trainer train, evaluate and predict on packed batches.

`attach` checks the arguments, plans the batches and patches the model. If all of this succeeds, `attach` replaces the
trainer's class by a subclass with the methods of a class in `trainer.py`. Losses stay those of the trainer and the
model.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, overload

import datasets
from transformers import Trainer

from hf_packing.attention import ProveInTraining, block_of, inner_model, predicts_tokens
from hf_packing.batch.collate import PackingCollator
from hf_packing.checks import check_choice, check_type, expect, refuse_older
from hf_packing.columns import LOSS_WEIGHT, LOSS_WEIGHTS, PICTURES, SEGMENT_COLUMNS, refuse_columns
from hf_packing.errors import PackingError
from hf_packing.rows.packing_trace import refuse_lost_borders
from hf_packing.sampling.batching import Batching, check_batching
from hf_packing.sampling.sampler import EpochSummary
from hf_packing.sampling.sizes import check_map_style
from hf_packing.sampling.token_budget import TokenBudget, with_documents_per_step
from hf_packing.training.checks import check_trainer, classes_of_trl
from hf_packing.training.kinds.split import ranks_of
from hf_packing.training.leveling import Leveling, check_can_level
from hf_packing.training.losses import Loss
from hf_packing.training.models import UnpaddedModels, models_unpatched_on_error, unpad_models
from hf_packing.training.ranks import PlannedFrom, on_all_ranks
from hf_packing.training.state import AttachedBatches, AttachedPacks, AttachedRows, decided_by
from hf_packing.training.step_cases import without_attach
from hf_packing.training.streams import StreamSummary
from hf_packing.training.trainer import PackedTrainer, UnpaddedTrainer, WholeRowTrainer
from hf_packing.trees.forest import check_fewest_shared

_SORTING = {"aot", "aot_unpaired"}
"""Losses of DPOTrainer that sort the pairs of a batch by what the models say of them. Few pairs show this seldom, above
all before the training, when the models are the same."""


@overload
def attach(
    trainer: Any,
    batching: None,
    *,
    prove: ProveInTraining = ...,
    share_prefixes: bool | int = ...,
    level: bool = ...,
) -> UnpaddedModels: ...
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
) -> EpochSummary | StreamSummary: ...
def attach(
    trainer: Any,
    batching: Batching | None,
    *,
    loss: Loss | None = None,
    match_documents_per_step: int | None = None,
    prove: ProveInTraining = "first batch",
    tokens: int | None = None,
    max_segments: int | None = None,
    share_prefixes: bool | int = False,
    level: bool = False,
) -> Any:
    """Make a Trainer or an SFTTrainer train, evaluate and predict on packed batches, or any trainer without padding.

    Call `attach` before `train()`, on all ranks at the same time. `attach` patches the model on its current device, so
    that documents in a batch do not attend to each other. The argument `batching` then decides which rows share a
    micro-batch; per_device_train_batch_size, seed, data_seed and dataloader_drop_last no longer do. All ranks and
    epochs have equally many micro-batches, in an order that changes every epoch. A resumed run continues exactly with
    the next micro-batch. The gradient of a mean over labels does not depend on how an optimizer step is split.
    Labels and loss masks are used as without attach; the column `loss_weights`, one number for each token, or
    `loss_weight`, one for each document, weights the loss. A collator that masks tokens masks each document by itself,
    anew in every epoch. The evaluation loss is the mean over all labels other than -100, with their weights. An
    evaluation batch joins up to per_device_eval_batch_size rows into one flat row of no more tokens than in training,
    unless a row alone has more, and predictions have the same flat shape. After you change the training dataset or
    something that decides batches or the loss, call `attach` again; until then, train(), evaluate() and predict() raise
    an error that names the change.

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
        level: if `batching` is None, whether rows of GRPOTrainer, RLOOTrainer or KTOTrainer change places between
            ranks, and those that were sampled also between the micro-batches of an optimizer step, so that all have
            about as much work, and as many rows as before. The loss of the step stays the same, which the first steps
            show.

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
    if classes_of_trl(type(trainer)):
        refuse_older("trl")
    of_packed_rows = {"loss": loss, "tokens": tokens, "max_segments": max_segments}
    if batching is None:
        stock = "if batching is None, since the trainer then makes its own batches"
        expect(None, stock, **of_packed_rows, match_documents_per_step=match_documents_per_step)
        expect(None, f"{stock}; pass the model", model_init=getattr(trainer, "model_init", None))
        fewest_shared = check_fewest_shared(share_prefixes)
        no_weights = f"no weights {stock}, and computes its own loss; remove the column"
        columns = getattr(getattr(trainer, "train_dataset", None), "column_names", None) or ()
        refuse_columns((LOSS_WEIGHT, LOSS_WEIGHTS), columns, no_weights)
        if level:
            check_can_level(trainer)

        def unpad(planned_from: PlannedFrom) -> UnpaddedModels:
            planned_from.note_settings(batching=None, prove=prove, share_prefixes=fewest_shared, level=level)
            return unpad_models(trainer, prove, fewest_shared)

        with models_unpatched_on_error(trainer):
            unpadded = on_all_ranks(unpad)
        if isinstance(trainer, Trainer):
            _become(trainer, UnpaddedTrainer, AttachedBatches(without_attach(trainer), prove))
            trainer.attached.leveling = Leveling(trainer) if level else None
        return unpadded
    expect(False, "beside a batching; pass it to TokenBudget", share_prefixes=share_prefixes)
    expect(False, "beside a batching, which levels all ranks itself", level=level)
    plain = without_attach(trainer)
    is_whole = keeps_rows_whole(plain)

    def plan(planned_from: PlannedFrom) -> AttachedPacks | AttachedRows:
        complete = check_batching(batching)
        if match_documents_per_step is not None:
            complete = with_documents_per_step(complete, match_documents_per_step)
        if is_whole:
            expect(None, "for rows that stay whole, of which the trainer computes its own loss", **of_packed_rows)
            check_trainer(plain, None)
            _check_keeps_rows(plain, complete)
            return AttachedRows(plain, complete, prove, planned_from)
        of_packs = check_choice("loss", loss or "token", Loss)
        check_trainer(plain, of_packs)
        return AttachedPacks(plain, complete, prove, of_packs, (tokens, max_segments), planned_from)

    state = on_all_ranks(plan)
    if (ranks := ranks_of(state.batching)) > 1:
        block_of(ranks)  # now, since a rank may make a loader alone
    with models_unpatched_on_error(plain):
        on_all_ranks(lambda _: state.settle(plain))
        summary = on_all_ranks(lambda _: state.summary(plain))
        _become(trainer, WholeRowTrainer if is_whole else PackedTrainer, state)
    state.expected = decided_by(trainer)
    return summary


def _become(trainer: Any, methods: Any, state: AttachedBatches) -> None:
    """Give a trainer what attach has decided, and the class whose `methods` run first."""
    trainer.__class__ = _subclass_with(methods, state.kind)
    trainer.attached, trainer.data_collator = state, state.collator


def keeps_rows_whole(trainer: Any) -> bool:
    """Return whether `attach` keeps the trainer's collator and loss, and forms micro-batches of whole rows.

    This is so for models that are not language models, for trainers of TRL that train on pairs, and for rows with
    pictures. All other trainers train on rows of tokens, which attach joins into packed rows.
    """
    if not isinstance(trainer, Trainer) or getattr(trainer, "model", None) is None:
        return False
    if hasattr(inner_model(trainer.model).config, "vision_config") and _has_pictures(trainer.train_dataset):
        return True
    if of_trl := classes_of_trl(type(trainer)):
        return "SFTTrainer" not in [base.__name__ for base in of_trl]
    return not isinstance(trainer.data_collator, PackingCollator) and not predicts_tokens(inner_model(trainer.model))


def _has_pictures(dataset: Any) -> bool:
    """Return whether the rows of a map-style dataset have pictures in one of the usual columns."""
    names = getattr(dataset, "column_names", None) or next(iter(dataset or ()), ())
    return isinstance(names, (list, Mapping)) and not PICTURES.isdisjoint(names)


def _check_keeps_rows(trainer: Trainer, batching: Any) -> None:
    """Refuse a trainer or a batching that does not work with whole rows."""
    kind, model = type(trainer).__name__, type(inner_model(trainer.model)).__name__
    whole = f"for {kind} with {model}, whose rows stay whole"
    accepted = f"a TokenBudget {whole}, or None, to keep the trainer's batches and take out their padding"
    check_type("batching", batching, TokenBudget, accepted)
    expect(None, whole, length_schedule=batching.length_schedule, max_length=batching.max_length)
    expect(1, whole, align_tokens=batching.align_tokens, max_ranks_per_document=ranks_of(batching))
    if found := _SORTING.intersection(getattr(trainer, "loss_types", ())):
        raise PackingError(
            f"loss_type: expected a loss that is a mean over pairs, got {min(found)!r}, which sorts the pairs of a "
            "micro-batch. attach(trainer, None) keeps the trainer's batches, and takes out their padding"
        )
    if getattr(trainer, "aux_loss_enabled", False):
        of_routers = (
            f"with a batching, since the loss of the routers of {model} depends on which rows share a micro-batch; or "
            "attach(trainer, None), to keep the trainer's batches and take out their padding"
        )
        expect(0.0, of_routers, router_aux_loss_coef=trainer.router_aux_loss_coef)
    if batching.overflow not in ("error", "drop"):
        raise PackingError(
            f"overflow: expected 'error' or 'drop', since a row with its label, or a pair, cannot be cut; got "
            f"{batching.overflow!r}. To cut long texts, let the tokenizer or the collator truncate them"
        )
    data = trainer.train_dataset
    check_map_style("train_dataset", data)
    columns = data.column_names if isinstance(data, datasets.Dataset) else ()
    refuse_lost_borders(data, columns)
    first = next(iter(data), ())
    refuse_columns(
        (LOSS_WEIGHT, LOSS_WEIGHTS),
        columns or (first if isinstance(first, Mapping) else ()),
        f"no weights {whole}, of which the trainer computes its own loss; remove the column",
    )
    if packed := [column for column in SEGMENT_COLUMNS if column in columns]:
        raise PackingError(
            f"train_dataset: expected one document or one pair in each row, but the column {packed[0]!r} says that "
            "rows are packs; pass the documents, since attach forms the batches"
        )
    if getattr(trainer.args, "precompute_ref_log_probs", False) or _has_pictures(data):
        lost = f"with precompute_ref_log_probs or pictures, since attach cannot count what {kind} cuts or drops then"
        expect(None, lost, max_length=getattr(trainer.args, "max_length", None))


@cache
def _subclass_with(methods: Any, kind: Any) -> Any:
    """Return the class that a trainer of class `kind` has after attach, whose `methods` run first.

    Raises:
        TypeError: the trainer's class cannot be subclassed.
    """
    if kind is Trainer:
        return methods
    name = methods.__name__.removesuffix("Trainer") + kind.__name__
    return type(name, (methods, kind), {"__module__": methods.__module__})
