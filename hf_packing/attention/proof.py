"""The proof of patch_model: packed documents do not affect each other, and have the outputs that they have unpacked.

Also measured here: whether a model sees the input token at each label's position.
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
"""Largest gradient with respect to another document, as a share of the largest with respect to the document itself.
Where no path leads from one document to another, the gradient is 0 in any precision."""

_GRADIENT_LENIENCE = 10
"""Factor on the allowed difference of gradients, since rounding affects the backward pass too."""

_REFERENCE = "eager"
"""The attention with which documents alone are computed, in addition to the model's own. It is written out in the
model's file; others have had bugs: in transformers 5.17, "sdpa" ignores Gemma 2's soft cap."""

STOCK_ATTENTIONS = ("eager", "sdpa", "flex_attention")

RANDOM = "it draws random numbers in training mode that cannot be switched off"
VARYING = "its logits for the same tokens vary from run to run in training mode"


@dataclass(frozen=True)
class Reference:
    """The outputs of documents alone, with one attention of the unpatched model."""

    logits: list[Tensor]
    gradients: list[Tensor] | None


@dataclass(frozen=True)
class Exam:
    """Documents, and the outputs that they must have when they are packed."""

    probe: Probe
    references: list[Reference]
    """The outputs with one or several attentions of the unpatched model; empty if they cannot be compared."""
    unproven: str = ""
    """Why something cannot be proven in training mode."""
    can_be_run: bool = True
    """Whether the same tokens give the same logits."""
    rows: int = 1
    """Packed rows in a batch."""


def run_alone(model: PreTrainedModel, probe: Probe, gradients: bool = True) -> Exam:
    """Run each document alone on an unpatched model, with its own attention, and also with eager attention unless its
    attention function is a custom one.

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
        raise ModelNotSupportedError(f"{name}: it cannot be called with input_ids alone: {error}{missing}")
    return Exam(probe, references)


