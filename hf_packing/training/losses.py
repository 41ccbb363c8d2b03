"""The loss of a global batch as a sum over weighted tokens, so that it does not depend on how the batch is split.

"token" is the mean over all trainable tokens. "sequence" is the mean over documents of each document's own mean, so
that every document weighs the same whatever its length (per-sequence loss of arXiv 2107.02027; loss weighting of arXiv
2401.18058). Pieces of a document that was split count as documents. The weight of a token depends on how many tokens or
documents the whole batch has, over all ranks and accumulated micro-batches. A batch without trainable labels has loss
zero.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import functional as F

from hf_packing.columns import IGNORED_LABEL
from hf_packing.errors import PackingError

Loss = Literal["token", "sequence"]

ITEMS = "num_items_in_batch"
"""The argument in which models of transformers take the number that their summed loss is divided by."""
TARGETS, WEIGHTS = "targets", "target_weights"
"""What a batch has instead of labels where the model must not compute the loss itself."""


def check_loss(loss: Any) -> Loss:
    if loss not in get_args(Loss):
        raise PackingError(f"loss: expected one of {', '.join(get_args(Loss))}, got {loss!r}")
    return loss  # type: ignore[no-any-return]


def trainable_per_document(batch: Mapping[str, Any]) -> Tensor:
    """Count the trainable labels of each segment of a packed batch: int64 [segments]."""
    trainable = (batch["labels"][0] != IGNORED_LABEL).to(torch.int64)
    total = F.pad(trainable.cumsum(0), (1, 0))
    return total[batch["cu_seq_lens_q"].long()].diff()


def items_in(batch: Mapping[str, Any], loss: Loss) -> Tensor:
    """Count the tokens or documents of a packed batch that the loss is a mean over: int64 scalar."""
    trainable = trainable_per_document(batch)
    return trainable.sum() if loss == "token" else (trainable > 0).sum()


def exact_type(device: torch.device) -> torch.dtype:
    """Return the widest float type of a device."""
    return torch.float32 if device.type == "mps" else torch.float64


def weights_of(batch: Mapping[str, Any], loss: Loss) -> Tensor:
    """Return the weight of each label of a packed batch, not yet divided by the items of the global batch.

    Returns:
        float64 [1, tokens].
    """
    labeled: Tensor = (batch["labels"] != IGNORED_LABEL).to(exact_type(batch["labels"].device))
    if loss == "token":
        return labeled
    lengths = batch["cu_seq_lens_q"].long().diff()
    return labeled / trainable_per_document(batch).clamp(min=1).repeat_interleave(lengths)[None]


def weighted_loss(logits: Tensor, labels: Tensor, weights: Tensor, shift: bool) -> Tensor:
    """Return the sum over tokens of weight times cross-entropy.

    Args:
        logits: float [1, tokens, vocabulary]; 16-bit logits are converted to float32.
        labels: int64 [1, tokens], -100 where there is none.
        weights: float [1, tokens], 0 where there is no label.
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
    """Return the batch with what its share in the loss of the global batch is computed from.

    Args:
        batch: packed, with labels.
        loss: what is averaged.
        items: float scalar: what the summed loss is divided by.
        keep_labels: True to add num_items_in_batch, from which the model computes the loss itself; False to replace
            labels by targets and a weight for each of them.
    """
    if keep_labels:
        return {**batch, ITEMS: items}
    weights = weights_of(batch, loss) / items
    others = {name: value for name, value in batch.items() if name != "labels"}
    return {**others, TARGETS: batch["labels"], WEIGHTS: weights}


def summed_loss(logits: Tensor, batch: Mapping[str, Any], shift: bool) -> tuple[Tensor, Tensor]:
    """Return the loss of a packed batch summed over its trainable tokens, and how many those are."""
    total = weighted_loss(logits, batch["labels"], weights_of(batch, "token"), shift)
    return total, trainable_per_document(batch).sum()


class TokenMean:
    """A mean over tokens, accumulated batch by batch on every rank."""

    def __init__(self, device: torch.device) -> None:
        self._total = torch.zeros(2, dtype=exact_type(device), device=device)
        self.batches = 0

    def add(self, summed_loss: Tensor, tokens: Tensor) -> None:
        self._total += torch.stack([summed_loss.detach().to(self._total), tokens.to(self._total)])
        self.batches += 1

    def over_ranks(self, accelerator: Accelerator) -> tuple[float, float]:
        """Return the summed loss and the number of tokens over all ranks; all ranks must call this."""
        summed_loss, tokens = accelerator.reduce(self._total, reduction="sum").tolist()
        return summed_loss, tokens
