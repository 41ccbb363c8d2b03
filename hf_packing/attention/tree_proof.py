"""Prove that a patched model computes a shared prefix once, as if every document of a tree were alone.

The proof runs a row of two trees and a document without relatives. Before that, the unpatched model has to show that
its outputs for a prefix do not depend on what follows. Otherwise, a prefix cannot be computed once.
"""

from contextlib import suppress
from itertools import combinations
from math import nan
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_packing.attention.forward import Patch
from hf_packing.attention.inspect_model import Embedded, gradient_by_token, has_local_weights, record_embeddings
from hf_packing.attention.probe import DocumentTokens, Probe
from hf_packing.attention.proof import (
    GRADIENT_LENIENCE,
    Exam,
    Reference,
    closest_reference,
    repeat_thoroughly,
    run_alone,
    run_alone_in_training,
)
from hf_packing.attention.route import PATCH, route_of
from hf_packing.attention.tolerance import LARGEST_GRADIENT_LEAK, comparable, largest_difference, spread
from hf_packing.columns import PARENTS, SEGMENT_LENGTHS
from hf_packing.errors import ModelNotSupportedError
from hf_packing.trees.segments import TreeSegments

_LENGTHS = (13, 7, 11, 5, 9, 6, 1, 8, 12, 9, 4, 10)
_PARENTS = (-1, 0, 1, 1, 0, 0, 5, 5, -1, 8, 8, -1)
_ENDS = (1, 2, 3, 4, 6, 7, 9, 10, 11)
"""The trees of the proof: three levels, a document that ends inside others, a segment of a single token, branches that
are not the first of their parent, and a document alone. The sum of the lengths is 95."""

TREES = TreeSegments(_LENGTHS, _PARENTS)


class TreeProof(NamedTuple):
    """Measurements of the proof of trees."""

    max_leak: float
    """The largest change of a logit that is not below a replaced segment."""
    max_gradient_leak: float
    """The largest gradient of a document's logits with respect to other segments than its own, as a share of the
    largest one with respect to its own; nan if gradients cannot be computed."""
    unproven: str
    """The reason why training mode is not fully proven, or an empty string."""


@torch.inference_mode(False)  # gradients are compared
def prove_trees(model: PreTrainedModel) -> TreeProof:
    """Prove that a patched model runs rows of trees, and note this in its route.

    Args:
        model: a patched model.

    Returns:
        The largest leaks that the proof has measured.

    Raises:
        ModelNotSupportedError: a document has other outputs or gradients in a tree than alone, or a segment depends on
            tokens that are not above it; the message has the reason. Or the weights are not in memory.
    """
    if not has_local_weights(model):
        raise ModelNotSupportedError(
            f"{type(model).__name__}: trees were not proven while the weights were in memory; call "
            "patch_model(model, trees=True) before the model is sharded"
        )
    patch: Patch = getattr(model, PATCH)
    with torch.inference_mode(False):
        try:
            evaluation, training = _run_alone(model, patch)
            patch.facts.takes_trees = True
            leak, _ = _pass(evaluation, patch)
            _, gradient_leak = _pass(training if training.can_be_run else evaluation, patch)
            return TreeProof(leak, gradient_leak, training.unproven)
        except BaseException as error:
            patch.facts.takes_trees = False
            if isinstance(error, ModelNotSupportedError) or not isinstance(error, Exception):
                raise
            raise ModelNotSupportedError(f"the model cannot be called on a row of trees: {error}") from error


def share_prefixes(model: PreTrainedModel, fewest: int | None) -> None:
    """Let a patched model compute the prefixes that rows of a padded batch share only once.

    Args:
        model: a patched model that returns outputs for each token.
        fewest: the fewest tokens to share; None to compute every row.

    Raises:
        ModelNotSupportedError: it cannot be proven that the model runs trees, or its backbone takes no packed rows.
    """
    patch: Patch = getattr(model, PATCH)
    if fewest is not None:
        unpadding = patch.facts.unpadding
        if not patch.facts.takes_packed_rows or (unpadding is not None and (unpadding.by_length or unpadding.readers)):
            raise ModelNotSupportedError(
                f"{type(model).__name__}: rows of a padded batch can share prefixes only if the model returns outputs "
                "for each token, and nothing for whole rows"
            )
        if not patch.facts.takes_trees:
            prove_trees(model)
    patch.facts.fewest_shared = fewest


