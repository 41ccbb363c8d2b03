"""Warn of what documents that share a prefix cannot have of their own."""

import warnings
from weakref import WeakSet

from torch import nn
from transformers import PreTrainedModel

from hf_packing.attention import inner_model

_WARNED: "WeakSet[PreTrainedModel]" = WeakSet()


def warn_of_shared_randomness(model: nn.Module) -> None:
    """Warn once for each model of dropout and of losses of routers, which are not those of the documents alone."""
    inner = inner_model(model)
    if inner in _WARNED:
        return
    _WARNED.add(inner)
    config = inner.config.get_text_config()
    dropout = any(isinstance(each, nn.Dropout) and each.p > 0 for each in model.modules())
    if dropout or getattr(config, "attention_dropout", None):
        warnings.warn(
            "dropout: documents that share a prefix also share what is dropped in it; set the dropout of the model to "
            "0 for the gradients of separate documents",
            stacklevel=2,
        )
    if getattr(config, "output_router_logits", False):
        warnings.warn(
            "output_router_logits: the balancing loss of routers counts tokens of a shared prefix once, not once for "
            "each document",
            stacklevel=2,
        )
