"""Measure, for models of each causal architecture, how documents that share prefixes in a row of trees differ from the
same documents run alone on the unpatched model. The proof of trees in hf_packing has other trees, and no part in it."""

import copy
import inspect
import warnings
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from hf_packing import ModelNotSupportedError, PackingCollator, patch_model
from tools.internals import logits_of, route_of
from tools.survey.measure import EXACT, VARIANTS, all_jobs, explained_by_rounding, in_processes, largest, make_documents
from tools.tiny_model import VOCABULARY, tiny_model

LOSSES = ("token", "sequence")
"""The losses of documents: the summed cross-entropies of all their tokens, or the sum of each document's mean."""

Gradients = dict[str, dict[str, Tensor]]
"""The gradients of each loss by parameter."""

Status = Literal["exact", "refused", "WRONG", "not built"]


@dataclass(frozen=True)
class Forest:
    """The segments of a row of trees, and its documents."""

    lengths: tuple[int, ...]
    """Number of tokens in each segment."""
    parents: tuple[int, ...]
    """The segment before each segment in its documents; -1 for the first segment of a tree."""
    ends: tuple[int, ...]
    """The segment in which each document ends."""

    def above(self, segment: int) -> list[int]:
        """Return the segments from the first of the tree to this one."""
        parent = self.parents[segment]
        return [*(self.above(parent) if parent >= 0 else []), segment]

    def tokens_of(self, segment: int) -> list[int]:
        """Return the indices of a segment's tokens in the row."""
        before = sum(self.lengths[:segment])
        return list(range(before, before + self.lengths[segment]))

    def path(self, document: int) -> list[int]:
        """Return the indices of a document's tokens in the row."""
        return [token for segment in self.above(self.ends[document]) for token in self.tokens_of(segment)]

    def outside(self, segment: int) -> list[int]:
        """Return the indices of the tokens that are neither in a segment nor below it."""
        others = [each for each in range(len(self.lengths)) if segment not in self.above(each)]
        return [token for each in others for token in self.tokens_of(each)]


_PARENTS = (-1, 0, 1, 1, 3, 0, 5, 5, 7, -1, 9, 9, -1)
_ENDS = (0, 2, 3, 4, 6, 8, 8, 10, 11, 12, 7)

FOREST = Forest((6, 1, 13, 4, 9, 17, 3, 8, 5, 11, 2, 16, 4), _PARENTS, _ENDS)
"""Two trees, of four and two levels, and a document alone. Documents end in the first segment of a tree and inside
others, one document occurs twice, and a segment with branches has a single token."""

LONGER = replace(FOREST, lengths=(15, 1, 13, 4, 9, 17, 3, 8, 5, 14, 2, 16, 18))
"""Trees for models that cannot be called with very short documents."""


@dataclass(frozen=True)
class MeasuredTrees:
    """The results for one architecture."""

    name: str
    status: Status = "exact"
    modules: dict[str, int] = field(default_factory=dict)
    """The number of modules that run on each path, by class name."""
    difference: float = float("nan")
    """Largest difference of a logit between a row of trees and documents alone."""
    change: float = float("nan")
    """Largest change of a logit that is neither in a segment nor below it, when the tokens of this segment change."""
    gradient: float = float("nan")
    """Largest difference of a gradient of either loss, relative to the largest gradient of this loss."""
    gradient_in_float64: bool = False
    """Whether `gradient` was measured in float64, since the difference in float32 is too large."""
    explained: float = EXACT
    """The largest difference that counts as exact for this model: EXACT, or the effect of rounding if larger."""
    reason: str = ""
    prefix: float = float("nan")
    """For a refused model, the largest difference of a logit of a prefix, without any packing, between two documents
    that begin with the prefix."""

    @property
    def is_exact(self) -> bool:
        most = EXACT if self.gradient_in_float64 else self.explained
        return self.change <= EXACT and self.difference <= self.explained and self.gradient <= most


