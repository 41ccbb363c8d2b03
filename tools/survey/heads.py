"""Measure, for models of each architecture and head, how the outputs and gradients of the rows of a padded batch differ
from those of each row alone, before and after patching."""

import copy
import inspect
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_packing import ModelNotSupportedError, patch_model
from tools.internals import route_of
from tools.survey.measure import in_processes, make_documents
from tools.tiny_model import architectures, tiny_model

HEADS = ("sequence classification", "token classification", "question answering", "multiple choice")

EXACT = 1e-5
"""The largest difference that counts as exact in float64, in an output, or in a gradient relative to the largest one.
Parts of many models, such as norms and rotary embeddings, compute in float32."""

_LENGTHS = (5, 19, 2, 15, 22)
"""Lengths of the documents in tokens, shorter and longer than those with which `patch_model` proves a model."""

_LONGER = (18, 14, 21, 16, 37)
"""Lengths for models that cannot be called with very short documents."""

_SETTINGS: dict[str, dict[str, Any]] = {
    "t5": {"decoder_start_token_id": 0},
    "lilt": {"channel_shrink_ratio": 4, "hidden_size": 96, "num_attention_heads": 4},
}

Side = Literal["right", "left"]

Outputs = list[dict[str, Tensor]]
"""The outputs of each document by name, without padding."""


@dataclass(frozen=True)
class MeasuredHead:
    """The results for one architecture and head."""

    head: str
    name: str
    status: Literal["exact", "refused", "WRONG", "cannot run alone", "not built"] = "exact"
    route: str = ""
    by_length: bool = False
    """True if the backbone takes no packed rows, and runs on the rows of equal length together."""
    right: float = float("nan")
    """Largest difference of an output or a gradient between a batch with padding on the right and documents alone."""
    left: float = float("nan")
    """The same with padding on the left; nan if the model is refused or refuses such batches."""
    stock_right: float = float("nan")
    """As `right`, for the outputs of the unpatched model; nan if the model cannot be called."""
    stock_left: float = float("nan")
    reason: str = ""


def measure_heads(jobs: list[tuple[str, str]], processes: int) -> list[MeasuredHead]:
    """Measure heads of architectures in several processes; return the results in the order of the jobs."""
    return in_processes(_measure_job, jobs, processes, " heads")


def _measure_job(job: tuple[str, str]) -> MeasuredHead:
    return measure_head(*job)


def head_jobs() -> list[tuple[str, str]]:
    """Return a pair (head, model type) for every architecture with a head."""
    return [(head, name) for head in HEADS for name in architectures(head)]


