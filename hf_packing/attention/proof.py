"""The proof of patch_model: packed documents are apart, in logits and in gradients, and each is as it is alone."""

from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

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
    """Under one attention of the unpatched model, or more."""


def prove_isolation(exam: Exam) -> None:
    """Raise ModelNotSupportedError unless packed documents are apart, and as in one of the references."""
    probe, references = exam.probe, exam.references
    leak, scale = probe.largest_leak()
    if not leak <= probe.leak_tolerance * scale:
        raise ModelNotSupportedError(f"changing one packed document changes the logits of another by {leak:.2g}")
    if not probe.sees_leaks():
        raise ModelNotSupportedError("no leak can be seen even with the borders taken away, so nothing is proven")
    packed = probe.packed(probe.documents)
    differences = [probe.difference(packed, alone.logits) for alone in references]
    if difference := min(differences):
        raise ModelNotSupportedError(f"a document's logits differ by {difference:.2g} between packed and alone")
    alone = references[differences.index(0)]
    if alone.gradients is None:
        return
    gradients = probe.packed_gradients()
    leak = largest_gradient_leak(gradients)
    if not leak <= GRADIENT_LEAK_TOLERANCE:
        raise ModelNotSupportedError(f"gradients of a packed document reach another, up to {leak:.2g} of its own")
    own = [found[number] for number, found in enumerate(gradients)]
    if difference := probe.difference(own, alone.gradients, GRADIENT_LENIENCE):
        raise ModelNotSupportedError(f"a document's gradients differ by {difference:.2g} between packed and alone")


def takes_padding_for_tokens(exam: Exam) -> bool:
    """Whether documents with pad tokens inside are other ones packed than alone, where they may be padding."""
    try:
        with exam.probe.quiet():
            packed = exam.probe.packed(exam.probe.documents)
    except Exception:  # it refuses them itself
        return False
    return all(exam.probe.difference(packed, alone.logits) > 0 for alone in exam.references)


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
        raise ModelNotSupportedError(f"{name}: it cannot be called with input_ids alone: {error}")
    return Exam(probe, references)


def documents_alone_under(attention: str, model: PreTrainedModel, probe: Probe, gradients: bool) -> Alone | Exception:
    try:
        if attention != model.config._attn_implementation:
            model.set_attn_implementation(attention)
        with probe.quiet():
            return Alone(probe.alone(use_cache=False), gradients_alone(probe) if gradients else None)
    except Exception as error:  # whatever a stranger's model raises
        return error


def gradients_alone(probe: Probe) -> list[Tensor] | None:
    """None for a model that has no gradients outside training, whose patch is proven on logits alone."""
    try:
        return probe.gradients_alone(use_cache=False)
    except (RuntimeError, AssertionError):
        return None
