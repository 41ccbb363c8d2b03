"""Prove that packed documents do not affect each other, and have the same outputs as when they are run alone.

The module also finds out whether a model sees the input token at each label's position.
"""

from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_packing.attention.inspect_model import record_embeddings
from hf_packing.attention.probe import DocumentTokens, Probe, pack_in_one_row
from hf_packing.attention.tolerance import NoLanguageModelError, largest_difference, spread, what_is_missing
from hf_packing.columns import IGNORED_LABEL
from hf_packing.errors import ModelNotSupportedError

LARGEST_GRADIENT_LEAK = 1e-6
"""Largest allowed gradient of a document's logits with respect to another document, as a share of the largest gradient
with respect to the document itself. Without a leak, the gradient is exactly 0 in any precision."""

_GRADIENT_LENIENCE = 10
"""Factor from the tolerance for logits to the tolerance for gradients. Rounding also affects the backward pass."""

_REFERENCE = "eager"
"""The attention function with which documents are run alone, in addition to the model's own attention function. Eager
attention is plain PyTorch code in the model's file. Other attention functions have had bugs: in transformers 5.17,
"sdpa" ignores Gemma 2's soft cap."""

STOCK_ATTENTIONS = ("eager", "sdpa", "flex_attention")

RANDOM = "the model draws random numbers in training mode even with dropout switched off"
VARYING = "the model's logits for the same tokens vary from run to run in training mode even with the same random seed"


@dataclass(frozen=True)
class Reference:
    """The outputs of documents run one at a time on the unpatched model, all with the same attention function."""

    logits: list[Tensor]
    gradients: list[Tensor] | None


@dataclass(frozen=True)
class Exam:
    """A test of isolation: a probe with test documents, and the outputs that the packed documents must have."""

    probe: Probe
    references: list[Reference]
    """The outputs of the unpatched model, one `Reference` for each attention function; empty if the outputs cannot be
    compared."""
    unproven: str = ""
    """The reason why isolation cannot be fully proven in training mode; empty if there is no such reason."""
    can_be_run: bool = True
    """True if the model runs in the probe's mode, and returns the same logits for the same tokens."""
    rows: int = 1
    """The number of packed rows in a batch."""


def run_alone(model: PreTrainedModel, probe: Probe, gradients: bool = True) -> Exam:
    """Run each document alone on an unpatched model, and return an `Exam` with the documents' outputs.

    The documents are run with the model's own attention function and, if this function is not custom and can be
    changed, also with eager attention.

    Raises:
        ModelNotSupportedError: the model cannot be called with input_ids alone.
    """
    own = model.config._attn_implementation
    attentions = [own]
    if model._can_set_attn_implementation() and (own in STOCK_ATTENTIONS or "flash" in own):
        attentions = list(dict.fromkeys([_REFERENCE, own]))
    found = [_run_alone_with(attention, model, probe, gradients) for attention in attentions]
    references = [reference for reference in found if isinstance(reference, Reference)]
    if not references:
        name, error = type(model).__name__, found[-1]
        if isinstance(error, NoLanguageModelError):
            raise error
        missing = what_is_missing(model)
        raise ModelNotSupportedError(f"{name}: the model cannot be called with input_ids alone: {error}{missing}")
    return Exam(probe, references)


def run_alone_in_training(model: PreTrainedModel, rounding: float | None) -> Exam:
    """Run each document alone on an unpatched model in training mode, and return an `Exam` with the documents' outputs.

    If some outputs cannot be compared, the field `unproven` of the `Exam` contains the reason.
    """
    probe = Probe(model, training=True)
    probe.rounding = rounding
    try:
        with probe.undisturbed():
            is_random = probe.is_random(lambda: probe.alone(use_cache=False))
    except Exception as error:  # custom model code may raise anything
        return Exam(
            probe,
            [],
            f"the model cannot be called in training mode with input_ids alone: {error}",
            can_be_run=False,
        )
    if is_random is None:
        return Exam(probe, [], VARYING, can_be_run=False)
    if is_random:
        return Exam(probe, [], RANDOM)
    exam = run_alone(model, probe)
    if any(reference.gradients is None for reference in exam.references):
        return replace(
            exam, unproven="the model's gradients cannot be computed in training mode, so only logits were compared"
        )
    return exam


def _run_alone_with(attention: str, model: PreTrainedModel, probe: Probe, gradients: bool) -> Reference | Exception:
    try:
        if attention != model.config._attn_implementation:
            model.set_attn_implementation(attention)
        with probe.undisturbed():
            logits = probe.alone(use_cache=False)
            if probe.rounding is None:
                probe.measure_rounding(logits, use_cache=False)
            return Reference(logits, _gradients_alone(probe) if gradients else None)
    except Exception as error:  # custom model code may raise anything
        return error


