"""The proof of patch_model: packed documents are apart, in logits and in gradients, and each is as it is alone."""

from dataclasses import dataclass, replace

from torch import Tensor
from transformers import PreTrainedModel

from hf_packing.attention.logits import NoLanguageModelError, what_is_missing
from hf_packing.attention.probe import GRADIENT_LEAK_TOLERANCE, GRADIENT_LENIENCE, Probe
from hf_packing.errors import ModelNotSupportedError

REFERENCE = "eager"
"""What a document's logits are compared with, beside the model's own attention: the one written out in its file.
Others have had gaps: transformers 5.17 lets "sdpa" ignore Gemma 2's soft cap."""

PLAIN = ("eager", "sdpa", "flex_attention")


def largest_gradient_leak(gradients: list[list[Tensor]]) -> float:
    """Largest gradient in another document, as a share of the largest in the document itself."""
    leak = 0.0
    for number, found in enumerate(gradients):
        own = float(found[number].abs().max())
        others = max(float(each.abs().max()) for other, each in enumerate(found) if other != number)
        leak = max(leak, others / own if own else float("inf") if others else 0.0)
    return leak


@dataclass(frozen=True)
class Alone:
    """What a probe's documents are alone, under one attention of the unpatched model."""

    logits: list[Tensor]
    gradients: list[Tensor] | None


@dataclass(frozen=True)
class Exam:
    """Documents, and what they have to be when they are packed."""

    probe: Probe
    references: list[Alone]
    """Under one attention of the unpatched model, or more; none where it has no logits that could be compared."""
    unproven: str = ""
    """Why not all of this can be proven in training mode."""
    can_be_run: bool = True
    """Whether documents give the same logits when the same are run again."""
    rows: int = 1
    """Packed rows in a batch."""


def prove_isolation(exam: Exam) -> None:
    """Raise ModelNotSupportedError unless packed documents are apart, and as in one of the references."""
    if not exam.can_be_run:
        return
    try:
        prove_apart(exam.probe)
        if exam.references:
            prove_equal(exam)
        else:
            gradients_apart(exam.probe)
    except ModelNotSupportedError as error:
        raise ModelNotSupportedError(f"{exam.probe.mode}{error}") from error


def prove_apart(probe: Probe) -> None:
    leak, scale = probe.largest_leak()
    if not leak <= probe.tolerance.leak * scale:
        raise ModelNotSupportedError(f"changing one packed document changes the logits of another by {leak:.2g}")
    if probe.training and (names := probe.remembers()) is not None:
        raise ModelNotSupportedError(f"a document's logits depend on earlier ones{through(names)}")
    if not probe.training and not probe.sees_leaks():
        raise ModelNotSupportedError("no leak can be seen even with the borders taken away, so nothing is proven")


def through(buffers: list[str]) -> str:
    return f", through {', '.join(buffers[:3])}" if buffers else ""


def prove_equal(exam: Exam) -> None:
    probe, references = exam.probe, exam.references
    packed = probe.packed(probe.documents)
    differences = [probe.tolerance.unexplained(packed, alone.logits) for alone in references]
    if difference := min(differences):
        raise ModelNotSupportedError(
            f"a document's logits differ by {difference:.2g} between packed and alone{probe.tolerance.limits()}"
        )
    alone = references[differences.index(0)]
    if alone.gradients is None:
        return
    own = gradients_apart(probe)
    if difference := probe.tolerance.unexplained(own, alone.gradients, GRADIENT_LENIENCE):
        raise ModelNotSupportedError(f"a document's gradients differ by {difference:.2g} between packed and alone")


def gradients_apart(probe: Probe) -> list[Tensor]:
    """Those of each document in itself, where they reach no other."""
    gradients = probe.packed_gradients()
    leak = largest_gradient_leak(gradients)
    if not leak <= GRADIENT_LEAK_TOLERANCE:
        raise ModelNotSupportedError(f"gradients of a packed document reach another, up to {leak:.2g} of its own")
    return [found[number] for number, found in enumerate(gradients)]


def takes_padding_for_tokens(exam: Exam) -> bool:
    """Whether documents with pad tokens inside are other ones packed than alone, where they may be padding."""
    try:
        with exam.probe.quiet():
            packed = exam.probe.packed(exam.probe.documents)
    except Exception:  # it refuses them itself
        return False
    return all(exam.probe.tolerance.unexplained(packed, alone.logits) > 0 for alone in exam.references)


def documents_alone(model: PreTrainedModel, probe: Probe, gradients: bool = True) -> Exam:
    """Each document alone, under the model's own attention and, unless that is the user's, under eager."""
    own = model.config._attn_implementation
    attentions = [own]
    if model._can_set_attn_implementation() and (own in PLAIN or "flash" in own):
        attentions = list(dict.fromkeys([REFERENCE, own]))
    found = [documents_alone_under(attention, model, probe, gradients) for attention in attentions]
    references = [alone for alone in found if isinstance(alone, Alone)]
    if not references:
        name, error = type(model).__name__, found[-1]
        if isinstance(error, NoLanguageModelError):
            raise error
        missing = what_is_missing(model)
        raise ModelNotSupportedError(f"{name}: it cannot be called with input_ids alone: {error}{missing}")
    return Exam(probe, references)


CHANCE = "it draws random numbers there that cannot be switched off"
EACH_TIME = "it gives other logits each time for the same tokens there"


def documents_alone_in_training(model: PreTrainedModel, rounding: float | None) -> Exam:
    """The same in training mode, or why there is nothing to compare with."""
    probe = Probe(model, training=True)
    probe.rounding = rounding
    try:
        with probe.quiet():
            drawn = probe.draws_at_random(lambda: probe.alone(use_cache=False))
    except Exception as error:  # whatever a stranger's model raises
        return Exam(probe, [], f"it cannot be called there with input_ids alone: {error}", can_be_run=False)
    if drawn is None:
        return Exam(probe, [], EACH_TIME, can_be_run=False)
    if drawn:
        return Exam(probe, [], CHANCE)
    exam = documents_alone(model, probe)
    if any(alone.gradients is None for alone in exam.references):
        return replace(exam, unproven="its gradients cannot be taken there, only its logits were compared")
    return exam


def documents_alone_under(attention: str, model: PreTrainedModel, probe: Probe, gradients: bool) -> Alone | Exception:
    try:
        if attention != model.config._attn_implementation:
            model.set_attn_implementation(attention)
        with probe.quiet():
            logits = probe.alone(use_cache=False)
            if probe.rounding is None:
                probe.measure_rounding(logits, use_cache=False)
            return Alone(logits, gradients_alone(probe) if gradients else None)
    except Exception as error:  # whatever a stranger's model raises
        return error


def gradients_alone(probe: Probe) -> list[Tensor] | None:
    """None for a model that has no gradients outside training, whose patch is proven on logits alone."""
    try:
        return probe.gradients_alone(use_cache=False)
    except (RuntimeError, AssertionError):
        return None
