"""Let a model compute its own loss of a packed batch, and find out which token its logits predict.

Nothing of a loss is computed here, except for loss="sequence", weights of labels and trees: then a weighted sum takes
the place of the cross-entropy, wherever the model computes one of its logits.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from hf_packing.attention import (
    ALIGNED,
    NoLanguageModelError,
    has_local_weights,
    in_mode,
    inner_model,
    input_device,
    is_patched,
    predicts_tokens,
    random_documents,
    restored_random_state,
    sees_labels,
    small_copy_of,
    takes_argument,
)
from hf_packing.batch.collate import PackingCollator
from hf_packing.batch.segments import segments_in
from hf_packing.checks import expect
from hf_packing.columns import IGNORED_LABEL, INPUT_IDS, LABELS
from hf_packing.errors import PackingError
from hf_packing.training.head import Head, Weighting, observed_logits
from hf_packing.training.kinds import KINDS, labels_of
from hf_packing.training.losses import COUNTS, ITEMS, TARGETS, WEIGHTS, Batch, Loss, exact_type, positive

_NOT_FOR_THE_MODEL = {ITEMS, TARGETS, WEIGHTS, COUNTS, *(name for kind in KINDS for name in kind.of_loss)}


def inputs_of_model(batch: Batch) -> Batch:
    """Return a batch without what only the loss needs."""
    return {name: value for name, value in batch.items() if name not in _NOT_FOR_THE_MODEL}


@dataclass(frozen=True)
class WholeStep:
    """A micro-batch that is run as if it were its whole optimizer step: the loss is a mean over its own items."""

    inputs: Batch
    """What the model gets, with labels: at least one, also if there are no items, since a mean over none is NaN."""
    own: Tensor
    """The number of items in the micro-batch, a scalar."""
    weighting: Weighting | None
    """What takes the place of the model's cross-entropy; None to leave it alone."""

    @classmethod
    def of(cls, model: nn.Module, batch: Batch, loss: Loss) -> "WholeStep":
        """Return a batch of a PackingCollator, or as `with_share` returns it."""
        of, inputs = labels_of(batch), inputs_of_model(batch)
        labels, segments = of.labels, segments_in(batch)
        kept = None if segments is None else segments.first_labels
        inner = inner_model(model)
        if kept not in (None, sees_labels(inner)) and predicts_tokens(inner) and kept == predicts_next(model):
            how = "predicts" if kept else "does not predict"
            of_model = f"in PackingCollator, since the model {how} the next token; or pass it to prepare_dataloader"
            expect(not kept, of_model, keep_first_labels=kept)
        if not of.is_weighted(loss):
            own = (labels != IGNORED_LABEL).sum()
            labels = labels.clone()
            labels[0, -1] = torch.where(own > 0, labels[0, -1], (batch[INPUT_IDS][0, -1] == 0).to(labels))
            return cls({**inputs, LABELS: labels}, own, None)
        if of.shares_tokens:
            check_predicts_next(model)
        is_shifted = predicts_next(model)
        weights, (rows, tokens, targets) = of.weights(loss), of.next_tokens(is_shifted)
        own, given = of.total_of(weights), F.pad(labels[0], (0, 1), value=IGNORED_LABEL)[int(is_shifted) :]
        return cls({**inputs, LABELS: labels}, own, Weighting(rows, targets, weights[0, tokens], positive(own), given))

    @property
    def items(self) -> Tensor:
        """The num_items_in_batch that the model or the trainer gets, a scalar."""
        return positive(self.own)

    def share_of(self, items: Tensor | None) -> Tensor:
        """Return the micro-batch's share of a number of items, which may be 0 if it has none itself; 1 for None."""
        whole = self.items.to(exact_type(self.own.device))
        return torch.where(self.own > 0, whole / (self.items if items is None else items), 0)

    @contextmanager
    def observed(self, model: nn.Module) -> Iterator[Head]:
        """Context manager for the forward: cross-entropies run in chunks, and the weighted sum takes the place of one.

        Raises:
            PackingError: there is a weighted sum, but not exactly one cross-entropy of the logits.
        """
        with observed_logits(model, self.inputs[LABELS].shape, self.weighting) as observed:
            yield observed
        if self.weighting is not None and (found := len(observed.sums)) != 1:
            raise PackingError(
                "loss: expected a model whose own loss is computed from one F.cross_entropy of its logits for "
                f"loss='sequence', for loss_weights and for documents that share prefixes or are on several ranks, but "
                f"{type(inner_model(model)).__name__} computes {found}, or is compiled as a whole"
            )

    def run(self, model: nn.Module) -> tuple[Tensor, Head]:
        """Run a model with its own loss, and return the loss and what was observed of its cross-entropies."""
        items = {ITEMS: self.items} if takes_argument(inner_model(model), ITEMS) else {}
        with self.observed(model) as observed:
            outputs = model(**self.inputs, **items)
        loss = outputs[0] if isinstance(outputs, tuple) else getattr(outputs, "loss", None)
        if not isinstance(loss, Tensor):
            raise PackingError(
                f"model: expected a model that returns a loss, but {type(inner_model(model)).__name__} does not"
            )
        return loss, observed


class OwnLoss(NamedTuple):
    """The way in which a model computes its own loss."""

    predicts_next: bool
    """True if the logits of a token predict the next token; False if they predict the token itself."""
    is_divided: bool
    """True if the loss depends on num_items_in_batch."""


