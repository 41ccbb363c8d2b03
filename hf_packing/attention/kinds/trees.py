"""Rows of trees, in which documents share their prefixes: a document is a path from a root down to a segment.

Tokens attend to the tokens above them on their path, and modules that are not segment-local run on whole paths. The
rows of a padded batch can share prefixes in the same way. A proof runs before the first such row: a shared prefix is
computed once, as if every document were alone.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_packing.attention.batch_proof import BatchCase
from hf_packing.attention.cases import DocumentTokens, RowCase, examine_in_training
from hf_packing.attention.kinds.kind import Batch, proving, refuse_earlier_tokens, refuse_missing_weights, tokens_of
from hf_packing.attention.kinds.padded import PADDED, PaddedRows, unpadding_of
from hf_packing.attention.layout import Layout, on_device, within
from hf_packing.attention.model import Arguments, Inputs
from hf_packing.attention.proof import require
from hf_packing.attention.route import PATCH, Route
from hf_packing.attention.runs import Runner
from hf_packing.attention.token_axes import Place, TokenAxes
from hf_packing.attention.tolerance import apart
from hf_packing.columns import CU_SEQ_LENS, ENDS, PARENTS, SEGMENT_LENGTHS, SEQ_IDX
from hf_packing.errors import ModelNotSupportedError, PackingError
from hf_packing.planning.lengths import IntArray
from hf_packing.trees.find import BatchTrees, find_in_batch
from hf_packing.trees.segments import Places, TreeSegments

TREES = "trees"
"""What rows of trees are called among the kinds of batches that are proven for a model."""

_takes_labels: ContextVar[bool] = ContextVar("_takes_labels", default=False)
"""Whether models take labels of trees."""


def labels_of_trees() -> AbstractContextManager[None]:
    """Return a context manager: within the block, models take labels of trees, since the caller replaces their
    cross-entropy."""
    return within(_takes_labels, True)


class TreeLayout(Layout):
    """The segments of a row of trees, some of which have parents."""

    sees_others = True
    most_tokens_of_call: ClassVar[float] = 4096
    """Together, paths may have many times the tokens of the row, and large tensors are slow: with all paths in one
    call, Mamba ran at a third of its speed."""

    @cached_property
    def places(self) -> Sequence[Place]:
        """The indices of the tokens of each path, int64 [tokens]."""
        return torch.split(on_device(self._tokens_of_paths, self.cu_seq_lens.device), self.path_lengths)

    @cached_property
    def _tokens_of_paths(self) -> Places:
        """The index of each token of all paths, laid end to end, int64 [tokens of paths]."""
        return np.concatenate([*map(self.trees.path_of, self.trees.leaves)])

    def find_keys(self, places: IntArray, *_: Any) -> IntArray:
        return self._tokens_of_paths[places]

    def gather_keys(
        self, key: Tensor, value: Tensor, where: str, is_causal: bool, *_: Any
    ) -> tuple[Tensor, Tensor, Arguments]:
        if not is_causal:
            raise PackingError(
                f"model: expected causal attention on a row of trees, but {where} attends to later tokens, so a "
                "shared prefix would depend on the documents that continue it"
            )
        return key, value, {}

    @cached_property
    def _first_places(self) -> Tensor:
        """The index of each token among the tokens of all paths, laid end to end, on the first path that has it, int64
        [tokens]."""
        _, first = np.unique(self._tokens_of_paths, return_index=True)
        return on_device(first, self.cu_seq_lens.device)

    def gather_documents(self, given: Any, axes: TokenAxes) -> tuple[Any, Layout, Tensor]:  # noqa: ARG002
        return given, self, self._first_places


@dataclass(frozen=True, eq=False)
class TreeRow(Batch):
    """A row of trees."""

    layout: Layout

    @classmethod
    def read(cls, forward: Any, inputs: Inputs) -> "TreeRow | None":
        if not has_trees(inputs):
            return None
        refuse_earlier_tokens(inputs)
        layout = read_trees(inputs)
        if layout.sees_others and not (proving.get() or TREES in forward.patch.facts.proven):
            raise PackingError(
                f"{PARENTS}: expected packed rows, since it is not proven that {type(forward.model).__name__} runs "
                "rows of trees; call patch_model(model, trees=True) before training"
            )
        return cls(layout)

    @classmethod
    def case(cls, model: nn.Module, batch: Mapping[str, Any], training: bool) -> BatchCase | None:
        if not has_trees(batch):
            return None
        ends = () if batch.get(ENDS) is None else [*dict.fromkeys(batch[ENDS].tolist())]
        return BatchCase(model, batch, training, read_trees, ends)


def has_trees(inputs: Inputs) -> bool:
    """Return whether the arguments of a model's forward are a row of trees."""
    return inputs.get(PARENTS) is not None or inputs.get(SEGMENT_LENGTHS) is not None


