"""Logical streams of one process read a shard together, and yield the rows that they would yield if each read alone."""

import pickle
from collections import Counter
from itertools import chain, islice, pairwise, zip_longest
from types import SimpleNamespace
from unittest.mock import patch

import datasets
import numpy as np
import pyarrow as pa
import pytest
from datasets.distributed import split_dataset_by_node
from datasets.iterable_dataset import ArrowExamplesIterable, ExamplesIterable
from document_streams import NAMES, keep_most, make_documents, names_in, reverse_batch
from hypothesis import given, settings
from hypothesis import strategies as st

import hf_packing as hfp
from hf_packing.planning.windows import WindowSize
from hf_packing.streams import shared_shard
from hf_packing.streams.shared_reading import SharedReading
from hf_packing.streams.shares import Part, ShareOfShards

FEATURES = datasets.Features({"input_ids": datasets.List(datasets.Value("int64"))})
FORMS = ["tables", "dicts", "filtered and mapped", "arrow map"]


def cut(documents, shards):
    """The documents in some shards of about equal size."""
    borders = np.linspace(0, len(documents), shards + 1).astype(int)
    return [documents[a:b] for a, b in pairwise(borders)]


def open_source(shards, form, rows_in_table=7):
    """A stream, and counts of how often each document was read, and each shard was opened."""
    counts = SimpleNamespace(read=Counter(), mapped=Counter(), opened=Counter())

    def note(documents, counter):
        counter.update(document[0] - NAMES for document in documents)

    def dicts(parts):
        for documents in parts:
            counts.opened[documents[0][0] - NAMES if documents else None] += 1
            for document in documents:
                note([document], counts.read)
                yield document[0], {"input_ids": document}

    def tables(parts):
        for documents in parts:
            counts.opened[documents[0][0] - NAMES if documents else None] += 1
            for start in range(0, len(documents), rows_in_table):
                block = documents[start : start + rows_in_table]
                note(block, counts.read)
                yield start, pa.table({"input_ids": pa.array(block, pa.list_(pa.int64())), "text": ["x"] * len(block)})

    def counted(batch):
        ids = batch["input_ids"].to_pylist() if isinstance(batch, pa.Table) else batch["input_ids"]
        note(ids, counts.mapped)
        return batch if isinstance(batch, pa.Table) else reverse_batch(batch)

    kind, generate = (ExamplesIterable, dicts) if form == "dicts" else (ArrowExamplesIterable, tables)
    known = FEATURES if form == "dicts" else datasets.Features({**FEATURES, "text": datasets.Value("string")})
    info = datasets.DatasetInfo(features=known)
    stream = datasets.IterableDataset(kind(generate, {"parts": shards}), info=info).select_columns(["input_ids"])
    if form == "filtered and mapped":
        stream = stream.filter(keep_most).map(counted, batched=True, batch_size=5, features=FEATURES)
    elif form == "arrow map":
        stream = stream.with_format("arrow").map(counted, batched=True, batch_size=9, features=FEATURES)
        stream = stream.with_format(None)
    return stream, counts


def reading_alone():
    return patch.object(SharedReading, "share", lambda self, share: ShareOfShards(self._examples, share))


def turns_of(packed, state=None):
    """For each logical stream, its rows and its positions after them; and the numbers of the streams, turn by turn."""
    examples = packed._ex_iterable
    examples._init_state_dict()
    if state is not None:
        examples.load_state_dict(state)
    rows, positions, order = {}, {}, []
    for turn in examples.turns():
        order.append(turn.stream)
        if turn.row is not None:
            rows.setdefault(turn.stream, []).append(turn.row.to_pylist()[0])
            positions.setdefault(turn.stream, []).append(pickle.loads(pickle.dumps(turn.position)))
    return rows, positions, order


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_every_document_is_read_once(shards, form):
    stream, counts = open_source(cut(make_documents(), shards), form)
    packed = hfp.pack(stream, hfp.BestFit(64, overflow="split"), window_packs=4, streams=8)
    for each in (counts.read, counts.mapped, counts.opened):
        each.clear()
    made = []
    with patch.object(
        SharedReading, "__init__", lambda *a, init=SharedReading.__init__: (made.append(a[0]), init(*a))[1]
    ):
        rows = list(packed)
    expected = [n for n, ids in enumerate(make_documents()) if form != "filtered and mapped" or ids[-1] % 11]
    assert sorted(names_in(rows)) == expected
    assert counts.read == Counter(range(240))
    assert set(counts.opened.values()) == {1}
    assert counts.mapped == (Counter(expected) if "map" in form else Counter())
    assert [reading._shards for reading in made] == [{}]  # nothing is kept of shards that were read
    with reading_alone():
        counts.read.clear()
        assert list(packed) == rows
    assert sum(counts.read.values()) >= 240 * 8 / shards


