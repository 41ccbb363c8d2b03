"""Logits of any model, and how far apart two of them are."""

import math
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_packing.attention.nested import LARGEST
from hf_packing.errors import PackingError


def logits_of(model: PreTrainedModel, output: Any) -> Tensor:
    """[rows, tokens, vocabulary], at least float32."""
    logits = getattr(output, "logits", None)
    if logits is None:
        logits = getattr(output, "prediction_logits", None)
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        raise PackingError(
            f"model: expected logits of shape [rows, tokens, vocabulary], {type(model).__name__} has none"
        )
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def comparable(logits: Tensor) -> Tensor:
    """bool: which logits are numbers, and no stand-in for minus infinity."""
    return logits.abs() < LARGEST


def largest_difference(left: Tensor, right: Tensor) -> float:
    """Over all comparable logits; infinity where one is comparable and the other is not."""
    both = comparable(left) & comparable(right)
    if not torch.equal(comparable(left), comparable(right)):
        return math.inf
    return float((left - right)[both].abs().max()) if both.any() else 0.0


def spread(logits: Tensor) -> float:
    """Standard deviation of the comparable logits."""
    return float(logits[comparable(logits)].std())