def shares_prefixes(model: PreTrainedModel) -> bool:
    """Return whether a patched model computes the prefixes that rows of a padded batch share only once."""
    route = route_of(model)
    return route is not None and route.facts.fewest_shared is not None


class TreeProbe(Probe):
    """A probe that runs a model on the random documents of `TREES`, in a single row, or each document alone."""

    def __init__(
        self, model: PreTrainedModel, training: bool = False, like: "TreeProbe | None" = None, seed: int = 0
    ) -> None:
        super().__init__(model, seed, TREES.lengths, training=training, like=like)
        self.segments, self.other_segments = self.documents, self.others
        self.documents = [[token for each in TREES.segments_of(end) for token in self.segments[each]] for end in _ENDS]
        self.lengths = list(map(len, self.documents))

    def in_trees(self, segments: DocumentTokens | None = None) -> Tensor:
        """Run the segments as a row of trees, and return the logits of all tokens, [tokens, vocabulary]."""
        tokens = [token for each in segments or self.segments for token in each]
        trees = {SEGMENT_LENGTHS: torch.tensor(TREES.lengths), PARENTS: torch.tensor(TREES.parents)}
        return self.logits(input_ids=torch.tensor([tokens]), **trees)

    def in_trees_with_gradients(self) -> tuple[Tensor, list[Tensor], float]:
        """Run the segments as a row of trees, with gradients.

        Returns:
            The logits of all tokens, [tokens, vocabulary]; the gradients of each document's logits with respect to the
            embeddings of its own tokens; and the largest gradient with respect to other tokens, as a share of the
            largest one with respect to the document's own tokens.
        """
        with record_embeddings(self.model) as embedded:
            logits = self.in_trees()
            found, leak = [], 0.0
            for number, end in enumerate(_ENDS):
                own, others = self._own_and_other(logits[TREES.path_of(end)], number, embedded, keep=True)
                found.append(own)
                largest = float(others.abs().max())
                leak = max(leak, largest / float(own.abs().max()) if largest else 0.0)
        return logits.detach(), found, leak

    def _gradients(self, logits: Tensor, number: int, embedded: Embedded, keep: bool = False) -> list[Tensor]:
        own, _ = self._own_and_other(logits, number, embedded, keep)
        return [own] * len(self.documents)  # `alone_with_gradients` reads the one of the document itself

    def _own_and_other(self, logits: Tensor, number: int, embedded: Embedded, keep: bool) -> tuple[Tensor, Tensor]:
        """Return the gradients of a randomly weighted sum of a document's logits with respect to the embeddings of the
        tokens that only its own segments have, and of those that only other segments have."""
        weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(number)).to(logits)
        score = torch.where(comparable(logits), logits, 0).mul(weights).sum()
        by_token = gradient_by_token(score, embedded, max(map(max, self.segments)), keep)
        above = TREES.segments_of(_ENDS[number])
        own = {token for each in above for token in self.segments[each]}
        others = {token for each, tokens in enumerate(self.segments) if each not in above for token in tokens}
        return by_token[sorted(own - others)], by_token[sorted(others - own)]


def _run_alone(model: PreTrainedModel, patch: Patch) -> tuple[Exam, Exam]:
    """Run every document alone on the model without its patch, in evaluation and in training mode."""
    with patch.suspended():
        probe = TreeProbe(model)
        evaluation = run_alone(probe, gradients=False)
        _refuse_unstable_prefixes(evaluation)
        training = run_alone_in_training(TreeProbe(model, training=True, like=probe))
        if training.unproven:
            evaluation = run_alone(probe, gradients=True)
    return evaluation, training


