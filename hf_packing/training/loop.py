"""Functions for your own training loop: load packed batches, compute the loss of a batch, and evaluate on a dataset."""

from functools import partial
from typing import TYPE_CHECKING, Any

import datasets
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, send_to_device
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
from hf_packing.errors import PackingError
from hf_packing.sampling.batching import Batching, check_batching
from hf_packing.sampling.evaluation import InOrder
from hf_packing.sampling.rows import kept_labels
from hf_packing.sampling.sampler import RankBatchSampler
from hf_packing.sampling.sizes import sizes_of
from hf_packing.sampling.token_budget import with_linear_cost
from hf_packing.training.checks import check_accelerator, check_labels_are_hidden, check_not_dispatched
from hf_packing.training.loader import PackedLoader, rows_loader
from hf_packing.training.losses import Loss, check_loss, items_in
from hf_packing.training.model_loss import (
    check_loss_of_model,
    collator_for,
    own_loss_of,
    run_with_loss,
    weighting_of,
)
from hf_packing.training.passed_on import check_columns, passed_on, taken_by_model
from hf_packing.training.ranks import PlannedFrom, data_rank, on_all_ranks
from hf_packing.training.router_padding import refuse_padding_in_router_loss
from hf_packing.training.token_losses import TokenMean
from hf_packing.training.train_on_trees import check_takes_trees, trees_to_train
from hf_packing.training.tree_batch import labels_key