def tree_jobs() -> list[str]:
    """Return the names of all causal architectures and variants."""
    return [name for kind, name in all_jobs() if kind == "causal"]


def measure_all_trees(names: list[str], processes: int) -> list[MeasuredTrees]:
    """Measure architectures in several processes; return the results in the order of the names."""
    return in_processes(measure_trees, names, processes, " architectures with trees")


def measure_trees(name: str) -> MeasuredTrees:
    """Build a tiny float32 model, and compare documents in a row of trees with the documents alone."""
    model_type, changes = VARIANTS.get(name, (name, {}))
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = tiny_model(model_type, "causal", **changes)
        except Exception as error:  # configurations and models may raise anything
            return MeasuredTrees(name, "not built", reason=f"{type(error).__name__}: {error}")
        return _measure_model(MeasuredTrees(name), model)


def _measure_model(found: MeasuredTrees, untouched: PreTrainedModel) -> MeasuredTrees:
    model = copy.deepcopy(untouched)
    try:
        patch_model(model, trees=True)
    except ModelNotSupportedError as error:
        return replace(found, status="refused", reason=str(error), prefix=_difference_of_prefixes(untouched))
    except Exception as error:  # patch_model should raise no other error
        return replace(found, status="WRONG", reason=f"patch_model failed, {type(error).__name__}: {error}")
    route = route_of(model)
    assert route is not None
    found = replace(found, modules=route.modules)
    try:
        try:
            forest, (alone, gradients) = FOREST, _alone(untouched, FOREST)
        except RuntimeError:
            forest, (alone, gradients) = LONGER, _alone(untouched, LONGER)
        found = replace(
            found,
            difference=_difference(model, forest, alone),
            change=_change(model, forest),
            gradient=_difference_of_gradients(model, forest, gradients),
            explained=max(EXACT, explained_by_rounding(untouched, _documents(forest), torch.cat(alone))),
        )
        if not found.gradient <= found.explained and found.difference <= found.explained:
            gradient = _difference_in_float64(untouched, forest)
            found = replace(found, gradient=gradient, gradient_in_float64=True)
    except Exception as error:  # a model that raises is not exact
        return replace(found, status="WRONG", reason=f"{type(error).__name__}: {error}")
    return found if found.is_exact else replace(found, status="WRONG")


def row_of(forest: Forest, segments: list[list[int]]) -> dict[str, Any]:
    """Return a row of trees, as a data set has it. Documents train on all tokens but their first ones."""
    tokens = [token for each in segments for token in each]
    first = [forest.tokens_of(segment)[0] for segment, parent in enumerate(forest.parents) if parent < 0]
    runs = [(document, 1, len(forest.path(document)) - 1) for document in range(len(forest.ends))]
    return {
        "tree_input_ids": tokens,
        "tree_labels": [-100 if place in first else token for place, token in enumerate(tokens)],
        "segment_lengths": forest.lengths,
        "parents": forest.parents,
        "ends": forest.ends,
        "trained": [number for run in runs for number in run],
    }


def _logits_of_row(model: PreTrainedModel, forest: Forest, segments: list[list[int]], plain: bool = False) -> Tensor:
    """Return the logits of a row, [tokens, vocabulary]. If `plain`, the model gets no positions and no documents."""
    batch = PackingCollator()([row_of(forest, segments)])
    if plain:
        batch = {name: batch[name] for name in ("input_ids", "segment_lengths", "parents")}
    return logits_of(model, model(**batch))[0]


def _difference(model: PreTrainedModel, forest: Forest, alone: list[Tensor]) -> float:
    segments, found = make_documents(0, forest.lengths), 0.0
    with torch.no_grad():
        for plain in (False, True):
            logits = _logits_of_row(model, forest, segments, plain)
            found = max(found, *(largest(logits[forest.path(number)], own) for number, own in enumerate(alone)))
    return found