def read_trees(inputs: Inputs) -> Layout:
    """Read the segments of a row of trees from a model's inputs, which waits for the device. Without any parents, they
    are those of a packed row.

    Raises:
        PackingError: the segments do not fit the tokens or the positions, or come with other borders or with labels.
    """
    tokens = tokens_of(inputs)
    if inputs.get(SEGMENT_LENGTHS) is None or inputs.get(PARENTS) is None:
        raise PackingError("segment_lengths: expected both segment_lengths and parents beside a row of trees")
    if inputs.get("labels") is not None and not _takes_labels.get():
        raise PackingError(
            "labels: expected None with a row of trees, since no model computes the loss of trees by itself; call "
            "hfp.compute_loss(model, batch)"
        )
    if borders := [name for name in (*CU_SEQ_LENS, SEQ_IDX) if inputs.get(name) is not None]:
        raise PackingError(
            f"{borders[0]}: expected None with a row of trees, whose borders are given by segment_lengths and parents"
        )
    trees = TreeSegments.from_arrays(*(torch.as_tensor(inputs[name]).cpu() for name in (SEGMENT_LENGTHS, PARENTS)))
    if tokens.shape != (1, trees.tokens):
        raise PackingError(
            f"segment_lengths: expected lengths that add up to a single row of {list(tokens.shape)} tokens, got "
            f"{trees.tokens}"
        )
    layout = (TreeLayout if trees.has_branches else Layout).of(trees, tokens.device)
    positions = inputs.get("position_ids")
    if positions is not None and not torch.equal(positions.to(tokens.device), layout.position_ids):
        raise PackingError(
            "position_ids: expected the depth of each token in its tree, or None, got positions that begin with "
            f"{positions.flatten().tolist()[:8]}"
        )
    return layout


_TREES = TreeSegments((13, 7, 11, 5, 9, 6, 1, 8, 12, 9, 4, 10), (-1, 0, 1, 1, 0, 0, 5, 5, -1, 8, 8, -1))
_ENDS = (1, 2, 3, 4, 6, 7, 9, 10, 11)
"""The trees of the proof, with 95 tokens: three levels, a document that ends inside others, a segment of a single
token, branches that are not the first of their parent, and a document alone."""


class TreeCase(RowCase):
    """Random documents that share prefixes in a row of trees."""

    where = "row of trees"
    leaks = "changing one segment of a tree changed the logits of tokens that are not below it"
    may_be_filled = False


def _row_of_trees(segments: DocumentTokens) -> Arguments:
    columns = {"input_ids": [[*chain(*segments)]], SEGMENT_LENGTHS: _TREES.lengths, PARENTS: _TREES.parents}
    return {name: torch.tensor(values) for name, values in columns.items()}


@torch.inference_mode(False)  # gradients are compared
def prove_trees(model: PreTrainedModel) -> None:
    """Prove that a patched model runs rows of trees, and note this in its route.

    Args:
        model: a patched model.

    Raises:
        ModelNotSupportedError: a document has other outputs or gradients in a tree than alone, or a segment depends on
            tokens that are not above it; the message has the reason. Or the weights are not in memory.
    """
    refuse_missing_weights(model, "trees", "patch_model(model, trees=True)")
    evaluation = TreeCase(Runner(model), lengths=_TREES, make_batch=_row_of_trees, ends=_ENDS)
    evaluation.examine()
    _refuse_unstable_prefixes(evaluation)
    training = evaluation.in_training()
    training.replacements = []
    examine_in_training(training, evaluation)
    with within(proving, True):
        require(evaluation, training)
    route: Route = getattr(model, PATCH).route
    by_path = f", {len(route.by_segment)} modules on each path" if route.by_segment else ""
    route.facts.proven[TREES] = f"shared prefixes are computed once{by_path}"


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


@dataclass(frozen=True, eq=False)
class SharedRows(PaddedRows):
    """The rows of a padded batch whose shared prefixes stand once in the row that `lay_end_to_end` makes.

    Args:
        shared: the trees of the rows.
    """

    shared: BatchTrees = field(kw_only=True)

    @cached_property
    def layout(self) -> Layout:  # type: ignore[override]
        return TreeLayout.of(self.shared.trees, self.device)

    def lay_end_to_end(self, value: Any) -> Any:
        return self.take(value, self.places[on_device(self.shared.taken, self.device)][None])

    def spread(self, values: Tensor) -> Tensor:
        return super().spread(values[on_device(self.shared.given, values.device)])


def sharing_prefixes(rows: PaddedRows, inputs: Inputs, fewest: int) -> PaddedRows:
    """Return the rows of a padded batch as trees, if they share prefixes. They share none if a backbone gets labels, or
    anything for each token but integers, such as embeddings.

    Args:
        rows: the rows.
        inputs: the arguments of the backbone for the padded batch.
        fewest: the fewest tokens that rows share.
    """
    values = {name: each for name, each in inputs.items() if isinstance(each, Tensor) and each.ndim}
    known = all(each.shape == rows.shape and not each.is_floating_point() for each in values.values())
    if not known or "input_ids" not in values or "labels" in values:
        return rows
    tokens = {name: each.cpu().numpy()[rows.real] for name, each in values.items()}
    found = find_in_batch(tokens.pop("input_ids"), tokens, rows.layout.lengths, fewest)
    if found.trees.tokens == rows.layout.tokens:
        return rows
    return SharedRows(rows.real, rows.device, rows.side, rows.has_positions, rows.media, shared=found)


def share_prefixes(model: PreTrainedModel, fewest: int | None) -> None:
    """Let a patched model compute the prefixes that rows of a padded batch share only once.

    Args:
        model: a patched model that returns outputs for each token.
        fewest: the fewest tokens to share; None to compute every row.

    Raises:
        ModelNotSupportedError: it cannot be proven that the model runs trees, or its backbone takes no packed rows.
    """
    facts, unpadding = getattr(model, PATCH).facts, unpadding_of(model)
    if fewest is not None:
        if unpadding is None or unpadding.by_length or unpadding.rows_after or not facts.takes_packed_rows:
            raise ModelNotSupportedError(
                f"{type(model).__name__}: rows of a padded batch can share prefixes only if the model returns outputs "
                "for each token, and nothing for whole rows"
            )
        if TREES not in facts.proven:
            prove_trees(model)
    if unpadding is not None:
        share = None if fewest is None else partial(sharing_prefixes, fewest=fewest)
        facts.proven[PADDED] = replace(unpadding, share=share)