if TYPE_CHECKING:
    from hf_packing.training.streams.stream_loop import StreamLoopLoader

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
) -> "PackedLoader | StreamLoopLoader":
    """Return a loader of this rank's batches for your own training loop; all ranks must call this function together.

    The loop uses `accelerator.accumulate(model)` and `accelerator.backward(loss)` as usual. Compute the loss with
    `compute_loss(model, batch)`, which gives the same gradient for every split of an optimizer step into ranks and
    accumulated micro-batches. If loss="token" and the model divides its own loss by `num_items_in_batch`,
    `model(**batch).loss` is the same loss. For other models and for loss="sequence", use only `compute_loss`.

    Args:
        accelerator: the Accelerator of the loop; its gradient_accumulation_steps is the number of micro-batches that
            each rank runs in an optimizer step.
        dataset: a map-style dataset of packed rows, rows of trees or documents, or a stream, which is an
            IterableDataset: documents, or the result of `pack(stream, strategy, streams=...)`.
        batching: a TokenBudget or a BucketBatches; for a stream, a TokenBudget.
        loss: "token" for the mean over all trainable tokens; "sequence" to average first within each document, then
            over documents.
        model: the model to train. This function patches the model, if it is not patched yet, and checks on a short
            document that the model's own loss is the cross-entropy of its logits, as compute_loss computes it. If
            linear_cost of the batching is None, the model's configuration decides the value. If `model` is None, patch
            the model yourself; batches are then made for a model that predicts the next token, and a linear_cost of
            None stands for a typical value.
        prove: "first batch" to prove isolation of `model` when the loader yields its first batch; the route of a large
            model is then found on a small copy. "model" or "small" to prove isolation now, as `patch_model` does.
        tokens: number of tokens in every batch, for torch.compile; see `PackingCollator`. None for batches of any
            shape.
        max_segments: number of segments in every batch. The batching gets max_documents=max_segments - 1.
        options: further arguments of torch's DataLoader, such as num_workers.

    Returns:
        PackedLoader: an iterable over micro-batches; their number is the same on every rank and in every epoch.
            `print(loader.summary)` shows what an epoch has. For a stream, a StreamLoopLoader: each iteration goes on
            where the last one has stopped, up to the end of the epoch.

    Raises:
        PackingError: split_batches, context or sequence parallelism is on, or dispatch_batches without a stream; the
            dataset is neither map-style nor a stream, or has fewer rows than ranks; a row is longer than a micro-batch;
            all labels are in what is cut or dropped;
            the model's own loss is not the cross-entropy of its logits; the model is already sharded; data or arguments
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
    if isinstance(dataset, datasets.IterableDataset):
        from hf_packing.training.streams.stream_loop import prepare_stream_loader

        shapes, keeps_labels = (tokens, max_segments), partial(_keeps_labels, model, loss)
        return prepare_stream_loader(
            accelerator, dataset, check_batching(batching), loss, model, prove, shapes, keeps_labels, options
        )

    def plan(planned_from: PlannedFrom) -> tuple[Any, RankBatchSampler]:
        check_accelerator(accelerator)
        check_not_dispatched(accelerator)
        config = None if model is None else inner_model(model).config
        balanced = with_linear_cost(check_batching(batching), config)
        if (tokens, max_segments) != (None, None):
            balanced = balanced.within((tokens, max_segments))
        accumulation = accelerator.gradient_accumulation_steps
        planned_from.note_settings(batching=balanced, gradient_accumulation_steps=accumulation, loss=check_loss(loss))
        planned_from.note_settings(tokens=tokens, max_segments=max_segments)
        own = dataset
        if balanced.fewest_shared is not None:
            own = trees_to_train(dataset, balanced, (), model, passed_on(dataset, taken_by_model(model)))
        sizes = sizes_of(own)
        planned_from.note_data("dataset", own, sizes)
        rank, world_size = data_rank(accelerator)
        check_columns("prepare_dataloader", [dataset], taken_by_model(model))
        return own, RankBatchSampler(balanced, sizes, world_size, rank, accumulation)

    dataset, sampler = on_all_ranks(plan)
    if model is not None:

        def isolate_and_check(_: PlannedFrom) -> None:
            patch_for_training(model, accelerator, prove)
            if tokens is not None:
                refuse_padding_in_router_loss(model)
            check_loss_of_model(model, loss)
            if sampler.sizes.trees is None:
                check_labels_are_hidden(dataset, sampler.sizes, model)
            else:
                check_takes_trees(model, loss, sampler.batching, (tokens, max_segments))

        with unpatched_on_error(model):
            on_all_ranks(isolate_and_check)
    collator = collator_for(model, tokens, max_segments)
    labels = on_all_ranks(lambda _: kept_labels(dataset, sampler, keep_first=collator.keep_first_labels))
    if labels is not None:
        labels.check_some_left("batching", sampler.batching)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        settings = accelerator.state.deepspeed_plugin.deepspeed_config
        if settings.get("train_micro_batch_size_per_gpu") == "auto":
            settings["train_micro_batch_size_per_gpu"] = 1  # one packed row
    pinned = {"pin_memory": accelerator.device.type == "cuda"}
    more = passed_on(dataset, taken_by_model(model))
    rows = rows_loader(dataset, sampler, model, more=more, collate_fn=collator, **(pinned | options))
    prove_on = model if prove == "first batch" else None
    loader = PackedLoader(accelerator, rows, sampler, loss, _keeps_labels(model, loss), prove_on, labels)
    accelerator.register_for_checkpointing(loader)
    return loader


def evaluation_loss(accelerator: Accelerator, model: nn.Module, dataset: Any, *, rows_per_batch: int = 1) -> float:
    """Return the mean loss over all trainable tokens of a dataset: all tokens with a label other than -100.

    The result is the same for any rows_per_batch and any number of ranks. After `attach`, the eval_loss of a Trainer is
    this mean, too.

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
        check_not_dispatched(accelerator)
        check_patched(model)
        planned_from.note_settings(rows_per_batch=rows_per_batch)
        sizes = sizes_of(dataset)
        planned_from.note_data("dataset", dataset, sizes)
        if sizes.trees is None:
            check_labels_are_hidden(dataset, sizes, model)
        rank, world_size = data_rank(accelerator)
        sampler = RankBatchSampler(InOrder(rows_per_batch), sizes, world_size, rank)
        return rows_loader(dataset, sampler, model, more=passed_on(dataset, taken_by_model(model)))

    if isinstance(dataset, datasets.IterableDataset):
        from hf_packing.training.streams.stream_loop import evaluation_loader

        loader: Any = evaluation_loader(accelerator, model, dataset, rows_per_batch)
    else:
        loader = on_all_ranks(load)
    mean = TokenMean(accelerator.device)
    with in_mode(model, training=False), torch.no_grad():
        for batch in tqdm(loader, desc="Evaluating", disable=not accelerator.is_main_process):
            batch = send_to_device(batch, accelerator.device)
            counted = items_in(batch, "token")
            weighting = weighting_of(model, batch, "token", counted.clamp(min=1))
            loss, observed = run_with_loss(model, batch, batch[labels_key(batch)], counted.clamp(min=1), weighting)
            mean.add(observed.sums[0] if len(observed.sums) == 1 else torch.nan_to_num(loss) * counted, counted)
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