def measure_head(head: str, name: str) -> MeasuredHead:
    """Build a tiny float64 model and compare padded batches with documents alone, before and after patching."""
    torch.set_num_threads(1)
    found = MeasuredHead(head, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = tiny_model(name, head, torch.float64, **_SETTINGS.get(name, {}))
        except Exception as error:  # configurations and models may raise anything
            return replace(found, status="not built", reason=f"{type(error).__name__}: {error}")
        with suppress(Exception):  # a model without experts
            model.set_experts_implementation("eager")  # the grouped kernel takes no float64
        problem = ""
        for lengths in (_LENGTHS, _LONGER):
            documents = _documents(model, lengths)
            try:
                alone = _alone(copy.deepcopy(model), documents, head)
                gradients = _gradients(own := copy.deepcopy(model), _alone(own, documents, head))
                break
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
        else:
            return replace(found, status="cannot run alone", reason=problem)
        right, left = (_difference_of_stock(model, documents, alone, head, side) for side in ("right", "left"))
        found = replace(found, stock_right=right, stock_left=left)
        return _measure_patched(found, model, documents, alone, gradients)


def _measure_patched(
    found: MeasuredHead,
    model: PreTrainedModel,
    documents: list[list[int]],
    alone: Outputs,
    gradients: dict[str, Tensor],
) -> MeasuredHead:
    try:
        patch_model(model)
    except ModelNotSupportedError as error:
        return replace(found, status="refused", reason=str(error))
    except Exception as error:  # patch_model should raise no other error
        return replace(found, status="WRONG", reason=f"patch_model failed, {type(error).__name__}: {error}")
    route = route_of(model)
    assert route is not None
    found = replace(
        found, route=route.name, by_length=getattr(route.facts.proven.get("padded batch"), "by_length", False)
    )
    for side in ("right", "left"):
        try:
            outputs = _padded(model, documents, found.head, side)
            difference = _difference(outputs, alone)
            model.zero_grad()
            own = _gradients(model, outputs)
            scale = max(
                (float(each[each.isfinite()].abs().max()) for each in gradients.values() if each.isfinite().any()),
                default=1.0,
            )
            difference = max(difference, *(_largest(own[name], each) / scale for name, each in gradients.items()))
        except ModelNotSupportedError as error:
            found = replace(found, reason=str(error))
            if side == "right":
                return replace(found, status="refused")
            continue
        except Exception as error:
            return replace(found, status="WRONG", reason=f"{side}: {type(error).__name__}: {error}")
        found = replace(found, right=difference) if side == "right" else replace(found, left=difference)
        if not difference <= EXACT:
            found = replace(found, status="WRONG")
    return found


def _documents(model: PreTrainedModel, lengths: tuple[int, ...]) -> list[list[int]]:
    documents = make_documents(0, lengths)
    if model.config.is_encoder_decoder:  # such as BART, whose classifier reads the end token
        documents = [[*each[:-1], model.config.eos_token_id] for each in documents]
    return documents


def _call(model: PreTrainedModel, ids: Tensor, mask: Tensor, head: str) -> dict[str, Tensor]:
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    taken = inspect.signature(type(model).forward).parameters
    inputs = {name: each for name, each in inputs.items() if name in taken or (route_of(model) and name != "use_cache")}
    if head == "multiple choice":
        inputs = {name: each[:, None] if isinstance(each, Tensor) else each for name, each in inputs.items()}
    output = model(**inputs)
    return {name: each for name, each in output.items() if isinstance(each, Tensor) and "logits" in name}


def _alone(model: PreTrainedModel, documents: list[list[int]], head: str) -> Outputs:
    found = []
    for tokens in documents:
        ids = torch.tensor([tokens])
        found.append({name: each[0] for name, each in _call(model, ids, torch.ones_like(ids), head).items()})
    return found


def _padded(model: PreTrainedModel, documents: list[list[int]], head: str, side: str) -> Outputs:
    longest, pad = max(map(len, documents)), model.config.get_text_config().pad_token_id or 0
    ids = torch.full((len(documents), longest), pad)
    mask = torch.zeros_like(ids)
    places = [slice(0, len(t)) if side == "right" else slice(longest - len(t), longest) for t in documents]
    for number, (tokens, place) in enumerate(zip(documents, places, strict=True)):
        ids[number, place], mask[number, place] = torch.tensor(tokens), 1
    outputs = _call(model, ids, mask, head)
    return [
        {name: each[number][place] if each.shape[1:2] == (longest,) else each[number] for name, each in outputs.items()}
        for number, place in enumerate(places)
    ]


def _difference_of_stock(
    model: PreTrainedModel, documents: list[list[int]], alone: Outputs, head: str, side: str
) -> float:
    try:
        with torch.no_grad():
            return _difference(_padded(copy.deepcopy(model), documents, head, side), alone)
    except Exception:
        return float("nan")


def _difference(outputs: Outputs, alone: Outputs) -> float:
    return max(_largest(one[name], other[name]) for one, other in zip(outputs, alone, strict=True) for name in other)


def _gradients(model: PreTrainedModel, outputs: Outputs) -> dict[str, Tensor]:
    """Return the gradients of a weighted sum of all outputs by parameter."""
    generator = torch.Generator().manual_seed(0)
    score = torch.zeros((), dtype=torch.float64)
    for each in outputs:
        for value in each.values():
            weights = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            score = score + (value.where(value.abs() < 1e30, 0) * weights).sum()
    torch.autograd.backward(score)
    zeros = {name: torch.zeros_like(each) for name, each in model.named_parameters()}
    return {name: zeros[name] if each.grad is None else each.grad.clone() for name, each in model.named_parameters()}


def _largest(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two tensors; infinity if only one of them is finite somewhere."""
    finite = one.isfinite() & other.isfinite()
    if not torch.equal(one.isfinite(), other.isfinite()):
        return float("inf")
    return float((one - other)[finite].detach().abs().max()) if finite.any() else 0.0
