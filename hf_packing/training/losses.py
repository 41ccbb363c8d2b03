"""Compute the loss of a global batch as a weighted sum over tokens. The split into micro-batches does not matter.

A global batch is all micro-batches of one optimizer step, on all ranks. The loss "token" is the mean over all trainable
tokens, which have a label other than -100. The loss "sequence" averages first within each document, then over
documents, so that long and short documents have the same weight (per-sequence loss of arXiv 2107.02027; loss weighting
of arXiv 2401.18058). If a document was split, each piece counts as a document. With both losses, the weight of a token
depends on the whole global batch. The loss of a batch without trainable tokens is zero.

`loss_of_model` tests whether a model's own loss compares the logits of a token with the next token.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, get_args

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from hf_packing.attention import (
    NoLanguageModelError,
    has_local_weights,
    inner_model,
    input_device,
    is_patched,
    random_documents,
    small_copy_of,
    takes_argument,
)
from hf_packing.collate import PackingCollator, is_tree_batch
from hf_packing.columns import ENDS, IGNORED_LABEL
from hf_packing.errors import PackingError
from hf_packing.training.tree_batch import labels_key, trained_per_tree_document, tree_weights

Loss = Literal["token", "sequence"]

ITEMS = "num_items_in_batch"
"""The keyword argument of transformers models that gives the divisor of the summed loss."""

TARGETS, WEIGHTS = "targets", "target_weights"
"""Keys of the entries that replace the labels of a batch, so that the model does not compute the loss itself."""


def check_loss(loss: Any) -> Loss:
    if loss not in get_args(Loss):
        raise PackingError(f"loss: expected one of {', '.join(get_args(Loss))}, got {loss!r}")
    return loss  # type: ignore[no-any-return]


def trainable_per_document(batch: Mapping[str, Any]) -> Tensor:
    """Return how many tokens each document of a batch trains on, int64 [documents].

    In a packed batch, documents are the segments, and their trained tokens have a label other than -100.
    """
    if is_tree_batch(batch):
        return trained_per_tree_document(batch)
    trainable = (batch["labels"][0] != IGNORED_LABEL).to(torch.int64)
    total = F.pad(trainable.cumsum(0), (1, 0))
    return total[batch["cu_seq_lens_q"].long()].diff()


def documents_in(batch: Mapping[str, Any]) -> Tensor:
    """Return the number of documents in a batch, an int64 scalar.

    In a packed batch, documents are the segments, without those that only fill fixed shapes.
    """
    if is_tree_batch(batch):
        return torch.tensor(len(batch[ENDS]), device=batch[ENDS].device)
    last: Tensor = batch["seq_idx"].max().long()
    return last + 1


def items_in(batch: Mapping[str, Any], loss: Loss) -> Tensor:
    """Count the trainable tokens of a batch or, if loss="sequence", the documents with trainable tokens.

    In a batch of trees, a token counts once for each document that trains on it.

    Returns:
        An int64 scalar: the number of items over which the loss of the batch is averaged.
    """
    trainable = trainable_per_document(batch)
    return trainable.sum() if loss == "token" else (trainable > 0).sum()


def exact_type(device: torch.device) -> torch.dtype:
    """Return the most precise floating-point dtype that a device supports: float32 on MPS, else float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def weights_of(batch: Mapping[str, Any], loss: Loss) -> Tensor:
    """Return each token's weight in the summed loss of a batch, not yet divided by the number of items.

    Returns:
        float64 [1, tokens], or float32 on an MPS device. The weight is 0 for a label of -100. Otherwise, the weight is
        1 for loss="token", and 1 / (number of trainable tokens in the token's document) for loss="sequence". In a batch
        of trees, it is the sum of these weights over all documents that train on the token.
    """
    if is_tree_batch(batch):
        device = batch[ENDS].device
        weights = torch.from_numpy(tree_weights(batch, by_document=loss == "sequence"))
        return weights[None].to(exact_type(device)).to(device)
    labeled: Tensor = (batch["labels"] != IGNORED_LABEL).to(exact_type(batch["labels"].device))
    if loss == "token":
        return labeled
    lengths = batch["cu_seq_lens_q"].long().diff()
    return labeled / trainable_per_document(batch).clamp(min=1).repeat_interleave(lengths)[None]


