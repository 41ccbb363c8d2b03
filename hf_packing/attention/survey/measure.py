"""One architecture, measured: what the stock model does to packed documents, and what is left of it when patched."""

import copy
import inspect
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_packing.attention.isolation import check_isolation
from hf_packing.attention.patch import patch_model, unpatch_model
from hf_packing.attention.probe import Probe
from hf_packing.attention.sizes import VOCABULARY
from hf_packing.attention.survey.architectures import VARIANTS
from hf_packing.attention.survey.tiny import tiny_model
from hf_packing.attention.tolerance import comparable, logits_of, spread
from hf_packing.collate import PackingCollator
from hf_packing.errors import ModelNotSupportedError

LENGTHS = (5, 19, 2, 15, 19, 22)
"""Tokens of the documents; others than those of the proof, and half of them make a row as long as the other half."""

LONGER = (18, 14, 21, 16, 37)
"""For models that cannot be called with very short documents."""

EXACT = 1e-4
"""Largest difference of a logit, and of a gradient as a share of the largest, of a model that counts as exact, unless
rounding alone was measured to make more."""


@dataclass(frozen=True)
class Measured:
    """What was seen of one architecture."""

    kind: str
    name: str
    built: bool = True
    stock: str = ""
    route: str = ""
    modules: dict[str, int] = field(default_factory=dict)
    packed_share: float = 0.0
    change: float = float("nan")
    """Largest change of a logit of a document when another one was changed, patched, over all feedings."""
    difference: float = float("nan")
    """Largest difference of a logit between packed and alone, over all feedings."""
    gradient: float = float("nan")
    """Largest difference of a parameter's gradient between packed and alone, as a share of the largest."""
    reason: str = ""
    """Why it was not built, is refused, or takes no faster route."""
    explained: float = EXACT
    """What rounding explains of a difference in this model: EXACT, or more where it was measured to be more."""
    unproven: str = ""
    """Why it was proven in evaluation mode only, or not all of it in training mode."""

    @property
    def exact(self) -> bool:
        return self.change <= EXACT and all(each <= self.explained for each in (self.difference, self.gradient))


def measure(kind: str, name: str) -> Measured:
    """Build, measure stock, patch, measure again.

    Args:
        kind: "causal" or "masked".
        name: a model type of transformers, or a variant.
    """
    model_type, changes = VARIANTS.get(name, (name, {}))
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = tiny_model(model_type, kind, **changes)
        except Exception as error:  # of a hundred kinds: what cannot be built is listed
            return Measured(kind, name, built=False, reason=f"{type(error).__name__}: {error}")
        return measure_model(kind, name, model)


def measure_model(kind: str, name: str, model: PreTrainedModel) -> Measured:
    stock, untouched = stock_result(model), copy.deepcopy(model)
    try:
        patch_model(model)
    except ModelNotSupportedError as error:
        return Measured(kind, name, stock=stock, reason=str(error))
    except Exception as error:  # which is not what patch_model promises
        return Measured(kind, name, stock=stock, reason=f"patch_model failed, {type(error).__name__}: {error}")
    route = check_isolation(model).route
    assert route is not None
    known = Measured(kind, name, True, stock, route.name, route.modules, route.packed_share, unproven=route.unproven)
    try:
        try:
            documents, (alone, gradients) = make_documents(0, LENGTHS), documents_alone(untouched, LENGTHS)
        except RuntimeError:
            documents, (alone, gradients) = make_documents(0, LONGER), documents_alone(untouched, LONGER)
        change, difference, gradient = differences(model, documents, alone, gradients)
        explained = max(EXACT, explained_by_rounding(untouched, documents, alone))
    except Exception as error:  # a model that raises is not exact
        return replace(known, reason=f"{type(error).__name__}: {error}")
    reason = "; ".join(route.tried)
    return replace(known, change=change, difference=difference, gradient=gradient, explained=explained, reason=reason)


def explained_by_rounding(model: PreTrainedModel, documents: list[list[int]], alone: Tensor) -> float:
    """What rounding explains of a difference of a logit."""
    probe = Probe(model)
    probe.documents = documents
    with probe.undisturbed():
        probe.measure_rounding(list(torch.split(alone, [len(each) for each in documents])), use_cache=False)
    return probe.tolerance.difference * spread(alone)


