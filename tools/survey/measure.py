"""Measure whether a model of each architecture isolates packed documents, before and after patching."""

import copy
import inspect
import logging
import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_packing import ModelNotSupportedError, PackingCollator, check_isolation, patch_model, unpatch_model
from tools.internals import RowCase, Runner, comparable, logits_of, spread
from tools.tiny_model import VOCABULARY, architectures, tiny_model

Job = TypeVar("Job")
Result = TypeVar("Result")

KINDS = ("causal", "masked")

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon with alibi": ("falcon", {"alibi": True, "multi_query": True}),
    "granitemoehybrid of attention": ("granitemoehybrid", {"layer_types": ["attention"] * 4}),
    "llama with dynamic rope": (
        "llama",
        {
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        },
    ),
    "nemotron_h of attention": ("nemotron_h", {"layers_block_type": ["attention", "moe"] * 2}),
    "phi3 with longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 16,
                "short_factor": [1.0] * 8,
                "long_factor": [4.0] * 8,
            },
        },
    ),
}
"""Variants by name: a model type, and settings that make the model run different code."""

EXACT = 1e-4
"""The largest difference that counts as exact, in a logit, or in a gradient relative to the largest gradient. A larger
difference counts as exact only if rounding alone was measured to cause a difference of this size."""

ISOLATED_WITHOUT_CACHE = "leaks unless use_cache=False"
"""What the page says of an unpatched model in which documents attend to each other only if it fills a cache."""

_LENGTHS = (5, 19, 2, 15, 19, 22)
"""Lengths of the documents in tokens. `patch_model` uses other lengths. A document ends in the middle of the row."""

_LONGER = (18, 14, 21, 16, 37)
"""Lengths for models that cannot be called with very short documents."""


@dataclass(frozen=True)
class Measured:
    """The results for one architecture."""

    kind: str
    name: str
    built: bool = True
    stock: str = ""
    """How the unpatched model treats packed documents, such as "leaks"."""
    route: str = ""
    """The route of the patched model; empty if `patch_model` refuses the model."""
    modules: dict[str, int] = field(default_factory=dict)
    """The number of modules that run by segment, by class name."""
    packed_share: float = 0.0
    """The share of the parameters in modules that run on the whole packed row."""
    change: float = float("nan")
    """Largest change of a logit of one document when another document changes, over all ways to call the model."""
    difference: float = float("nan")
    """Largest difference of a logit between packed and separate documents, over all ways to call the model."""
    gradient: float = float("nan")
    """Largest difference of a gradient between packed and separate documents, relative to the largest gradient."""
    gradient_in_float64: bool = False
    """Whether `gradient` was measured in float64, since the difference in float32 is too large."""
    reason: str = ""
    """Why no model was built, why `patch_model` refuses the model, or why the model takes no faster route."""
    explained: float = EXACT
    """The largest difference that counts as exact for this model: EXACT, or the effect of rounding if larger."""
    unproven: str = ""
    """Why isolation in training mode was not verified, or only in part; empty if isolation was verified."""

    @property
    def exact(self) -> bool:
        return self.change <= EXACT and all(each <= self.explained for each in (self.difference, self.gradient))


def all_jobs() -> list[tuple[str, str]]:
    """Return a pair (kind, name) for every architecture and variant."""
    jobs = [(kind, name) for kind in KINDS for name in architectures(kind)]
    return jobs + [("causal", name) for name in sorted(VARIANTS)]


def measure_all(jobs: list[tuple[str, str]], processes: int) -> list[Measured]:
    """Measure architectures in several processes; return the results in the order of the jobs."""
    return in_processes(_measure_job, jobs, processes, " architectures")


def _measure_job(job: tuple[str, str]) -> Measured:
    return measure(*job)


def in_processes(measure_job: Callable[[Job], Result], jobs: Sequence[Job], processes: int, unit: str) -> list[Result]:
    """Measure jobs in several processes, with a progress bar; return the results in the order of the jobs."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, _silence, maxtasksperchild=16) as pool:
        return list(tqdm(pool.imap(measure_job, jobs), total=len(jobs), unit=unit))


def _silence() -> None:
    """Silence warnings of models about their own defaults."""
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)


def measure(kind: str, name: str) -> Measured:
    """Build a tiny model and return measurements of the model before and after patching.

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
        except Exception as error:  # configurations and models may raise anything
            return Measured(kind, name, built=False, reason=f"{type(error).__name__}: {error}")
        return _measure_model(kind, name, model)


def _measure_model(kind: str, name: str, model: PreTrainedModel) -> Measured:
    stock, untouched = _stock_result(model), copy.deepcopy(model)
    try:
        patch_model(model)
    except ModelNotSupportedError as error:
        return Measured(kind, name, stock=stock, reason=str(error))
    except Exception as error:  # patch_model should raise no other error
        return Measured(kind, name, stock=stock, reason=f"patch_model failed, {type(error).__name__}: {error}")
    route = check_isolation(model).route
    assert route is not None
    known = Measured(kind, name, True, stock, route.name, route.modules, route.packed_share, unproven=route.unproven)
    try:
        try:
            documents, (alone, gradients) = make_documents(0, _LENGTHS), _documents_alone(untouched, _LENGTHS)
        except RuntimeError:
            documents, (alone, gradients) = make_documents(0, _LONGER), _documents_alone(untouched, _LONGER)
        change, difference = _differences(model, documents, alone)
        gradient = _difference_of_gradients(model, documents, gradients)
        explained = max(EXACT, explained_by_rounding(untouched, documents, alone))
        if in_float64 := not gradient <= explained:
            gradient = _difference_in_float64(untouched, documents)
    except Exception as error:  # a model that raises is not exact
        return replace(known, reason=f"{type(error).__name__}: {error}")
    reason = "; ".join(route.tried)
    return replace(
        known,
        change=change,
        difference=difference,
        gradient=gradient,
        gradient_in_float64=in_float64,
        explained=explained,
        reason=reason,
    )


