"""Compute the loss of a packed batch or a batch of trees in your own training loop."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_packing.attention import check_patched, inner_model
from hf_packing.batch.collate import is_tree_batch
from hf_packing.columns import CU_SEQ_LENS, INPUT_IDS, TREE_LABELS
from hf_packing.errors import PackingError
from hf_packing.training.losses import ITEMS, TARGETS, Loss, check_loss, exact_type
from hf_packing.training.model_loss import WholeStep
from hf_packing.training.tree_batch import TREE_KEYS, labels_key


def compute_loss(
    model: nn.Module, batch: Mapping[str, Any], *, loss: Loss | None = None, num_items_in_batch: Any = None
) -> Tensor:
    """Compute the loss of a batch for `loss.backward()` or `accelerator.backward(loss)`.

    The batch comes from a loader of `prepare_dataloader`, or from a PackingCollator. In a batch of trees, each token
    counts once for every document that trains on it, so that the loss is that of the documents without shared prefixes.
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
            backward(), while the model has gradients of an earlier batch; in training, the labels of a masked language
            model only repeat the input tokens; or the model is a masked language model, and the batch is one of trees.

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
    step = WholeStep.of(model, batch, check_loss(loss or "token"))
    items = _items_of_step(batch, loss, num_items_in_batch)
    result = step.run(model)[0] * step.share_of(items)
    # the number of items is in float64, whatever the model's dtype
    result = result.to(torch.promote_types(torch.float32, next(inner_model(model).parameters()).dtype))
    if items is None and result.requires_grad:
        result.register_hook(lambda _: _refuse_accumulation(model))  # type: ignore[no-untyped-call]
    return result


def check_keys(batch: Any) -> None:
    """Raise PackingError unless a batch has labels, and the borders of its documents."""
    found = batch if isinstance(batch, Mapping) else {}
    borders = {*TREE_KEYS} - {TREE_LABELS} if is_tree_batch(found) else {CU_SEQ_LENS[0]}
    for name in (TARGETS if TARGETS in found else labels_key(found), *borders):
        if name not in found:
            raise PackingError(
                f"batch: expected a batch from prepare_dataloader or PackingCollator, got {type(batch).__name__} "
                f"without {name!r}, with the keys: {', '.join(found) or 'none'}"
            )


def _items_of_step(batch: Mapping[str, Any], loss: Loss | None, num_items_in_batch: Any) -> Tensor | None:
    """Return the number of items of the optimizer step, divided by what its losses are averaged over; None for those of
    the batch alone."""
    if ITEMS in batch:
        for name, value in (("loss", loss), (ITEMS, num_items_in_batch)):
            if value is not None:
                raise PackingError(
                    f"{name}: expected None, since the batch has a loss and a divisor already, as batches of "
                    f"prepare_dataloader do, got {value!r}"
                )
        items: Tensor = batch[ITEMS]
        return items
    if num_items_in_batch is not None:
        device = batch[INPUT_IDS].device
        return _as_number(num_items_in_batch).to(device, exact_type(device))
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if ranks > 1 and torch.is_grad_enabled():
        raise PackingError(
            f"{ITEMS}: expected the number of items of the whole optimizer step divided by the {ranks} ranks, got "
            "None; the gradient would depend on how the step is split into ranks"
        )
    return None


def _as_number(value: Any) -> Tensor:
    """Return num_items_in_batch as a tensor."""
    number = torch.as_tensor(value) if isinstance(value, (int, float, Tensor)) else None
    if (
        number is None
        or number.numel() != 1
        or number.dtype == torch.bool
        or (number.device.type == "cpu" and number < 0)
    ):
        raise PackingError(f"{ITEMS}: expected a number of tokens or documents, not negative, got {value!r}")
    return number.squeeze()


def _refuse_accumulation(model: nn.Module) -> None:
    """Raise PackingError if the model has gradients already, when the backward pass of a loss begins."""
    if any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in model.parameters()):
        raise PackingError(
            f"{ITEMS}: expected the number of items of the whole optimizer step, got None, but the model already has "
            "gradients. If several batches make an optimizer step, each would have the same weight, however few labels "
            "it has: pass num_items_in_batch. If not, call optimizer.zero_grad() before backward()"
        )
