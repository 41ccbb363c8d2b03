"""Packed streams whose documents share prefixes within a window."""

from collections import Counter

import datasets
import numpy as np
import pytest
from any_strategy import few_examples
from datasets import Dataset
from document_streams import stream_of
from hypothesis import given
from hypothesis import strategies as st
from literal_trie import forests

import hf_packing as hfp
from hf_packing.trees.segments import TreeSegments

pytestmark = pytest.mark.filterwarnings("ignore:pack (skips|reads):UserWarning")

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


def test_a_single_window_is_packed_like_a_dataset():
    documents, strategy = alike(), hfp.BestFit(100)
    rows = list(hfp.pack(stream_of(documents), strategy, window_packs=1000, share_prefixes=True))
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int64"))})
    dataset = Dataset.from_dict({"input_ids": documents}, features=features)
    whole = hfp.pack(dataset, strategy.with_seed_for("window 0"), share_prefixes=True)
    assert rows == list(whole)
    assert sum(len(row["tree_input_ids"]) for row in rows) == sum(map(len, documents)) - 20 * 3 * 30


def test_relatives_of_a_window_share_and_some_wait():
    documents = alike(groups=200)
    packed = hfp.pack(stream_of(documents), hfp.BestFit(100), window_packs=8, share_prefixes=True)
    rows = list(packed)
    assert Counter(documents_in(rows)) == Counter(map(tuple, documents))
    raw, unique = sum(map(len, documents)), sum(len(row["tree_input_ids"]) for row in rows)
    assert raw - unique > 0.9 * 20 * 3 * 200
    assert unique > 0.9 * 100 * len(rows)
