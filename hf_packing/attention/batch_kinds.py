"""Prove that a patched model takes other batches than packed rows: padded batches, and rows of trees.

Every row of a padded batch, with padding on the right, on the left and on both sides, has to have the outputs and
gradients that it has alone, in the whole model with its head. For that, a way is searched in which the backbone runs
without padding. In a row of trees, a shared prefix is computed once, as if every document were alone.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise, product
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_packing.attention.by_segment import find_last_of_tokens
from hf_packing.attention.cases import DocumentTokens, RowCase, examine_in_training
from hf_packing.attention.forward import Patch, backbones_of, install_unpadding
from hf_packing.attention.layout import CACHES
from hf_packing.attention.model import (
    Arguments,
    Inputs,
    embedding_of,
    has_local_weights,
    pad_token_of,
)
from hf_packing.attention.padded import SIDES, Side, Unpadding
from hf_packing.attention.proof import Proof, require
from hf_packing.attention.route import PATCH
from hf_packing.attention.runs import NotCallableError, Runner
from hf_packing.attention.tolerance import apart
from hf_packing.columns import PARENTS, SEGMENT_LENGTHS
from hf_packing.errors import ModelNotSupportedError
from hf_packing.trees.segments import TreeSegments

_NOT_COMPARED = ("loss", "hidden_states", "attentions", "aux_loss", "router_logits", *CACHES)
"""Names of outputs of padded rows that are not compared."""


class PaddedCase(RowCase):
    """Random documents as the rows of a padded batch of a model with any head. All outputs of a row are compared, as
    one vector: those of its tokens, and those of the row as a whole.

    Args:
        runner: runs the model.
        seed: seed of the random tokens.
        with_end: the documents that end in the model's end token, which some heads look for.
        has_choices: whether the model gets rows with a single choice each, as models for multiple choice need.
    """

    where = "padded batch"
    only_of_batch = ()
    may_be_filled = False

    def __init__(self, runner: Runner, seed: int, with_end: Sequence[int], has_choices: bool) -> None:
        super().__init__(runner, seed=seed)
        self.has_choices = has_choices
        end: Any = getattr(runner.model.config.get_text_config(), "eos_token_id", None)
        if end in range(len(embedding_of(runner.model).weight)) and end != pad_token_of(runner.model):
            last = torch.from_numpy(self.trees.begins[1:] - 1)[list(with_end)]
            self.tokens[last] = self.others[last] = end
        self.pad_on("right")

    def pad_on(self, side: Side) -> None:
        """Make a batch with padding on a side. Documents are replaced only where it is on the right, at first."""
        self.make_batch = partial(_padded, pad_token=pad_token_of(self.model) or 0, side=side)
        self.lay_out()
        self.replacements = [[each] for each in range(len(self.paths))] if side == "right" else []

    def ask(self, inputs: Inputs, places: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        # some models pass their own use_cache
        given = {
            name: each for name, each in inputs.items() if name != "use_cache" or name in self.runner.signature.names
        }
        if self.has_choices:
            given |= {name: each[:, None] for name, each in given.items() if isinstance(each, Tensor)}
        parts = []
        for name, value in self.runner(given).items():
            if name not in _NOT_COMPARED and isinstance(value, Tensor) and value.is_floating_point():
                value = value.to(torch.promote_types(value.dtype, torch.float32))
                is_of_tokens = value.shape[:2] == inputs["input_ids"].shape
                parts.append(torch.split(value.flatten(0, 1)[places], [*lengths]) if is_of_tokens else value)
        return [torch.cat([each.flatten() for each in row])[:, None] for row in zip(*parts, strict=True)]


def _padded(documents: DocumentTokens, pad_token: int, side: Side) -> dict[str, Tensor]:
    """Return a padded batch with one document in each row."""
    rows = []
    for tokens in documents:
        missing = max(map(len, documents)) - len(tokens)
        before = {"right": 0, "left": missing, "both": missing // 2}[side]
        rows.append([-1] * before + tokens + [-1] * (missing - before))
    ids = torch.tensor(rows)
    return {"input_ids": ids.where(ids >= 0, pad_token), "attention_mask": (ids >= 0).long()}


def examined_padded_rows(runner: Runner, seed: int = 0) -> PaddedCase:
    """Return a case of documents that the model takes: two of them end in an end token, or all, as BART needs for
    classification, or none. Every document has run alone.

    Raises:
        ModelNotSupportedError: the model takes no rows of tokens.
    """
    failures = []
    for has_choices, with_end in product((False, True), ((0, 2), (0, 1, 2), ())):
        case = PaddedCase(runner, seed, with_end, has_choices)
        try:
            case.examine()
            return case
        except NotCallableError as error:
            failures.append(error)
    raise ModelNotSupportedError(str(failures[0])) from failures[0]


def _check_weights(model: PreTrainedModel, kind: str, advice: str) -> None:
    """Raise ModelNotSupportedError if a proof would need weights that are not in memory."""
    if not has_local_weights(model):
        raise ModelNotSupportedError(
            f"{type(model).__name__}: {kind} were not proven while the weights were in memory; call {advice} before "
            "the model is sharded"
        )


@torch.inference_mode(False)  # gradients are compared
def prove_unpadding(model: PreTrainedModel, by_length: bool = False) -> None:
    """Find a way in which a patched model runs padded batches, prove it, and install it.

    Args:
        model: a patched model.
        by_length: whether the backbone takes no packed rows, and runs on the rows of equal length together.

    Raises:
        ModelNotSupportedError: no way is found in which every row of a padded batch has the outputs and gradients that
            it has alone; the message contains the reason. Or the weights are not in memory.
    """
    _check_weights(model, "padded batches", "patch_model, and the model on a padded batch,")
    evaluation = examined_padded_rows(Runner(model))
    training = evaluation.in_training()
    examine_in_training(training, evaluation)
    failures = []
    try:
        for unpadding in _candidates(model, by_length, evaluation):
            install_unpadding(model, unpadding)
            try:
                for side, case in product(SIDES, (evaluation, training)):
                    case.pad_on(side)
                    require(case)
                return
            except ModelNotSupportedError as error:
                failures.append(error)
        raise ModelNotSupportedError(f"{type(model).__name__}: padded batches are not supported: {failures[0]}")
    except BaseException:
        install_unpadding(model, None)
        raise


def _candidates(model: PreTrainedModel, by_length: bool, case: PaddedCase) -> Iterator[Unpadding]:
    """Yield ways in which a model may run padded batches, the fastest first: its backbones, the innermost first, on a
    packed row or, with `by_length` only, on the rows of equal length together."""
    backbones = [each for each in backbones_of(model) if isinstance(each, PreTrainedModel)]
    names = dict.fromkeys(name for module in backbones for name, each in model.named_modules() if each is module)
    for together in (True,) if by_length else (False, True):
        for name in names:
            unpadding = Unpadding(name, by_length=together)
            if not together:
                unpadding = _with_poolers(model, unpadding, case)
            for side in (None, "right", "left"):
                yield replace(unpadding, to=side)


def _with_poolers(model: PreTrainedModel, unpadding: Unpadding, case: PaddedCase) -> Unpadding:
    """Return a way in which the poolers of the backbone, if it has any, get every document in a row of its own."""
    install_unpadding(model, unpadding)
    module = model.get_submodule(unpadding.backbone)
    forward: Any = module.forward
    row = replace(case.row, is_unpadded=True)
    with suppress(Exception), case.undisturbed():  # the backbone may take no packed rows by itself
        run = partial(forward.run_packed, {"input_ids": case.tokens[None]}, row)
        return replace(unpadding, rows_after=find_last_of_tokens(model, module, run, row))
    return unpadding


TREES = TreeSegments((13, 7, 11, 5, 9, 6, 1, 8, 12, 9, 4, 10), (-1, 0, 1, 1, 0, 0, 5, 5, -1, 8, 8, -1))
_ENDS = (1, 2, 3, 4, 6, 7, 9, 10, 11)
"""The trees of the proof, with 95 tokens: three levels, a document that ends inside others, a segment of a single
token, branches that are not the first of their parent, and a document alone."""


class TreeCase(RowCase):
    """Random documents that share prefixes in a row of trees."""

    where = "row of trees"
    leaks = "changing one segment of a tree changed the logits of tokens that are not below it"
    may_be_filled = False


def _row_of_trees(segments: DocumentTokens) -> Arguments:
    columns = {"input_ids": [[*chain(*segments)]], SEGMENT_LENGTHS: TREES.lengths, PARENTS: TREES.parents}
    return {name: torch.tensor(values) for name, values in columns.items()}


@torch.inference_mode(False)  # gradients are compared
def prove_trees(model: PreTrainedModel) -> tuple[list[Proof], str]:
    """Prove that a patched model runs rows of trees, and note this in its route.

    Args:
        model: a patched model.

    Returns:
        The proofs, in evaluation mode and in training mode, and the reason why the latter is not fully proven, or an
        empty string.

    Raises:
        ModelNotSupportedError: a document has other outputs or gradients in a tree than alone, or a segment depends on
            tokens that are not above it; the message has the reason. Or the weights are not in memory.
    """
    _check_weights(model, "trees", "patch_model(model, trees=True)")
    evaluation = TreeCase(Runner(model), lengths=TREES, make_batch=_row_of_trees, ends=_ENDS)
    evaluation.examine()
    _refuse_unstable_prefixes(evaluation)
    training = evaluation.in_training()
    training.replacements = []
    examine_in_training(training, evaluation)
    patch: Patch = getattr(model, PATCH)
    patch.facts.takes_trees = True
    try:
        return require(evaluation, training), training.unproven
    except BaseException:
        patch.facts.takes_trees = False
        raise


def _refuse_unstable_prefixes(case: TreeCase) -> None:
    """Raise ModelNotSupportedError if the outputs for a prefix depend on what follows it, in the model itself."""
    alone = case.known[0].runs
    for one, other in pairwise(alone):
        shared = sum(case.trees.lengths[each] for each in case.paths[one] if each in case.paths[other])
        before, after = (alone[each].outputs[0][:shared] for each in (one, other))
        if not case.tolerance()._replace(noise=math.inf).explains(apart(after, before)):
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
