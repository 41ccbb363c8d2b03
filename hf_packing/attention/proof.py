"""Prove that packed documents do not affect each other, and have the same outputs as when they are run alone.

The module also finds out whether a model sees the input token at each label's position.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_packing.attention.inspect_model import gradient_by_token, record_embeddings
from hf_packing.attention.probe import Probe, pack_in_one_row
from hf_packing.attention.snapshot import attention_of, restore_attention
from hf_packing.attention.tolerance import (
    NoLanguageModelError,
    NotCallableError,
    own_gradients,
    through,
    what_is_missing,
)
from hf_packing.columns import IGNORED_LABEL
from hf_packing.errors import ModelNotSupportedError, PackingError

GRADIENT_LENIENCE = 10
"""Factor from the tolerance for logits to the tolerance for gradients. Rounding also affects the backward pass."""

_REFERENCE = "eager"
"""The attention function with which documents are run alone, in addition to the model's own attention function. Eager
attention is plain PyTorch code in the model's file. Other attention functions have had bugs: in transformers 5.17,
"sdpa" ignores Gemma 2's soft cap."""

STOCK_ATTENTIONS = ("eager", "sdpa", "flex_attention")

RANDOM = "the model draws random numbers in training mode even with dropout switched off"
VARYING = "the model's logits for the same tokens vary from run to run in training mode even with the same random seed"


class BeyondRoundingError(ModelNotSupportedError):
    """Raised if outputs of packed documents differ by more than rounding can ever explain."""


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
    """The outputs of the unpatched model, one `Reference` for each attention function; empty if they vary."""
    unproven: str = ""
    """The reason why isolation cannot be fully proven in training mode, or an empty string."""
    can_be_run: bool = True
    """True if the model runs in the probe's mode, and returns the same logits for the same tokens."""
    rows: int = 1
    """The number of packed rows in a batch."""
    only_equality: bool = False
    """True if packed documents are only compared with documents alone, and no document is replaced."""
    is_thorough: bool = False
    """True if the documents were run with all attention functions, and the limits are no stricter than necessary."""

    @property
    def has_gradients(self) -> bool:
        return not self.references or any(reference.gradients is not None for reference in self.references)


def run_alone(probe: Probe, gradients: bool, thorough: bool = False) -> Exam:
    """Run each document alone on an unpatched model, and return an `Exam` with the documents' outputs.

    Args:
        probe: a probe of the model.
        gradients: whether to compute gradients, too.
        thorough: if True, the documents are run with the model's own attention function and, if this function is not
            custom and can be changed, also with eager attention. If False, one of these functions is enough, and the
            effect of rounding is measured on one document only.

    Raises:
        ModelNotSupportedError: the model cannot be called with input_ids alone.
    """
    model = probe.model
    own, before = model.config._attn_implementation, attention_of(model)
    can_be_set = model._can_set_attn_implementation() and (own in STOCK_ATTENTIONS or "flash" in own)
    found: list[Reference | Exception] = []
    for attention in dict.fromkeys([_REFERENCE, own] if can_be_set else [own]):
        if thorough or not any(isinstance(each, Reference) for each in found):
            found.append(_run_alone_with(attention, probe, gradients, thorough))
    restore_attention(before)
    if references := [each for each in found if isinstance(each, Reference)]:
        return Exam(probe, references, is_thorough=thorough)
    name, error = type(model).__name__, found[-1]
    if isinstance(error, NoLanguageModelError):
        raise error
    missing = what_is_missing(model)
    raise NotCallableError(f"{name}: the model cannot be called with input_ids alone: {error}{missing}")


def _run_alone_with(attention: str, probe: Probe, gradients: bool, thorough: bool) -> Reference | Exception:
    try:
        if attention != probe.model.config._attn_implementation:
            probe.model.set_attn_implementation(attention)
        with probe.undisturbed():
            found = _outputs_alone(probe, gradients, thorough)
            if probe.rounding is None:
                probe.measure_rounding(found.logits, only_longest=not thorough, use_cache=False)
            return found
    except Exception as error:  # custom model code may raise anything
        return error


def _outputs_alone(probe: Probe, gradients: bool, thorough: bool) -> Reference:
    """Run each document alone. If the model cannot compute gradients, the result has none. In a thorough exam, logits
    are computed in forwards without gradients, since a model may then run other code."""
    logits = probe.alone(use_cache=False) if thorough or not gradients else None
    with suppress(RuntimeError, AssertionError):
        if gradients:
            found = probe.alone_with_gradients(use_cache=False)
            return Reference(logits or found[0], found[1])
    return Reference(logits or probe.alone(use_cache=False), None)


