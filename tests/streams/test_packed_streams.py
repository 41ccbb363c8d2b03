"""The rows of packed streams, with shared prefixes too, depend on the documents and the strategy alone."""

from collections import Counter
from itertools import chain

import datasets
import numpy as np
import pyarrow as pa
import pytest
from any_strategy import any_strategy, few_examples
from datasets import Dataset, IterableDataset
from document_streams import make_documents, names_in, stream_of, tokens_in
from hypothesis import given
from hypothesis import strategies as st
from literal_stream import literal_rows
from literal_trie import forests

import hf_packing as hfp
from hf_packing.trees.segments import TreeSegments

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


def test_epochs_and_parts_of_a_stream():
    packed = hfp.pack(stream_of(make_documents(60)), hfp.BestFit(16), window_packs=3)
    epochs = []
    for epoch in (0, 1, 2, 0, 1):
        packed.set_epoch(epoch)
        epochs.append(list(packed))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[3:] == epochs[:2]
    assert sorted(names_in(epochs[0])) == sorted(names_in(epochs[1])) == list(range(60))
    packed = hfp.pack(stream_of(make_documents(60)), hfp.BestFit(16), window_packs=3)
    rows = list(packed)
    assert list(packed.take(5)) == rows[:5]
    assert list(packed.skip(5)) == rows[5:]
    mapped = packed.map(lambda row: {"tokens": len(row["input_ids"])})
    assert [row["tokens"] for row in mapped] == [len(row["input_ids"]) for row in rows]


def test_dicts_and_cast_types():
    streams = datasets.IterableDatasetDict(train=stream_of(make_documents(30)), test=stream_of(make_documents(5)))
    packed = hfp.pack(streams, hfp.BestFit(16))
    assert sorted(names_in(packed["train"])) == list(range(30))
    assert sorted(names_in(packed["test"])) == list(range(5))
    stream = stream_of([[1, 2], [3]], weights=pa.array([[1, 2], [3]])).cast_column(
        "weights", datasets.List(datasets.Value("float32"))
    )
    packed = hfp.pack(stream, hfp.BestFit(4))
    assert packed.features["weights"] == datasets.List(datasets.Value("float32"))
    assert sorted(next(iter(packed))["weights"]) == [1.0, 2.0, 3.0]


STRATEGIES = [hfp.BestFit(9), hfp.FirstCome(9), hfp.Multipack(9, window=5), hfp.Bucket((5, 9), padding_threshold=1)]


def documents_in(rows):
    """The tokens of the documents of rows of trees."""
    for row in rows:
        segments = TreeSegments.from_arrays(row["segment_lengths"], row["parents"])
        for end in row["ends"]:
            yield tuple(row["tree_input_ids"][place] for place in segments.path_of(end))


def alike(groups=30, each=4, seed=0):
    """Documents in groups that begin with the same 20 tokens, one group after the other."""
    rng = np.random.default_rng(seed)
    prefixes = rng.integers(0, 1000, (groups, 20)).tolist()
    return [
        [*prefixes[group], *rng.integers(0, 1000, rng.integers(1, 15)).tolist()]
        for group in range(groups)
        for _ in range(each)
    ]


@few_examples
@given(forests(longest=9), st.sampled_from(STRATEGIES), st.integers(1, 3), st.sampled_from([None, 1, 2]))
def test_every_document_goes_out_once(documents, strategy, window_packs, streams):
    how = {"window_packs": window_packs, "streams": streams, "share_prefixes": 2}
    rows = list(hfp.pack(stream_of(documents, rows_in_table=4), strategy, **how))
    assert Counter(documents_in(rows)) == Counter(tuple(document) for document in documents if document)
    assert all(len(row["tree_input_ids"]) <= 9 for row in rows)


def test_relatives_of_a_window_share_as_in_a_dataset():
    documents, strategy = alike(), hfp.BestFit(100)
    rows = list(hfp.pack(stream_of(documents), strategy, window_packs=1000, share_prefixes=True))
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int64"))})
    dataset = Dataset.from_dict({"input_ids": documents}, features=features)
    whole = hfp.pack(dataset, strategy.with_seed_for("window 0"), share_prefixes=True)
    assert rows == list(whole)
    assert sum(len(row["tree_input_ids"]) for row in rows) == sum(map(len, documents)) - 20 * 3 * 30
    documents = alike(groups=200)
    packed = hfp.pack(stream_of(documents), hfp.BestFit(100), window_packs=8, share_prefixes=True)
    rows = list(packed)
    assert Counter(documents_in(rows)) == Counter(map(tuple, documents))
    raw, unique = sum(map(len, documents)), sum(len(row["tree_input_ids"]) for row in rows)
    assert raw - unique > 0.9 * 20 * 3 * 200
    assert unique > 0.9 * 100 * len(rows)
