"""How a model makes its loss from its logits, found out by asking it: is a token's logit about the next token?"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from hf_packing.attention import (
    NoLanguageModelError,
    has_local_weights,
    inner_model,
    input_device,
    is_patched,
    random_documents,
    small_copy_of,
    takes_argument,
)
from hf_packing.collate import PackingCollator
from hf_packing.errors import PackingError
from hf_packing.training.losses import ITEMS, weighted_loss, weights_of


class OwnLoss(NamedTuple):
    """The loss a model returns, where it is the mean cross-entropy of its logits, plus that of its routers."""

    predicts_next: bool
    """Whether a token's logits are compared with the next token."""
    divided_by_items: bool
    """Whether the model divides by num_items_in_batch where it is given that."""


LEARNT: "weakref.WeakKeyDictionary[PreTrainedModel, tuple[Any, OwnLoss | None]]" = weakref.WeakKeyDictionary()
"""What models that were asked have answered, with the function that made their loss then; None for another loss."""

PROBED_TOKENS = 13
CLOSE, CLOSE_IN_HALF_PRECISION = 1e-5, 1e-3
"""Relative difference of two losses that are the same."""


def predicts_next(model: nn.Module) -> bool:
    """Whether a token's logits are compared with the next token, as those of most causal models are.

    Raises:
        PackingError: neither a model whose loss can be learnt, nor a causal or a masked language model by its class.
    """
    if (own := own_loss(model)) is not None:
        return own.predicts_next
    inner = inner_model(model)
    names = {base.__name__ for base in type(inner).__mro__}
    if names & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        return True
    if names & set(MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()):
        return False
    name = type(inner).__name__
    raise PackingError(
        f"model: expected a causal or a masked language model of transformers, got {name}; "
        f"{NoLanguageModelError.SUPPORTED}. A classifier of tokens can be patched by patch_model, and trained by "
        "a Trainer with PackingCollator(keep_first_labels=True)"
    )


def own_loss(model: nn.Module) -> OwnLoss | None:
    """What kind of loss the model returns; None for another kind. A model is asked once for each function it is given.

    Args:
        model: patched, or one whose weights are elsewhere, in whose place a small one of the same kind is asked.
    """
    inner = inner_model(model)
    function = getattr(inner, "loss_function", None)
    if inner not in LEARNT or LEARNT[inner][0] is not function:
        LEARNT[inner] = function, ask(inner if has_local_weights(inner) else small_model_like(inner))
    return LEARNT[inner][1]


def small_model_like(model: PreTrainedModel) -> PreTrainedModel | None:
    try:
        return small_copy_of(model)
    except Exception:  # a configuration may be refused for a hundred reasons
        return None


def ask(model: PreTrainedModel | None) -> OwnLoss | None:
    """Compare the loss that a model returns for a short document with ours."""
    if model is None:
        return None
    documents, _ = random_documents(model, [PROBED_TOKENS], seed=0)
    packed = PackingCollator(keep_first_labels=True)([{"input_ids": documents[0]}])
    packed = send_to_device(packed, input_device(model))
    batch = packed
    if not is_patched(model):
        batch = {name: packed[name] for name in ("input_ids", "labels")}
        batch |= {"use_cache": False} if takes_argument(model, "use_cache") else {}
    unlabelled = answer(model, {name: value for name, value in batch.items() if name != "labels"})
    logits = getattr(unlabelled, "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[-1] <= max(documents[0]):
        return None  # such labels would be out of range, which no CUDA device recovers from
    outputs = answer(model, batch)
    if not isinstance(logits := getattr(outputs, "logits", None), Tensor) or outputs.loss is None:
        return None
    routed = router_loss(outputs, model)
    own = float(outputs.loss) - (0.0 if routed is None else float(routed))
    for shift in (True, False):
        weights = weights_of(packed, "token")
        weights[0, 0] = not shift
        items = weights.sum()
        ours = float(weighted_loss(logits, packed["labels"], weights / items, shift))
        if is_close(ours, own, logits):
            halved = answer(model, {**batch, ITEMS: 2 * items})
            lost = None if getattr(halved, "loss", None) is None else float(outputs.loss - halved.loss)
            return OwnLoss(shift, lost is not None and is_close(lost, ours / 2, logits))
    return None


def answer(model: PreTrainedModel, batch: dict[str, Any]) -> Any:
    """The model's outputs; None where it takes no such batch."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return model(**batch)
    except (TypeError, ValueError, RuntimeError):
        return None
    finally:
        model.train(was_training)


def is_close(ours: float, own: float, logits: Tensor) -> bool:
    close = CLOSE if logits.dtype in (torch.float32, torch.float64) else CLOSE_IN_HALF_PRECISION
    return abs(ours - own) <= close * abs(own)


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


@contextmanager
def without_router_loss(model: nn.Module) -> Iterator[None]:
    """Within it, the model's outputs have the loss of its logits alone, as an evaluation is about."""

    def leave_out(_: nn.Module, __: Any, outputs: Any) -> None:
        if (routed := router_loss(outputs, model)) is None:
            return
        if outputs.loss is not None:
            outputs.loss = outputs.loss - routed.to(outputs.loss.device)
        outputs.aux_loss = torch.zeros_like(outputs.aux_loss)

    handle = model.register_forward_hook(leave_out)
    try:
        yield
    finally:
        handle.remove()


def refuse_unknown_loss(model: nn.Module, loss: str) -> None:
    predicts_next(model)
    raise PackingError(
        f"loss: expected a model whose own loss is the cross-entropy of its logits, that of "
        f"{type(inner_model(model)).__name__} is another; got loss={loss!r}"
    )