_KNOWN: "weakref.WeakKeyDictionary[PreTrainedModel, tuple[Any, OwnLoss | None, str]]" = weakref.WeakKeyDictionary()
"""For each model, the loss function that it had when `own_loss_of` was called, the result, and the error."""


def own_loss_of(model: nn.Module) -> OwnLoss | None:
    """Return how a language model computes its own loss; None if it returns no loss of its logits, or if this is not
    known."""
    inner = inner_model(model)
    function = getattr(inner, "loss_function", None)
    if inner not in _KNOWN or _KNOWN[inner][0] is not function:
        try:
            _KNOWN[inner] = function, _ask(model), ""
        except Exception as error:  # a model may raise anything
            _KNOWN[inner] = function, None, f" ({error})"
    return _KNOWN[inner][1]


def predicts_next(model: nn.Module) -> bool:
    """Return whether a model's logits at a token predict the next token, as in most causal language models.

    Otherwise, the logits predict the token at the same position, as in masked language models.

    Raises:
        PackingError: the model's own loss does not show it, nor the name of its class if the model is not in memory.
    """
    if (known := own_loss_of(model)) is not None:
        return known.predicts_next
    inner = inner_model(model)
    names = set() if has_local_weights(model) else {base.__name__ for base in type(inner).__mro__}
    if names & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        return True
    if names & set(MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()):
        return False
    raise PackingError(
        f"model: expected a causal or a masked language model that returns a loss of its logits if it gets input_ids "
        f"and labels alone, got {type(inner).__name__}{_KNOWN[inner][2]}; {NoLanguageModelError.SUPPORTED}. To train a "
        "token classifier, use patch_model and a Trainer with PackingCollator(keep_first_labels=True)"
    )


def check_predicts_next(model: nn.Module) -> None:
    """Raise PackingError unless a model predicts the next token, from this token and earlier ones."""
    inner = inner_model(model)
    if not predicts_next(model) or sees_labels(inner):
        raise PackingError(
            f"model: expected a causal language model for documents that share prefixes and for log-probabilities of "
            f"documents, but {type(inner).__name__} sees the tokens that it predicts"
        )


def collator_for(
    model: nn.Module | None,
    tokens: int | None = None,
    max_segments: int | None = None,
    align_tokens: int = 1,
) -> PackingCollator:
    """Return a PackingCollator for a model; None stands for any model that predicts the next token."""
    predicts_itself = model is not None and not predicts_next(model)
    return PackingCollator(predicts_itself, tokens, max_segments, align_tokens=align_tokens)


_PROBED_TOKENS, _LABELED = 13, 6
"""The number of tokens in the short document, and the only token with a label."""

_MUCH = 1e-3
"""If doubling num_items_in_batch changes a loss by more than this share, the loss counts as divided by that number."""


def _ask(model: nn.Module) -> OwnLoss | None:
    """Find out how a model computes its loss, or a small copy if its weights are not in memory."""
    inner = inner_model(model)
    asked = inner if has_local_weights(model) else small_copy_of(inner)
    try:
        return _ask_about(asked, _PROBED_TOKENS)
    except Exception:  # layers in FP8 take no such number of tokens
        return _ask_about(asked, ALIGNED)


def _ask_about(model: PreTrainedModel, tokens: int) -> OwnLoss | None:
    """Run a model on a document with one label. The gradient shows which token's logits the loss depends on; None if it
    is that of another token, or if the logits are not those of a vocabulary."""
    device = input_device(model)
    documents, _ = random_documents(model, [tokens], seed=0)
    batch = send_to_device(PackingCollator(keep_first_labels=True)([{INPUT_IDS: documents[0]}]), device)
    labels = torch.full_like(batch[LABELS], IGNORED_LABEL)
    labels[0, _LABELED] = 1  # small, since labels out of range would put a CUDA device into an error state for good
    if not is_patched(model):
        batch = {INPUT_IDS: batch[INPUT_IDS]} | ({"use_cache": False} if takes_argument(model, "use_cache") else {})

    def run(items: int) -> Any:
        divisor = {ITEMS: items} if takes_argument(model, ITEMS) else {}
        return model(**{**batch, LABELS: labels}, **divisor)

    with in_mode(model, training=False, probed=True), restored_random_state(device), torch.enable_grad():
        model.get_input_embeddings().register_forward_hook(_with_gradients)
        outputs, others = run(1), run(2)
    (gradient,) = torch.autograd.grad(outputs.loss, outputs.logits)
    predictor = int(gradient[0].abs().amax(-1).argmax())
    # padding of the vocabulary may be cut off; a classifier of tokens has fewer logits
    is_vocabulary = 2 * outputs.logits.shape[-1] > int(batch[INPUT_IDS].max())
    if not is_vocabulary or predictor not in (_LABELED - 1, _LABELED):
        return None
    return OwnLoss(predictor < _LABELED, bool((others.loss - outputs.loss).abs() > _MUCH * outputs.loss.abs()))


def _with_gradients(_: nn.Module, __: Any, embeddings: Any) -> Any:
    """Make embeddings leaves of the graph, since all weights may be frozen."""
    if not isinstance(embeddings, Tensor):
        return embeddings
    return embeddings.detach().requires_grad_().clone()  # a forward may change them in place
