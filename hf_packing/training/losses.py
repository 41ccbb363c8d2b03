"""Compute the loss of a global batch as a weighted sum over tokens; the loss is the same however the batch is split.

The loss "token" is the mean over all trainable tokens. The loss "sequence" averages first within each document, then
over documents, so that all documents have the same weight, whatever their lengths (per-sequence loss of arXiv
2107.02027; loss weighting of arXiv 2401.18058). Pieces of a document that was split count as documents. The weight of a
token depends on the number of tokens or documents in the whole batch, over all ranks and accumulated micro-batches. The
loss of a batch without trainable labels is zero.

`loss_of_model` probes a model to find out whether the model's loss compares the logits of a token with the next token.
"""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, get_args

import torch
from accelerate import Accelerator
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
from hf_packing.collate import PackingCollator
from hf_packing.columns import IGNORED_LABEL
from hf_packing.errors import PackingError

Loss = Literal["token", "sequence"]

ITEMS = "num_items_in_batch"
"""The argument by which models of transformers receive the divisor of the summed loss."""

TARGETS, WEIGHTS = "targets", "target_weights"
"""Entries that replace the labels of a batch if the model must not compute the loss itself."""


def check_loss(loss: Any) -> Loss:
    if loss not in get_args(Loss):
        raise PackingError(f"loss: expected one of {', '.join(get_args(Loss))}, got {loss!r}")
    return loss  # type: ignore[no-any-return]


def trainable_per_document(batch: Mapping[str, Any]) -> Tensor:
    """Return the number of trainable labels in each segment of a packed batch, int64 [segments]."""
    trainable = (batch["labels"][0] != IGNORED_LABEL).to(torch.int64)
    total = F.pad(trainable.cumsum(0), (1, 0))
    return total[batch["cu_seq_lens_q"].long()].diff()


def items_in(batch: Mapping[str, Any], loss: Loss) -> Tensor:
    """Return the number of tokens or documents over which a packed batch's loss is averaged, an int64 scalar."""
    trainable = trainable_per_document(batch)
    return trainable.sum() if loss == "token" else (trainable > 0).sum()


def exact_type(device: torch.device) -> torch.dtype:
    """Return the most precise float type of a device."""
    return torch.float32 if device.type == "mps" else torch.float64


def weights_of(batch: Mapping[str, Any], loss: Loss) -> Tensor:
    """Return the weight of each label of a packed batch, before division by the divisor of the global batch.

    Returns:
        float64 [1, tokens], or float32 on an MPS device.
    """
    labeled: Tensor = (batch["labels"] != IGNORED_LABEL).to(exact_type(batch["labels"].device))
    if loss == "token":
        return labeled
    lengths = batch["cu_seq_lens_q"].long().diff()
    return labeled / trainable_per_document(batch).clamp(min=1).repeat_interleave(lengths)[None]


def weighted_loss(logits: Tensor, labels: Tensor, weights: Tensor, shift: bool) -> Tensor:
    """Return the sum over tokens of each token's weight times its cross-entropy.

    Args:
        logits: float [1, tokens, vocabulary]; 16-bit logits are converted to float32.
        labels: int64 [1, tokens]; -100 marks a token without a label.
        weights: float [1, tokens]; 0 for a token without a label.
        shift: whether the logits of a token predict the next token.
    """
    if shift:
        logits, labels, weights = logits[:, :-1], labels[:, 1:], weights[:, 1:]
    exact = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(
        exact.flatten(0, 1), labels.flatten().to(exact.device), ignore_index=IGNORED_LABEL, reduction="none"
    )
    return losses @ weights.flatten().to(losses)


def with_share(batch: Mapping[str, Any], loss: Loss, items: Tensor, keep_labels: bool) -> dict[str, Any]:
    """Return a batch with added entries, from which the batch's share of the global batch's loss is computed.

    Args:
        batch: a packed batch with labels.
        loss: "token" or "sequence".
        items: the divisor of the summed loss, a float scalar.
        keep_labels: True to add num_items_in_batch, so that the model computes the loss itself; False to replace the
            labels by targets and target_weights.
    """
    if keep_labels:
        return {**batch, ITEMS: items}
    weights = weights_of(batch, loss) / items
    others = {name: value for name, value in batch.items() if name != "labels"}
    return {**others, TARGETS: batch["labels"], WEIGHTS: weights}


def summed_loss(logits: Tensor, batch: Mapping[str, Any], shift: bool) -> tuple[Tensor, Tensor]:
    """Return the loss of a packed batch, summed over trainable tokens, and the number of trainable tokens."""
    total = weighted_loss(logits, batch["labels"], weights_of(batch, "token"), shift)
    return total, trainable_per_document(batch).sum()


