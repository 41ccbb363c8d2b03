"""Compute the loss of a packed batch or a batch of trees in your own training loop."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_packing.attention import check_patched, inner_model
from hf_packing.batch.collate import is_tree_batch
from hf_packing.columns import LABELS
from hf_packing.errors import PackingError
from hf_packing.training.losses import ITEMS, TARGETS, WEIGHTS, Loss, check_loss, exact_type, items_in
from hf_packing.training.model_loss import own_loss_of, run_with_loss, weighting, weighting_of, with_a_label
from hf_packing.training.tree_batch import TREE_KEYS, labels_key

_ITEMS_OF: dict[Loss, str] = {"token": "trainable tokens", "sequence": "documents with trainable tokens"}
"""What `num_items_in_batch` counts, for each loss."""


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
        A float scalar, the loss that the model and its wrappers return. For a batch of prepare_dataloader, accelerate
        averages the gradients of such losses over ranks and accumulated micro-batches; the average is the gradient of
        the mean loss over all batches of the optimizer step. What the model does not divide by num_items_in_batch, such
        as the load-balancing loss of a mixture of experts or a regularizer of PEFT, is then averaged over ranks, and
        always divided by gradient_accumulation_steps, even if the last step of an epoch has fewer micro-batches. In
        another loop, it is multiplied by the batch's share of num_items_in_batch.

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
    if not isinstance(batch, Mapping):
        raise PackingError(
            f"batch: expected a batch from prepare_dataloader or PackingCollator, got {type(batch).__name__}"
        )
    planned = WEIGHTS in batch or ITEMS in batch
    result = (
        _of_planned(model, batch, loss, num_items_in_batch) if planned else _of(model, batch, loss, num_items_in_batch)
    )
    # the number of items is in float64, whatever the model's dtype
    result = result.to(torch.promote_types(torch.float32, next(inner_model(model).parameters()).dtype))
    if not planned and num_items_in_batch is None and result.requires_grad:
        result.register_hook(lambda _: _refuse_accumulation(model))  # type: ignore[no-untyped-call]
    return result


def _of_planned(model: nn.Module, batch: Mapping[str, Any], loss: Loss | None, num_items_in_batch: Any) -> Tensor:
    """Return the loss of a batch from `prepare_dataloader`."""
    for name, value in (("loss", loss), (ITEMS, num_items_in_batch)):
        if value is not None:
            raise PackingError(
                f"{name}: expected None, since the batch has a loss and a divisor already, as batches of "
                f"prepare_dataloader do, got {value!r}"
            )
    check_patched(model)
    if WEIGHTS in batch:
        weights: Tensor = batch[WEIGHTS]
        if _can_be_weighted(model):
            weighted = weighting(model, batch, batch[TARGETS], weights, 1)
            return run_with_loss(model, batch, batch[TARGETS], 1, weighted)[0]
        return _mean_loss(model, {**batch, LABELS: batch[TARGETS]}, (weights > 0).sum()) * weights.sum()
    _check_keys(batch)
    items: Tensor = batch[ITEMS]
    if is_tree_batch(batch) or _is_divided(model):
        return _with_items(model, batch, "token", items)
    own = items_in(batch, "token")
    return _mean_loss(model, batch, own) * (own / items)


def _of(model: nn.Module, batch: Mapping[str, Any], loss: Loss | None, num_items_in_batch: Any) -> Tensor:
    """Return the loss of a batch from a PackingCollator: the mean over its items, times its share of all items."""
    _check_keys(batch)
    check_patched(model)
    kind = "token" if loss is None else check_loss(loss)
    own = items_in(batch, kind)
    if num_items_in_batch is None:
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        if ranks > 1 and torch.is_grad_enabled():
            raise PackingError(
                f"{ITEMS}: expected the number of {_ITEMS_OF[kind]} of the whole optimizer step divided by the "
                f"{ranks} ranks, got None; the gradient would depend on how the step is split into ranks"
            )
        items = own.clamp(min=1)
    else:
        items = _as_number(num_items_in_batch).to(own.device, exact_type(own.device))
    share = torch.where(own > 0, own / items, 0)  # 0 for a batch without trainable tokens, also if items is 0
    if kind == "sequence" or is_tree_batch(batch) or _is_divided(model):
        return _with_items(model, batch, kind, own.clamp(min=1)) * share
    return _mean_loss(model, batch, own) * share


def _with_items(model: nn.Module, batch: Mapping[str, Any], loss: Loss, items: Any) -> Tensor:
    """Return the model's loss, in which the cross-entropies are divided by `items`."""
    weights = weighting_of(model, batch, loss, items)
    return run_with_loss(model, batch, batch[labels_key(batch)], items, weights)[0]


def _mean_loss(model: nn.Module, batch: Mapping[str, Any], own: Tensor) -> Tensor:
    """Return the loss of a model that takes the mean over the labels of a batch, whose number is `own`."""
    batch = with_a_label(batch, own)
    return run_with_loss(model, batch, batch[LABELS], own.clamp(min=1))[0]


def _is_divided(model: nn.Module) -> bool:
    known = own_loss_of(model)
    return known is None or known.is_divided


def _can_be_weighted(model: nn.Module) -> bool:
    known = own_loss_of(model)
    return known is None or known.cross_entropies == 1


def _check_keys(batch: Mapping[str, Any]) -> None:
    for name in TREE_KEYS if is_tree_batch(batch) else ("labels", "cu_seq_lens_q"):
        if name not in batch:
            raise PackingError(
                "batch: expected a batch from prepare_dataloader or PackingCollator, "
                f"got one without {name!r}, with the keys: {', '.join(batch) or 'none'}"
            )


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