def _change(model: PreTrainedModel, forest: Forest) -> float:
    segments, found = make_documents(0, forest.lengths), 0.0
    with torch.no_grad():
        before = _logits_of_row(model, forest, segments)
        for number, tokens in enumerate(segments):
            others = [8 + (token - 7) % (VOCABULARY - 16) for token in tokens]
            after = _logits_of_row(model, forest, [*segments[:number], others, *segments[number + 1 :]])
            elsewhere = forest.outside(number)
            found = max(found, largest(after[elsewhere], before[elsewhere]))
    return found


def _difference_of_gradients(model: PreTrainedModel, forest: Forest, gradients: Gradients) -> float:
    segments, documents, found = make_documents(0, forest.lengths), _documents(forest), 0.0
    for loss in LOSSES:
        model.zero_grad()
        logits = _logits_of_row(model, forest, segments)
        losses = [_loss(logits[forest.path(number)], tokens, loss) for number, tokens in enumerate(documents)]
        torch.autograd.backward(torch.stack(losses).sum())
        has = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        scale = max(float(each.abs().max()) for each in gradients[loss].values())
        differences = [float((has[name] - each).abs().max()) for name, each in gradients[loss].items()]
        found = max(found, max(differences) / scale)
    return found


def _difference_in_float64(untouched: PreTrainedModel, forest: Forest) -> float:
    """Return the value of `MeasuredTrees.gradient` in float64; see the survey of packed documents."""
    untouched = copy.deepcopy(untouched).double()
    with suppress(ValueError):  # the model has no experts
        untouched.set_experts_implementation("eager")  # grouped products of matrices have no float64
    patched = patch_model(copy.deepcopy(untouched), trees=True)
    return _difference_of_gradients(patched, forest, _alone(untouched, forest)[1])


def _documents(forest: Forest) -> list[list[int]]:
    """Return the token ids of each document."""
    tokens = [token for each in make_documents(0, forest.lengths) for token in each]
    return [[tokens[place] for place in forest.path(document)] for document in range(len(forest.ends))]


def _difference_of_prefixes(model: PreTrainedModel) -> float:
    """Return the value of `MeasuredTrees.prefix`; nan if the model cannot be called on documents alone."""
    for forest in (FOREST, LONGER):
        with suppress(Exception), torch.no_grad():  # a model may raise anything
            alone = [_run_alone(copy.deepcopy(model), tokens) for tokens in _documents(forest)]
            paths = [forest.path(document) for document in range(len(alone))]
            pairs = [
                (own[: len(shared)], other[: len(shared)])
                for (path, own), (other_path, other) in combinations(zip(paths, alone, strict=True), 2)
                if (shared := set(path) & set(other_path))
            ]
            return max(largest(own, other) for own, other in pairs)
    return float("nan")


def _alone(model: PreTrainedModel, forest: Forest) -> tuple[list[Tensor], Gradients]:
    """Return the logits of each document alone, and the sums of all documents' gradients."""
    logits: list[Tensor] = []
    gradients: Gradients = {loss: {} for loss in LOSSES}
    for tokens in _documents(forest):
        for loss in LOSSES:
            own = copy.deepcopy(model)  # since some models keep positions from earlier calls
            output = _run_alone(own, tokens)
            torch.autograd.backward(_loss(output, tokens, loss))
            for name, parameter in own.named_parameters():
                if parameter.grad is not None and parameter.numel():
                    known = gradients[loss].get(name, torch.zeros_like(parameter))
                    gradients[loss][name] = known + parameter.grad
        logits.append(output.detach())
    return logits, gradients


def _run_alone(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    return logits_of(model, model(torch.tensor([tokens]), **options))[0]


def _loss(logits: Tensor, tokens: list[int], loss: str) -> Tensor:
    """Return the loss of predicting each next token of a document: the sum for "token", the mean for "sequence"."""
    return cross_entropy(logits[:-1], torch.tensor(tokens)[1:], reduction="sum" if loss == "token" else "mean")
