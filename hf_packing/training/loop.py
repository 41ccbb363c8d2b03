"""Functions for your own training loop: load packed batches, compute the loss of a batch, and evaluate on a dataset."""

import math
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from datasets.utils import tqdm
from torch import Tensor, nn

from hf_packing.attention import (
    ON_RANKS,
    ProveInTraining,
    block_of,
    check_patched,
    in_mode,
    inner_model,
    patch_for_training,
    unpatched_on_error,
)
from hf_packing.batch.collate import PackingCollator
from hf_packing.checks import check_choice, check_real, check_type, expect
from hf_packing.columns import INPUT_IDS, PICTURES, refuse_columns
from hf_packing.errors import PackingError
from hf_packing.sampling.batching import Batching, check_batching
from hf_packing.sampling.evaluation import InOrder
from hf_packing.sampling.token_budget import with_linear_cost
from hf_packing.training.checks import check_accelerator, check_labels_are_hidden
from hf_packing.training.kinds import check_keys
from hf_packing.training.kinds.split import ranks_of
from hf_packing.training.loader import LoopSteps, PackedLoader
from hf_packing.training.losses import ITEMS, Batch, Loss, TokenMean, exact_type
from hf_packing.training.model_loss import WholeStep, collator_for, own_loss_of
from hf_packing.training.models import check_takes_rows
from hf_packing.training.ranks import PlannedFrom, on_all_ranks
from hf_packing.training.resume import save_with
from hf_packing.training.sources import Reading, Source, open_source
from hf_packing.training.step_cases import LoopCase
from hf_packing.training.streams import StreamLoader

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
    check_type("accelerator", accelerator, Accelerator, "an Accelerator")
    if decided := _DECIDED_BY_BATCHING & options.keys():
        raise PackingError(f"{min(decided)}: expected no value, since the batching decides the rows of every batch")
    shapes = tokens, max_segments

    def plan(planned_from: PlannedFrom) -> tuple[Batching, Source, PackingCollator]:
        check_accelerator(accelerator)
        balanced = with_linear_cost(check_batching(batching), None if model is None else inner_model(model).config)
        if model is None and ranks_of(balanced) > 1:
            raise PackingError("model: expected the model that is trained, for documents on several ranks, got None")
        if shapes != (None, None):
            balanced = balanced.within(shapes)
        of_loop = (
            "no pictures, which a loop would leave out; remove the column, or use attach, which keeps such rows whole"
        )
        refuse_columns(sorted(PICTURES), getattr(dataset, "column_names", None) or (), of_loop)
        reading = Reading.of_model(model)
        source = open_source(
            "dataset",
            dataset,
            balanced,
            accelerator,
            reading,
            planned_from,
            accumulation=accelerator.gradient_accumulation_steps,
            loss=check_choice("loss", loss, Loss),
        )
        planned_from.note_settings(tokens=tokens, max_segments=max_segments)
        return balanced, source, collator_for(model, *shapes, balanced.align_tokens)

    balanced, source, collator = on_all_ranks(plan)
    if (ranks := ranks_of(balanced)) > 1:
        block_of(ranks)

    def isolate_and_check(_: PlannedFrom) -> None:
        if model is not None:
            patch_for_training(model, accelerator, prove, ranks)
            check_takes_rows(model, source, balanced, shapes)
        source.count_labels(collator)

    with nullcontext() if model is None else unpatched_on_error(model):
        on_all_ranks(isolate_and_check)
        known = None if model is None else own_loss_of(model)
        # the model then can compute the loss itself
        keeps_labels = loss == "token" and (model is None or (known is not None and known.is_divided))
        proves = prove == "first batch" or ranks > 1
        step_case = partial(LoopCase, collator=collator, loss=loss, source=source)
        steps = LoopSteps(accelerator, balanced, loss, keeps_labels, model if proves else None, step_case)
        loader: PackedLoader | StreamLoader = source.loader(
            accelerator, collator, steps, **{"pin_memory": accelerator.device.type == "cuda", **options}
        )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        settings = accelerator.state.deepspeed_plugin.deepspeed_config
        if settings.get("train_micro_batch_size_per_gpu") == "auto":
            settings["train_micro_batch_size_per_gpu"] = 1  # one packed row
    save_with(accelerator, loader)
    return loader


