"""Sizes without reading a token, and rows as a sampler asks for them."""

import re

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator

import hf_packing as hfp
from hf_packing.errors import PackingError
from hf_packing.sampling.rows import SampledRows
from hf_packing.sampling.sampler import RankBatchSampler
from hf_packing.sampling.sizes import sizes_of

DOCUMENTS = [[5, 6, 7], [8], [], [9, 10, 11, 12, 13]]


@pytest.fixture
def documents():
    return datasets.Dataset.from_dict({"input_ids": DOCUMENTS, "name": list("abcd")})


class Plain(torch.utils.data.Dataset):
    """Map-style, with nothing but what torch asks for."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def test_sizes_of_documents(documents):
    sizes = sizes_of(documents)
    assert sizes.tokens.tolist() == [3, 1, 0, 5]
    assert sizes.squares.tolist() == [9, 1, 0, 25]
    assert sizes.segments.tolist() == [1, 1, 0, 1]
    assert not sizes.packed


@pytest.mark.parametrize("change", [lambda d: d, lambda d: d.select([1, 0]), lambda d: d.shuffle(seed=1)])
@pytest.mark.parametrize("strategy", [hfp.BestFit(4, seed=None), hfp.Bucket((4, 8), seed=1)])
def test_sizes_of_packed_rows(documents, strategy, change):
    with pytest.warns(UserWarning, match="skips 1 document without a token"):
        packed = change(hfp.pack(documents.remove_columns("name"), strategy))
    sizes = sizes_of(packed)
    rows = packed.with_format(None)["seq_lengths"][:]
    assert sizes.tokens.tolist() == [sum(row) for row in rows]
    assert sizes.squares.tolist() == [sum(length**2 for length in row) for row in rows]
    assert sizes.segments.tolist() == [len(row) for row in rows]
    assert sizes.packed
    assert (sizes.bucket is None) == (strategy == hfp.BestFit(4, seed=None))
    if sizes.bucket is not None:
        assert sizes.bucket.tolist() == packed["bucket"][:]


def test_other_map_style_datasets_are_read_once(documents):
    plain = Plain([{"input_ids": row} for row in DOCUMENTS])
    assert sizes_of(plain).tokens.tolist() == sizes_of(documents).tokens.tolist()
    transformed = documents.with_transform(lambda rows: {"input_ids": [row * 2 for row in rows["input_ids"]]})
    assert sizes_of(transformed).tokens.tolist() == [6, 2, 0, 10]
    packed = Plain([{"input_ids": [1, 2, 3], "seq_lengths": [2, 1], "bucket": 4}])
    assert sizes_of(packed).squares.tolist() == [5]
    assert sizes_of(packed).bucket.tolist() == [4]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"text": ["a"]}, "expected a column 'seq_lengths' or 'input_ids', got columns text"),
        ({"input_ids": [[1]], "position_ids": [[0]]}, "'seq_lengths' beside 'position_ids'"),
        ({"input_ids": [[1]], "seq_idx": [[0]]}, "'seq_lengths' beside 'seq_idx'"),
        ({"input_ids": [[1]], "cu_seq_lens_q": [[0, 1]]}, "'seq_lengths' beside 'cu_seq_lens_q'"),
        ({"input_ids": ["text"]}, "column 'input_ids': expected lists of integers, got string"),
        ({"seq_lengths": [3]}, "column 'seq_lengths': expected lists of integers, got int64"),
        ({"seq_lengths": [[1.5]]}, "column 'seq_lengths': expected lists of integers, got list<item: double>"),
        ({"seq_lengths": [[3], [-2]], "input_ids": [[1] * 3] * 2}, "add up to the 3 tokens of row 1, got [-2]"),
        ({"seq_lengths": [[3], [2, 2]], "input_ids": [[1] * 3] * 2}, "add up to the 3 tokens of row 1, got [2, 2]"),
        ({"seq_lengths": [[3]], "bucket": [4.0]}, "column 'bucket': expected an integer in every row, got double"),
        ({"seq_lengths": [[3], [2]], "bucket": [4, None]}, "column 'bucket': expected an integer in every row"),
    ],
)
def test_datasets_without_lengths(rows, message):
    with pytest.raises(PackingError, match=re.escape(message)):
        sizes_of(datasets.Dataset.from_dict(rows))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1, 2]], "expected rows that are mappings, row 0 is a list"),
        ([{"input_ids": None}], "column 'input_ids': expected a list of integers in every row, row 0 has None"),
        (
            [{"input_ids": [1], "seq_lengths": [1]}, {"input_ids": [1]}],
            "'seq_lengths': expected in all rows or in none",
        ),
        ([{"input_ids": [1], "labels": [1]}, {"input_ids": [1]}], "'labels': expected in all rows or in none, row 1"),
        ([{"input_ids": [1], "completion_mask": [0]}, {"input_ids": [1]}], "'completion_mask': expected in all rows"),
        ([{"input_ids": [1]}, {"input_ids": [1], "assistant_masks": [0]}], "'assistant_masks': expected in all rows"),
        ([{"input_ids": torch.ones(1, 3)}], "'input_ids': expected a list of integers in every row, row 0 has shape"),
        ([{"input_ids": [[1, 2, 3]]}], "'input_ids': expected a list of integers in every row, row 0 has [[1, 2, 3]]"),
        ([{"input_ids": "text"}], "'input_ids': expected a list of integers in every row, row 0 has 'text'"),
        ([{"input_ids": [1, 2, 3], "seq_lengths": 3}], "'seq_lengths': expected a list of integers in every row"),
        ([{"input_ids": [1, 2, 3], "seq_lengths": [2, 2]}], "add up to the 3 tokens of row 0, got [2, 2]"),
        ([{"input_ids": [1, 2, 3], "seq_lengths": [1.5, 1.5]}], "'seq_lengths', row 0: expected integers, got float64"),
        ([{"seq_lengths": [3], "bucket": None}], "column 'bucket': expected an integer in every row, row 0 has None"),
    ],
)
def test_rows_without_lengths(rows, message):
    with pytest.raises(PackingError, match=re.escape(message)):
        sizes_of(Plain(rows))


def test_documents_may_have_a_bucket_that_is_none_of_ours():
    rows = [{"input_ids": [1, 2], "bucket": "news"}, {"input_ids": [3]}]
    assert sizes_of(rows).tokens.tolist() == [2, 1]
    assert sizes_of(rows).bucket is None


def test_rows_that_are_made_as_they_are_read_may_differ_in_their_tokens():
    rows = [{"input_ids": [1, 2, 3]}]
    before = sizes_of(Plain(rows)).fingerprint
    assert sizes_of(Plain([{"input_ids": [1, 9, 3]}])).fingerprint == before


@pytest.mark.parametrize("overflow", ["error", "truncate"])
@pytest.mark.parametrize("kind", [Plain, list])
@pytest.mark.parametrize("labels", [[1, 2, 3, 4], 5, None, torch.tensor(5)])
def test_labels_of_another_length(overflow, labels, kind):
    budget = hfp.TokenBudget(8 if overflow == "error" else 2, overflow=overflow)
    dataset = sampled(kind([{"input_ids": [1, 2, 3], "labels": labels}]), budget)
    with pytest.raises(PackingError, match="column 'labels': expected 3 values in row 0, as many as input_ids"):
        dataset[0]


@pytest.mark.parametrize("labels", [1, 0.5, None, "a", [[1], [2, 3]]], ids=str)
def test_labels_that_are_not_about_tokens(labels):
    rows = [{"input_ids": [5, 6], "labels": labels}] * 2
    with pytest.raises(hfp.PackingError, match="column 'labels': expected 2 values in row [01]"):
        list(hfp.prepare_dataloader(Accelerator(cpu=True), rows, hfp.TokenBudget(4)))


def test_an_iterable_dataset(documents):
    with pytest.raises(PackingError, match="expected a map-style dataset, whose length is known, got IterableDataset"):
        sizes_of(documents.to_iterable_dataset())


def test_lengths_without_tokens():
    with pytest.raises(PackingError, match="dataset: expected a column 'input_ids', got seq_lengths"):
        sampled(datasets.Dataset.from_dict({"seq_lengths": [[3]]}), hfp.TokenBudget(8))


def test_rows_with_lengths_but_no_tokens():
    rows = sampled(Plain([{"seq_lengths": [2, 1], "inputs_embeds": [[0.5]] * 3}]), hfp.TokenBudget(8))
    with pytest.raises(PackingError, match="dataset: expected a column 'input_ids', row 0 has seq_lengths"):
        rows[0]


def test_rows_that_are_read_several_at_a_time_may_come_from_a_generator():
    class Several(Plain):
        def __getitems__(self, numbers):
            return (self.rows[number] for number in numbers)

    rows = sampled(Several([{"input_ids": [1, 2]}, {"input_ids": [3]}]), hfp.TokenBudget(8))
    assert [row["input_ids"] for row in rows.__getitems__([1, 0])] == [[3], [1, 2]]


def test_an_iterable_dataset_with_a_length():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([])

        def __len__(self):
            return 3

    with pytest.raises(PackingError, match="expected a map-style dataset, whose length is known, got Stream"):
        sizes_of(Stream())


@pytest.mark.parametrize("make", [datasets.Dataset.from_list, list])
def test_datasets_are_told_apart_by_their_labels(make):
    prints = {
        sizes_of(make([{"input_ids": [1, 2], "labels": [first, 2]}] * 1000)).fingerprint for first in (1, -100, -100)
    }
    assert len(prints) == 2


@pytest.mark.parametrize("make", [datasets.Dataset.from_list, list])
@pytest.mark.parametrize("name", ["completion_mask", "assistant_masks"])
@pytest.mark.parametrize("values", [(1, 0), (True, False)])
def test_datasets_are_told_apart_by_their_loss_masks(make, name, values):
    prints = {sizes_of(make([{"input_ids": [1, 2], name: [value, value]}])).fingerprint for value in values}
    assert len(prints) == 2


def test_datasets_are_told_apart_by_their_tokens():
    one, other = ({"input_ids": [[first, 2, 3], [4, 5, 6]]} for first in (1, 9))
    prints = [sizes_of(datasets.Dataset.from_dict(rows)).fingerprint for rows in (one, other, one)]
    assert prints[0] == prints[2] != prints[1]
    packed = [hfp.pack(datasets.Dataset.from_dict(rows), hfp.BestFit(6)) for rows in (one, other)]
    assert sizes_of(packed[0]).fingerprint != sizes_of(packed[1]).fingerprint


def sampled(dataset, budget, **ranks):
    return SampledRows(dataset, RankBatchSampler(budget, sizes_of(dataset), **ranks))


def test_copies_have_nothing_to_train_on(documents):
    rows = sampled(documents, hfp.TokenBudget(8))
    row, copy = rows.__getitems__([3, ~0])
    assert row["labels"].tolist() == [9, 10, 11, 12, 13]
    assert copy["input_ids"].tolist() == [5, 6, 7]
    assert copy["labels"].tolist() == [-100] * 3
    assert rows[0]["labels"].tolist() == [5, 6, 7]


def test_labels_of_the_dataset_stay(documents):
    rows = sampled(documents.map(lambda row: {"labels": [-100] * len(row["input_ids"])}), hfp.TokenBudget(8))
    assert rows[0]["labels"].tolist() == [-100] * 3


@pytest.mark.parametrize("kind", ["arrow", "plain"])
def test_loss_masks_make_labels_where_there_are_none(documents, kind):
    masked = documents.map(lambda row: {"completion_mask": [0] + [1] * (len(row["input_ids"]) - 1)})
    dataset = masked if kind == "arrow" else Plain(list(masked))
    row = sampled(dataset, hfp.TokenBudget(8))[0]
    assert np.asarray(row["labels"]).tolist() == [-100, 6, 7]
    assert "completion_mask" not in row


def test_loss_masks_beside_labels_or_not_to_be_applied_are_for_the_collator(documents):
    masked = documents.map(lambda row: {"completion_mask": [1] * len(row["input_ids"])})
    labelled = masked.map(lambda row: {"labels": row["input_ids"]})
    assert "completion_mask" in sampled(labelled, hfp.TokenBudget(8))[0]
    sampler = RankBatchSampler(hfp.TokenBudget(8), sizes_of(masked))
    row = SampledRows(masked, sampler, apply_masks=False)[0]
    assert "labels" not in row
    assert "completion_mask" in row
    assert "completion_mask" not in SampledRows(masked, sampler, unread=["completion_mask"])[0]


def test_rows_that_change():
    rows = [{"input_ids": [1, 2, 3]}]
    dataset = sampled(Plain(rows), hfp.TokenBudget(8))
    rows[0] = {"input_ids": [1, 2]}
    with pytest.raises(PackingError, match="expected the 3 tokens that row 0 had when batches were planned, it has 2"):
        dataset[0]


@pytest.mark.parametrize("times", [0, 2])
def test_a_transform_that_returns_other_rows_than_it_is_given(documents, times):
    transformed = documents.with_transform(
        lambda rows: {"input_ids": rows["input_ids"] * (times if len(rows["input_ids"]) > 1 else 1)}
    )
    rows = sampled(transformed, hfp.TokenBudget(8))
    assert rows[0]["input_ids"] == [5, 6, 7]
    with pytest.raises(PackingError, match=f"dataset: expected 2 rows for as many numbers, got {2 * times}"):
        rows.__getitems__([0, 1])


@pytest.mark.parametrize("kind", ["arrow", "plain"])
def test_pieces_of_long_documents(documents, kind):
    dataset = documents if kind == "arrow" else Plain([{"input_ids": row, "name": 1} for row in DOCUMENTS])
    rows = sampled(dataset, hfp.TokenBudget(2, overflow="split"))
    pieces = [np.asarray(rows[index]["input_ids"]).tolist() for index in range(len(rows))]
    assert sorted(pieces) == [[5, 6], [7], [8], [9, 10], [11, 12], [13]]


@pytest.mark.parametrize("workers", [0, 2])
def test_through_a_data_loader(documents, workers):
    sampler = RankBatchSampler(hfp.TokenBudget(5), sizes_of(documents))
    loader = torch.utils.data.DataLoader(
        SampledRows(documents, sampler), batch_sampler=sampler, collate_fn=hfp.PackingCollator(), num_workers=workers
    )
    assert len(loader) == 2
    assert sorted(token for batch in loader for token in batch["input_ids"][0].tolist()) == list(range(5, 14))


def test_the_first_steps_are_skipped_without_being_read():
    class Unreadable(Plain):
        def __getitem__(self, index):
            raise AssertionError(f"row {index} was read")

    sizes = sizes_of(Plain([{"input_ids": [1, 2]}] * 1000))
    sampler = RankBatchSampler(hfp.TokenBudget(4), sizes)
    everything = list(sampler)
    sampler.first_step = 400
    assert list(sampler) == everything[400:]
    sampler.set_epoch(1)
    sampler.first_step = 0
    assert list(sampler) != everything


def test_what_decides_is_compared():
    sizes = sizes_of(Plain([{"input_ids": [1, 2]}] * 10))
    sampler = RankBatchSampler(hfp.TokenBudget(4), sizes, world_size=2)
    sampler.check_same(sampler.what_decides())
    sampler.check_same(sampler.what_decides() | {"world_size": 3}, whole_epochs=True)
    for name, value in {
        "plans": 0,
        "world_size": 3,
        "accumulation": 2,
        "dataset": "other",
        "batching": "other",
    }.items():
        with pytest.raises(PackingError, match=f"{name}: expected {value!r}, as when the checkpoint was saved"):
            sampler.check_same(sampler.what_decides() | {name: value})
