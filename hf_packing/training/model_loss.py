"""Let a model compute its own loss of a packed batch, and find out how it does that.

A loss L(n) = a / n + b has a part that the model divides by the number of items n, such as the cross-entropy, and a
part that it does not divide, such as the loss of routers, a z-loss, or what PEFT adds around the model. Nothing of it
is computed here, except for loss="sequence" and for trees: then a weighted sum takes the place of the cross-entropy,
wherever the model computes one of its logits.
"""

import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from hf_packing.attention import (
    NoLanguageModelError,
    has_local_weights,
    in_mode,
    inner_model,
    input_device,
    is_patched,
    random_documents,
    restored,
    restored_random_state,
    sees_labels,
    small_copy_of,
    takes_argument,
)
from hf_packing.batch.collate import PackingCollator, is_tree_batch
from hf_packing.columns import IGNORED_LABEL, LABELS
from hf_packing.errors import PackingError
from hf_packing.training.head import Head, Logits, Weighting, called_on_outputs, observed_logits
from hf_packing.training.losses import ITEMS, TARGETS, WEIGHTS, Loss, exact_type, weights_of
from hf_packing.training.next_tokens import NextTokens
from hf_packing.training.tree_batch import TREE_KEYS_OF_THE_LOSS, labels_key

_NOT_FOR_THE_MODEL = {LABELS, *TREE_KEYS_OF_THE_LOSS, ITEMS, TARGETS, WEIGHTS}