def _gradients_alone(probe: Probe) -> list[Tensor] | None:
    """Run each document alone, and return the gradients of its logits; None if the model cannot compute gradients."""
    try:
        return probe.gradients_alone(use_cache=False)
    except (RuntimeError, AssertionError):
        return None


def prove_isolation(exam: Exam) -> None:
    """Prove that packed documents do not affect each other, and have the same outputs as when they are run alone.

    Raises:
        ModelNotSupportedError: packed documents affect each other, or have other outputs than when they are run alone;
            or the proof would not notice a leak in this model, if there were one.
    """
    if not exam.can_be_run:
        return
    try:
        _prove_no_leak(exam.probe)
        if exam.references:
            _prove_equal(exam)
        else:
            _prove_no_gradient_leak(exam.probe)
    except ModelNotSupportedError as error:
        raise ModelNotSupportedError(f"{exam.probe.mode}{error}") from error


def _prove_no_leak(probe: Probe) -> None:
    leak, scale = probe.largest_leak()
    if not leak <= probe.tolerance.leak * scale:
        raise ModelNotSupportedError(
            f"changing one packed document changes the logits of another document by {leak:.2g}"
        )
    if probe.training and (buffers := probe.memory()) is not None:
        raise ModelNotSupportedError(f"a document's logits depend on earlier batches{through(buffers)}")
    if not probe.training and not can_detect_leaks(probe):
        raise ModelNotSupportedError(
            "isolation cannot be tested, since changing the first tokens of a document does not change the logits of "
            "the following tokens"
        )


def can_detect_leaks(probe: Probe) -> bool:
    """Return whether the proof would notice a leak. The test joins all documents into one document without borders,
    replaces the first document, and checks whether the logits of the second document change."""
    before = _second_of_one_document(probe, probe.documents)
    after = _second_of_one_document(probe, probe.with_other(0))
    return largest_difference(before, after) > probe.tolerance.leak * spread(before)


def _second_of_one_document(probe: Probe, documents: DocumentTokens) -> Tensor:
    """Run all documents joined into one long document, and return the logits of the second document's tokens."""
    logits = probe.logits(**pack_in_one_row([[token for tokens in documents for token in tokens]]))
    return torch.split(logits, probe.lengths)[1]


def through(buffers: list[str]) -> str:
    """Return the end of an error message, which names up to three buffers; an empty string if `buffers` is empty."""
    return f", through {', '.join(buffers[:3])}" if buffers else ""


def _prove_equal(exam: Exam) -> None:
    probe, references = exam.probe, exam.references
    packed = probe.packed(probe.documents)
    differences = [probe.tolerance.unexplained(packed, reference.logits) for reference in references]
    if difference := min(differences):
        raise ModelNotSupportedError(
            f"a document's logits differ by {difference:.2g} between the packed row and the document alone"
            f"{probe.tolerance.note()}"
        )
    reference = references[differences.index(0)]
    if reference.gradients is None:
        return
    own = _prove_no_gradient_leak(probe)
    if difference := probe.tolerance.unexplained(own, reference.gradients, _GRADIENT_LENIENCE):
        raise ModelNotSupportedError(
            f"a document's gradients differ by {difference:.2g} between the packed row and the document alone"
        )


def _prove_no_gradient_leak(probe: Probe) -> list[Tensor]:
    """Check that gradients do not leak, and return each document's gradients with respect to its own embeddings.

    Raises:
        ModelNotSupportedError: gradients of a packed document reach another document.
    """
    gradients = probe.packed_gradients()
    leak = largest_gradient_leak(gradients)
    if not leak <= LARGEST_GRADIENT_LEAK:
        raise ModelNotSupportedError(
            "gradients of a packed document reach another document; the largest gradient at another document's tokens "
            f"is {leak:.2g} times the largest gradient at the document's own tokens"
        )
    return [found[number] for number, found in enumerate(gradients)]


def largest_gradient_leak(gradients: list[list[Tensor]]) -> float:
    """Return the largest gradient of a document's logits with respect to another document's embeddings, divided by the
    largest gradient with respect to the document's own embeddings.

    Args:
        gradients: the gradients of packed documents, as `Probe.packed_gradients` returns them.
    """
    leak = 0.0
    for number, found in enumerate(gradients):
        own = float(found[number].abs().max())
        others = max(float(each.abs().max()) for other, each in enumerate(found) if other != number)
        leak = max(leak, others / own if own else float("inf") if others else 0.0)
    return leak


def treats_pad_as_padding(exam: Exam) -> bool:
    """Return whether a patched model treats pad tokens in a document as padding.

    If so, documents that contain pad tokens have different logits in a packed row and in a row of their own.

    Args:
        exam: test documents that contain pad tokens, and their outputs on the unpatched model.
    """
    try:
        with exam.probe.undisturbed():
            packed = exam.probe.packed(exam.probe.documents)
    except Exception:  # the model refuses pad tokens itself
        return False
    return all(exam.probe.tolerance.unexplained(packed, reference.logits) > 0 for reference in exam.references)