def differences(
    model: PreTrainedModel, documents: list[list[int]], alone: Tensor, gradients: dict[str, Tensor]
) -> tuple[float, float, float]:
    """The change, difference and gradient of a patched model; see `Measured`."""
    change = difference = 0.0
    other, first = make_documents(1, [len(documents[0])]), len(documents[0])
    labels = learns_from_labels(model, documents[-1])
    with torch.no_grad():
        for before, after in zip(feedings(documents, labels), feedings([*other, *documents[1:]], labels), strict=True):
            packed = logits_of(model, model(**before)).flatten(0, 1)
            difference = max(difference, largest(packed, alone))
            changed = logits_of(model, model(**after)).flatten(0, 1)
            change = max(change, largest(changed[first:], packed[first:]))
    model.zero_grad()
    torch.autograd.backward(score(logits_of(model, model(**next(feedings(documents, False))))[0], documents))
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    scale = max(float(each.abs().max()) for each in gradients.values())
    gradient = max(float((found[name] - each).abs().max()) for name, each in gradients.items()) / scale
    return change, difference, gradient


def make_documents(seed: int, lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(8, VOCABULARY - 8, (length,), generator=generator).tolist() for length in lengths]


def stock_result(model: PreTrainedModel) -> str:
    """What the model does as a training loop would call it, and at its best."""
    model = copy.deepcopy(model)
    try:
        report = check_isolation(model)
        if report.isolated:
            return "isolated"
        if "with use_cache=False it does not" in report.reason:
            return "leaks unless use_cache=False"
        return "cannot be called on a packed row" if report.max_leak != report.max_leak else "leaks"
    except Exception as error:  # a stranger's model
        return f"not measured: {error}"


def learns_from_labels(model: PreTrainedModel, tokens: list[int]) -> bool:
    """Whether labels change nothing but the loss; decoders of some make their input of them, or expect an image."""
    model, ids = copy.deepcopy(model), torch.tensor([tokens])  # rotary scales remember long documents
    unpatch_model(model)
    masked = ids.masked_fill(torch.arange(len(tokens)) < 2, -100)
    try:
        with torch.no_grad():
            logits = [logits_of(model, model(ids, **labels)) for labels in ({}, {"labels": masked})]
    except Exception:  # of a hundred kinds
        return False
    return torch.equal(*logits)


def feedings(documents: list[list[int]], labels: bool) -> Iterator[dict[str, Any]]:
    """All ways to tell a model of packed documents: in one row, and in two where a document ends at half of it."""
    batch = PackingCollator()([{"input_ids": tokens} for tokens in documents])
    given = {"labels": batch.pop("labels")}
    ids, positions = batch["input_ids"], batch["position_ids"]
    yield batch
    if labels:  # as a trainer does
        yield {**batch, **given, "num_items_in_batch": torch.tensor(len(documents))}
    for name in ("position_ids", "cu_seq_lens_q", "seq_idx"):
        yield {"input_ids": ids, name: batch[name]}
    yield {"input_ids": ids, "position_ids": positions, "attention_mask": torch.ones_like(ids)}
    if positions[0, ids.shape[1] // 2] == 0:
        yield {"input_ids": ids.view(2, -1), "position_ids": positions.view(2, -1)}


def documents_alone(model: PreTrainedModel, lengths: Sequence[int]) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits [tokens, vocabulary], and the gradients of every parameter, each document in a model of its own."""
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    logits: list[Tensor] = []
    gradients: dict[str, Tensor] = {}
    for tokens in make_documents(0, lengths):
        own = copy.deepcopy(model)
        logits.append(logits_of(own, own(torch.tensor([tokens]), **options))[0])
        torch.autograd.backward(score(logits[-1], [tokens]))
        for name, parameter in own.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients.get(name, torch.zeros_like(parameter)) + parameter.grad
    return torch.cat(logits).detach(), gradients


def score(logits: Tensor, documents: list[list[int]]) -> Tensor:
    """Cross-entropy of the next tokens inside each document, summed."""
    losses = []
    for own, tokens in zip(torch.split(logits, [len(each) for each in documents]), documents, strict=True):
        losses.append(torch.nn.functional.cross_entropy(own[:-1], torch.tensor(tokens)[1:], reduction="sum"))
    return torch.stack(losses).sum()


def largest(one: Tensor, other: Tensor) -> float:
    return float((one - other)[comparable(one) & comparable(other)].abs().max())
