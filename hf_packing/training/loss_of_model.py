"""How a model makes its loss from its logits, found out by asking it once: is a token's logit about the next token?"""

import weakref
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from hf_packing.attention.documents import random_documents
from hf_packing.attention.inner import inner_model
from hf_packing.attention.installed import is_patched
from hf_packing.attention.probe import device_of_inputs
from hf_packing.attention.sharded import where_weights_are
from hf_packing.collate import PackingCollator
from hf_packing.errors import PackingError
from hf_packing.training.losses import weighted_loss, weights_of

LEARNT: "weakref.WeakKeyDictionary[PreTrainedModel, bool]" = weakref.WeakKeyDictionary()
"""What models that were asked have answered."""

PROBED_TOKENS = 13
CLOSE, CLOSE_IN_HALF_PRECISION = 1e-5, 1e-3
"""Relative difference of two losses that are the same."""


def predicts_next(model: nn.Module) -> bool:
    """Whether the model's loss compares a token's logits with the next token, as those of most causal models do.

    As the model has answered to `learn_loss`; for one that was not asked, as its kind of class does.

    Raises:
        PackingError: neither asked, nor a causal or a masked language model.
    """
    inner = inner_model(model)
    if (learnt := LEARNT.get(inner)) is not None:
        return learnt
    names = {base.__name__ for base in type(inner).__mro__}
    if names & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        return True
    if names & set(MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()):
        return False
    raise PackingError(
        f"model: expected a causal or a masked language model of transformers, got {type(inner).__name__}"
    )


def learn_loss(model: nn.Module) -> bool:
    """Ask a model for its own loss of a short document, and compare.

    Args:
        model: patched.

    Returns:
        Whether its loss is known: the mean cross-entropy of its logits, with the next token or with the token itself,
        plus the weighted loss of its routers. Also True for weights that are elsewhere, which cannot be asked.
    """
    if where_weights_are(model) is not None:
        return True
    inner = inner_model(model)
    documents, _ = random_documents(inner, [PROBED_TOKENS], seed=0)
    batch = send_to_device(PackingCollator()([{"input_ids": documents[0]}]), device_of_inputs(inner))
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            outputs = model(**batch)
    except (TypeError, ValueError, RuntimeError):
        return False
    finally:
        model.train(was_training)
    if not isinstance(logits := getattr(outputs, "logits", None), Tensor) or outputs.loss is None:
        return False
    weights = weights_of(batch, "token")
    routers = router_loss(outputs, model)
    routed = 0.0 if routers is None else float(routers)
    close = CLOSE if logits.dtype in (torch.float32, torch.float64) else CLOSE_IN_HALF_PRECISION
    own = float(outputs.loss)
    for shift in (True, False):
        ours = float(weighted_loss(logits, batch["labels"], weights / weights.sum(), shift)) + routed
        if abs(ours - own) <= close * abs(own):
            LEARNT[inner] = shift
            return True
    return False


def check_patched(model: nn.Module) -> None:
    """Refuse a model that has not been shown to keep the documents of a packed batch apart.

    Raises:
        PackingError: it is not patched.
    """
    inner = inner_model(model)
    if not is_patched(inner):
        raise PackingError(
            f"model: expected one that patch_model has patched, {type(inner).__name__} is not, and may let documents "
            "read each other; prepare_dataloader(..., model=model) patches it, too"
        )


def router_loss(outputs: Any, model: nn.Module) -> Tensor | None:
    """The auxiliary loss of a mixture of experts, weighted as its configuration says; None without one."""
    if (auxiliary := getattr(outputs, "aux_loss", None)) is None:
        return None
    weighted: Tensor = auxiliary * getattr(inner_model(model).config.get_text_config(), "router_aux_loss_coef", 0.0)
    return weighted


def refuse_unknown_loss(model: nn.Module, loss: str) -> None:
    raise PackingError(
        f"loss: expected a model whose own loss is the cross-entropy of its logits, that of "
        f"{type(inner_model(model)).__name__} is another; got loss={loss!r}"
    )
