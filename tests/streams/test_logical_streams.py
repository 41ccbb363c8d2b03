"""Logical streams, of mixtures too: the same rows in the same order on any number of ranks and workers."""

import pickle
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from accelerate import Accelerator
from any_strategy import few_examples
from datasets import Dataset, concatenate_datasets
from datasets.distributed import split_dataset_by_node
from document_streams import (
    NAMES,
    check_resumed,
    generated,
    make_documents,
    names_in,
    stream_of,
    tokens_in,
    write_source,
)
from hypothesis import example, given
from hypothesis import strategies as st
from tiers import fast_only

import hf_packing as hfp
from hf_packing.streams import reader
from hf_packing.streams.logical import START, documents_of_streams
from hf_packing.streams.reader import equal_shares

pytestmark = pytest.mark.filterwarnings("ignore:pack (leaves|reads):UserWarning")

sizes_of_shards = st.lists(st.floats(1.0, 10_000.0), min_size=1, max_size=12)


@given(sizes_of_shards, st.integers(1, 70))
def test_shares_are_equal_and_have_every_part_once(sizes, shares):
    found = equal_shares(sizes, shares)
    assert len(found) == shares
    parts = [part for share in found for part in share]
    for shard in range(len(sizes)):
        (pieces,) = {part.pieces for part in parts if part.shard == shard}
        assert [part.number for part in parts if part.shard == shard] == [*range(len(pieces))]
    whole = sum(sizes) / shares
    for share in found:
        size = sum(sizes[part.shard] * part.pieces[part.number] / sum(part.pieces) for part in share)
        assert abs(size - whole) <= max(sizes) / (64 * shares) + 1e-6 * sum(sizes)


@given(st.integers(1, 30), st.integers(0, 30), st.integers(0, 30), st.integers(1, 9))
def test_shares_of_a_shard_take_turns(whole, first, last, shares):
    """Of the first documents, however many there are, every share has its part, but for about one document."""
    pieces = [min(each, whole) for each in (first, *[whole] * shares, last) if each]
    turns = reader.turns_of(tuple(pieces))
    assert len(turns) == sum(pieces)
    taken = np.cumsum(turns[:, None] == np.arange(len(pieces)), axis=0)
    wanted = np.outer(np.arange(1, len(turns) + 1), pieces) / sum(pieces)
    assert (np.abs(taken - wanted) < 1.5).all()
    assert (taken[-1] == pieces).all()


@given(st.lists(st.integers(0, 70), min_size=1, max_size=40), st.integers(1, 20))
def test_shares_of_known_documents_differ_by_one(documents, shares):
    divided = equal_shares(documents, shares, documents)
    counts = []
    for share in divided:
        counts.append(0)
        for part in share:
            turns = reader.turns_of(part.pieces)
            counts[-1] += int((turns[np.arange(documents[part.shard]) % len(turns)] == part.number).sum())
    assert reader.documents_of_shares(documents, divided) == counts
    assert sum(counts) == sum(documents)
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("most", [reader._COUNTED, 20])
def test_known_numbers_of_documents(most, tmp_path, monkeypatch):
    """Those of small streams, which are read to count them, whatever changes their documents."""
    monkeypatch.setattr(reader, "_COUNTED", most)
    kinds = ("parquet", "row groups", "jsonl", "generator", "mapped in batches")
    streams = {kind: write_source(tmp_path, kind)() for kind in kinds}
    documents = streams["row groups"].select_columns("input_ids")
    joined = concatenate_datasets([streams["parquet"].select_columns("input_ids"), documents])
    streams |= {
        "mapped": streams["row groups"].map(unchanged).select_columns("input_ids"),
        "joined": joined,
        "filtered": documents.filter(lambda row: row["input_ids"][0] % 3 > 0),
        "filtered and joined": joined.filter(lambda _: True),
    }
    for stream in streams.values():
        packed = hfp.pack(stream, hfp.BestFit(64), streams=4)
        read = [sum(1 for _ in names_in(packed.shard(4, number))) for number in range(4)]
        known = documents_of_streams(stream._ex_iterable, 4)
        assert known == ({"the stream": read} if most > 20 else {})
        assert most == 20 or max(read) - min(read) <= 1, "also with small and empty files"
    sources = {"a": dataset(0, 50, 4), "b": streams["jsonl"].select_columns("input_ids")}
    mixed = hfp.mix(sources, {"a": 1, "b": 1}, stopping_strategy=ALL)
    sources = documents_of_streams(mixed._ex_iterable, 4)
    assert [*sources] == [f"streams[{name!r}] of the mixture" for name in "ab" if most > 20]