def weighted_loss(
    logits: Tensor, labels: Tensor, weights: Tensor, shift: bool, see: Callable[[Tensor], None] | None = None
) -> Tensor:
    """Return the weighted sum of cross-entropies over the tokens of a packed batch, a float scalar.

    Args:
        logits: float [1, tokens, vocabulary]; 16-bit logits are converted to float32.
        labels: int64 [1, tokens]; -100 marks a token without a label.
        weights: float [1, tokens]; 0 for a token without a label.
        shift: True if the logits of a token predict the next token's label; False if they predict the token's own
            label.
        see: a function that is called with the cross-entropies, float [labels]; 0 for a label of -100.
    """
    if shift:
        logits, labels, weights = logits[:, :-1], labels[:, 1:], weights[:, 1:]
    exact = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(
        exact.flatten(0, 1), labels.flatten().to(exact.device), ignore_index=IGNORED_LABEL, reduction="none"
    )
    if see is not None:
        see(losses.detach())
    return losses @ weights.flatten().to(losses)


def with_share(batch: Mapping[str, Any], loss: Loss, items: Tensor, keep_labels: bool) -> dict[str, Any]:
    """Return a copy of a batch, with what is needed to compute its contribution to the loss of the global batch.

    Args:
        batch: a packed batch with labels, or a batch of trees.
        loss: "token" or "sequence".
        items: the divisor of the summed loss, a float scalar.
        keep_labels: True to add num_items_in_batch, so that the model can compute the loss itself; False to replace the
            labels by targets and target_weights, as is always done in a batch of trees.
    """
    if keep_labels and not is_tree_batch(batch):
        return {**batch, ITEMS: items}
    weights = weights_of(batch, loss) / items
    key = labels_key(batch)
    others = {name: value for name, value in batch.items() if name != key}
    return {**others, TARGETS: batch[key], WEIGHTS: weights}


_CLOSE, _CLOSE_IN_HALF_PRECISION = 1e-5, 1e-3
"""The largest relative differences at which two losses count as equal, in single and in half precision."""


PROBED_TOKENS = 13
"""Number of tokens in the random document that shows how a model or a trainer computes its loss."""


class ModelLoss(NamedTuple):
    """The way in which a model computes its own loss, the mean cross-entropy of the model's logits.

    A mixture of experts may add an auxiliary loss.
    """

    predicts_next: bool
    """True if the loss compares the logits of a token with the next token; False for the same token."""
    divided_by_items: bool
    """True if the model divides the summed loss by num_items_in_batch when the caller passes that argument."""


_ANSWERS: "weakref.WeakKeyDictionary[PreTrainedModel, tuple[Any, ModelLoss | None]]" = weakref.WeakKeyDictionary()
"""The cache of `loss_of_model`: for each model, the loss function for which the result was found, and the result."""


def loss_of_model(model: nn.Module) -> ModelLoss | None:
    """Return how a model computes its own loss, or None if that loss is not the cross-entropy of the model's logits.

    A test compares the model's loss on a short document with the cross-entropy. The result is kept until the model gets
    another loss function. If the model's weights are not in memory, a small model of the same class is tested instead.

    Args:
        model: a patched model, or a model whose weights are not in memory.
    """
    inner = inner_model(model)
    function = getattr(inner, "loss_function", None)
    if inner not in _ANSWERS or _ANSWERS[inner][0] is not function:
        _ANSWERS[inner] = function, _ask(model_to_test(model))
    return _ANSWERS[inner][1]


def predicts_next(model: nn.Module) -> bool:
    """Return whether a model's logits at a token predict the next token, as in most causal language models.

    Otherwise, the logits predict the token at the same position, as in masked language models.

    Raises:
        PackingError: the model's own loss is not the cross-entropy of its logits, and the model's class is neither a
            causal nor a masked language model of transformers.
    """
    if (known := loss_of_model(model)) is not None:
        return known.predicts_next
    inner = inner_model(model)
    names = {base.__name__ for base in type(inner).__mro__}
    if names & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        return True
    if names & set(MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()):
        return False
    raise PackingError(
        f"model: expected a causal or a masked language model of transformers, got {type(inner).__name__}; "
        f"{NoLanguageModelError.SUPPORTED}. To train a token classifier, use patch_model and a Trainer with "
        "PackingCollator(keep_first_labels=True)"
    )


def refuse_unknown_loss(model: nn.Module, loss: str) -> None:
    """Raise a PackingError, since a model's own loss is not the cross-entropy of its logits.

    Args:
        model: a model for which `loss_of_model` returned None.
        loss: "token" or "sequence", the loss that the caller asked for.
    """
    predicts_next(model)
    raise PackingError(
        f"loss: expected a model whose own loss is the cross-entropy of its logits, but "
        f"{type(inner_model(model)).__name__} computes a different loss, for which loss={loss!r} is not supported"
    )