cases = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.lists(st.integers(1, 20), max_size=60), min_size=1, max_size=4),
        "long": st.tuples(st.integers(1, 64), st.integers(0, 63)),
        "form": st.sampled_from(FORMS),
        "rows_in_table": st.integers(1, 20),
        "streams": st.integers(1, 12),
        "window_packs": st.integers(1, 3),
        "windows_in_queue": st.sampled_from([1 / 16, 1, 4]),
        "at_once": st.sampled_from([1, 64]),
        "stops": st.lists(st.floats(0, 1), min_size=12, max_size=12),
        "is_saved_alone": st.booleans(),
    }
)


@settings(max_examples=40)
@given(cases)
def test_together_as_alone(case):
    """Any documents, any bound, and a resume with a place of its own for each logical stream."""
    period, place = case["long"]
    numbers = iter(range(10**6))
    shards = [
        [
            [NAMES + next(numbers)] + [1] * (length * (10 if n % period == place else 1) - 1)
            for n, length in enumerate(shard)
        ]
        for shard in case["lengths"]
    ]
    if not any(shards):
        return

    def packed():
        stream, _ = open_source(shards, case["form"], case["rows_in_table"])
        strategy = hfp.BestFit(16, overflow="split")
        return hfp.pack(stream, strategy, window_packs=case["window_packs"], streams=case["streams"])

    bounds = {"_WINDOWS_IN_QUEUE": case["windows_in_queue"], "_DOCUMENTS_AT_ONCE": case["at_once"]}
    with patch.multiple(shared_shard, **bounds):
        together, positions, order = turns_of(packed())
        with reading_alone():
            alone, positions_alone, order_alone = turns_of(packed())
        assert (together, order) == (alone, order_alone)
        read = Counter(names_in(chain.from_iterable(together.values())))
        assert read == Counter(range(sum(map(len, shards)))) or case["form"] == "filtered and mapped"
        stops = {stream: round(case["stops"][stream] * len(rows)) for stream, rows in together.items()}
        saved = positions_alone if case["is_saved_alone"] else positions
        state = packed()._ex_iterable.state_at({each: saved[each][stop - 1] for each, stop in stops.items() if stop})
        rest, _, order = turns_of(packed(), state)
        assert rest == {each: rows[stops[each] :] for each, rows in together.items() if rows[stops[each] :]}
        with reading_alone():
            assert turns_of(packed(), state)[::2] == (rest, order)


@pytest.mark.parametrize("form", ["filtered and mapped", "arrow map"])
def test_a_resumed_stream_maps_few_documents_again(form, rng):
    documents, streams = make_documents(3000), 8
    stream, counts = open_source(cut(documents, 2), form)
    packed = hfp.pack(stream, hfp.BestFit(64, overflow="split"), window_packs=2, streams=streams)
    counts.mapped.clear()
    rows = list(packed)
    total = sum(counts.mapped.values())
    for stop in rng.integers(0, len(rows), 3).tolist():
        counts.mapped.clear()
        head = list(islice(packed, stop))
        state = packed.state_dict()
        before = sum(counts.mapped.values())
        counts.mapped.clear()
        resumed = hfp.pack(stream, hfp.BestFit(64, overflow="split"), window_packs=2, streams=streams)
        counts.mapped.clear()
        resumed.load_state_dict(pickle.loads(pickle.dumps(state)))
        assert head + list(resumed) == rows
        assert max(counts.mapped.values()) == 1
        window = 2 * 16 + 2 * 64  # documents, and those that were read together
        assert sum(counts.mapped.values()) <= total - before + 2 * streams * window


