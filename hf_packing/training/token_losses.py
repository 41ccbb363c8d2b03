"""Keep the loss of every label of a batch beside the loss that is trained on, for the logs of a mixture."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_packing.training.losses import exact_type


class TokenLosses:
    """The cross-entropy of every label of a packed batch, without a graph. The loss that is trained on is not changed.

    Args:
        like: a tensor [1, tokens] on the device of the batch.

    Attributes:
        of_labels: float64 [1, tokens], or float32 on an MPS device; 0 for a token without a label.
        are_known: True if the losses were put.
    """

    def __init__(self, like: Tensor) -> None:
        self.of_labels = torch.zeros(like.shape, dtype=exact_type(like.device), device=like.device)
        self.are_known = False

    def put(self, losses: Tensor, tokens: slice | Tensor) -> None:
        """Keep losses; those of a token may be put more than once, as when a chunk is computed again.

        Args:
            losses: float [labels].
            tokens: the tokens whose labels these are, a slice or int64 [labels].
        """
        self.of_labels[0, tokens] = losses.detach().to(self.of_labels)
        self.are_known = True

    @contextmanager
    def of_log_probs(self, model: nn.Module) -> Iterator[None]:
        """Context manager: within the block, keep the `log_probs` [1, tokens - 1] of SFTTrainer's fused LM head."""

        def keep(_: nn.Module, __: Any, outputs: Any) -> None:
            found = getattr(outputs, "log_probs", None)
            if isinstance(found, Tensor) and found.shape == self.of_labels[:, 1:].shape:
                self.put(-found[0], slice(1, None))

        handle = model.register_forward_hook(keep)
        try:
            yield
        finally:
            handle.remove()