def collator_for(
    model: nn.Module | None, tokens: int | None = None, max_segments: int | None = None
) -> PackingCollator:
    """Return a PackingCollator for a model; None stands for any model that predicts the next token."""
    keep_first_labels = model is not None and not predicts_next(model)
    return PackingCollator(keep_first_labels, tokens, max_segments)


def router_loss(outputs: Any, model: nn.Module) -> Tensor | None:
    """Return the auxiliary loss in a model's outputs times router_aux_loss_coef, or None if there is no such loss.

    The routers of a mixture of experts have an auxiliary loss, for load balancing.
    """
    if (auxiliary := getattr(outputs, "aux_loss", None)) is None:
        return None
    weighted: Tensor = auxiliary * getattr(inner_model(model).config.get_text_config(), "router_aux_loss_coef", 0.0)
    return weighted


@contextmanager
def without_router_loss(model: nn.Module) -> Iterator[None]:
    """Context manager: within the block, the loss that a model returns does not include the auxiliary loss of routers.

    The evaluation loss is the cross-entropy alone.
    """

    def leave_out(_: nn.Module, __: Any, outputs: Any) -> None:
        if (routed := router_loss(outputs, model)) is None:
            return
        if outputs.loss is not None:
            outputs.loss = outputs.loss - routed.to(outputs.loss.device)
        outputs.aux_loss = torch.zeros_like(outputs.aux_loss)

    handle = model.register_forward_hook(leave_out)
    try:
        yield
    finally:
        handle.remove()


def model_to_test(model: nn.Module) -> PreTrainedModel | None:
    """Return the model inside wrappers if its weights are in memory, else a small one of the same class, or None."""
    inner = inner_model(model)
    if has_local_weights(model):
        return inner
    try:
        return small_copy_of(inner)
    except Exception:  # building a model can fail in many ways, depending on the configuration
        return None


def short_batch(model: PreTrainedModel) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a packed batch of one short random document, with labels for all tokens, and the inputs for the model.

    The inputs are the batch itself, unless the model is not patched.
    """
    documents, _ = random_documents(model, [PROBED_TOKENS], seed=0)
    packed = PackingCollator(keep_first_labels=True)([{"input_ids": documents[0]}])
    packed = send_to_device(packed, input_device(model))
    if is_patched(model):
        return packed, packed
    batch = {name: packed[name] for name in ("input_ids", "labels")}
    return packed, batch | ({"use_cache": False} if takes_argument(model, "use_cache") else {})


def _ask(model: PreTrainedModel | None) -> ModelLoss | None:
    """Compare a model's own loss on a short document with `weighted_loss`, and return the result of `loss_of_model`."""
    if model is None:
        return None
    packed, batch = short_batch(model)
    unlabeled = _answer(model, {name: value for name, value in batch.items() if name != "labels"})
    logits = getattr(unlabeled, "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[-1] <= int(packed["labels"].max()):
        return None  # labels out of range would put a CUDA device into an error state for good
    outputs = _answer(model, batch)
    if not isinstance(logits := getattr(outputs, "logits", None), Tensor) or outputs.loss is None:
        return None
    routed = router_loss(outputs, model)
    theirs = float(outputs.loss) - (0.0 if routed is None else float(routed))
    for shift in (True, False):
        weights = weights_of(packed, "token")
        weights[0, 0] = not shift
        items = weights.sum()
        ours = float(weighted_loss(logits, packed["labels"], weights / items, shift))
        if _is_close(ours, theirs, logits):
            halved = _answer(model, {**batch, ITEMS: 2 * items})
            lost = None if getattr(halved, "loss", None) is None else float(outputs.loss - halved.loss)
            return ModelLoss(shift, lost is not None and _is_close(lost, ours / 2, logits))
    return None


def _answer(model: PreTrainedModel, batch: dict[str, Any]) -> Any:
    """Return the model's outputs for a batch in evaluation mode, or None if the model rejects the batch."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return model(**batch)
    except (TypeError, ValueError, RuntimeError):
        return None
    finally:
        model.train(was_training)


def _is_close(ours: float, theirs: float, logits: Tensor) -> bool:
    close = _CLOSE if logits.dtype in (torch.float32, torch.float64) else _CLOSE_IN_HALF_PRECISION
    return abs(ours - theirs) <= close * abs(theirs)
