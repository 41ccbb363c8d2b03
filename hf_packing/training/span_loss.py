"""Compute the loss of question answering without padding.

The loss of transformers' question answering models is a softmax over all places of a padded row, so it depends on how
much padding the row has. Here the softmax is over the row's own tokens, as if the row were a batch of its own.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_packing.attention import inner_model
from hf_packing.columns import ATTENTION_MASK
from hf_packing.errors import PackingError

POSITIONS = ("start_positions", "end_positions")
"""Names of the columns that say where an answer begins and ends."""

_LOGITS = ("start_logits", "end_logits")


@contextmanager
def span_loss_without_padding(model: nn.Module) -> Iterator[None]:
    """Context manager: within the block, the model's own loss of a question answering batch leaves out the padding.

    Models of other kinds, and batches without answers, are not affected.
    """

    def replace(_: nn.Module, __: Any, given: Mapping[str, Any], outputs: Any) -> None:
        start, end = (getattr(outputs, name, None) for name in _LOGITS)
        if getattr(outputs, "loss", None) is not None and start is not None and end is not None:
            outputs.loss = span_loss(start, end, given)

    handle = inner_model(model).register_forward_hook(replace, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def span_loss(start_logits: Tensor, end_logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Return the mean cross-entropy of the places where the answers begin and end, a float scalar.

    Args:
        start_logits: float [rows, tokens].
        end_logits: float [rows, tokens].
        batch: attention_mask, integers [rows, tokens]; start_positions and end_positions, int64 [rows] or [rows, 1].

    Raises:
        PackingError: an answer begins or ends at a place that is not a token of its row.
    """
    losses = []
    for name, logits in zip(POSITIONS, (start_logits, end_logits), strict=True):
        places = batch[name].reshape(-1).to(logits.device)
        is_token = torch.ones_like(logits, dtype=torch.bool)
        if batch.get(ATTENTION_MASK) is not None:
            is_token = batch[ATTENTION_MASK].to(logits.device) != 0
        inside = (places >= 0) & (places < logits.shape[1])
        inside &= is_token.gather(1, places.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        if not inside.all():
            row = int((~inside).int().argmax())
            raise PackingError(
                f"{name}: expected the number of a token in its row, but row {row} of a batch has {int(places[row])}, "
                f"and the row has {int(is_token[row].sum())} tokens in the {logits.shape[1]} places of the batch. For "
                "a question without an answer in the text, use the place of the first token"
            )
        losses.append(F.cross_entropy(logits.masked_fill(~is_token, -torch.inf), places))
    return (losses[0] + losses[1]) / 2