def evaluation_loss(
    accelerator: Accelerator,
    model: nn.Module,
    dataset: Any,
    *,
    rows_per_batch: int = 1,
    max_tokens: int | None = None,
    align_tokens: int = 1,
) -> float:
    """Return the mean loss over all trainable tokens of a dataset: all tokens with a label other than -100.

    With a column `loss_weights` or `loss_weight`, it is the weighted mean.

    The result is the same for any rows_per_batch and any number of ranks. After `attach`, the eval_loss of a Trainer is
    this mean, too, plus what the model adds to its cross-entropy, such as the loss of routers. If the model was trained
    with max_ranks_per_document, rows are on several ranks here, too.

    Args:
        accelerator: the Accelerator of the loop.
        model: a patched causal or masked language model of transformers, with or without wrappers of PEFT and
            accelerate.
        dataset: a map-style dataset of packed rows or documents, or a stream that `pack` has packed with `streams`.
        rows_per_batch: the most rows in a forward pass; the number affects only speed and memory.
        max_tokens: the most tokens in a forward pass, on each rank; a row of more tokens has a forward pass of its own.
            None for no limit.
        align_tokens: a multiple that batches are filled up to; the loss does not change. max_tokens is rounded down to
            a multiple.

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
        ranks = check_patched(model).facts.proven.get(ON_RANKS, 1)
        planned_from.note_settings(rows_per_batch=rows_per_batch, max_tokens=max_tokens)
        reading = Reading.of_model(model)
        in_order = InOrder(rows_per_batch, max_tokens=max_tokens and ranks * max_tokens, align_tokens=align_tokens)
        if ranks > 1:
            expect(1, f"with max_ranks_per_document={ranks}", align_tokens=align_tokens)
        source = open_source(
            "dataset", dataset, None, accelerator, reading, planned_from, in_order=in_order, ranks=ranks
        )
        check_labels_are_hidden(source, model)
        return source.loader(accelerator, collator_for(model, align_tokens=align_tokens))

    loader = on_all_ranks(load)
    mean = TokenMean(accelerator.device)
    with in_mode(model, training=False), torch.no_grad():
        for batch in tqdm(loader, desc="Evaluating", disable=not accelerator.is_main_process):
            step = WholeStep.of(model, batch, "token")
            loss, observed = step.run(model)
            # without what the model adds to its cross-entropy, such as the loss of routers
            mean.add(observed.sums[0] / step.items if len(observed.sums) == 1 else loss, step.own)
    summed, tokens = mean.over_ranks(accelerator)
    if not tokens:
        raise PackingError("dataset: expected at least one label to evaluate on, but all labels are -100, or weigh 0")
    return summed / tokens


def compute_loss(model: nn.Module, batch: Batch, *, loss: Loss | None = None, num_items_in_batch: Any = None) -> Tensor:
    """Compute the loss of a batch for `loss.backward()` or `accelerator.backward(loss)`.

    The batch comes from a loader of `prepare_dataloader`, or from a PackingCollator. In a batch of trees, each token
    counts once for every document that trains on it, so that the loss is that of the documents without shared prefixes.
    With `loss_weights` in the batch, the sum is weighted, and its items are the sum of the weights without their signs.
    Logits are computed for one chunk of tokens at a time, and only for tokens with a label, so that large vocabularies
    need little memory.

    Args:
        model: a patched causal or masked language model of transformers, with or without wrappers of PEFT, accelerate
            and torch.
        batch: a batch of prepare_dataloader, or a batch of a PackingCollator on the device of the model.
        loss: "token" to sum over the trainable tokens, whose labels are not -100; "sequence" to average within each
            document first, then sum over documents. None means "token", and is the only value for a batch of
            prepare_dataloader, which has its own `loss`.
        num_items_in_batch: the number by which this sum is divided, an int, float or scalar tensor: the trainable
            tokens of the whole optimizer step or, for "sequence", its documents with trainable tokens. DDP and FSDP
            average gradients over ranks; pass the number on all ranks divided by the number of ranks. With None, the
            sum is divided by the items of this batch, which is right only if the batch is a whole optimizer step. A
            batch of prepare_dataloader has its own number.

    Returns:
        A float scalar: the loss that the model and its wrappers return for the batch, as a mean over its own items,
        times the batch's share of num_items_in_batch. For a batch of prepare_dataloader, accelerate averages the
        gradients of such losses over ranks and accumulated micro-batches; the average is the gradient of the mean loss
        over all batches of the optimizer step. What the model adds to the mean, such as the load-balancing loss of a
        mixture of experts or a regularizer of PEFT, is weighted in the same way.

    Raises:
        PackingError: the batch has no labels or borders; the model is not patched, or returns no loss; its loss is not
            computed from one cross-entropy of its logits, for "sequence" or a batch of trees; an argument is given that
            a batch of prepare_dataloader already has; num_items_in_batch is None on several ranks or, raised by
            backward(), while the model has gradients of an earlier batch; the labels of a masked language model lack
            those of first tokens or, in training, only repeat the input tokens; or the model is a masked language
            model, and the batch is one of trees.

    Example:
        >>> import hf_packing as hfp, torch, transformers
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> model = hfp.patch_model(transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=99, **sizes)))
        >>> batch = hfp.PackingCollator()([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
        >>> whole = hfp.compute_loss(model, batch)  # the mean over 3 trainable tokens
        >>> third = hfp.compute_loss(model, batch, num_items_in_batch=9)  # the same sum, divided by 9
        >>> bool(torch.isclose(whole, 3 * third))
        True
    """
    check_keys(batch)
    check_patched(model)
    step = WholeStep.of(model, batch, check_choice("loss", loss or "token", Loss))
    items = _items_of_step(batch, loss, num_items_in_batch)
    result = step.run(model)[0] * step.share_of(items)
    # the number of items is in float64, whatever the model's dtype
    result = result.to(torch.promote_types(torch.float32, next(inner_model(model).parameters()).dtype))
    if items is None and result.requires_grad:
        result.register_hook(lambda _: _refuse_accumulation(model))  # type: ignore[no-untyped-call]
    return result


def _items_of_step(batch: Batch, loss: Loss | None, num_items_in_batch: Any) -> Tensor | None:
    """Return the number of items of the optimizer step, divided by what its losses are averaged over; None for those of
    the batch alone."""
    if ITEMS in batch:
        done = "for a batch of prepare_dataloader, which has a loss and a divisor already"
        expect(None, done, loss=loss, num_items_in_batch=num_items_in_batch)
        items: Tensor = batch[ITEMS]
        return items
    if num_items_in_batch is not None:
        given, device = num_items_in_batch, batch[INPUT_IDS].device
        if not (isinstance(given, Tensor) and given.numel() == 1 and given.dtype != torch.bool):
            check_real(ITEMS, given, 0, math.inf, "a number of tokens or documents, not negative")
        return torch.as_tensor(given).squeeze().to(device, exact_type(device))
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if ranks > 1 and torch.is_grad_enabled():
        raise PackingError(
            f"{ITEMS}: expected the number of items of the whole optimizer step divided by the {ranks} ranks, got "
            "None; the gradient would depend on how the step is split into ranks"
        )
    return None


def _refuse_accumulation(model: nn.Module) -> None:
    """Raise PackingError if the model has gradients already, when the backward pass of a loss begins."""
    if any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in model.parameters()):
        raise PackingError(
            f"{ITEMS}: expected the number of items of the whole optimizer step, got None, but the model already has "
            "gradients. If several batches make an optimizer step, each would have the same weight, however few labels "
            "it has: pass num_items_in_batch. If not, call optimizer.zero_grad() before backward()"
        )
