"""The loss of a global batch, as a sum of weighted tokens: right however the batch is split.

"token" is the mean over all trainable tokens. "sequence" is the mean over documents of each document's own mean, so
that all documents weigh the same however long they are; the pieces of one that was cut count one by one (per-sequence
loss of arXiv 2107.02027; loss weighting of arXiv 2401.18058). Both are sums over tokens of weights that know how many
tokens or documents the whole batch has, on all ranks and over all accumulated steps. A batch without a trainable label
has the loss zero.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_packing.columns import IGNORED_LABEL
from hf_packing.errors import PackingError

Loss = Literal["token", "sequence"]

ITEMS = "num_items_in_batch"
"""The name under which models of transformers take what their summed loss is divided by."""
TARGETS, WEIGHTS = "targets", "target_weights"
"""What a batch has in place of labels where a model must not make the loss itself."""


def check_loss(loss: Any) -> Loss:
    if loss not in get_args(Loss):
        raise PackingError(f"loss: expected one of {', '.join(get_args(Loss))}, got {loss!r}")
    return loss  # type: ignore[no-any-return]


def trainable_per_document(batch: Mapping[str, Any]) -> Tensor:
    """int64 [segments]: how many labels of each segment of a packed batch are trained on."""
    trainable = (batch["labels"][0] != IGNORED_LABEL).to(torch.int64)
    total = F.pad(trainable.cumsum(0), (1, 0))
    return total[batch["cu_seq_lens_q"].long()].diff()


def items_in(batch: Mapping[str, Any], loss: Loss) -> Tensor:
    """int64 scalar: how many tokens, or documents, of a packed batch the loss is a mean over."""
    trainable = trainable_per_document(batch)
    return trainable.sum() if loss == "token" else (trainable > 0).sum()


def exact_type(device: torch.device) -> torch.dtype:
    """The widest float of a device."""
    return torch.float32 if device.type == "mps" else torch.float64


def weights_of(batch: Mapping[str, Any], loss: Loss) -> Tensor:
    """float64 [1, tokens]: the weight of each label of a packed batch, not yet divided by the items of all batches."""
    labelled: Tensor = (batch["labels"] != IGNORED_LABEL).to(exact_type(batch["labels"].device))
    if loss == "token":
        return labelled
    lengths = batch["cu_seq_lens_q"].long().diff()
    return labelled / trainable_per_document(batch).clamp(min=1).repeat_interleave(lengths)[None]


def weighted_loss(logits: Tensor, labels: Tensor, weights: Tensor, shift: bool) -> Tensor:
    """The sum over tokens of weight times cross-entropy.

    Args:
        logits: float [1, tokens, vocabulary]; 16-bit ones are made float32.
        labels: int64 [1, tokens], -100 where there is none.
        weights: float [1, tokens], 0 where there is no label.
        shift: whether a token's logits are about the next token.
    """
    if shift:
        logits, labels, weights = logits[:, :-1], labels[:, 1:], weights[:, 1:]
    exact = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(
        exact.flatten(0, 1), labels.flatten().to(exact.device), ignore_index=IGNORED_LABEL, reduction="none"
    )
    return losses @ weights.flatten().to(losses)


def with_share(batch: Mapping[str, Any], loss: Loss, items: Tensor, keep_labels: bool) -> dict[str, Any]:
    """The batch with its share in the loss of a larger one.

    Args:
        batch: packed, with labels.
        loss: what is averaged.
        items: float scalar: what the summed losses are divided by.
        keep_labels: beside num_items_in_batch, from which a model makes the right loss itself; else they become
            targets, with a weight for each.
    """
    if keep_labels:
        return {**batch, ITEMS: items}
    weights = weights_of(batch, loss) / items
    others = {name: value for name, value in batch.items() if name != "labels"}
    return {**others, TARGETS: batch["labels"], WEIGHTS: weights}
