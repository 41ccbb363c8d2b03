"""Functions for your own training loop: load packed batches, compute the loss of a batch, and evaluate on a dataset."""

from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from datasets.utils import tqdm
from torch import nn

from hf_packing.attention import (
    ProveInTraining,
    check_patched,
    in_mode,
    inner_model,
    patch_for_training,
    unpatched_on_error,
)
from hf_packing.batch.collate import PackingCollator
from hf_packing.errors import PackingError
from hf_packing.sampling.batching import Batching, check_batching
from hf_packing.sampling.evaluation import InOrder
from hf_packing.sampling.token_budget import with_linear_cost
from hf_packing.training.checks import check_accelerator
from hf_packing.training.loader import LoopSteps, PackedLoader
from hf_packing.training.losses import Loss, TokenMean, check_loss
from hf_packing.training.model_loss import WholeStep, collator_for, own_loss_of
from hf_packing.training.passed_on import warn_of_columns_left_out
from hf_packing.training.ranks import PlannedFrom, on_all_ranks
from hf_packing.training.sources import PackedRows, Reading, open_source
from hf_packing.training.streams.stream_loader import StreamedRows, StreamLoader
from hf_packing.training.train_on_trees import check_takes_trees

_DECIDED_BY_BATCHING = frozenset(
    ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "collate_fn", "in_order", "generator")
)
"""Arguments of DataLoader that a caller of `prepare_dataloader` must not pass, since the batching decides them."""


def prepare_dataloader(
    accelerator: Accelerator,
    dataset: Any,
    batching: Batching,
    *,
    loss: Loss = "token",
    model: nn.Module | None = None,
    prove: ProveInTraining = "first batch",
    tokens: int | None = None,
    max_segments: int | None = None,
    **options: Any,
) -> PackedLoader | StreamLoader:
    """Return a loader of this rank's batches for your own training loop; all ranks must call this function together.

    The loop uses `accelerator.accumulate(model)` and `accelerator.backward(loss)` as usual. Compute the loss with
    `compute_loss(model, batch)`, which gives the same gradient for every split of an optimizer step into ranks and
    accumulated micro-batches. If loss="token" and the model divides its own loss by `num_items_in_batch` and adds
    nothing to it, `model(**batch).loss` is the same loss. For other models and loss="sequence", use only
    `compute_loss`.

    Args:
        accelerator: the Accelerator of the loop; its gradient_accumulation_steps is the number of micro-batches that
            each rank runs in an optimizer step.
        dataset: a map-style dataset of packed rows, rows of trees or documents, or a stream, which is an
            IterableDataset: documents, or the result of `pack(stream, strategy, streams=...)`.
        batching: a TokenBudget or a BucketBatches; for a stream, a TokenBudget.
        loss: "token" for the mean over all trainable tokens; "sequence" to average first within each document, then
            over documents.
        model: the model to train. This function patches the model, if it is not patched yet, and checks on a short
            document which token its logits predict. If linear_cost of the batching is None, the model's configuration
            decides the value. If `model` is None, patch the model yourself; batches are then made for a model that
            predicts the next token, and a linear_cost of None stands for a typical value.
        prove: "first batch" to prove isolation of `model` when the loader yields its first batch; the route of a large
            model is then found on a small copy. "model" or "small" to prove isolation now, as `patch_model` does.
        tokens: number of tokens in every batch, for torch.compile; see `PackingCollator`. None for batches of any
            shape.
        max_segments: number of segments in every batch. The batching gets max_documents=max_segments - 1.
        options: further arguments of torch's DataLoader, such as num_workers.

    Returns:
        PackedLoader: an iterable over micro-batches; their number is the same on every rank and in every epoch.
            `print(loader.summary)` shows what an epoch has. For a stream, a StreamLoader: each iteration goes on
            where the last one has stopped, up to the end of the epoch.

    Raises:
        PackingError: split_batches, dispatch_batches, context or sequence parallelism is on; the dataset is neither
            map-style nor a stream, or has fewer rows than ranks; a row is longer than a micro-batch; all labels are in
            what is cut or dropped; the model returns no loss of its logits, or is already sharded; data or arguments
            differ between ranks (raised on all ranks); or a masked language model gets data without labels, or labels
            that only repeat the input.
        ModelNotSupportedError: it cannot be verified that the model isolates documents.

    Example:
        >>> import accelerate, datasets, hf_packing as hfp
        >>> documents = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5], [6, 7, 8, 9]]})
        >>> loader = hfp.prepare_dataloader(accelerate.Accelerator(cpu=True), documents, hfp.TokenBudget(5))
        >>> len(loader), sorted(batch["input_ids"].shape[1] for batch in loader)
        (2, [4, 5])
    """
    if not isinstance(accelerator, Accelerator):
        raise PackingError(f"accelerator: expected an Accelerator, got {type(accelerator).__name__}")
    if decided := _DECIDED_BY_BATCHING & options.keys():
        raise PackingError(f"{min(decided)}: expected no value, since the batching decides the rows of every batch")
    shapes = tokens, max_segments

    def plan(planned_from: PlannedFrom) -> tuple[Batching, PackedRows | StreamedRows, PackingCollator]:
        check_accelerator(accelerator)
        balanced = with_linear_cost(check_batching(batching), None if model is None else inner_model(model).config)
        if shapes != (None, None):
            balanced = balanced.within(shapes)
        accumulation, reading = accelerator.gradient_accumulation_steps, Reading.of_model(model)
        planned_from.note_settings(batching=balanced, gradient_accumulation_steps=accumulation, loss=check_loss(loss))
        planned_from.note_settings(tokens=tokens, max_segments=max_segments)
        source = open_source(
            "dataset", dataset, balanced, accelerator, reading, planned_from, accumulation=accumulation, loss=loss
        )
        warn_of_columns_left_out("prepare_dataloader", dataset, reading.takes)
        return balanced, source, collator_for(model, *shapes)

    balanced, source, collator = on_all_ranks(plan)

    def isolate_and_check(_: PlannedFrom) -> None:
        if model is not None:
            patch_for_training(model, accelerator, prove)
            if source.shares_prefixes:
                check_takes_trees(model, balanced, shapes)
            source.check_labels(model)
        source.count_labels(collator)

    with nullcontext() if model is None else unpatched_on_error(model):
        on_all_ranks(isolate_and_check)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        settings = accelerator.state.deepspeed_plugin.deepspeed_config
        if settings.get("train_micro_batch_size_per_gpu") == "auto":
            settings["train_micro_batch_size_per_gpu"] = 1  # one packed row
    prove_on = model if prove == "first batch" else None
    steps = LoopSteps(accelerator, balanced, loss, _keeps_labels(model, loss), prove_on)
    loader: PackedLoader | StreamLoader = source.loader(
        collator, steps, **{"pin_memory": accelerator.device.type == "cuda", **options}
    )
    accelerator.register_for_checkpointing(loader)
    return loader


