"""Columns that say what is trained on are packed or refused, and those of documents without a token have no type."""

import datasets
import pytest
from datasets import Dataset, IterableDataset

import hf_packing as hfp
import hf_packing.arrow.columns

STRATEGY = hfp.BestFit(8)
NOT_ABOUT_TOKENS = [[1, 0], ["a", "b"], [None, None], [[[1], [2]], [[3]]]]


def how_packed(columns):
    yield lambda: hfp.pack(Dataset.from_dict(columns), STRATEGY)
    yield lambda: Dataset.from_dict(columns).map(STRATEGY, batched=True)
    yield lambda: list(Dataset.from_dict(columns).to_iterable_dataset().map(STRATEGY, batched=True))
    yield lambda: STRATEGY(columns)


@pytest.mark.parametrize("name", ["labels", "attention_mask", "assistant_masks"])
@pytest.mark.parametrize("values", NOT_ABOUT_TOKENS, ids=str)
def test_columns_that_would_be_made_or_left_out_instead(name, values):
    for pack in how_packed({"input_ids": [[5, 6], [7]], name: values}):
        with pytest.raises(hfp.PackingError, match=f"column '{name}': expected lists of .*, one for each token, got"):
            pack()


@pytest.mark.parametrize("name", ["labels", "attention_mask", "completion_mask"])
@pytest.mark.parametrize("values", [[[1, 1], 1], [[1, 1], "a"], [[1, 1], [[1]]], [[1, 1], [2**70]]], ids=str)
def test_one_row_of_a_stream_is_not_about_tokens(name, values):
    rows = [{"input_ids": ids, name: value} for ids, value in zip([[5, 6], [7]], values, strict=True)]
    stream = IterableDataset.from_generator(lambda: iter(rows)).map(STRATEGY, batched=True)
    with pytest.raises(hfp.PackingError, match=f"column '{name}': expected lists of"):
        next(iter(stream))


def test_a_batch_of_a_stream_without_a_token():
    weights = {"input_ids": [5, 6], "weights": [0.5, 1.0], "labels": [5, 6]}
    rows = [{name: [] for name in weights}] * 2 + [weights] * 2
    stream = IterableDataset.from_generator(lambda: iter(rows)).map(STRATEGY, batched=True, batch_size=2)
    (packed,) = stream
    assert packed["weights"] == [0.5, 1.0] * 2


def test_lists_that_are_empty_beside_tokens_are_left_out():
    with pytest.warns(UserWarning, match="leaves out columns without one number for each token: 'tools'"):
        packed = hfp.pack(Dataset.from_dict({"input_ids": [[5, 6], [7]], "tools": [[], []]}), STRATEGY)
    assert "tools" not in packed.column_names


def test_a_split_without_rows_or_types():
    packed = hfp.pack(Dataset.from_dict({"input_ids": [], "labels": [], "attention_mask": []}), STRATEGY)
    assert packed.column_names == ["input_ids", "labels", "position_ids", "seq_lengths"]


@pytest.mark.parametrize("padded", [0, 1, 3])
def test_padding_is_found_block_by_block(monkeypatch, padded):
    monkeypatch.setattr(hf_packing.arrow.columns, "TOKENS_AT_ONCE", 3)
    masks = [[1, 1], [1], [], [1, 1, 1, 1]]
    masks[padded][-1] = 0
    documents = Dataset.from_dict({"input_ids": masks, "attention_mask": masks})
    with pytest.raises(hfp.PackingError, match=f"expected documents without padding, row {padded} has a 0"):
        hfp.pack(documents, STRATEGY)


LISTS = {
    "list": datasets.List(datasets.ClassLabel(names=["a", "b"])),
    "large_list": datasets.LargeList(datasets.ClassLabel(names=["a", "b"])),
    "fixed_size_list": datasets.List(datasets.ClassLabel(names=["a", "b"]), length=3),
}


@pytest.mark.parametrize("ids", LISTS)
@pytest.mark.parametrize("others", LISTS)
def test_lists_of_several_kinds(ids, others):
    tokens = datasets.Value("int64")
    input_ids = datasets.LargeList(tokens) if ids == "large_list" else datasets.List(tokens, LISTS[ids].length)
    features = datasets.Features({"input_ids": input_ids, "labels": LISTS[others], "tags": LISTS[others]})
    columns = {"input_ids": [[1, 2, 3], [4, 5, 6]], "labels": [[1, 0, 1]] * 2, "tags": [[0, 1, 1], [1, 0, 0]]}
    packed = hfp.pack(Dataset.from_dict(columns, features=features), hfp.BestFit(8))
    assert len(packed) == 1
    assert packed.features["tags"].feature == LISTS[others].feature
    assert hfp.unpack(packed)[:] == columns


def test_a_hidden_column_with_the_name_of_one_that_is_made():
    documents = Dataset.from_dict({"input_ids": [[1, 2, 3, 4], [5] * 8], "bucket": [1, 2]})
    hidden = documents.with_format(columns=["input_ids"])
    assert sorted(hfp.pack(hidden, hfp.Bucket((4, 8)))["bucket"]) == [4, 8]