def explained_by_rounding(model: PreTrainedModel, documents: list[list[int]], alone: Tensor) -> float:
    """Return the largest difference of a logit that rounding alone can cause."""
    case = RowCase(Runner(model), lengths=[len(each) for each in documents])
    case.tokens = torch.tensor([token for each in documents for token in each])
    case.examine()
    return case.tolerance().limit * spread(alone)


def _differences(model: PreTrainedModel, documents: list[list[int]], alone: Tensor) -> tuple[float, float]:
    """Return the values of `Measured.change` and `Measured.difference` for a patched model."""
    change = difference = 0.0
    other, first = make_documents(1, [len(documents[0])]), len(documents[0])
    labels = _ignores_labels(model, documents[-1])
    with torch.no_grad():
        for before, after in zip(feedings(documents, labels), feedings([*other, *documents[1:]], labels), strict=True):
            packed = logits_of(model, model(**before)).flatten(0, 1)
            difference = max(difference, largest(packed, alone))
            changed = logits_of(model, model(**after)).flatten(0, 1)
            change = max(change, largest(changed[first:], packed[first:]))
    return change, difference


def _difference_of_gradients(model: PreTrainedModel, documents: list[list[int]], gradients: dict[str, Tensor]) -> float:
    """Return the value of `Measured.gradient` for a patched model, from the gradients of separate documents."""
    model.zero_grad()
    torch.autograd.backward(_loss(logits_of(model, model(**next(feedings(documents, False))))[0], documents))
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    scale = max(float(each.abs().max()) for each in gradients.values())
    return max(float((found[name] - each).abs().max()) for name, each in gradients.items()) / scale


def _difference_in_float64(untouched: PreTrainedModel, documents: list[list[int]]) -> float:
    """Return the value of `Measured.gradient` in float64.

    In float32, rounding can change a gradient by any amount: a ReLU passes it or not, depending on the sign of a number
    near 0.
    """
    untouched = copy.deepcopy(untouched).double()
    patched = patch_model(copy.deepcopy(untouched))
    _, gradients = _documents_alone(untouched, [len(each) for each in documents])
    return _difference_of_gradients(patched, documents, gradients)


def make_documents(seed: int, lengths: Sequence[int]) -> list[list[int]]:
    """Return documents of random token ids, with one document for each length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(8, VOCABULARY - 8, (length,), generator=generator).tolist() for length in lengths]


def _stock_result(model: PreTrainedModel) -> str:
    """Return how an unpatched model treats packed documents in a plain training loop, and with use_cache=False."""
    model = copy.deepcopy(model)
    try:
        report = check_isolation(model)
        if report.isolated:
            return "isolated"
        if check_isolation(model, collator=_without_cache).modes != ("evaluation",):
            return ISOLATED_WITHOUT_CACHE
        return "cannot be called on a packed row" if report.max_leak != report.max_leak else "leaks"
    except Exception as error:  # a model may raise anything
        return f"not measured: {error}"


def _without_cache(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
    return {**PackingCollator()(rows), "use_cache": False}


def _ignores_labels(model: PreTrainedModel, tokens: list[int]) -> bool:
    """Return whether labels leave the logits unchanged. Some decoders make inputs from labels, or expect an image."""
    model, ids = copy.deepcopy(model), torch.tensor([tokens])  # a copy, since rotary scales depend on earlier calls
    unpatch_model(model)
    masked = ids.masked_fill(torch.arange(len(tokens)) < 2, -100)
    try:
        with torch.no_grad():
            logits = [logits_of(model, model(ids, **labels)) for labels in ({}, {"labels": masked})]
    except Exception:  # a model may raise anything
        return False
    return torch.equal(*logits)


def feedings(documents: list[list[int]], labels: bool) -> Iterator[dict[str, Any]]:
    """Yield the inputs for every way to call a model on packed documents.

    The documents are in one row. If a document ends in the middle of the row, the last inputs are two rows.
    """
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


def _documents_alone(model: PreTrainedModel, lengths: Sequence[int]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits [tokens, vocabulary] and gradients by parameter, with every document run separately."""
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    logits: list[Tensor] = []
    gradients: dict[str, Tensor] = {}
    for tokens in make_documents(0, lengths):
        own = copy.deepcopy(model)
        logits.append(logits_of(own, own(torch.tensor([tokens]), **options))[0])
        torch.autograd.backward(_loss(logits[-1], [tokens]))
        for name, parameter in own.named_parameters():
            if parameter.grad is not None and parameter.numel():
                gradients[name] = gradients.get(name, torch.zeros_like(parameter)) + parameter.grad
    return torch.cat(logits).detach(), gradients


def _loss(logits: Tensor, documents: list[list[int]]) -> Tensor:
    """Return the summed cross-entropy of predicting the next token within each document."""
    losses = []
    for own, tokens in zip(torch.split(logits, [len(each) for each in documents]), documents, strict=True):
        losses.append(torch.nn.functional.cross_entropy(own[:-1], torch.tensor(tokens)[1:], reduction="sum"))
    return torch.stack(losses).sum()


def largest(one: Tensor, other: Tensor) -> float:
    return float((one - other)[comparable(one) & comparable(other)].abs().max())