def test_logical_streams_without_a_document_are_refused(monkeypatch):
    """When it is known; a mixture that ends with its first source would read nothing else, so it is refused later."""
    known = r"streams: .* got 16 logical streams for 5 documents, of which number"
    few = dataset(0, 5, 4)
    for each in (few.to_iterable_dataset(2), generated([documents(0, 5, 4)]), hfp.mix({"a": few}, {"a": 1})):
        with pytest.raises(hfp.PackingError, match=known):
            hfp.pack(each, hfp.BestFit(64), streams=16)
    monkeypatch.setattr(reader, "_COUNTED", 4)
    mixed = hfp.mix({"a": generated([documents(0, 5, 4)]), "b": dataset(1, 90, 5)}, {"a": 1, "b": 1})
    with pytest.raises(hfp.PackingError, match="a document for each of 16 logical streams, ranks or w"):
        list(hfp.pack(mixed, hfp.BestFit(64), streams=16))


def turns_of(packed, rank=0, ranks=1):
    """The turns of the logical streams of a rank: (number of the stream, row or None)."""
    examples = packed._ex_iterable.shard_data_sources(ranks, rank, contiguous=False)
    return [
        (turn.stream, None if turn.row is None else turn.row.to_pylist()[0])
        for turn in examples.turns(dict.fromkeys(examples.owned, START))
    ]


def in_turn(turns_of_ranks, streams):
    """The rows of all ranks in the order of the streams, round by round."""
    by_stream = {}
    for turns in turns_of_ranks:
        for stream, row in turns:
            by_stream.setdefault(stream, []).append(row)
    assert sorted(by_stream) == list(range(streams))
    rounds = range(max(map(len, by_stream.values())))
    rows = [by_stream[stream][turn : turn + 1] for turn in rounds for stream in range(streams)]
    return [row[0] for row in rows if row and row[0] is not None]


SOURCES = [("row groups", 8), ("jsonl", 24), ("generator", 4)]


@pytest.mark.parametrize(("kind", "streams"), fast_only(SOURCES, SOURCES[0], SOURCES[2]))
def test_rows_do_not_depend_on_the_number_of_ranks(kind, streams, tmp_path):
    opened = write_source(tmp_path, kind, files=5)

    def packed():
        return hfp.pack(opened(), hfp.BestFit(64), window_packs=4, streams=streams)

    assert packed().num_shards == streams
    rows = list(packed())
    assert Counter(names_in(rows)) == Counter(range(240))
    for ranks in (2, 4):
        assert in_turn([turns_of(packed(), rank, ranks) for rank in range(ranks)], streams) == rows
        nodes = [split_dataset_by_node(packed(), rank, ranks) for rank in range(ranks)]
        assert Counter(names_in(row for node in nodes for row in node)) == Counter(range(240))


def test_a_state_of_all_streams_serves_any_rank(tmp_path):
    """A rank picks the states of its own streams."""
    opened = write_source(tmp_path, "row groups")

    def packed():
        return hfp.pack(opened(), hfp.BestFit(64), window_packs=4, streams=8)

    rows, stopped = list(packed()), packed()
    head = list(islice(stopped, 16))  # two rounds
    state = pickle.loads(pickle.dumps(stopped.state_dict()))
    rest = []
    for rank in range(4):
        node = split_dataset_by_node(packed(), rank, 4)
        node.load_state_dict(state)
        rest.append(list(node))
    assert head == rows[:16]
    assert sorted(map(str, [*head, *(row for each in rest for row in each)])) == sorted(map(str, rows))


def test_many_and_few_streams():
    with pytest.warns(UserWarning, match="pack reads the stream about 16 times, since 16 logical streams share 1 sh"):
        packed = hfp.pack(stream_of(make_documents(20)), hfp.BestFit(64), streams=16)
    assert sorted(names_in(packed)) == list(range(20))
    documents = [[number % 5 + 1] * 7 for number in range(400)]
    packed = hfp.pack(stream_of(documents), hfp.BestFit(16), window_packs=8, streams=2)
    first, second = ([row for stream, row in turns_of(packed) if stream == number and row] for number in (0, 1))
    assert [row["input_ids"] for row in first] != [row["input_ids"] for row in second]


