"""Collect losses of tokens: those of every label, for the logs of a mixture, and their mean over an evaluation."""

import torch
from accelerate import Accelerator
from torch import Tensor

from hf_packing.training.losses import exact_type


class TokenLosses:
    """The cross-entropy of every label of a packed batch, without a graph. The loss that is trained on is not changed.

    Args:
        like: a tensor [1, tokens] on the device of the batch.
        predicts_next: True if the logits of a token predict the next token.

    Attributes:
        of_labels: float64 [1, tokens], or float32 on an MPS device; 0 for a token without a label.
        are_known: True if the losses were put.
    """

    def __init__(self, like: Tensor, predicts_next: bool) -> None:
        self._shift = int(predicts_next)
        self.of_labels = torch.zeros(like.shape, dtype=exact_type(like.device), device=like.device)
        self.are_known = False

    def put(self, losses: Tensor, tokens: Tensor) -> None:
        """Keep losses; those of a token may be put more than once, as when a chunk is computed again.

        Args:
            losses: float [labels].
            tokens: the tokens whose logits predict the labels, int64 [labels]. A token without a label has a loss of 0.
        """
        self.put_at(losses, (tokens + self._shift).clamp(max=self.of_labels.shape[1] - 1))

    def put_at(self, losses: Tensor, labeled: Tensor) -> None:
        """Keep losses by the tokens that the labels belong to, int64 [labels]; see `put`."""
        self.of_labels[0, labeled.to(self.of_labels.device)] = losses.detach().to(self.of_labels)
        self.are_known = True


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