def _refuse_unstable_prefixes(exam: Exam) -> None:
    """Raise ModelNotSupportedError if the outputs for a prefix depend on what follows it, in the model itself."""
    tolerance, logits = exam.probe.tolerance, exam.references[0].logits
    for one, other in combinations(range(len(_ENDS)), 2):
        paths = TREES.segments_of(_ENDS[one]), TREES.segments_of(_ENDS[other])
        shared = sum(TREES.lengths[each] for each in set(paths[0]) & set(paths[1]))
        if shared and (difference := tolerance.widest.unexplained([logits[one][:shared]], [logits[other][:shared]])):
            raise ModelNotSupportedError(
                f"{type(exam.probe.model).__name__}: the outputs for a prefix are not stable: without any packing, the "
                f"logits of a prefix differ by {difference:.2g} between two documents that begin with it, so they "
                "depend on what follows; a shared prefix cannot be computed once"
            )


def _pass(exam: Exam, patch: Patch) -> tuple[float, float]:
    """Prove one exam on the patched model; if that fails, run the documents alone thoroughly, and prove again. Return
    the largest leaks of logits and of gradients."""
    try:
        with exam.probe.undisturbed():
            return _prove(exam)
    except Exception:
        if exam.is_thorough:
            raise
    with patch.suspended():
        exam = repeat_thoroughly(exam)
    with exam.probe.undisturbed():
        return _prove(exam)


def _prove(exam: Exam) -> tuple[float, float]:
    probe = exam.probe
    assert isinstance(probe, TreeProbe)
    logits = probe.in_trees()
    reference = _prove_equal(exam, logits)
    leak = nan if probe.training else _prove_only_descendants_notice(probe, logits)
    return leak, _prove_gradients(probe, reference) if exam.has_gradients else nan


def _prove_equal(exam: Exam, logits: Tensor) -> Reference | None:
    """Check that every document has the logits of one of the references, and return this reference."""
    if not exam.references:
        return None
    documents = [logits[TREES.path_of(end)] for end in _ENDS]
    return closest_reference(exam, documents, "a tree")


def _prove_only_descendants_notice(probe: TreeProbe, logits: Tensor) -> float:
    """Replace one segment at a time. Its own tokens have to change, those below it may, and no other token may. Return
    the largest change of another token."""
    scale, descendants_notice, largest = spread(logits), False, 0.0
    for segment in range(len(TREES.lengths)):
        begin, end = int(TREES.begins[segment]), int(TREES.begins[segment + 1])
        below = int(TREES.begins[TREES.ends_below[segment]])
        changed = [*probe.segments[:segment], probe.other_segments[segment], *probe.segments[segment + 1 :]]
        after = probe.in_trees(changed)
        elsewhere = [each for each in (slice(0, begin), slice(below, None)) if len(logits[each])]
        leak = max(largest_difference(logits[each], after[each]) for each in elsewhere)
        largest = max(largest, leak)
        if not leak <= probe.tolerance.leak * scale:
            raise ModelNotSupportedError(
                f"changing one segment of a tree changes the logits of tokens that are not below it by {leak:.2g}"
            )
        if not largest_difference(logits[begin:end], after[begin:end]) > 0:
            raise ModelNotSupportedError("trees cannot be tested, since the logits do not depend on the tokens")
        descendants_notice |= end < below and largest_difference(logits[end:below], after[end:below]) > 0
    if not descendants_notice:
        raise ModelNotSupportedError("trees cannot be tested, since changing a segment changes nothing below it")
    return largest


def _prove_gradients(probe: TreeProbe, reference: Reference | None) -> float:
    leak = nan
    with suppress(RuntimeError, AssertionError):  # the model supports only inference
        _, gradients, leak = probe.in_trees_with_gradients()
        if leak > LARGEST_GRADIENT_LEAK:
            raise ModelNotSupportedError(
                "gradients of a document in a tree reach segments that it does not have; the largest one is "
                f"{leak:.2g} times the largest gradient at its own tokens"
            )
        expected = None if reference is None else reference.gradients
        if expected and (difference := probe.tolerance.unexplained(gradients, expected, GRADIENT_LENIENCE)):
            raise ModelNotSupportedError(
                f"a document's gradients differ by {difference:.2g} between a tree and the document alone"
            )
    return leak
