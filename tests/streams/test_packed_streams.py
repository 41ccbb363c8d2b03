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
from literal_trie import forests
from plans import packs_of

import hf_packing as hfp
from hf_packing.planning.lengths import check_lengths
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
    for streams in {1, min(max(len(documents), 1), 3)}:
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
    streams = streams and min(streams, max(len(documents), 1))
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


def literal_rows(documents, strategy, window_packs, most_windows=4) -> list[dict]:
    """Pack documents window by window; see `hf_packing.pack`."""
    left, waiting, ages, number, rows = list(documents), [], [], 0, []
    ended = False
    while not ended:
        window, age = list(waiting), list(ages)
        size = window_packs * strategy.largest_capacity
        most = max(size, min(32 * size, 2**22))
        tokens, new = sum(map(len, waiting)), 0
        while ((new < 1 or tokens < size or len(window) < 16 * window_packs) and tokens < most) or not new:
            if not left:
                ended = True
                break
            tokens, new = tokens + len(left[0]), new + len(left[0])
            window.append(left.pop(0))
            age.append(0)
        plan, is_open, all_wait = strategy.plan_window(check_lengths([len(each) for each in window]), number)
        packs = packs_of(plan)
        capacity = plan.pack_capacity.tolist()
        free = [1 - sum(length for *_, length in pack) / capacity[p] for p, pack in enumerate(packs)]
        may_wait = [p for p in range(len(packs)) if is_open[p]]
        waits: list[int] = []
        for p in sorted(may_wait, key=lambda p: -free[p]):
            few = 4 * (len(waits) + 1) <= len(packs)
            small = 4 * sum(capacity[w] for w in [*waits, p]) <= min(sum(capacity), size)
            if all_wait or (few and small):
                waits.append(p)
            else:
                break
        if not all_wait:
            waits = _send_old(packs, waits, capacity, age, most_windows)
        if ended:
            waits = []
        for p, pack in enumerate(packs):
            if p not in waits:
                rows.append(_row(window, pack, capacity[p] if strategy.has_buckets else None))
        kept = sorted(segment for p in waits for segment in packs[p])
        waiting = [window[document][start : start + length] for document, start, length in kept]
        ages = [age[document] + 1 for document, *_ in kept]
        number += 1
    return rows


def _send_old(packs, waits, capacity, age, most_windows) -> list[int]:
    """Exchange old segments for young ones of packs that go out; return the packs that still wait."""

    def room(p):
        return capacity[p] - sum(length for *_, length in packs[p])

    everywhere = [(p, k) for p in range(len(packs)) for k in range(len(packs[p]))]
    old = [(p, k) for p, k in everywhere if p in waits and age[packs[p][k][0]] >= most_windows]
    young = [(p, k) for p, k in everywhere if p not in waits and age[packs[p][k][0]] < most_windows]
    taken = set()
    waits = list(waits)
    for p, k in sorted(old, key=lambda place: -packs[place[0]][place[1]][2]):
        if p not in waits:
            continue
        length = packs[p][k][2]
        free = [(q, j, packs[q][j][2], n) for n, (q, j) in enumerate(young) if (q, j) not in taken]
        shorter = [each for each in free if each[2] <= length and length - each[2] <= room(each[0])]
        longer = [each for each in free if each[2] > length]
        if shorter:
            q, j, *_ = max(shorter, key=lambda each: (each[2], each[3]))
        elif longer and min(each[2] for each in longer) - length <= room(p):
            q, j, *_ = min(longer, key=lambda each: (each[2], each[3]))
        else:
            waits.remove(p)
            continue
        packs[p][k], packs[q][j] = packs[q][j], packs[p][k]
        taken.add((q, j))
    return waits


def _row(window, pack, bucket) -> dict:
    segments = [window[document][start : start + length] for document, start, length in pack]
    row = {
        "input_ids": [token for segment in segments for token in segment],
        "labels": [label for segment in segments for label in [-100, *segment[1:]]],
        "position_ids": [place for segment in segments for place in range(len(segment))],
        "seq_lengths": [len(segment) for segment in segments],
    }
    return row if bucket is None else {**row, "bucket": bucket}
