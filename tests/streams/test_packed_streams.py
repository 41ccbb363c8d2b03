"""The rows of packed streams: what they hold, and that they depend on the documents and the strategy alone."""

from itertools import chain

import datasets
import pyarrow as pa
import pytest
from any_strategy import any_strategy, few_examples
from datasets import IterableDataset
from document_streams import make_documents, names_in, stream_of, tokens_in
from hypothesis import given
from hypothesis import strategies as st
from literal_stream import literal_rows

import hf_packing as hfp

pytestmark = pytest.mark.filterwarnings("ignore:pack (skips|drops|leaves|applies|reads):UserWarning")

short_documents = st.lists(st.lists(st.integers(1, 99), max_size=15), max_size=40)


def examples_of(documents):
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int64"))})
    return IterableDataset.from_generator(
        lambda: ({"input_ids": document} for document in documents), features=features
    )


@few_examples
@given(short_documents, any_strategy(), st.integers(1, 5), st.integers(1, 9))
def test_rows_are_those_of_the_literal_packer_and_logical_streams_have_its_tokens(
    documents, strategy, window_packs, rows_in_table
):
    expected = literal_rows(documents, strategy, window_packs)
    for stream in (stream_of(documents, rows_in_table), examples_of(documents)):
        assert list(hfp.pack(stream, strategy, window_packs=window_packs)) == expected
    for streams in (1, 3):
        rows = list(hfp.pack(stream_of(documents, rows_in_table), strategy, window_packs=window_packs, streams=streams))
        assert sorted(chain(*(row["input_ids"] for row in rows))) == sorted(
            chain(*(row["input_ids"] for row in expected))
        )
        assert all(sum(row["seq_lengths"]) == len(row["input_ids"]) > 0 for row in rows)


@few_examples
@given(short_documents, st.integers(1, 20), st.integers(1, 6))
def test_strategies_that_fill_one_pack_after_the_other_pack_a_stream_like_a_dataset(documents, length, window_packs):
    for strategy in (hfp.FixedLength(length, seed=None), hfp.FirstCome(length, order="dataset", seed=None)):
        whole = strategy({"input_ids": documents}) if documents else {"input_ids": []}
        packed = list(hfp.pack(stream_of(documents), strategy, window_packs=window_packs))
        assert [row["input_ids"] for row in packed] == whole["input_ids"]


def test_other_columns_go_along():
    documents = make_documents(30)
    mask = [[k % 2 for k, _ in enumerate(document)] for document in documents]
    weights = [[k / 2 for k, _ in enumerate(document)] for document in documents]
    columns = {"completion_mask": mask, "weights": weights, "attention_mask": [[1] * len(d) for d in documents]}
    stream = stream_of(documents, **columns, text=["x"] * 30)
    with pytest.warns(UserWarning, match="pack ") as warned:
        packed = hfp.pack(stream, hfp.BestFit(16), window_packs=2)
    assert [str(each.message) for each in warned] == [
        "pack applies completion_mask to labels: tokens with a 0 are not trained on",
        "pack leaves out columns without one number for each token: 'text' (string)",
    ]
    assert list(packed.features) == ["input_ids", "labels", "weights", "position_ids", "seq_lengths"]
    whole = hfp.pack(datasets.Dataset.from_dict({"input_ids": documents, **columns}), hfp.BestFit(16))
    assert packed.features == whole.features
    rows = list(packed)
    trained = sum(label != -100 for row in rows for label in row["labels"])
    assert 0 < trained <= sum(map(sum, mask))
    assert sum(weight for row in rows for weight in row["weights"]) == sum(map(sum, weights))


@pytest.mark.parametrize("streams", [None, 1, 5])
def test_losses_are_counted(streams):
    documents = [*make_documents(40), [], []]
    packed = hfp.pack(stream_of(documents), hfp.BestFit(16, overflow="drop"), window_packs=3, streams=streams)
    with pytest.warns(UserWarning, match="pack ") as warned:
        rows = list(packed)
    total, kept = sum(map(len, documents)), tokens_in(rows)
    assert 0 < kept < total
    said = [str(each.message) for each in warned]
    assert any(each.startswith(f"pack drops {total - kept:,} of {total:,} tokens of a stream") for each in said)
    assert "pack skips 2 documents without a token" in said
    assert len(said) == 2


def test_epochs_differ_and_come_again():
    packed = hfp.pack(stream_of(make_documents(60)), hfp.BestFit(16), window_packs=3)
    epochs = []
    for epoch in (0, 1, 2, 0, 1):
        packed.set_epoch(epoch)
        epochs.append(list(packed))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[3:] == epochs[:2]
    assert sorted(names_in(epochs[0])) == sorted(names_in(epochs[1])) == list(range(60))


def test_take_skip_and_map_after_packing():
    packed = hfp.pack(stream_of(make_documents(60)), hfp.BestFit(16), window_packs=3)
    rows = list(packed)
    assert list(packed.take(5)) == rows[:5]
    assert list(packed.skip(5)) == rows[5:]
    mapped = packed.map(lambda row: {"tokens": len(row["input_ids"])})
    assert [row["tokens"] for row in mapped] == [len(row["input_ids"]) for row in rows]


def test_a_dict_of_streams():
    streams = datasets.IterableDatasetDict(train=stream_of(make_documents(30)), test=stream_of(make_documents(5)))
    packed = hfp.pack(streams, hfp.BestFit(16))
    assert sorted(names_in(packed["train"])) == list(range(30))
    assert sorted(names_in(packed["test"])) == list(range(5))


def test_types_that_were_cast_are_the_types_that_are_packed():
    stream = stream_of([[1, 2], [3]], weights=pa.array([[1, 2], [3]])).cast_column(
        "weights", datasets.List(datasets.Value("float32"))
    )
    packed = hfp.pack(stream, hfp.BestFit(4))
    assert packed.features["weights"] == datasets.List(datasets.Value("float32"))
    assert sorted(next(iter(packed))["weights"]) == [1.0, 2.0, 3.0]
