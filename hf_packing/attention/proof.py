"""The proof of patch_model: packed documents are apart, in logits and in gradients, and each is as it is alone."""

from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_packing.arrow.loss_masks import IGNORED_LABEL
from hf_packing.attention.probe import GRADIENT_LEAK_TOLERANCE, GRADIENT_LENIENCE, Probe, embedded, in_one_row
from hf_packing.attention.snapshot import as_it_was, begin_chance
from hf_packing.attention.tolerance import NoLanguageModelError, what_is_missing
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


REACHES = 1e-4
"""Gradient in another document, as a share of the largest in its own; 0 where labels are shifted by one, or not."""

MIDDLE = 1


def refuse_a_loss_across_borders(probe: Probe, width: int) -> None:
    """Raise ModelNotSupportedError where the labels of a document train what the model makes of another.

    A head for the token after next does: of two labels at the beginning of a document, the first alone is left out.

    Args:
        probe: of a patched model, of three documents.
        width: how many logits a token has.
    """
    if (reached := reach_of_the_loss(probe, width)) > REACHES:
        raise ModelNotSupportedError(
            f"{type(probe.model).__name__}: {probe.mode}its own loss compares labels of a packed document with what it "
            f"makes of another (gradients reach it, up to {reached:.2g} of those in the document itself), as heads for "
            "the token after next do; give it no labels, and compute the loss of each document yourself"
        )


def reach_of_the_loss(probe: Probe, width: int) -> float:
    """Gradient of the loss of one document's labels in another, as a share of the largest in itself; 0 for models that
    make no loss of labels."""
    if not probe.signature.takes("labels"):
        return 0.0
    with suppress(Exception), probe.quiet(), embedded(probe.model) as embeddings:
        # two losses of the same tokens: what routers add cancels out
        own, other = (loss_of_the_middle(probe, each[MIDDLE], width) for each in (probe.documents, probe.others))
        found = torch.autograd.grad(own - other, [leaf for _, leaf in embeddings], allow_unused=True)
        size = max(token for document in probe.documents for token in document) + 1
        by_token = torch.zeros(size, embeddings[0][1].shape[-1], device=probe.device)
        for (seen, _), gradient in zip(embeddings, found, strict=True):
            if gradient is not None:
                by_token.index_add_(0, seen.flatten(), gradient.flatten(0, -2).float())
        inside = set(probe.documents[MIDDLE])
        outside = {token for document in probe.documents for token in document} - inside
        reached, most = (by_token[sorted(tokens)].abs().max() for tokens in (outside, inside))
        return float(reached / most)
    return 0.0


def loss_of_the_middle(probe: Probe, labels: list[int], width: int) -> Tensor:
    """Of all documents in a row, with these labels for the one in the middle, but for its first token."""
    batch = in_one_row(probe.documents)
    start = len(probe.documents[0])
    batch["labels"] = torch.full_like(batch["input_ids"], IGNORED_LABEL)
    batch["labels"][0, start + 1 : start + len(labels)] = torch.tensor(labels[1:]) % width
    given = {name: value.to(probe.device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    with as_it_was(*probe.model.modules()), probe.weights_kept():
        begin_chance(probe.chance)
        loss: Tensor = probe.model(**given).loss
    return loss


SEEN = 1e-4
"""Gradient at the token that a label asks for, as a share of the largest at any token; 0 in a causal model."""


def sees_its_labels(probe: Probe, width: int) -> bool:
    """Whether the token that a label asks for has a say in the logits that the label is compared with.

    So it is in masked language models, and in bidirectional ones with a causal loss; found by the gradients of the
    model's own loss. False where a model makes no loss of labels, or has no gradients.

    Args:
        probe: of a model that is not patched.
        width: how many logits a token has.
    """
    return bool(share_of_the_label(probe, width) > SEEN)


def share_of_the_label(probe: Probe, width: int) -> float:
    """Gradient of the loss of one label at the token that it asks for, as a share of the largest at any token."""
    tokens, others = probe.documents[0], probe.others[0]
    place = next((place for place in range(1, len(tokens)) if tokens.count(tokens[place]) == 1), None)
    if place is None or not probe.signature.takes("labels"):
        return 0.0
    with suppress(Exception), probe.quiet(), embedded(probe.model) as embeddings:
        # two labels at one place: what routers add to the loss cancels out
        labels = tokens[place] % width, others[place] % width
        losses = [loss_of_one_label(probe, tokens, place, label) for label in labels]
        found = torch.autograd.grad(losses[0] - losses[1], [leaf for _, leaf in embeddings], allow_unused=True)
        gradients = torch.zeros(max(tokens) + 1, embeddings[0][1].shape[-1], device=probe.device)
        for (seen, _), gradient in zip(embeddings, found, strict=True):
            if gradient is not None:
                gradients.index_add_(0, seen.flatten(), gradient.flatten(0, -2).float())
        of_token = gradients.abs().amax(1)
        return float(of_token[tokens[place]] / of_token.max())
    return 0.0


def loss_of_one_label(probe: Probe, tokens: list[int], place: int, label: int) -> Tensor:
    labels = torch.full((1, len(tokens)), IGNORED_LABEL, device=probe.device)
    labels[0, place] = label
    given = {"input_ids": torch.tensor([tokens], device=probe.device), "labels": labels, "use_cache": False}
    with as_it_was(*probe.model.modules()), probe.weights_kept():
        loss: Tensor = probe.model(**{name: value for name, value in given.items() if probe.signature.takes(name)}).loss
    return loss
