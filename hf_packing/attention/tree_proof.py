"""Prove that a patched model computes a shared prefix once, as if every document of a tree were alone."""

import math
from dataclasses import replace
from itertools import combinations

import torch
from transformers import PreTrainedModel

from hf_packing.attention.cases import TreeCase, examine_in_training
from hf_packing.attention.forward import Patch
from hf_packing.attention.inspect_model import has_local_weights
from hf_packing.attention.proof import Proof, require
from hf_packing.attention.route import PATCH, route_of
from hf_packing.attention.runs import Runner
from hf_packing.attention.tolerance import Noise, apart, differences
from hf_packing.errors import ModelNotSupportedError


@torch.inference_mode(False)  # gradients are compared
def prove_trees(model: PreTrainedModel) -> Proof:
    """Prove that a patched model runs rows of trees, and note this in its route.

    Args:
        model: a patched model.

    Returns:
        What the proof has measured.

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
            evaluation = TreeCase(Runner(model))
            evaluation.examine()
            _refuse_unstable_prefixes(evaluation)
            training = evaluation.in_training()
            training.replacements = []
            examine_in_training(training, evaluation)
            patch.facts.takes_trees = True
            found = require(evaluation)
            if training.can_be_run:
                found.packed.reach = require(training).max_gradient_leak
            return replace(found, unproven=training.unproven)
        except BaseException as error:
            patch.facts.takes_trees = False
            if isinstance(error, ModelNotSupportedError) or not isinstance(error, Exception):
                raise
            raise ModelNotSupportedError(f"the model cannot be called on a row of trees: {error}") from error


def _refuse_unstable_prefixes(case: TreeCase) -> None:
    """Raise ModelNotSupportedError if the outputs for a prefix depend on what follows it, in the model itself."""
    alone, widest = case.known[0].outputs, case.tolerance(Noise(math.inf))
    for one, other in combinations(range(len(case.paths)), 2):
        both = set(case.paths[one]) & set(case.paths[other])
        shared = sum(case.trees.lengths[each] for each in both)
        prefixes = alone[one][:shared], alone[other][:shared]
        if shared and not widest.explains(apart(*prefixes)):
            raise ModelNotSupportedError(
                f"{type(case.model).__name__}: the outputs for a prefix are not stable: without any packing, the "
                f"logits of a prefix differ by {float(differences(*prefixes).max()):.2g} between two documents that "
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