ALL = "all_exhausted_without_replacement"
MANY = 1000
"""Documents of source number s have names from s * MANY on."""


def documents(source, number, length):
    rng = np.random.default_rng(source)
    lengths = rng.integers(max(length // 2, 1), length + length // 2 + 1, number)
    return [[NAMES + MANY * source + n, *[source] * (int(size) - 1)] for n, size in enumerate(lengths)]


def dataset(*of):
    return Dataset.from_dict({"input_ids": documents(*of)})


def share_of_first(rows):
    sources = Counter(source for row in rows for source in row["source"])
    return sources[0] / sources.total()


def unchanged(row):
    return row


CHANGES = {
    "mixture": lambda mixed: mixed,
    "map and filter": lambda mixed: mixed.map(unchanged).filter(lambda row: len(row["input_ids"]) > 1),
    "maps in batches": lambda mixed: mixed.map(unchanged, batched=True, batch_size=7).map(
        unchanged, batched=True, batch_size=5
    ),
}


@pytest.mark.parametrize("change", fast_only(CHANGES, "mixture"))
def test_shares_in_logical_streams(change):
    """A source has 64 shards, but a logical stream is one mixture of them."""
    sources = {"short": dataset(0, 700, 4), "long": dataset(1, 130, 20)}
    for share in (0.75, 0.95):
        mixed = CHANGES[change](hfp.mix(sources, {"short": share, "long": 1 - share}))
        whole = tokens_in(mixed)
        packed = hfp.pack(mixed, hfp.BestFit(64), streams=4, window_packs=4)
        parts = [list(packed.shard(4, number)) for number in range(4)]
        rows = [row for part in parts for row in part]
        assert share_of_first(rows) == pytest.approx(share, abs=0.02)
        assert tokens_in(rows) > 0.85 * whole
        assert max(Counter(names_in(rows)).values()) == 1
        sizes = [tokens_in(part) for part in parts]
        assert max(sizes) < 1.25 * min(sizes)


@pytest.mark.slow
def test_small_sources_are_read_by_other_streams_in_each_pass(monkeypatch):
    monkeypatch.setattr(reader, "_COUNTED", 2)  # or else, logical streams without a document of few would be refused
    sources = {"many": generated([documents(0, 200, 10)] * 4), "few": generated([documents(1, 3, 10)])}
    shares = {"many": 0.8, "few": 0.2}
    rows = list(hfp.pack(hfp.mix(sources, shares, stopping_strategy="all_exhausted"), hfp.BestFit(64), streams=4))
    assert share_of_first(rows) == pytest.approx(0.8, abs=0.02)  # also where a logical stream has no document of few
    assert {name // MANY for name in names_in(rows)} == {0, 1}
    rows = list(hfp.pack(hfp.mix(sources, shares, stopping_strategy=ALL), hfp.BestFit(64), streams=4))
    assert Counter(names_in(rows)) == {**dict.fromkeys(range(200), 4), **dict.fromkeys(range(MANY, MANY + 3), 1)}
    # In each pass, a logical stream reads the documents of the next one, so that all have all documents in the end.
    sources = {"many": dataset(0, 400, 10), "few": dataset(1, 8, 10)}
    mixed = hfp.mix(sources, {"many": 0.5, "few": 0.5}, stopping_strategy="all_exhausted")
    packed = hfp.pack(mixed, hfp.BestFit(64), streams=4)
    for stream in range(4):
        names = Counter(names_in(packed.shard(4, stream)))
        few = [count for name, count in names.items() if name >= MANY]
        assert len(few) == 8
        assert max(few) - min(few) <= 1


@pytest.mark.parametrize("streams", fast_only([3, 8], 3))
def test_pieces_of_joined_sharded_and_taken_mixtures(streams):
    mixed = hfp.mix({"a": dataset(0, 30, 5), "b": dataset(1, 30, 5)}, {"a": 1, "b": 1}, stopping_strategy=ALL)

    def packed(documents):
        return sorted(names_in(hfp.pack(documents, hfp.BestFit(64), streams=streams)))

    names = sorted(names_in(mixed))
    assert len(names) == 60
    assert packed(concatenate_datasets([mixed, mixed])) == packed(mixed.repeat(2)) == sorted(2 * names)
    assert packed(mixed.take(40)) == sorted(names_in(mixed.take(40)))
    shards = [mixed.shard(2, number) for number in range(2)]
    assert shards[0].num_shards == 15
    assert sorted(name for shard in shards for name in packed(shard)) == names
    assert sorted(name for shard in shards for name in names_in(shard.reshard())) == names


def test_a_source_that_is_read_several_times_warns():
    mixed = hfp.mix({"a": generated([[[1]] * 5]), "b": dataset(1, 90, 5)}, {"a": 1, "b": 1}, stopping_strategy=ALL)
    with pytest.warns(UserWarning, match=r"pack reads streams\['a'\] of the mixture about 4 times, .* 4 .* 1 shards"):
        hfp.pack(mixed, hfp.BestFit(64), streams=4)


def make_mixture(share=0.5):
    sources = {"a": generated([documents(0, 120, 8), documents(2, 80, 8)]), "b": dataset(1, 200, 8)}
    return hfp.mix(sources, {"a": share, "b": 1 - share}, stopping_strategy=ALL)


@pytest.mark.parametrize("pack", [lambda mixed: mixed, lambda mixed: hfp.pack(mixed, hfp.BestFit(32), window_packs=2)])
def test_a_state_of_another_piece_is_refused(pack):
    streams = [pack(make_mixture()), *(split_dataset_by_node(pack(make_mixture()), rank, 2) for rank in range(2))]
    states = []
    for stream in streams:
        next(iter(stream))
        states.append(pickle.loads(pickle.dumps(stream.state_dict())))
    for number, stream in enumerate(streams):
        for other, state in enumerate(states):
            stream.load_state_dict(state)
            if number == other:
                next(iter(stream))
            else:
                with pytest.raises(hfp.PackingError, match=r"state_dict: expected .* seed 0(, piece \d of 2)?, got"):
                    next(iter(stream))


@few_examples
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=3),
    st.sampled_from([0, None, 1, 3]),
    st.sampled_from(sorted(CHANGES)),
    st.sampled_from(["first_exhausted", "all_exhausted", ALL]),
    st.integers(1, 40),
)
@example(
    [1, 30, 30], 0, "mixture", "all_exhausted", 1
)  # a source is between two tables, of a shard read from its begin
def test_resumed_at_any_row(stops, streams, change, how, rows_in_table):
    few, many = (documents(source, number, 8) for source, number in ((0, 30), (1, 60)))

    def make():
        sources = {"a": generated([few[:20], few[20:]]), "b": stream_of(many, rows_in_table)}
        mixed = CHANGES[change](hfp.mix(sources, {"a": 0.5, "b": 0.5}, stopping_strategy=how))
        return mixed if streams == 0 else hfp.pack(mixed, hfp.BestFit(64), window_packs=3, streams=streams)

    rows = list(make())
    assert how != ALL or sorted(names_in(rows)) == [*range(30), *range(MANY, MANY + 60)]
    check_resumed(make, rows, stops)


def test_other_shares_in_the_next_epoch_of_a_training():
    """Through `attach`, with a state for all ranks: a state from the end of an epoch takes other shares."""
    files = {name: [documents(source, 20, 8)] * 2 for source, name in enumerate("ab")}

    def loader(share):
        opened = {name: generated(files[name]) for name in files}
        mixed = hfp.mix(opened, {"a": share, "b": 1 - share}, stopping_strategy=ALL)
        packed = hfp.pack(mixed, hfp.BestFit(64), window_packs=2, streams=2)
        return hfp.prepare_dataloader(Accelerator(cpu=True), packed, hfp.TokenBudget(64))

    first, again = loader(0.5), loader(0.9)
    seen = [batch["input_ids"][0].tolist() for batch in first]
    again.load_state_dict(first.state_dict())
    assert again.epoch == 1
    other = [batch["input_ids"][0].tolist() for batch in again]
    assert [sorted(token for row in rows for token in row if token >= NAMES) for rows in (seen, other)] == [
        sorted(2 * [NAMES + name for name in (*range(20), *range(MANY, MANY + 20))])
    ] * 2
    middle = loader(0.5)
    for _ in islice(middle, 3):
        pass
    with pytest.raises(hfp.PackingError, match=r"state_dict: expected .* a \(0.9\), b \(0.1\)"):
        again.load_state_dict(middle.state_dict())