class TokenMean:
    """The mean loss over tokens, accumulated batch by batch on every rank."""

    def __init__(self, device: torch.device) -> None:
        self._total = torch.zeros(2, dtype=exact_type(device), device=device)
        self.batches = 0

    def add(self, summed_loss: Tensor, tokens: Tensor) -> None:
        self._total += torch.stack([summed_loss.detach().to(self._total), tokens.to(self._total)])
        self.batches += 1

    def over_ranks(self, accelerator: Accelerator) -> tuple[float, float]:
        """Return the summed loss and the number of tokens over all ranks; all ranks must call this method together."""
        summed_loss, tokens = accelerator.reduce(self._total, reduction="sum").tolist()
        return summed_loss, tokens


_CLOSE, _CLOSE_IN_HALF_PRECISION = 1e-5, 1e-3
"""Largest relative difference at which two losses count as equal."""


PROBED_TOKENS = 13
"""Number of tokens in the random document with which the loss of a model or trainer is probed."""


class ModelLoss(NamedTuple):
    """The kind of a loss that is the mean cross-entropy of a model's logits, plus any auxiliary loss of experts."""

    predicts_next: bool
    """Whether the logits of a token are compared with the next token."""
    divided_by_items: bool
    """Whether the model divides the summed loss by num_items_in_batch if the caller passes that argument."""


_ANSWERS: "weakref.WeakKeyDictionary[PreTrainedModel, tuple[Any, ModelLoss | None]]" = weakref.WeakKeyDictionary()
"""For each probed model: the loss function at the time of the probe, and the result of `loss_of_model`."""


def loss_of_model(model: nn.Module) -> ModelLoss | None:
    """Return the kind of loss that a model computes, or None for an unknown kind.

    A model is probed once, and again whenever its loss function is replaced. If the model's weights are not in memory,
    a small model of the same class is probed instead.

    Args:
        model: a patched model, or a model whose weights are not in memory.
    """
    inner = inner_model(model)
    function = getattr(inner, "loss_function", None)
    if inner not in _ANSWERS or _ANSWERS[inner][0] is not function:
        _ANSWERS[inner] = function, _ask(inner if has_local_weights(inner) else _small_model_like(inner))
    return _ANSWERS[inner][1]


def predicts_next(model: nn.Module) -> bool:
    """Return whether the logits of a token are compared with the next token in the loss, as in most causal models.

    Raises:
        PackingError: the kind of the model's loss is unknown, and the model's class is neither a causal nor a masked
            language model of transformers.
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
    """Raise PackingError: the model's own loss is of an unknown kind, so the model cannot be trained with `loss`."""
    predicts_next(model)
    raise PackingError(
        f"loss: expected a model whose own loss is the cross-entropy of its logits, but "
        f"{type(inner_model(model)).__name__} computes a different loss; got loss={loss!r}"
    )


def collator_for(model: nn.Module | None) -> PackingCollator:
    """Return the collator for a model; None stands for any model that predicts the next token."""
    return PackingCollator(keep_first_labels=model is not None and not predicts_next(model))


def router_loss(outputs: Any, model: nn.Module) -> Tensor | None:
    """Return a mixture of experts' auxiliary loss times its configured weight, or None if there is no such loss."""
    if (auxiliary := getattr(outputs, "aux_loss", None)) is None:
        return None
    weighted: Tensor = auxiliary * getattr(inner_model(model).config.get_text_config(), "router_aux_loss_coef", 0.0)
    return weighted


@contextmanager
def without_router_loss(model: nn.Module) -> Iterator[None]:
    """Context manager: within the block, the model's loss leaves out the loss of routers, as evaluation requires."""

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


def _small_model_like(model: PreTrainedModel) -> PreTrainedModel | None:
    try:
        return small_copy_of(model)
    except Exception:  # building a model can fail in many ways, depending on the configuration
        return None


def _ask(model: PreTrainedModel | None) -> ModelLoss | None:
    """Find the kind of a model's loss by comparing the model's loss on a short document with `weighted_loss`."""
    if model is None:
        return None
    documents, _ = random_documents(model, [PROBED_TOKENS], seed=0)
    packed = PackingCollator(keep_first_labels=True)([{"input_ids": documents[0]}])
    packed = send_to_device(packed, input_device(model))
    batch = packed
    if not is_patched(model):
        batch = {name: packed[name] for name in ("input_ids", "labels")}
        batch |= {"use_cache": False} if takes_argument(model, "use_cache") else {}
    unlabeled = _answer(model, {name: value for name, value in batch.items() if name != "labels"})
    logits = getattr(unlabeled, "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[-1] <= max(documents[0]):
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