_MIDDLE = 1
"""Index of the middle one of three documents."""

_REACHES = 1e-4
"""Largest allowed gradient of one document's loss with respect to another document, as a share of the largest gradient
with respect to the document itself. Usual losses have no gradient with respect to another document."""

_SEES = 1e-4
"""A model sees the input token at a label's position if the gradient of the label's loss with respect to this token
exceeds this share of the largest gradient with respect to any token. In a causal model, the share is 0."""


def refuse_loss_across_borders(probe: Probe, width: int) -> None:
    """Raise an error if a model's own loss compares labels of one packed document with outputs of another document.

    A head that predicts the token after the next token has such a loss, since the collator masks only the first label
    of a document, and not the second label.

    Args:
        probe: a probe of a patched model, with three documents.
        width: number of logits for each token.

    Raises:
        ModelNotSupportedError: the loss on one document's labels has a gradient with respect to another document.
    """
    if (reached := _loss_gradient_in_others(probe, width)) > _REACHES:
        raise ModelNotSupportedError(
            f"{type(probe.model).__name__}: {probe.mode}the model's own loss compares labels of a packed document with "
            "outputs of another document: for the loss on one document's labels, the largest gradient at another "
            f"document's tokens is {reached:.2g} times the largest gradient at the document's own tokens. A head that "
            "predicts the token after the next token, for example, has such a loss. Pass no labels, and compute the "
            "loss of each document yourself"
        )


def _loss_gradient_in_others(probe: Probe, width: int) -> float:
    """Take the loss on the middle document's labels. Return its largest gradient with respect to the other documents,
    divided by its largest gradient with respect to the middle document, or 0 if the model computes no loss or no
    gradients."""
    if not probe.signature.takes("labels"):
        return 0.0
    with suppress(Exception), probe.undisturbed(), record_embeddings(probe.model) as embedded:
        # both losses have the same input tokens, so auxiliary losses of routers cancel out in the difference
        own, other = (_loss_of_middle(probe, each[_MIDDLE], width) for each in (probe.documents, probe.others))
        by_token = probe.gradient_by_token(own - other, embedded)
        inside = set(probe.documents[_MIDDLE])
        outside = {token for document in probe.documents for token in document} - inside
        reached, most = (by_token[sorted(tokens)].abs().max() for tokens in (outside, inside))
        return float(reached / most)
    return 0.0


def _loss_of_middle(probe: Probe, labels: list[int], width: int) -> Tensor:
    """Return the loss of a packed row in which only the middle document has labels, from its second token on."""
    batch = pack_in_one_row(probe.documents)
    start = len(probe.documents[0])
    batch["labels"] = torch.full_like(batch["input_ids"], IGNORED_LABEL)
    batch["labels"][0, start + 1 : start + len(labels)] = torch.tensor(labels[1:]) % width
    return probe.loss(
        **{name: value.to(probe.device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    )


def model_sees_labels(probe: Probe, width: int) -> bool:
    """Return whether the input token at a label's position affects the logits that the label is compared with.

    This is so in masked language models, and in bidirectional models with a causal loss. The result is computed from
    the gradients of the model's own loss. If the model computes no loss or no gradients, the result is False.

    Args:
        probe: a probe of a model that is not patched.
        width: number of logits for each token.
    """
    return bool(_loss_gradient_at_label(probe, width) > _SEES)


def _loss_gradient_at_label(probe: Probe, width: int) -> float:
    """Return the gradient of one label's loss with respect to the input token at the label's position, divided by the
    largest gradient with respect to any token. Return 0 if the model computes no loss or no gradients."""
    tokens, others = probe.documents[0], probe.others[0]
    place = next((place for place in range(1, len(tokens)) if tokens.count(tokens[place]) == 1), None)
    if place is None or not probe.signature.takes("labels"):
        return 0.0
    with suppress(Exception), probe.undisturbed(), record_embeddings(probe.model) as embedded:
        # both losses have the same input tokens, so auxiliary losses of routers cancel out in the difference
        labels = tokens[place] % width, others[place] % width
        losses = [_loss_of_one_label(probe, tokens, place, label) for label in labels]
        of_token = probe.gradient_by_token(losses[0] - losses[1], embedded).abs().amax(1)
        return float(of_token[tokens[place]] / of_token.max())
    return 0.0


def _loss_of_one_label(probe: Probe, tokens: list[int], place: int, label: int) -> Tensor:
    labels = torch.full((1, len(tokens)), IGNORED_LABEL, device=probe.device)
    labels[0, place] = label
    inputs = {"input_ids": torch.tensor([tokens], device=probe.device), "labels": labels, "use_cache": False}
    return probe.loss(**{name: value for name, value in inputs.items() if probe.signature.takes(name)})
