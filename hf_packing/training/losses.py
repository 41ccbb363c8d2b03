"""Count and weigh the labels of a global batch, so that its split into micro-batches does not matter.

A global batch is all micro-batches of one optimizer step, on all ranks. The loss "token" is the mean over all trainable
tokens, which have a label other than -100. The loss "sequence" averages first within each document, then over
documents, so that long and short documents have the same weight (per-sequence loss of arXiv 2107.02027; loss weighting
of arXiv 2401.18058). If a document was split, each piece counts as a document. With both losses, the weight of a token
depends on the whole global batch. The loss of a batch without trainable tokens is zero.

There is one rule for all losses, of any model and trainer: a micro-batch is run as if it were the whole global batch,
and its loss is weighted by its share of the items, which are trainable tokens or documents with such tokens. So the
weighted sum over micro-batches is exact for a loss that is a mean over items, however it is computed. What is added to
it, such as the loss of routers or a regularizer, becomes the mean over micro-batches with these weights.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import functional as F

from hf_packing.batch.collate import is_tree_batch
from hf_packing.checks import check_choice
from hf_packing.columns import ENDS, IGNORED_LABEL
from hf_packing.training.tree_batch import labels_key, trained_per_tree_document, tree_weights

Loss = Literal["token", "sequence"]

ITEMS = "num_items_in_batch"
"""The keyword argument of transformers models that gives the divisor of the summed loss."""

TARGETS, WEIGHTS = "targets", "target_weights"
"""Keys of the entries that replace the labels of a batch, so that the model does not compute the loss itself; weights
as `weights_of` returns them."""


def check_loss(loss: Any) -> Loss:
    check_choice("loss", loss, Loss)
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


def with_share(batch: Mapping[str, Any], loss: Loss, items: Tensor, keep_labels: bool) -> dict[str, Any]:
    """Return a copy of a batch for `compute_loss`, with the number of items of its optimizer step, a float scalar.

    Unless `keep_labels`, the labels become targets, so that the model does not compute a loss itself. This is always so
    in a batch with weights: of trees, or for loss="sequence".
    """
    is_weighted = loss == "sequence" or is_tree_batch(batch)
    if keep_labels and not is_weighted:
        return {**batch, ITEMS: items}
    key = labels_key(batch)
    others = {name: value for name, value in batch.items() if name != key}
    weights = {WEIGHTS: weights_of(batch, loss)} if is_weighted else {}
    return {**others, TARGETS: batch[key], ITEMS: items, **weights}


class TokenMean:
    """Running sums of losses and of tokens; their quotient is the mean loss. Each rank adds its own batches."""

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