def run_alone_in_training(model: PreTrainedModel, rounding: float | None) -> Exam:
    """Like `run_alone`, in training mode. If outputs cannot be compared in that mode, the exam says why."""
    probe = Probe(model, training=True)
    probe.rounding = rounding
    try:
        with probe.undisturbed():
            is_random = probe.is_random(lambda: probe.alone(use_cache=False))
    except Exception as error:  # custom model code may raise anything
        return Exam(probe, [], f"it cannot be called in training mode with input_ids alone: {error}", can_be_run=False)
    if is_random is None:
        return Exam(probe, [], VARYING, can_be_run=False)
    if is_random:
        return Exam(probe, [], RANDOM)
    exam = run_alone(model, probe)
    if any(reference.gradients is None for reference in exam.references):
        return replace(
            exam, unproven="its gradients cannot be computed in training mode, only its logits were compared"
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
    """Return the gradients, or None if the model has none in this mode; then only its logits are compared."""
    try:
        return probe.gradients_alone(use_cache=False)
    except (RuntimeError, AssertionError):
        return None


def prove_isolation(exam: Exam) -> None:
    """Prove that packed documents do not affect each other, and have the outputs of one of the references.

    Raises:
        ModelNotSupportedError: one of the two cannot be proven.
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
        raise ModelNotSupportedError(f"changing one packed document changes the logits of another by {leak:.2g}")
    if probe.training and (buffers := probe.memory()) is not None:
        raise ModelNotSupportedError(f"a document's logits depend on earlier batches{through(buffers)}")
    if not probe.training and not can_detect_leaks(probe):
        raise ModelNotSupportedError("no leak can be detected even without borders, so nothing is proven")


def can_detect_leaks(probe: Probe) -> bool:
    """Return whether, without borders, changing one document changes the logits of its neighbor."""
    before = _second_of_one_document(probe, probe.documents)
    after = _second_of_one_document(probe, probe.with_other(0))
    return largest_difference(before, after) > probe.tolerance.leak * spread(before)


def _second_of_one_document(probe: Probe, documents: DocumentTokens) -> Tensor:
    """Return the logits of the second document's tokens when all tokens are given as a single document."""
    logits = probe.logits(**pack_in_one_row([[token for tokens in documents for token in tokens]]))
    return torch.split(logits, probe.lengths)[1]


def through(buffers: list[str]) -> str:
    """Return the end of a message about a model that remembers earlier batches."""
    return f", through {', '.join(buffers[:3])}" if buffers else ""


def _prove_equal(exam: Exam) -> None:
    probe, references = exam.probe, exam.references
    packed = probe.packed(probe.documents)
    differences = [probe.tolerance.unexplained(packed, reference.logits) for reference in references]
    if difference := min(differences):
        raise ModelNotSupportedError(
            f"a document's logits differ by {difference:.2g} between packed and alone{probe.tolerance.note()}"
        )
    reference = references[differences.index(0)]
    if reference.gradients is None:
        return
    own = _prove_no_gradient_leak(probe)
    if difference := probe.tolerance.unexplained(own, reference.gradients, _GRADIENT_LENIENCE):
        raise ModelNotSupportedError(f"a document's gradients differ by {difference:.2g} between packed and alone")


def _prove_no_gradient_leak(probe: Probe) -> list[Tensor]:
    """Return the gradients of each document's logits with respect to its own embeddings."""
    gradients = probe.packed_gradients()
    leak = largest_gradient_leak(gradients)
    if not leak <= LARGEST_GRADIENT_LEAK:
        raise ModelNotSupportedError(
            f"gradients of a packed document reach another document; the largest is {leak:.2g} of the largest in the "
            "document itself"
        )
    return [found[number] for number, found in enumerate(gradients)]


def largest_gradient_leak(gradients: list[list[Tensor]]) -> float:
    """Return the largest gradient with respect to another document, as a share of the largest in the document itself.

    Args:
        gradients: of the logits of each document, with respect to the embeddings of each document.
    """
    leak = 0.0
    for number, found in enumerate(gradients):
        own = float(found[number].abs().max())
        others = max(float(each.abs().max()) for other, each in enumerate(found) if other != number)
        leak = max(leak, others / own if own else float("inf") if others else 0.0)
    return leak


def treats_pad_as_padding(exam: Exam) -> bool:
    """Return whether documents with pad tokens inside differ between packed and alone, as if they were padded."""
    try:
        with exam.probe.undisturbed():
            packed = exam.probe.packed(exam.probe.documents)
    except Exception:  # the model refuses pad tokens itself
        return False
    return all(exam.probe.tolerance.unexplained(packed, reference.logits) > 0 for reference in exam.references)


_MIDDLE = 1
"""Index of the middle one of three documents."""

_REACHES = 1e-4
"""Largest gradient that a loss may have with respect to another document, as a share of the largest with respect to the
document itself. Usual losses have none."""

_SEES = 1e-4
"""A model sees its labels if the gradient at a label's input token exceeds this share of the largest at any token. In a
causal model it is 0."""


def refuse_loss_across_borders(probe: Probe, width: int) -> None:
    """Refuse a model whose own loss compares labels of one document with outputs of another.

    A head that predicts the token after next does so: the collator masks the first label of a document, not the second.

    Args:
        probe: a probe of a patched model, with three documents.
        width: logits of a token.

    Raises:
        ModelNotSupportedError: the loss on one document's labels has gradients with respect to another document.
    """
    if (reached := _loss_gradient_in_others(probe, width)) > _REACHES:
        raise ModelNotSupportedError(
            f"{type(probe.model).__name__}: {probe.mode}its own loss compares labels of a packed document with outputs "
            "of another, as heads that predict the token after next do (gradients reach the other document; the "
            f"largest is {reached:.2g} of the largest in the document itself); pass no labels, and compute the loss of "
            "each document yourself"
        )


def _loss_gradient_in_others(probe: Probe, width: int) -> float:
    """Return the largest gradient, with respect to the other documents, of the loss on one document's labels, as a
    share of the largest with respect to that document; 0 for a model that computes no loss."""
    if not probe.signature.takes("labels"):
        return 0.0
    with suppress(Exception), probe.undisturbed(), record_embeddings(probe.model) as embedded:
        # the difference of two losses of the same tokens, so that losses of routers cancel out
        own, other = (_loss_of_middle(probe, each[_MIDDLE], width) for each in (probe.documents, probe.others))
        by_token = probe.gradient_by_token(own - other, embedded)
        inside = set(probe.documents[_MIDDLE])
        outside = {token for document in probe.documents for token in document} - inside
        reached, most = (by_token[sorted(tokens)].abs().max() for tokens in (outside, inside))
        return float(reached / most)
    return 0.0


def _loss_of_middle(probe: Probe, labels: list[int], width: int) -> Tensor:
    """Return the loss of all documents in a row, with labels only for the middle document, except its first token."""
    batch = pack_in_one_row(probe.documents)
    start = len(probe.documents[0])
    batch["labels"] = torch.full_like(batch["input_ids"], IGNORED_LABEL)
    batch["labels"][0, start + 1 : start + len(labels)] = torch.tensor(labels[1:]) % width
    return probe.loss(
        **{name: value.to(probe.device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    )


def model_sees_labels(probe: Probe, width: int) -> bool:
    """Return whether the input token at a label's position affects the logits that the label is compared with.

    It does in masked language models, and in bidirectional ones with a causal loss. The gradients of the model's own
    loss decide; the answer is False if the model computes no loss, or has no gradients.

    Args:
        probe: a probe of a model that is not patched.
        width: logits of a token.
    """
    return bool(_loss_gradient_at_label(probe, width) > _SEES)


def _loss_gradient_at_label(probe: Probe, width: int) -> float:
    """Return the gradient of one label's loss with respect to the input token at its position, as a share of the
    largest with respect to any token."""
    tokens, others = probe.documents[0], probe.others[0]
    place = next((place for place in range(1, len(tokens)) if tokens.count(tokens[place]) == 1), None)
    if place is None or not probe.signature.takes("labels"):
        return 0.0
    with suppress(Exception), probe.undisturbed(), record_embeddings(probe.model) as embedded:
        # the difference of two labels in one place, so that losses of routers cancel out
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
