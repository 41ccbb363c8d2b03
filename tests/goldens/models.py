"""Tiny models whose weights are the same on any machine."""

import zlib

import numpy as np
import torch
from tiny_models import exact
from torch import nn
from transformers import PreTrainedModel

from tools.tiny_model import tiny_model

ARCHITECTURES = {
    "GPT-2": "gpt2",
    "Llama": "llama",
    "Qwen3": "qwen3",
    "Gemma 3 with windows": "gemma3_text",
    "GptOss with sinks": "gpt_oss",
    "DeepSeek with latents": "deepseek_v3",
    "Qwen3 with experts": "qwen3_moe",
    "Mamba 2": "mamba2",
    "Jamba": "jamba",
    "Qwen3-Next": "qwen3_next",
    "BERT": "bert",
    "ModernBERT": "modernbert",
}
"""Names -> model types of `tiny_model`; those with BERT are masked language models, others causal ones."""


def built(name: str) -> PreTrainedModel:
    """Return one of ARCHITECTURES in float64; experts run one by one, since the grouped kernel has no float64."""
    model = tiny_model(ARCHITECTURES[name], "masked" if "BERT" in name else "causal", torch.float64)
    model.set_experts_implementation("eager")
    draw(model)
    return exact(model)


def draw(model: nn.Module) -> None:
    """Draw the weights of a model with NumPy; those of norms and of the speeds of recurrent layers stay."""
    for name, parameter in model.named_parameters():
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        if name.endswith("dt_bias"):
            values = rng.random(tuple(parameter.shape)) * 3 - 4
        elif parameter.dim() >= 2 and not name.endswith("A_log"):
            values = (rng.random(tuple(parameter.shape)) - 0.5) * 4 / parameter.shape[-1] ** 0.5
        elif "sink" in name:
            values = rng.random(tuple(parameter.shape)) * 2 - 1
        else:
            continue
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(values))


def numbers(model: nn.Module, loss: torch.Tensor) -> list[float]:
    """Return the loss and, of all gradients, the norm, the norm with weights by place, and the largest."""
    loss.backward()
    gradients = [each.grad.double().flatten() for each in model.parameters() if each.grad is not None]
    model.zero_grad()
    every = torch.cat(gradients)
    by_place = every * (torch.arange(len(every)) % 7 + 1)
    return [float(loss), float(every.norm()), float(by_place.norm()), float(every.abs().max())]


def signs_like(values: torch.Tensor) -> torch.Tensor:
    return torch.cos(torch.arange(len(values), dtype=torch.float64)).sign()
