"""Measure, for models of each architecture that sees pictures, how the outputs and gradients of the rows of a padded
batch of texts and pictures differ from those of each row alone."""

import copy
import inspect
import warnings
from contextlib import contextmanager
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_packing.attention.patch import patch_model
from hf_packing.attention.route import route_of
from hf_packing.errors import PackingError
from tools.survey.heads import EXACT
from tools.survey.picture_inputs import Document, batch_of, make_documents, picture_model


@dataclass(frozen=True)
class MeasuredPictures:
    name: str
    status: Literal["exact", "refused", "WRONG", "cannot run alone", "not built"] = "exact"
    right: float = float("nan")
    left: float = float("nan")
    stock_right: float = float("nan")
    stock_left: float = float("nan")
    backbone: str = ""
    by_length: bool = False
    seen: str = ""
    reason: str = ""


def measure_pictures(name: str) -> MeasuredPictures:
    torch.set_num_threads(1)
    found = MeasuredPictures(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = picture_model(name)
        except Exception as error:
            return replace(found, status="not built", reason=f"{type(error).__name__}: {error}")
        try:
            documents = make_documents(model)
            alone, gradients = _alone(model, documents)
        except Exception as error:
            return replace(found, status="cannot run alone", reason=f"{type(error).__name__}: {error}")
        stock = {side: _stock(model, documents, alone, side) for side in ("right", "left")}
        found = replace(found, stock_right=stock["right"], stock_left=stock["left"])
        return _patched(found, model, documents, alone, gradients)


def _stock(model, documents, alone, side):
    try:
        with torch.no_grad():
            return max(float((a-b).abs().max()) for a,b in zip(_padded(copy.deepcopy(model), documents, side), alone))
    except Exception as e:
        return float("nan")


def _patched(found, model, documents, alone, gradients):
    try:
        patch_model(model)
    except PackingError as error:
        return replace(found, status="refused", reason="patch: " + str(error))
    total = sum(len(d.tokens) for d in documents)
    for side in ("right", "left"):
        try:
            with torch.no_grad():
                _padded(model, documents, side)
            with _seen(model) as counts:
                logits = _padded(model, documents, side)
            seen = sum(counts)
            model.zero_grad()
            _score(logits).backward()
        except PackingError as error:
            return replace(found, status="refused", reason=f"{side}: {error}")
        except Exception as error:
            return replace(found, status="WRONG", reason=f"{side}: {type(error).__name__}: {error}")
        un = route_of(model).unpadding
        own = _gradients_of(model)
        d = max(float((a - b).abs().max()) for a, b in zip(logits, alone, strict=True))
        scale = max(float(g.abs().max()) for g in gradients.values())
        g = max(float((own[n] - gradients[n]).abs().max()) for n in gradients) / scale
        v = [n for n, x in gradients.items() if ("vis" in n or "image" in n) and x.any()]
        found = replace(found, **{side: max(d, g)}, backbone=un.backbone, by_length=un.by_length, seen=f"{seen}/{total} vis={len(v)}")
        if seen != total or not max(d, g) <= EXACT:
            return replace(found, status="WRONG", reason=f"logits {d:.1e} gradients {g:.1e}")
    return found


@contextmanager
def _seen(model: PreTrainedModel) -> Iterator[list[int]]:
    decoder = model.get_decoder()
    layer = next(m for m in decoder.modules() if isinstance(m, nn.ModuleList))[0]
    counts = []
    def hook(module, args, kwargs):
        x = args[0] if args else kwargs["hidden_states"]
        counts.append(x.shape[0] * x.shape[1])
    h = layer.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield counts
    finally:
        h.remove()


def _call(model, documents, side):
    batch, places = batch_of(model, documents, side)
    taken = inspect.signature(type(model).forward).parameters
    return model(**batch, use_cache=False).logits, places


def _padded(model, documents, side):
    logits, places = _call(model, documents, side)
    return [logits[number, place] for number, place in enumerate(places)]


def _alone(model, documents):
    logits, gradients = [], {}
    for number, document in enumerate(documents):
        own = copy.deepcopy(model)
        logits.append(_padded(own, [document], "right")[0])
        _score([logits[-1]], number).backward()
        for name, each in _gradients_of(own).items():
            gradients[name] = gradients.get(name, 0) + each
    return [each.detach() for each in logits], gradients


def _gradients_of(model):
    return {name: torch.zeros_like(each) if each.grad is None else each.grad.clone() for name, each in model.named_parameters()}


def _score(logits, first=0):
    total = torch.zeros((), dtype=torch.float64)
    for number, each in enumerate(logits, first):
        weights = torch.randn(each.shape, generator=torch.Generator().manual_seed(number)).double()
        total = total + (each * weights).sum()
    return total
