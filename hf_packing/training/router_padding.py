"""Refuse batches of fixed shapes for a model whose routers would also learn from the padding."""

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from hf_packing.attention import has_local_weights, in_mode, inner_model, input_device, random_documents
from hf_packing.batch.collate import PackingCollator
from hf_packing.errors import PackingError

_DOCUMENT, _FILLED = 13, 130
"""Numbers of tokens in the random document that is tested, and in the batch that padding fills."""

_CLOSE = 0.05
"""The largest relative difference between two losses of routers that count as equal. If the loss included the padding,
nine in ten tokens would be sent to the same experts, and the loss would be far larger."""


def refuse_padding_in_router_loss(model: nn.Module) -> None:
    """Test on a short document that padding does not change the load-balancing loss of the model's routers.

    The test is skipped for models without such a loss, and for models whose weights are not in memory.

    Args:
        model: a patched model.

    Raises:
        PackingError: padding changes the loss.
    """
    inner = inner_model(model)
    if not has_local_weights(model):
        return
    documents, _ = random_documents(inner, [_DOCUMENT], seed=0)
    rows = [{"input_ids": documents[0]}]
    alone, padded = (
        _router_loss(model, collator, rows)
        for collator in (PackingCollator(), PackingCollator(tokens=_FILLED, max_segments=2))
    )
    if alone is not None and padded is not None and abs(padded - alone) > _CLOSE * abs(alone):
        raise PackingError(
            f"tokens: expected None, since {type(inner).__name__} would also compute its load-balancing loss for the "
            f"padding of fixed shapes (the loss of a document is {alone:.3g}, and {padded:.3g} with padding)"
        )


def _router_loss(model: nn.Module, collator: PackingCollator, rows: list[dict[str, list[int]]]) -> float | None:
    batch = send_to_device(collator(rows), input_device(inner_model(model)))
    with in_mode(model, training=False), torch.no_grad():
        outputs = model(**{name: value for name, value in batch.items() if name != "labels"})
    found = getattr(outputs, "aux_loss", None)
    return float(found) if isinstance(found, Tensor) else None
