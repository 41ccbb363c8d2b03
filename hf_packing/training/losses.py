"""Count and weigh the labels of a global batch, so that its split into micro-batches does not matter.

A global batch is all micro-batches of one optimizer step, on all ranks. The loss "token" is the mean over all trainable
tokens, which have a label other than -100. The loss "sequence" averages first within each document, then over
documents, so that long and short documents have the same weight (per-sequence loss of arXiv 2107.02027; loss weighting
of arXiv 2401.18058). If a document was split, each piece counts as a document. With both losses, the weight of a token
depends on the whole global batch. The loss of a batch without trainable tokens is zero. Labels may have weights of
their own, `loss_weights`: a sum is then divided by the sum of their sizes, without signs, in the place of the count.

There is one rule for all losses, of any model and trainer: a micro-batch is run as if it were the whole global batch,
and its loss is weighted by its share of the items, which are trainable tokens or documents with such tokens. So the
weighted sum over micro-batches is exact for a loss that is a mean over items, however it is computed. What is added to
it, such as the loss of routers or a regularizer, becomes the mean over micro-batches with these weights.

What the labels of each kind of batch are is in `kinds`.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor

Loss = Literal["token", "sequence"]

Batch = Mapping[str, Any]
"""A packed batch or a batch of trees, with the keys of a `PackingCollator`."""

ITEMS = "num_items_in_batch"
"""The keyword argument of transformers models that gives the divisor of the summed loss."""

TARGETS, WEIGHTS = "packed_targets", "packed_weights"
"""Keys of the entries that replace the labels of a batch, so that the model does not compute the loss itself."""

COUNTS = "packed_counts"
"""Key of an entry that is added to batches of whole rows, int64 [4]: their counts of rows that are no copies, which are
the documents; and to parts of rows on several ranks."""


def exact_type(device: torch.device) -> torch.dtype:
    """Return the most precise floating-point dtype that a device supports: float32 on MPS, else float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def positive(items: Tensor) -> Tensor:
    """Return a number of items by which a loss can be divided: 1 for 0."""
    return torch.where(items > 0, items, 1)


class TokenMean:
    """Running sums of losses and of tokens; their quotient is the mean loss. Each rank adds its own batches."""

    def __init__(self, device: torch.device) -> None:
        self._total = torch.zeros(2, dtype=exact_type(device), device=device)
        self.batches = 0

    def add(self, loss: Tensor, tokens: Tensor) -> None:
        """Add the mean loss of some tokens."""
        self._total += torch.stack([(loss.detach() * tokens).to(self._total), tokens.to(self._total)])
        self.batches += 1

    def over_ranks(self, accelerator: Accelerator) -> tuple[float, float]:
        """Return the summed loss and the number of tokens over all ranks; all ranks must call this method together."""
        summed_loss, tokens = accelerator.reduce(self._total, reduction="sum").tolist()
        return summed_loss, tokens
