"""Logits of any model, and how far apart two of them are."""

import math
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_packing.attention.nested import LARGEST
from hf_packing.errors import ModelNotSupportedError

SUPPORTED = (
    "causal and masked language models are supported, as AutoModelForCausalLM and AutoModelForMaskedLM load them; "
    "train others, such as classifiers and reward models, on padded batches without hf_packing"
)
"""What to do with other models."""


class NoLanguageModelError(ModelNotSupportedError):
    """A model whose output is not about tokens."""


def what_is_missing(model: PreTrainedModel) -> str:
    """Why a model that cannot be called with tokens alone may be none that is supported; empty where it may be one."""
    if model.config.is_encoder_decoder:
        return f"; {type(model).__name__} is an encoder-decoder, which takes two texts: {SUPPORTED}"
    with suppress(Exception):  # of a stranger's model
        if model.get_output_embeddings() is None:
            return f"; {type(model).__name__} has no head for a vocabulary: {SUPPORTED}"
    return ""


def logits_of(model: PreTrainedModel, output: Any) -> Tensor:
    """[rows, tokens, vocabulary], at least float32.

    Raises:
        NoLanguageModelError: there are none.
    """
    logits = getattr(output, "logits", None)
    if logits is None:
        logits = getattr(output, "prediction_logits", None)
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        found = f"those of shape {list(logits.shape)}" if isinstance(logits, Tensor) else "none"
        name = type(model).__name__
        raise NoLanguageModelError(
            f"model: expected logits of shape [rows, tokens, vocabulary], {name} has {found}; {SUPPORTED}"
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
