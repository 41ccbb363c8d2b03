"""Batches of PackingCollator, and those that `prepare_dataloader` yields."""

from pathlib import Path

from accelerate import Accelerator
from goldens.digests import digest, digest_of_batch
from goldens.inputs import LONGEST, dataset, labeled, related

import hf_packing as hfp


def collated(_: Path) -> dict[str, str]:
    """Batches of packed rows, documents and trees, of fixed shapes, and with segments cut by a length schedule."""
    documents = labeled().filter(lambda row: len(row["input_ids"]) > 0)
    strategy = hfp.BestFit(LONGEST)
    kinds = {
        "packs": hfp.pack(documents, strategy),
        "packs of tokens": hfp.pack(dataset(), strategy),
        "packs without position_ids": hfp.pack(documents, strategy, position_ids=False),
        "documents": documents.remove_columns("name"),
        "documents without labels": dataset(longest=LONGEST).filter(lambda row: len(row["input_ids"]) > 0),
        "buckets": hfp.pack(documents, hfp.Bucket((16, 32, LONGEST))),
    }
    collators = {
        "flat": hfp.PackingCollator(),
        "with first labels": hfp.PackingCollator(keep_first_labels=True),
        "of fixed shapes": hfp.PackingCollator(tokens=420, max_segments=90),
    }
    found = {}
    for name, rows in kinds.items():
        for shape, collate in collators.items():
            found[f"{name}, {shape}"] = digest([digest_of_batch(collate(list(rows.select(of)))) for of in _groups()])
    trees = hfp.pack(related(), hfp.BestFit(80), share_prefixes=4)
    found["trees"] = digest([digest_of_batch(hfp.PackingCollator()(list(trees.select(of)))) for of in _groups()])
    plain = dataset(longest=LONGEST)
    cut = hfp.TokenBudget(128, length_schedule=hfp.LengthSchedule(8, 10))
    loaders = {
        "loader of documents": (plain, hfp.TokenBudget(128), {}),
        "loader of documents, split": (dataset(), hfp.TokenBudget(50, overflow="split"), {}),
        "loader of packs": (kinds["packs"], hfp.TokenBudget(2 * LONGEST), {}),
        "loader of buckets": (kinds["buckets"], hfp.BucketBatches(2 * LONGEST), {}),
        "loader of fixed shapes": (plain, hfp.TokenBudget(128), {"tokens": 128, "max_segments": 40}),
        "loader of trees": (trees, hfp.TokenBudget(160), {}),
        "loader of documents that share prefixes": (related(), hfp.TokenBudget(160, share_prefixes=4), {}),
        "loader with segments cut": (plain, cut, {}),
    }
    for name, (rows, batching, options) in loaders.items():
        loader = hfp.prepare_dataloader(Accelerator(cpu=True), rows, batching, **options)
        made = [digest_of_batch(batch) for batch in loader]
        found[name] = f"{len(made)} batches {digest(made)}"
    return found


def _groups() -> list[list[int]]:
    """Row numbers of batches."""
    return [[0], [1, 2, 3], [5, 4, 4]]
