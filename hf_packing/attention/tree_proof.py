"""Prove that a patched model computes a shared prefix once, as if every document of a tree were alone."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_packing.attention.cases import DocumentTokens, RowCase, examine_in_training
from hf_packing.attention.forward import Patch
from hf_packing.attention.model import has_local_weights
from hf_packing.attention.proof import Proof, require
from hf_packing.attention.route import PATCH, route_of
from hf_packing.attention.runs import Runner
from hf_packing.attention.tolerance import apart
from hf_packing.columns import PARENTS, SEGMENT_LENGTHS
from hf_packing.errors import ModelNotSupportedError
from hf_packing.trees.segments import TreeSegments

TREES = TreeSegments((13, 7, 11, 5, 9, 6, 1, 8, 12, 9, 4, 10), (-1, 0, 1, 1, 0, 0, 5, 5, -1, 8, 8, -1))
_ENDS = (1, 2, 3, 4, 6, 7, 9, 10, 11)
"""The trees of the proof, with 95 tokens: three levels, a document that ends inside others, a segment of a single
token, branches that are not the first of their parent, and a document alone."""


class TreeCase(RowCase):
    """Random documents that share prefixes in a row of trees."""

    where = "a tree"
    leaks = "changing one segment of a tree changed the logits of tokens that are not below it"


def _row_of_trees(segments: DocumentTokens) -> dict[str, Any]:
    tokens = torch.tensor([[token for each in segments for token in each]])
    return {"input_ids": tokens, SEGMENT_LENGTHS: torch.tensor(TREES.lengths), PARENTS: torch.tensor(TREES.parents)}


@torch.inference_mode(False)  # gradients are compared
def prove_trees(model: PreTrainedModel) -> tuple[dict[str, Proof], str]:
    """Prove that a patched model runs rows of trees, and note this in its route.

    Args:
        model: a patched model.

    Returns:
        The proofs by mode, and the reason why training mode is not fully proven, or an empty string.

    Raises:
        ModelNotSupportedError: a document has other outputs or gradients in a tree than alone, or a segment depends on
            tokens that are not above it; the message has the reason. Or the weights are not in memory.
    """
    if not has_local_weights(model):
        raise ModelNotSupportedError(
            f"{type(model).__name__}: trees were not proven while the weights were in memory; call "
            "patch_model(model, trees=True) before the model is sharded"
        )
    evaluation = TreeCase(Runner(model), lengths=TREES, make_batch=_row_of_trees, ends=_ENDS)
    evaluation.examine()
    _refuse_unstable_prefixes(evaluation)
    training = evaluation.in_training()
    training.replacements = []
    examine_in_training(training, evaluation)
    patch: Patch = getattr(model, PATCH)
    patch.facts.takes_trees = True
    try:
        proofs = {"evaluation": require(evaluation)}
        if training.known:
            proofs["training"] = require(training)
        return proofs, training.unproven
    except BaseException as error:
        patch.facts.takes_trees = False
        if isinstance(error, ModelNotSupportedError) or not isinstance(error, Exception):
            raise
        raise ModelNotSupportedError(f"the model cannot be called on a row of trees: {error}") from error


def _refuse_unstable_prefixes(case: TreeCase) -> None:
    """Raise ModelNotSupportedError if the outputs for a prefix depend on what follows it, in the model itself."""
    alone = case.known[0].outputs
    for one, other in pairwise(alone):
        shared = sum(case.trees.lengths[each] for each in case.paths[one] if each in case.paths[other])
        before, after = alone[one][:shared], alone[other][:shared]
        if not replace(case.tolerance(), noise=math.inf).explains(apart(after, before)):
            raise ModelNotSupportedError(
                f"{type(case.model).__name__}: the outputs for a prefix are not stable: without any packing, the "
                f"logits of a prefix differ by {float((after - before).abs().max()):.2g} between two documents that "
                "begin with it, so they depend on what follows; a shared prefix cannot be computed once"
            )


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
        has_rows = unpadding is not None and (unpadding.by_length or unpadding.rows_after)
        if has_rows or not patch.facts.takes_packed_rows:
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
