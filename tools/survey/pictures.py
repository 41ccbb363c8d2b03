"""Measure, for models of each architecture that sees pictures, how the outputs and gradients of the rows of a padded
batch of texts and pictures differ from those of each row alone, on the unpatched model, with its own pictures."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_packing import PackingError, patch_model
from tools.internals import route_of
from tools.survey.heads import EXACT
from tools.survey.measure import in_processes
from tools.survey.picture_inputs import Document, batch_of, make_documents
from tools.survey.picture_models import picture_model
from tools.tiny_model import architectures

STOCK_MIXES = 1e-3
"""A larger difference between the rows of an unpatched model's batch and the rows alone is no rounding."""

_LEAST_EFFECT = 1e-3
"""A smaller change of all logits, when the pictures change, means that a model does not see them."""

Batch = Literal["right", "left", "one row"]
"""Where the padding of a batch is; "one row" is a batch of one document with padding on the right."""

_BATCHES: tuple[Batch, ...] = ("right", "left", "one row")

Status = Literal["exact", "refused", "WRONG", "as unpatched", "cannot run alone", "not built"]


@dataclass(frozen=True)
class MeasuredPictures:
    """The results for one architecture."""

    name: str
    status: Status = "exact"
    difference: float = float("nan")
    """Largest difference of a logit between padded batches and documents alone."""
    gradient: float = float("nan")
    """Largest difference of a gradient, relative to the largest gradient."""
    stock: float = float("nan")
    """As `difference`, for batches with padding on the right and the unpatched model."""
    by_length: bool = False
    """True if the backbone takes no packed rows, and runs on the rows of equal length together."""
    reason: str = ""


def picture_jobs() -> list[str]:
    """Return the model types of all architectures that see pictures."""
    return architectures("pictures")


def measure_all_pictures(names: list[str], processes: int) -> list[MeasuredPictures]:
    """Measure architectures in several processes; return the results in the order of the names."""
    return in_processes(measure_pictures, names, processes, " architectures with pictures")


