"""Sizes of rows, without reading their tokens where that is possible, and what ranks compare of their data."""

import re

import datasets
import numpy as np
import pytest
import torch
from any_strategy import few_examples
from hypothesis import given
from hypothesis import strategies as st
from trainers import Plain
from tree_rows import documents_of, labeled_documents, tree_row

import hf_packing as hfp
from hf_packing.sampling.sizes import data_facts, sizes_of
from hf_packing.trees.segments import TreeSegments


def test_documents_of_any_kind_are_read_once(documents):
    sizes = sizes_of(documents)
    assert sizes.tokens.tolist() == [3, 1, 0, 5]
    assert sizes.squared_lengths.tolist() == [9, 1, 0, 25]
    assert sizes.segments.tolist() == [1, 1, 0, 1]
    assert not sizes.packed
    plain = Plain([{"input_ids": row} for row in documents["input_ids"]])
    assert sizes_of(plain).tokens.tolist() == sizes_of(documents).tokens.tolist()
    transformed = documents.with_transform(lambda rows: {"input_ids": [row * 2 for row in rows["input_ids"]]})
    assert sizes_of(transformed).tokens.tolist() == [6, 2, 0, 10]
    packed = Plain([{"input_ids": [1, 2, 3], "seq_lengths": [2, 1], "bucket": 4}])
    assert sizes_of(packed).squared_lengths.tolist() == [5]
    assert sizes_of(packed).bucket.tolist() == [4]


@pytest.mark.parametrize("change", [lambda d: d, lambda d: d.select([1, 0]), lambda d: d.shuffle(seed=1)])
@pytest.mark.parametrize("strategy", [hfp.BestFit(4, seed=None), hfp.Bucket((4, 8), seed=1)])
def test_sizes_of_packed_rows(documents, strategy, change):
    with pytest.warns(UserWarning, match="skips 1 document without a token"):
        packed = change(hfp.pack(documents.remove_columns("name"), strategy))
    sizes = sizes_of(packed)
    rows = packed.with_format(None)["seq_lengths"][:]
    assert sizes.tokens.tolist() == [sum(row) for row in rows]
    assert sizes.squared_lengths.tolist() == [sum(length**2 for length in row) for row in rows]
    assert sizes.segments.tolist() == [len(row) for row in rows]
    assert sizes.packed
    assert (sizes.bucket is None) == (strategy == hfp.BestFit(4, seed=None))
    if sizes.bucket is not None:
        assert sizes.bucket.tolist() == packed["bucket"][:]


def test_what_does_not_change_sizes():
    rows = [{"input_ids": [1, 2], "bucket": "news"}, {"input_ids": [3]}]
    assert sizes_of(rows).tokens.tolist() == [2, 1]
    assert sizes_of(rows).bucket is None
    rows = [{"input_ids": [1, 2, 3]}]
    before = sizes_of(Plain(rows)).fingerprint
    assert sizes_of(Plain([{"input_ids": [1, 9, 3]}])).fingerprint == before


@pytest.mark.parametrize("make", [datasets.Dataset.from_list, list])
@pytest.mark.parametrize("name", ["labels", "completion_mask", "assistant_masks"])
@pytest.mark.parametrize("values", [(1, 0, 0), (True, False, True)])
def test_datasets_are_told_apart_by_their_labels_and_loss_masks(make, name, values):
    prints = {sizes_of(make([{"input_ids": [1, 2], name: [value, value]}] * 1000)).fingerprint for value in values}
    assert len(prints) == 2


def test_datasets_are_told_apart_by_their_tokens():
    one, other = ({"input_ids": [[first, 2, 3], [4, 5, 6]]} for first in (1, 9))
    prints = [sizes_of(datasets.Dataset.from_dict(rows)).fingerprint for rows in (one, other, one)]
    assert prints[0] == prints[2] != prints[1]
    packed = [hfp.pack(datasets.Dataset.from_dict(rows), hfp.BestFit(6)) for rows in (one, other)]
    assert sizes_of(packed[0]).fingerprint != sizes_of(packed[1]).fingerprint


@few_examples
@given(st.lists(labeled_documents(), min_size=1, max_size=3))
def test_sizes_of_trees_are_those_of_the_documents(rows):
    rows = [tree_row(*documents)[0] for documents in rows]
    for made in (datasets.Dataset.from_dict({name: [row[name] for row in rows] for name in rows[0]}), Plain(rows)):
        sizes = sizes_of(made)
        assert sizes.tokens.tolist() == [len(row["tree_input_ids"]) for row in rows]
        assert sizes.segments.tolist() == [len(row["ends"]) for row in rows]
        for row, work in zip(rows, sizes.squared_lengths, strict=True):
            position = TreeSegments(tuple(row["segment_lengths"]), tuple(row["parents"])).position_ids
            own = sum(np.square(row["segment_lengths"]))  # tokens of a segment attend to each other, and to those above
            above = 2 * sum(position - np.concatenate([np.arange(length) for length in row["segment_lengths"]]))
            assert work == own + above
        assert sizes.trees.raw_tokens == sum(len(tokens) for row in rows for tokens, *_ in documents_of(row))
        assert (sizes.trees.unique_tokens, sizes.trees.documents) == (sizes.tokens.sum(), sizes.segments.sum())


@pytest.mark.parametrize("share_prefixes", [False, 2])
def test_lazy_packs_and_trees_have_the_buckets_of_stored_ones(share_prefixes):
    rows = datasets.Dataset.from_dict({"input_ids": [[5, 6, 7, *range(n)] for n in range(1, 9)]})
    stored, lazy = (
        sizes_of(
            hfp.pack(rows, hfp.Bucket((12, 24), padding_threshold=1), share_prefixes=share_prefixes, lazy=lazy)
        ).bucket
        for lazy in (False, True)
    )
    assert stored.tolist() == lazy.tolist()
    assert set(stored.tolist()) <= {12, 24}


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
    for own, others in zip(*(data_facts(data, sizes_of(data)) for data in (one, other)), strict=True):
        if own and others and own != others:
            return re.sub("digest .*", "digest", f"rank 0 has {own}, but rank 1 has {others}")
    return None


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
