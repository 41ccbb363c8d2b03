"""What patched models compute for packed rows, padded batches, trees and fixed shapes: logits, losses, gradients."""

import zlib
from pathlib import Path

import datasets
import numpy as np
import torch
from goldens.inputs import Cases, spread
from tiny_models import exact
from torch import nn
from transformers import PreTrainedModel

import hf_packing as hfp
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


def computed(_: Path) -> Cases:
    """The route of each architecture, and numbers of the logits and gradients of each kind of batch."""
    found: Cases = {}
    for name in ARCHITECTURES:
        model = hfp.patch_model(built(name), padded=True, trees="BERT" not in name)
        rows = _documents(masked="BERT" in name)
        for kind, batch in _batches(rows).items():
            found[f"{name}, {kind}"] = _numbers_of(model, batch, sum(len(row["input_ids"]) for row in rows))
        if "BERT" not in name:
            found[f"{name}, trees"] = _of_trees(model)
        route = hfp.check_isolation(model).route
        found[f"{name}, route"] = f"{route.name} {route.modules}"
    return found


def _documents(masked: bool) -> list[dict[str, list[int]]]:
    rng = np.random.default_rng(3)
    rows = []
    for length in [1, 40, *np.minimum(spread(rng, 7, 5), 40)]:
        ids = rng.integers(8, 120, length)
        labels = np.where(rng.random(length) < 0.7, rng.integers(8, 120, length) if masked else ids, -100)
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return rows


def _batches(rows: list[dict[str, list[int]]]) -> dict[str, dict[str, torch.Tensor]]:
    tokens = sum(len(row["input_ids"]) for row in rows)
    fixed = hfp.PackingCollator(tokens=tokens + 13, max_segments=len(rows) + 4, keep_first_labels=True)
    batches = {
        "packed": dict(hfp.PackingCollator(keep_first_labels=True)(rows)),
        "fixed shapes": dict(fixed(rows)),
        "one document": dict(hfp.PackingCollator(keep_first_labels=True)(rows[1:2])),
    }
    return batches | {f"padded on the {side}": _padded(rows[1:], side) for side in ("left", "right")}


def _padded(rows: list[dict[str, list[int]]], side: str) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows) + 2
    batch = {name: torch.full((len(rows), longest), fill) for name, fill in [("input_ids", 0), ("labels", -100)]}
    batch["attention_mask"] = torch.zeros_like(batch["input_ids"])
    for number, row in enumerate(rows):
        length = len(row["input_ids"])
        place = slice(0, length) if side == "right" else slice(longest - length, longest)
        batch["attention_mask"][number, place] = 1
        for name, values in row.items():
            batch[name][number, place] = torch.tensor(values)
    return batch


def _numbers_of(model: PreTrainedModel, batch: dict[str, torch.Tensor], tokens: int) -> list[float]:
    with torch.no_grad():
        logits = model.eval()(**batch).logits
    real = batch["attention_mask"].bool() if "attention_mask" in batch else torch.ones_like(batch["input_ids"]).bool()
    values = logits[real][:tokens].double().flatten()
    return [float(values @ signs_like(values)), float(values.norm()), *numbers(model, model.train()(**batch).loss)]


def _of_trees(model: PreTrainedModel) -> list[float]:
    prompt = list(range(20, 31))
    answers = [[40, 41, 42, 43], [40, 41, 50], [60], [61, 62, 63, 64, 65, 66]]
    rows = [{"input_ids": prompt + answer, "labels": [-100] * 11 + answer} for answer in answers]
    rows.append({"input_ids": [70, 71, 72], "labels": [70, 71, 72]})
    packed = hfp.pack(datasets.Dataset.from_list(rows), hfp.BestFit(64), share_prefixes=2)
    batch = hfp.PackingCollator()(list(packed))
    return numbers(model, hfp.compute_loss(model.train(), batch))
