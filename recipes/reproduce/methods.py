"""The eight ways of arXiv 2407.09105 to make batches of documents, as steps of training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import datasets
import numpy as np
import torch
from transformers.trainer_pt_utils import get_length_grouped_indices

import hf_packing as hfp
from hf_packing.columns import IGNORED_LABEL

BATCH = 4
"""Rows per step: documents, or packs."""
Row = dict[str, Any]
Batch = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """How documents become the batches of an epoch."""

    name: str
    rows: Callable[[datasets.Dataset, int], Sequence[Row]]
    """Turns documents, and the number of tokens a row may hold, into rows in training order."""
    padded: bool = False
    """Whether a batch is padded to its longest row, for an unpatched model; else it is flat, for a patched one."""


def in_random_order(documents: datasets.Dataset, _: int) -> Sequence[Row]:
    return list(documents.shuffle(seed=0))


def grouped_by_length(documents: datasets.Dataset, _: int) -> Sequence[Row]:
    """Group as Trainer does: sorted by length within blocks of 50 batches."""
    lengths = list(map(len, documents["input_ids"]))
    order = get_length_grouped_indices(lengths, BATCH, generator=torch.Generator().manual_seed(0))
    return list(documents.select(order))


def packed(strategy: Callable[[int], Any]) -> Callable[[datasets.Dataset, int], Sequence[Row]]:
    return lambda documents, row_length: list(hfp.pack(documents, strategy(row_length)))


def fixed_length(row_length: int) -> hfp.FixedLength:
    """Keep documents in their order, which is random already."""
    return hfp.FixedLength(row_length, seed=None)


def without_position_ids(documents: datasets.Dataset, row_length: int) -> Sequence[Row]:
    """Make rows that look like one document to the model: attention and positions continue across the borders."""
    return [{"input_ids": row["input_ids"]} for row in packed(fixed_length)(documents, row_length)]


PADDING, MINI_BATCH, WITHOUT, WITH = "random + padding", "minibatch + PosID", "fixed length", "fixed length + PosID"
MULTIPACK, SORTED, RANDOM = "multipack + PosID", "sorted + PosID", "random packing + PosID"
METHODS = (
    Method(PADDING, in_random_order, padded=True),
    Method("group by length + padding", grouped_by_length, padded=True),
    Method(MINI_BATCH, in_random_order),
    Method(WITHOUT, without_position_ids),
    Method(WITH, packed(fixed_length)),
    Method(MULTIPACK, packed(hfp.Multipack)),
    Method(SORTED, packed(lambda row_length: hfp.FirstCome(row_length, order="longest_first"))),
    Method(RANDOM, packed(hfp.FirstCome)),
)
BY_NAME = {method.name: method for method in METHODS}


def steps_of(method: Method, documents: datasets.Dataset, row_length: int, batch: int = BATCH) -> list[Sequence[Row]]:
    """Cut the epoch into steps; the last one may be smaller."""
    rows = method.rows(documents, row_length)
    return [rows[begin : begin + batch] for begin in range(0, len(rows), batch)]


def in_as_many_steps(steps: Sequence[Sequence[Row]], number: int) -> list[Sequence[Row]]:
    """Cut the same rows, in the same order, into this number of steps, as evenly as possible."""
    rows = [row for step in steps for row in step]
    ends = np.linspace(0, len(rows), number + 1).round().astype(int).tolist()
    return [rows[begin:end] for begin, end in pairwise(ends)]


def padded_batch(rows: Sequence[Row]) -> Batch:
    """Pad rows with zeros to the longest one."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids, mask = np.zeros((len(rows), longest), dtype=np.int64), np.zeros((len(rows), longest), dtype=np.int64)
    for place, row in enumerate(rows):
        ids[place, : len(row["input_ids"])] = row["input_ids"]
        mask[place, : len(row["input_ids"])] = 1
    labels = np.where(mask, ids, IGNORED_LABEL)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {name: torch.from_numpy(values) for name, values in batch.items()}


def batch_of(method: Method, rows: Sequence[Row]) -> Batch:
    return padded_batch(rows) if method.padded else hfp.PackingCollator()(rows)
