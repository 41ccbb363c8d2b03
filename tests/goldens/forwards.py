"""What patched models compute for packed rows, padded batches, trees and fixed shapes: logits, losses, gradients."""

from pathlib import Path

import datasets
import numpy as np
import torch
from goldens.digests import Cases
from goldens.inputs import spread
from goldens.models import ARCHITECTURES, built, numbers, signs_like
from transformers import PreTrainedModel

import hf_packing as hfp

_LEFT_AND_RIGHT = ("left", "right")


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
    return batches | {f"padded on the {side}": _padded(rows[1:], side) for side in _LEFT_AND_RIGHT}


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
