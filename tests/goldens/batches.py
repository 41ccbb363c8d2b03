"""Batches of PackingCollator and of `prepare_dataloader`, and EpochPlans: the micro-batches of every rank."""

import itertools
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from goldens.inputs import LONGEST, dataset, digest, digest_of_batch, labeled, related
from goldens.inside import epochs_of, trees_of

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
    return [[0], [1, 2, 3], [5, 4, 4]]


def planned(_: Path) -> dict[str, str]:
    """Epochs of both batchings on packed rows, documents and trees, for several ranks and accumulations."""
    long, plain = dataset(300, 2), dataset(300, 2, longest=LONGEST)
    packs, buckets = hfp.pack(long, hfp.BestFit(LONGEST)), hfp.pack(long, hfp.Bucket((16, 32, LONGEST)))
    sharing = hfp.TokenBudget(160, share_prefixes=4)
    cases: dict[str, tuple[Any, Any]] = {
        "packs": (packs, hfp.TokenBudget(2 * LONGEST)),
        "packs, level tokens, seed 3": (packs, hfp.TokenBudget(2 * LONGEST, balance="tokens", seed=3)),
        "packs, at most 20 documents": (packs, hfp.TokenBudget(3 * LONGEST, max_documents=20)),
        "documents": (plain, hfp.TokenBudget(128)),
        "documents, level tokens": (plain, hfp.TokenBudget(128, balance="tokens")),
        "documents, at most 4, seed 1": (plain, hfp.TokenBudget(128, max_documents=4, seed=1)),
        "documents, linear_cost 64": (plain, hfp.TokenBudget(128, linear_cost=64)),
        "documents, length schedule": (plain, hfp.TokenBudget(128, length_schedule=hfp.LengthSchedule(8, 10))),
        "long documents, split": (long, hfp.TokenBudget(50, overflow="split")),
        "long documents, truncate": (long, hfp.TokenBudget(50, overflow="truncate")),
        "long documents, drop": (long, hfp.TokenBudget(50, overflow="drop")),
        "trees in rows": (hfp.pack(related(40), hfp.BestFit(80), share_prefixes=4), hfp.TokenBudget(160)),
        "trees of documents": (trees_of(related(40), sharing), sharing),
        "buckets": (buckets, hfp.BucketBatches(2 * LONGEST)),
        "buckets, short to long": (buckets, hfp.BucketBatches(2 * LONGEST, order="short_to_long", cycles=2, seed=3)),
        "buckets, token budget": (buckets, hfp.TokenBudget(2 * LONGEST)),
        "few documents": (dataset(9, longest=20), hfp.TokenBudget(30)),
    }
    found = {}
    splits = list(itertools.product((1, 2, 8), (1, 4)))
    for name, (rows, batching) in cases.items():
        for (ranks, accumulation), plans in zip(splits, epochs_of(batching, rows, splits), strict=True):
            digests = " ".join(map(_digest, plans))
            found[f"{name}, {ranks} ranks x {accumulation}"] = f"{plans[0].num_micro_batches} micro-batches {digests}"
    return found


def _digest(plan: hfp.EpochPlan) -> str:
    return digest([plan.left_out, plan.bucket, [list(plan.micro_batches(rank)) for rank in range(plan.world_size)]])
