"""What ranks compare of their data: every difference that changes batches or their content is seen, and said."""

import re

import datasets
import numpy as np
import pytest
import torch

import hf_packing as hfp
from hf_packing.sampling.sizes import data_facts, sizes_of

ROWS = [{"input_ids": [n % 90 + 3] * (n % 7 + 1), "labels": [-100] + [n % 90 + 3] * (n % 7)} for n in range(300)]


class Made(torch.utils.data.Dataset):
    """Rows of one length that are made as they are read."""

    def __init__(self, first=0, noise=False):
        self.first, self.noise = first, noise

    def __len__(self):
        return 40

    def __getitem__(self, index):
        noise = np.random.randint(50) if self.noise else 0
        return {"input_ids": [self.first + index + noise] * 4}


def table(rows):
    return datasets.Dataset.from_list(rows)


def said(one, other):
    facts, others = (data_facts(data, sizes_of(data)) for data in (one, other))
    difference = facts.difference(others, 1)
    return None if difference is None else re.sub("digest .*", "digest", difference)


def changed(row, column, token=0):
    rows = [{name: list(values) for name, values in each.items()} for each in ROWS]
    rows[row][column][token] += 1
    return rows


def unseen(data):
    """The same through a transform that leaves nothing to compare in what it returns."""
    return data.with_transform(lambda batch: {"input_ids": [np.random.permutation(row) for row in batch["input_ids"]]})


OTHER_SIZES = "rank 0 has lengths, segments and buckets with the digest"
OTHER_CONTENT = "rank 0 has tokens and labels with the digest"


@pytest.mark.parametrize("kind", [table, list])
@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (ROWS[:299], "rank 0 has 300 rows and 1,197 tokens, but rank 1 has 299 rows and 1,191 tokens"),
        (ROWS[1:] + ROWS[:1], OTHER_SIZES),
        (changed(299, "input_ids"), OTHER_CONTENT),
        (changed(299, "labels"), OTHER_CONTENT),
        (changed(103, "labels", 1), OTHER_CONTENT),
        (ROWS, None),
    ],
)
def test_differences(kind, rows, words):
    assert said(kind(ROWS), kind(rows)) == words


def test_packed_rows_with_other_borders():
    packed = hfp.pack(table(ROWS), hfp.BestFit(8))
    assert said(packed, packed) is None
    whole = packed.map(lambda row: {"seq_lengths": [len(row["input_ids"])]})
    assert max(map(len, packed["seq_lengths"])) > 1
    assert said(packed, whole) == OTHER_SIZES


def test_rows_that_are_made_or_changed_at_random():
    assert said(Made(), Made(first=1)) == OTHER_CONTENT
    assert said(Made(), Made()) is None
    assert said(Made(noise=True), Made(noise=True)) is None
    assert data_facts(Made(noise=True), sizes_of(Made())).content == ""
    everywhere = unseen(table([{"input_ids": [token + 1 for token in row["input_ids"]]} for row in ROWS]))
    plain = unseen(table([{"input_ids": row["input_ids"]} for row in ROWS]))
    assert said(plain, everywhere) == OTHER_CONTENT
    assert said(plain, plain) is None