def test_a_logical_stream_that_is_left_behind_reads_alone(monkeypatch):
    """The documents of the fourth of eight logical streams are a hundred times longer."""
    streams, of = 8, 128
    long = range(3 * of // streams, 4 * of // streams)
    documents = [[NAMES + n] + [1] * (99 if n % of in long else 0) for n in range(4000)]
    stream, counts = open_source([documents], "dicts")
    packed = hfp.pack(stream, hfp.BestFit(64, overflow="split"), window_packs=2, streams=streams)
    counts.read.clear()
    counts.opened.clear()
    queued = []

    def noting(receiver, block, state, deal=shared_shard.Receiver.deal):
        deal(receiver, block, state)
        queued.append((receiver.tokens, receiver.documents))

    monkeypatch.setattr(shared_shard.Receiver, "deal", noting)
    together = turns_of(packed)
    assert counts.opened == {0: 2}  # left behind once
    assert max(counts.read.values()) == 2
    window = 32  # documents, which have more than the 128 tokens of two packs
    at_once = 64 * streams
    assert max(documents for _, documents in queued) <= 4 * window + at_once
    assert max(tokens for tokens, _ in queued) > 4 * window * 100 / 2  # the queue was full
    with reading_alone():
        assert turns_of(packed)[::2] == together[::2]


def test_logical_streams_with_different_progress_read_together():
    """Half of the logical streams have read 30 % of their documents, the others 80 %."""
    stream, counts = open_source([make_documents(6000)], "arrow map")
    packed = hfp.pack(stream, hfp.BestFit(64, overflow="split"), window_packs=4, streams=8)
    rows, positions, _ = turns_of(packed)
    stops = {each: len(rows[each]) * (3 if each % 2 else 8) // 10 for each in rows}
    state = packed._ex_iterable.state_at({each: positions[each][stop - 1] for each, stop in stops.items()})
    counts.mapped.clear()
    counts.opened.clear()
    assert turns_of(packed, state)[0] == {each: rows[each][stop:] for each, stop in stops.items()}
    assert counts.opened == {0: 1}
    assert max(counts.mapped.values()) == 1
    assert sum(counts.mapped.values()) < 6000 * 0.85


def test_readers_join_where_they_meet():
    """One that reads fast and one that is far behind have two readers, until the second comes to the first."""
    documents = [[NAMES + n] for n in range(2000)]
    stream, counts = open_source([documents], "tables")
    counts.opened.clear()
    examples, schema = stream._ex_iterable, pa.schema([("input_ids", pa.list_(pa.int32()))])
    reading = SharedReading(examples, schema, WindowSize(tokens=8, documents=8, most_tokens=64))
    slow, fast = (reading.share((Part(0, first, first + 1, 2),)) for first in (0, 1))
    for share in (slow, fast):
        share._init_state_dict()
    fast_tables = fast.iter_arrow()
    seen = {0: [], 1: [next(fast_tables)[1] for _ in range(20)]}
    slow_tables = slow.iter_arrow()
    readers = []
    while readers[-2:] != [2, 1]:
        seen[0].append(next(slow_tables)[1])
        readers.append(len(reading._shards[0]._readers))
    for tables in zip_longest(slow_tables, fast_tables):
        for each, table in enumerate(tables):
            seen[each] += [] if table is None else [table[1]]
    numbers = {
        each: [ids[0].as_py() - NAMES for t in tables for ids in t["input_ids"]] for each, tables in seen.items()
    }
    assert numbers == {0: list(range(0, 2000, 2)), 1: list(range(1, 2000, 2))}
    assert counts.opened == {0: 2}


@pytest.mark.filterwarnings("ignore:pack (drops|leaves):UserWarning")
def test_a_process_warns_of_documents_that_it_reads_for_others():
    packed = hfp.pack(open_source([make_documents(100)], "tables")[0], hfp.BestFit(512), streams=8)
    list(packed)
    with pytest.warns(
        UserWarning, match="about 4 documents for each one that this process keeps: 8 logical .* 1 shards"
    ):
        list(split_dataset_by_node(packed, 1, 4))