def evaluation_loss(accelerator: Accelerator, model: nn.Module, dataset: Any, *, rows_per_batch: int = 1) -> float:
    """Return the mean loss over all trainable tokens of a dataset: all tokens with a label other than -100.

    The result is the same for any rows_per_batch and any number of ranks. After `attach`, the eval_loss of a Trainer is
    this mean, too, plus what the model adds to its cross-entropy, such as the loss of routers.

    Args:
        accelerator: the Accelerator of the loop.
        model: a patched causal or masked language model of transformers, with or without wrappers of PEFT and
            accelerate.
        dataset: a map-style dataset of packed rows or documents, or a stream that `pack` has packed with `streams`.
        rows_per_batch: number of rows in a forward pass; the number affects only speed and memory.

    Returns:
        The mean loss, the same number on all ranks. The exponential of the mean loss is the perplexity.

    Raises:
        PackingError: the dataset has no rows or no trainable token; the model is not patched; the labels of a masked
            language model only repeat the input tokens; or the data differ between ranks.

    Example:
        >>> import accelerate, datasets, hf_packing as hfp, transformers
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> model = hfp.patch_model(transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=99, **sizes)))
        >>> documents = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5], [6, 7, 8, 9]]})
        >>> round(hfp.evaluation_loss(accelerate.Accelerator(cpu=True), model, documents))
        5
    """

    def load(planned_from: PlannedFrom) -> Any:
        check_accelerator(accelerator)
        check_patched(model)
        planned_from.note_settings(rows_per_batch=rows_per_batch)
        reading, in_order = Reading.of_model(model), InOrder(rows_per_batch)
        source = open_source("dataset", dataset, None, accelerator, reading, planned_from, in_order=in_order)
        source.check_labels(model)
        return source.loader(collator_for(model))

    loader = on_all_ranks(load)
    mean = TokenMean(accelerator.device)
    with in_mode(model, training=False), torch.no_grad():
        for batch in tqdm(loader, desc="Evaluating", disable=not accelerator.is_main_process):
            step = WholeStep.of(model, batch, "token")
            loss, observed = step.run(model)
            # without what the model adds to its cross-entropy, such as the loss of routers
            mean.add((observed.sums[0] / step.items if len(observed.sums) == 1 else loss) * step.own, step.own)
    summed, tokens = mean.over_ranks(accelerator)
    if not tokens:
        raise PackingError("dataset: expected at least one label to evaluate on, but all labels are -100")
    return summed / tokens


def _keeps_labels(model: nn.Module | None, loss: Loss) -> bool:
    """Return whether `prepare_dataloader` leaves labels in batches, so that the model can compute the loss itself."""
    if model is None or loss == "sequence":
        return loss == "token"
    known = own_loss_of(model)
    return known is not None and known.is_divided