def run_alone_in_training(probe: Probe, thorough: bool = False) -> Exam:
    """Run each document alone on an unpatched model in training mode, and return an `Exam` with the documents' outputs.

    If some outputs cannot be compared, the field `unproven` of the `Exam` contains the reason. If not `thorough`, the
    documents are run with the model's own attention function only.
    """
    probe.intercepts_dropout = True
    found: list[Reference] = []

    def run() -> list[Tensor]:
        found.append(_outputs_alone(probe, not thorough, thorough))
        return found[-1].logits

    try:
        with probe.undisturbed():
            is_random = probe.is_random(run)
    except Exception as error:  # custom model code may raise anything
        reason = f"the model cannot be called in training mode with input_ids alone: {error}"
        return Exam(probe, [], reason, can_be_run=False)
    probe.intercepts_dropout |= thorough
    if is_random is None:
        return Exam(probe, [], VARYING, can_be_run=False)
    if is_random:
        return Exam(probe, [], RANDOM, is_thorough=True)
    exam = run_alone(probe, True, thorough) if thorough else Exam(probe, found[:1])
    if any(reference.gradients is None for reference in exam.references):
        unproven = "the model's gradients cannot be computed in training mode, so only logits were compared"
        return replace(exam, unproven=unproven)
    return exam


def own_attention_agrees(exam: Exam) -> bool:
    """Return whether the model's own attention function gives an unpatched model the logits of the exam.

    In training mode, the exam used this function itself, so the result is False.
    """
    with suppress(Exception), exam.probe.undisturbed():
        own = exam.probe.alone(use_cache=False)
        agrees = any(not exam.probe.tolerance.unexplained(own, each.logits) for each in exam.references)
        return agrees and not exam.probe.training
    return False


def repeat_thoroughly(exam: Exam) -> Exam:
    """Run the documents of an exam alone once more, on an unpatched model, and return a thorough exam."""
    exam.probe.rounding = None
    if exam.probe.training:
        return run_alone_in_training(exam.probe, thorough=True)
    return replace(run_alone(exam.probe, exam.has_gradients, thorough=True), rows=exam.rows)


def prove_isolation(exam: Exam) -> None:
    """Prove that packed documents do not affect each other, and have the same outputs as when they are run alone.

    Raises:
        ModelNotSupportedError: packed documents affect each other, or have other outputs than when they are run alone;
            or the proof would not notice a leak in this model, if there were one.
    """
    try:
        if exam.can_be_run:
            _prove(exam)
    except ModelNotSupportedError as error:
        raise type(error)(f"{exam.probe.mode}{error}") from error


def _prove(exam: Exam) -> None:
    probe = exam.probe
    one_forward = probe.training and exam.has_gradients  # since all forwards in training have gradients
    packed, gradients = probe.packed_with_gradients() if one_forward else (probe.packed(probe.documents), None)
    if not exam.only_equality:
        _prove_no_leak(exam, packed)
    expected = closest_reference(exam, packed, "the packed row").gradients if exam.references else None
    if exam.references and expected is None:
        return
    own = own_gradients(gradients or probe.packed_with_gradients()[1])
    relative = replace(probe.tolerance, unit=None)  # the unit of a probe is that of its outputs
    if expected is not None and (difference := relative.unexplained(own, expected, GRADIENT_LENIENCE)):
        raise ModelNotSupportedError(
            f"a document's gradients differ by {difference:.2g} between the packed row and the document alone"
        )


def _prove_no_leak(exam: Exam, packed: list[Tensor]) -> None:
    probe = exam.probe
    if probe.training and _is_isolated_in_series(probe, packed):
        return
    leak, inside, scale = probe.largest_leak(packed)
    if not leak <= probe.tolerance.leak * scale:
        kind = ModelNotSupportedError if leak <= probe.tolerance.widest.leak * scale else BeyondRoundingError
        raise kind(f"changing one packed document changes the logits of another document by {leak:.2g}")
    if probe.training and (buffers := probe.memory(packed)) is not None:
        raise ModelNotSupportedError(f"a document's logits depend on earlier batches{through(buffers)}")
    if not probe.training and inside <= probe.tolerance.leak * scale:
        raise ModelNotSupportedError(
            "isolation cannot be tested, since changing the first tokens of a document does not change the logits of "
            "the following tokens"
        )


def _is_isolated_in_series(probe: Probe, packed: list[Tensor]) -> bool:
    """Return whether neither a packed document nor an earlier batch affects the logits of the other documents."""
    with suppress(PackingError), probe.in_series():
        leak, _, scale = probe.largest_leak(packed)
        return leak <= probe.tolerance.leak * scale
    return False


def closest_reference(exam: Exam, packed: list[Tensor], where: str) -> Reference:
    """Check that documents, packed in `where`, have the logits of one of the exam's references, and return it."""
    tolerance, references = exam.probe.tolerance, exam.references
    differences = [tolerance.unexplained(packed, reference.logits) for reference in references]
    if difference := min(differences):
        beyond = tolerance.is_measured and all(tolerance.widest.unexplained(packed, each.logits) for each in references)
        raise (BeyondRoundingError if beyond else ModelNotSupportedError)(
            f"a document's logits differ by {difference:.2g} between {where} and the document alone{tolerance.note()}"
        )
    return references[differences.index(0)]