def inputs_of_model(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch without what only the loss needs."""
    return {name: value for name, value in batch.items() if name not in _NOT_FOR_THE_MODEL}


def with_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a model gets of a packed batch or a batch of trees to compute its own loss."""
    return {**inputs_of_model(batch), LABELS: batch[labels_key(batch)]}


def weighting_of(model: nn.Module, batch: Mapping[str, Any], loss: Loss, items: Any) -> Weighting | None:
    """Return what takes the place of a model's cross-entropy, which it divides by `items`; None to leave it alone."""
    if loss == "token" and not is_tree_batch(batch):
        return None
    return weighting(model, batch, batch[labels_key(batch)], weights_of(batch, loss), items)


def weighting(model: nn.Module, batch: Mapping[str, Any], labels: Tensor, weights: Tensor, items: Any) -> Weighting:
    """Return a weighted sum over the labels of a batch, int64 [1, tokens], with weights of the same shape."""
    if is_tree_batch(batch):
        check_predicts_next(model)
    return Weighting(NextTokens.of_batch(batch, labels, predicts_next(model)), weights, items)


def run_with_loss(
    model: nn.Module, batch: Mapping[str, Any], labels: Tensor, items: Any, weighting: Weighting | None = None
) -> tuple[Tensor, Head]:
    """Run a model with its own loss L(items), and return the loss and what was observed of its cross-entropies.

    Raises:
        PackingError: there is a weighting, but the model does not compute one cross-entropy of its logits.
    """
    divisor = {ITEMS: items} if takes_argument(inner_model(model), ITEMS) else {}
    with observed_logits(model, labels.shape, weighting) as observed:
        outputs = model(**inputs_of_model(batch), labels=labels, **divisor)
    if weighting is not None:
        check_is_weighted(model, len(observed.sums))
    loss = outputs[0] if isinstance(outputs, tuple) else getattr(outputs, "loss", None)
    if not isinstance(loss, Tensor):
        raise PackingError(
            f"model: expected a model that returns a loss, but {type(inner_model(model)).__name__} does not"
        )
    return loss, observed


def check_is_weighted(model: nn.Module, cross_entropies: int) -> None:
    """Raise PackingError unless there is exactly one cross-entropy of a model's logits, which can be weighted."""
    if cross_entropies != 1:
        raise PackingError(
            "loss: expected a model whose own loss is computed from one F.cross_entropy of its logits for "
            f"loss='sequence' and for documents that share prefixes, but {type(inner_model(model)).__name__} computes "
            f"{cross_entropies}, or is compiled as a whole"
        )


def only_cross_entropy(model: nn.Module, observed: Head, items: Tensor) -> AbstractContextManager[None]:
    """Context manager: within the block, the loss that a model returns is its cross-entropy divided by `items`.

    A model that computes none of its logits, or several, returns its loss as usual.
    """

    def replace(outputs: Any) -> None:
        if len(observed.sums) == 1 and getattr(outputs, "loss", None) is not None:
            outputs["loss"] = observed.sums[0] / items

    return called_on_outputs(inner_model(model), replace)


def with_a_label(batch: Mapping[str, Any], items: Tensor) -> dict[str, Any]:
    """Return a packed batch that has a label even if it has no items, since a mean over no labels is not a number."""
    labels = batch[LABELS].clone()
    labels[0, -1] = torch.where(items > 0, labels[0, -1], (batch["input_ids"][0, -1] == 0).to(labels))
    return {**batch, LABELS: labels}


class OwnLoss(NamedTuple):
    """The way in which a model computes its own loss."""

    predicts_next: bool
    """True if the logits of a token predict the next token; False if they predict the token itself."""
    is_divided: bool
    """True if the loss depends on num_items_in_batch."""
    cross_entropies: int
    """The number of cross-entropies of the logits from which the loss is computed."""


_KNOWN: "weakref.WeakKeyDictionary[PreTrainedModel, tuple[Any, OwnLoss | str]]" = weakref.WeakKeyDictionary()
"""For each model, the loss function that it had when `_known_of` was called, and the result."""


def own_loss_of(model: nn.Module) -> OwnLoss | None:
    """Return how a model computes its own loss; None if it returns no loss, or if this is not known."""
    known = _known_of(model)
    return known if isinstance(known, OwnLoss) else None


def _known_of(model: nn.Module) -> OwnLoss | str:
    """Return how a model computes its own loss, or what happened instead, as the end of a sentence."""
    inner = inner_model(model)
    function = getattr(inner, "loss_function", None)
    if inner not in _KNOWN or _KNOWN[inner][0] is not function:
        _KNOWN[inner] = function, _ask(model)
    return _KNOWN[inner][1]


def predicts_next(model: nn.Module) -> bool:
    """Return whether a model's logits at a token predict the next token, as in most causal language models.

    Otherwise, the logits predict the token at the same position, as in masked language models.

    Raises:
        PackingError: this shows neither in the model's own loss nor in the name of its class.
    """
    if (known := own_loss_of(model)) is not None:
        return known.predicts_next
    inner = inner_model(model)
    names = {base.__name__ for base in type(inner).__mro__}
    if names & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        return True
    if names & set(MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()):
        return False
    raise PackingError(
        f"model: expected a causal or a masked language model of transformers, got {type(inner).__name__}; "
        f"{NoLanguageModelError.SUPPORTED}. To train a token classifier, use patch_model and a Trainer with "
        "PackingCollator(keep_first_labels=True)"
    )


def check_predicts_next(model: nn.Module) -> None:
    """Raise PackingError unless a model predicts the next token, from this token and earlier ones."""
    inner = inner_model(model)
    if not predicts_next(model) or sees_labels(inner):
        raise PackingError(
            f"model: expected a causal language model for documents that share prefixes and for log-probabilities of "
            f"documents, but {type(inner).__name__} sees the tokens that it predicts"
        )


def check_loss_of_model(model: nn.Module, loss: Loss, trees: bool = False) -> None:
    """Raise PackingError if a model returns no loss, or if its cross-entropy cannot be weighted where this is needed.

    A model is not checked if neither its weights nor a small copy of it are in memory.
    """
    inner, known = inner_model(model), _known_of(model)
    if isinstance(known, str):
        predicts_next(model)
        if has_local_weights(model):
            raise PackingError(
                f"model: expected a model that returns a loss of a packed batch, but {type(inner).__name__} {known}"
            )
    elif trees or loss == "sequence":
        check_is_weighted(model, known.cross_entropies)


def collator_for(
    model: nn.Module | None, tokens: int | None = None, max_segments: int | None = None
) -> PackingCollator:
    """Return a PackingCollator for a model; None stands for any model that predicts the next token."""
    return PackingCollator(model is not None and not predicts_next(model), tokens, max_segments)


_PROBED_TOKENS, _LABELED = 13, 6
"""The number of tokens in the short document, and the only token with a label."""


def _ask(model: nn.Module) -> OwnLoss | str:
    """Run a model on a short document with one label. The gradient shows which token's logits the loss depends on."""
    inner = inner_model(model)
    if not has_local_weights(model):
        try:
            inner = small_copy_of(inner)
        except Exception:  # building a model can fail in many ways, depending on the configuration
            return "is not in memory"
    documents, _ = random_documents(inner, [_PROBED_TOKENS], seed=0)
    packed = send_to_device(PackingCollator(keep_first_labels=True)([{"input_ids": documents[0]}]), input_device(inner))
    batch = packed if is_patched(inner) else {"input_ids": packed["input_ids"]}
    if not is_patched(inner) and takes_argument(inner, "use_cache"):
        batch = {**batch, "use_cache": False}
    labels = torch.full_like(packed[LABELS], IGNORED_LABEL)
    labels[0, _LABELED] = 1  # small, since labels out of range would put a CUDA device into an error state for good
    items = torch.tensor(1.0, dtype=exact_type(labels.device), device=labels.device)

    leaves: list[Tensor] = []

    def cut(_: nn.Module, __: Any, output: Any) -> Any:
        """Make the logits leaves of the graph, so that the model itself needs none."""
        if not isinstance(output, Tensor) or output.shape[:2] != labels.shape:
            return None
        leaves.append(output.detach().requires_grad_())
        own = leaves[-1].clone()  # a forward may change its logits in place
        return Logits.of_values(output.head, own, output.places) if isinstance(output, Logits) else own

    def run(items: Tensor) -> tuple[Any, Head]:
        divisor = {ITEMS: items} if takes_argument(inner, ITEMS) else {}
        with observed_logits(inner, labels.shape) as observed:
            outputs = inner(**{**batch, LABELS: labels}, **divisor)
        if not leaves and isinstance(logits := getattr(outputs, "logits", None), Tensor):
            leaves.append(logits)  # of a model that does not name its output layer
        return getattr(outputs, "loss", None), observed

    layer, device = inner.get_output_embeddings(), input_device(inner)
    with restored(*inner.modules()), in_mode(inner, training=False), restored_random_state(device), torch.enable_grad():
        if isinstance(layer, nn.Module):
            layer.register_forward_hook(cut)
        try:
            loss, observed = run(items.requires_grad_())
            if not isinstance(loss, Tensor) or not leaves:
                return "returns no loss, or no logits of every token"
            if leaves[0].shape[-1] <= int(packed["input_ids"].max()):
                return "has logits of other things than tokens"
            *of_logits, of_items = torch.autograd.grad(loss, [*leaves, items], allow_unused=True)
            is_divided = of_items is not None
            if not is_divided and takes_argument(inner, ITEMS):
                is_divided = bool((run(items.detach() * 2)[0] - loss).abs() > MUCH * loss.abs())
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            return f"raises {type(error).__name__}: {error}"
    if of_logits[0] is None:
        return "returns a loss that does not depend on its logits"
    predictor = int(of_logits[0][0].abs().amax(-1).argmax())
    if predictor not in (_LABELED - 1, _LABELED):
        return f"compares the label of a token with the logits {_LABELED - predictor} tokens before it"
    return OwnLoss(predictor < _LABELED, is_divided, len(observed.sums))


MUCH = 1e-3
"""If doubling num_items_in_batch changes a loss by more than this share, the loss counts as divided by that number."""
