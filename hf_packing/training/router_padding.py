"""Refuse batches of fixed shapes for a model whose routers have a loss, which would also learn from the padding."""

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from hf_packing.attention import has_local_weights, in_mode, inner_model, input_device, random_documents
from hf_packing.batch.collate import PackingCollator
from hf_packing.errors import PackingError

_DOCUMENT = 13
"""Number of tokens in the random document that is tested."""


def refuse_padding_in_router_loss(model: nn.Module) -> None:
    """Raise PackingError if the routers of a patched model compute a load-balancing loss for a short document.

    The test is skipped for models whose weights are not in memory. They raise an error at the first batch with padding.
    """
    inner = inner_model(model)
    if not has_local_weights(model):
        return
    documents, _ = random_documents(inner, [_DOCUMENT], seed=0)
    batch = send_to_device(PackingCollator()([{"input_ids": documents[0]}]), input_device(inner))
    with in_mode(model, training=False), torch.no_grad():
        outputs = model(**{name: value for name, value in batch.items() if name != "labels"})
    if isinstance(getattr(outputs, "aux_loss", None), Tensor):
        raise PackingError(
            f"tokens: expected None, since {type(inner).__name__} would also compute the load-balancing loss of its "
            "routers for the padding of fixed shapes; set output_router_logits=False in its configuration, or use "
            "batches of any shape"
        )