_REACHES = 1e-4
"""Largest allowed gradient of one document's loss with respect to another document, as a share of the largest gradient
with respect to the document itself. Usually, it is 0."""

_SEES = 1e-4
"""A model sees the input token at a label's position if the gradient of the label's loss with respect to this token
exceeds this share of the largest gradient with respect to any token. In a causal model, the share is 0."""


def refuse_loss_across_borders(probe: Probe, in_training: Probe, width: int) -> None:
    """Raise an error if a model's own loss compares labels of one packed document with outputs of another document.

    A head that predicts the token after the next token has such a loss, since the collator masks only the first label
    of a document, and not the second label.

    Args:
        probe: a probe of a patched model, with three documents, one of which gets labels.
        in_training: a probe of the same model in training mode.
        width: number of logits for each token.

    Raises:
        ModelNotSupportedError: the loss on one document's labels has a gradient with respect to another document.
    """
    if not probe.signature.takes("labels"):
        return
    (first, middle, last), (other, _, another) = probe.documents, probe.others
    own_loss: float | None = None
    for each in (probe, in_training):

        def loss(labels: list[int], before: list[int] = first, after: list[int] = last, each: Probe = each) -> Tensor:
            """Return the loss of a packed row in which only the middle document has labels, from its second token."""
            batch = pack_in_one_row([before, middle, after])
            batch["labels"] = torch.full_like(batch["input_ids"], IGNORED_LABEL)
            batch["labels"][0, len(first) + 1 : len(first) + len(middle)] = torch.tensor(labels[1:]) % width
            return each.loss(**batch)

        with suppress(Exception), each.undisturbed(), torch.set_grad_enabled(each.training):
            known, own_loss = own_loss, float(loss(middle).detach())
            if own_loss == known or own_loss == float(loss(middle, before=other, after=another).detach()):
                continue  # the same loss as in evaluation mode, or as with other documents
        share = _gradient_share(each, loss, (middle, probe.others[1]), {*first, *last}, set(middle), _REACHES)
        if share > _REACHES:
            raise ModelNotSupportedError(
                f"{type(probe.model).__name__}: {each.mode}the model's own loss compares labels of a packed document "
                "with outputs of another document: for the loss on one document's labels, the largest gradient at "
                f"another document's tokens is {share:.2g} times the largest gradient at the document's own tokens. A "
                "head that predicts the token after the next token, for example, has such a loss. Pass no labels, and "
                "compute the loss of each document yourself"
            )


def model_sees_labels(probe: Probe, width: int) -> bool:
    """Return whether the input token at a label's position affects the logits that the label is compared with.

    This is so in masked language models, and in bidirectional models with a causal loss. The result is computed from
    the gradients of the model's own loss. If the model computes no loss or no gradients, the result is False.

    Args:
        probe: a probe of a model that is not patched.
        width: number of logits for each token.
    """
    tokens = probe.documents[0]
    place = next((place for place in range(1, len(tokens)) if tokens.count(tokens[place]) == 1), None)
    if place is None or not probe.signature.takes("labels"):
        return False

    def loss(labels: list[int]) -> Tensor:
        """Return the loss of the first document alone, if only one of its tokens has a label."""
        given = torch.full((1, len(tokens)), IGNORED_LABEL)
        given[0, place] = labels[place] % width
        inputs = {"input_ids": torch.tensor([tokens]), "labels": given, "use_cache": False}
        return probe.loss(**{name: value for name, value in inputs.items() if probe.signature.takes(name)})

    return _gradient_share(probe, loss, (tokens, probe.others[0]), {tokens[place]}, set(tokens), _SEES) > _SEES


def _gradient_share(
    probe: Probe,
    loss: Callable[[list[int]], Tensor],
    labels: tuple[list[int], list[int]],
    at: set[int],
    among: set[int],
    limit: float,
) -> float:
    """Return the largest gradient of a loss at the tokens `at`, divided by its largest gradient at the tokens `among`;
    0 if the model computes no loss or no gradients.

    The function `loss` takes labels, and returns the model's own loss. If its result for the first of two lists of
    labels exceeds `limit`, auxiliary losses, such as those of routers, may be the reason. The result is then computed
    for the difference to the loss with the other labels, in which auxiliary losses cancel out.
    """
    with suppress(Exception), probe.undisturbed(), record_embeddings(probe.model) as embedded:

        def share(score: Tensor) -> float:
            gradient = gradient_by_token(score, embedded, max(at | among), keep=True).abs()
            return float(gradient[sorted(at)].max() / gradient[sorted(among)].max())

        own, other = labels
        first = loss(own)
        found = share(first)
        return found if found <= limit else share(first - loss(other))
    return 0.0