def measure_pictures(name: str) -> MeasuredPictures:
    """Build a tiny float64 model and compare padded batches of texts and pictures with documents alone."""
    torch.set_num_threads(1)
    found = MeasuredPictures(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = picture_model(name)
        except Exception as error:  # configurations and models may raise anything
            return replace(found, status="not built", reason=f"{type(error).__name__}: {error}")
        if model.config.is_encoder_decoder:
            return _of_two_texts(found, model)
        try:
            documents = make_documents(model)
            alone, gradients = _alone(model, documents)
            _check_effect(model, documents[0], alone[0])
        except Exception as error:  # the model may need other inputs
            return replace(found, status="cannot run alone", reason=f"{type(error).__name__}: {error}")
        try:
            with torch.no_grad():
                together = _rows(copy.deepcopy(model), documents, "right")
            found = replace(found, stock=_largest(together, alone))
        except Exception:  # the unpatched model may take no such batches
            together = []
        found = _measure_patched(found, model, documents, alone, gradients)
        if found.status == "WRONG" and not found.reason and found.stock > STOCK_MIXES:
            with torch.no_grad():
                same = _largest(_rows(model, documents, "right"), together) <= EXACT
            found = replace(found, status="as unpatched") if same else found
        return found


def _measure_patched(
    found: MeasuredPictures,
    model: PreTrainedModel,
    documents: list[Document],
    alone: list[Tensor],
    gradients: list[dict[str, Tensor]],
) -> MeasuredPictures:
    differences, relative = [], []
    try:
        patch_model(model, padded=True)
        for batch in _BATCHES:
            own = documents[:1] if batch == "one row" else documents
            with torch.no_grad():
                _rows(model, own, batch)  # the first padded batch is also used for a proof
            model.zero_grad()
            with _tokens_of_backbone(model) as counts:
                logits = _rows(model, own, batch)
            torch.autograd.backward(_score(logits))
            if sum(counts) != sum(len(each.tokens) for each in own):
                return replace(found, status="WRONG", reason=f"{batch}: the backbone got {sum(counts)} tokens")
            expected = {name: sum(each[name] for each in gradients[: len(own)]) for name in gradients[0]}
            scale = max(float(each.abs().max()) for each in map(torch.as_tensor, expected.values()))
            differences.append(_largest(logits, alone[: len(own)]))
            has = _gradients_of(model)
            relative.append(max(float((has[name] - each).abs().max()) for name, each in expected.items()) / scale)
    except PackingError as error:
        return replace(found, status="refused", reason=str(error))
    except Exception as error:  # only a PackingError is a refusal
        return replace(found, status="WRONG", reason=f"{type(error).__name__}: {error}")
    route = route_of(model)
    assert route is not None
    found = replace(found, by_length=getattr(route.facts.proven.get("padded batch"), "by_length", False))
    found = replace(found, difference=max(differences), gradient=max(relative))
    return found if max(found.difference, found.gradient) <= EXACT else replace(found, status="WRONG")


def _of_two_texts(found: MeasuredPictures, model: PreTrainedModel) -> MeasuredPictures:
    """Return the reason why an encoder-decoder is refused, which gets an encoder's and a decoder's text."""
    ids = torch.tensor([[9, 10, 11, 12], [13, 14, 0, 0]])
    try:
        patch_model(model, padded=True)
        model(input_ids=ids, attention_mask=(ids != 0).long(), decoder_input_ids=ids)
    except PackingError as error:
        return replace(found, status="refused", reason=str(error))
    except Exception as error:  # only a PackingError is a refusal
        return replace(found, status="WRONG", reason=f"{type(error).__name__}: {error}")
    return replace(found, status="WRONG", reason="a padded batch of two texts was not refused")


@contextmanager
def _tokens_of_backbone(model: PreTrainedModel) -> Iterator[list[int]]:
    """Context manager: within the block, the number of tokens in each call of the first text layer is recorded."""
    layers = next(each for each in model.get_decoder().modules() if isinstance(each, nn.ModuleList))
    counts: list[int] = []

    def count(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = args[0] if args else kwargs["hidden_states"]
        counts.append(states.shape[0] * states.shape[1])

    handle = layers[0].register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield counts
    finally:
        handle.remove()


def _check_effect(model: PreTrainedModel, document: Document, logits: Tensor) -> None:
    """Raise ValueError if other pictures do not change the logits."""
    changed = {name: -value if value.is_floating_point() else value for name, value in document.pictures.items()}
    with torch.no_grad():
        (other,) = _rows(copy.deepcopy(model), [replace(document, pictures=changed)], "right")
    if not _largest([other], [logits]) > _LEAST_EFFECT:
        raise ValueError("the pictures do not change the logits")


def _rows(model: PreTrainedModel, documents: list[Document], batch: Batch) -> list[Tensor]:
    """Run a model on a padded batch, and return the logits of each document without padding."""
    inputs, places = batch_of(model, documents, "left" if batch == "left" else "right", 3 * (batch == "one row"))
    logits = model(**inputs, use_cache=False).logits
    return [logits[number, place] for number, place in enumerate(places)]


def _alone(model: PreTrainedModel, documents: list[Document]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Return the logits of each document alone, and its gradients by parameter."""
    logits, gradients = [], []
    for number, document in enumerate(documents):
        own = copy.deepcopy(model)  # since some models keep positions from earlier calls
        logits += _rows(own, [document], "right")
        torch.autograd.backward(_score(logits[-1:], number))
        gradients.append(_gradients_of(own))
    return [each.detach() for each in logits], gradients


def _score(logits: list[Tensor], first: int = 0) -> Tensor:
    """Return a weighted sum of logits, with the same weights for the document of each number."""
    total = torch.zeros((), dtype=torch.float64)
    for number, each in enumerate(logits, first):
        weights = torch.randn(each.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        total = total + (each * weights).sum()
    return total


def _gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(each) if each.grad is None else each.grad.clone()
        for name, each in model.named_parameters()
    }


def _largest(some: list[Tensor], others: list[Tensor]) -> float:
    pairs = list(zip(some, others, strict=True))
    if any(one.shape != other.shape for one, other in pairs):
        return float("inf")
    return max(float((one - other).detach().abs().max()) for one, other in pairs)
