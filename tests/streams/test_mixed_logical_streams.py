"""Mixtures in logical streams, on ranks, and after other shares are given at a resume."""

import pickle
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from accelerate import Accelerator
from datasets import Dataset, concatenate_datasets
from datasets.distributed import split_dataset_by_node
from document_streams import NAMES, generated, names_in, read_stream, tokens_in, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import fast_only

import hf_packing as hfp
from hf_packing.streams import upstream
from hf_packing.streams.mixtures_in import divided_mixture

pytestmark = pytest.mark.filterwarnings("ignore:pack reads:UserWarning")

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


def longer_than_one(row):
    return len(row["input_ids"]) > 1


CHANGES = {
    "mixture": lambda mixed: mixed,
    "map and filter": lambda mixed: mixed.map(unchanged).filter(longer_than_one),
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


def test_differences_of_logical_streams_cancel():
    """With documents of one length, the differences of 64 logical streams of up to half a document each add up to 0."""
    sources = {
        name: Dataset.from_dict({"input_ids": [[number] * length] * (200_000 // length)})
        for number, (name, length) in enumerate({"a": 20, "b": 100, "c": 500}.items())
    }
    mixed = hfp.mix(sources, {"a": 0.5, "b": 0.3, "c": 0.2}, stopping_strategy="all_exhausted")
    divided = divided_mixture(upstream.examples_of(mixed), 64)
    tokens = np.array([_first_tokens(divided.shard_data_sources(64, stream), 6200) for stream in range(64)])
    by_source = np.array([(tokens == source).sum(1) for source in range(3)]) / 6200
    assert by_source.mean(1) == pytest.approx([0.5, 0.3, 0.2], abs=0.001)
    assert by_source[2].std() > 0.02


def _first_tokens(examples, number):
    tables = islice(examples.tables(), number)
    found: list[int] = []
    while len(found) < number:
        found += next(tables).column("input_ids").combine_chunks().flatten().to_pylist()
    return found[:number]


def test_a_source_with_fewer_documents_than_logical_streams():
    sources = {"many": generated([documents(0, 200, 10)] * 8), "few": generated([documents(1, 3, 10)])}
    shares = {"many": 0.8, "few": 0.2}
    rows = list(hfp.pack(hfp.mix(sources, shares, stopping_strategy="all_exhausted"), hfp.BestFit(64), streams=8))
    assert share_of_first(rows) == pytest.approx(0.8, abs=0.02)  # also where a logical stream has no document of few
    assert {name // MANY for name in names_in(rows)} == {0, 1}
    rows = list(hfp.pack(hfp.mix(sources, shares, stopping_strategy=ALL), hfp.BestFit(64), streams=8))
    assert Counter(names_in(rows)) == {**dict.fromkeys(range(200), 8), **dict.fromkeys(range(MANY, MANY + 3), 1)}


def test_a_source_is_read_by_other_logical_streams_in_its_next_pass():
    """In each pass, a logical stream reads the documents of the next one, so that all have all documents in the end."""
    sources = {"many": dataset(0, 400, 10), "few": dataset(1, 8, 10)}
    mixed = hfp.mix(sources, {"many": 0.5, "few": 0.5}, stopping_strategy="all_exhausted")
    packed = hfp.pack(mixed, hfp.BestFit(64), streams=4)
    for stream in range(4):
        names = Counter(names_in(packed.shard(4, stream)))
        few = [count for name, count in names.items() if name >= MANY]
        assert len(few) == 8
        assert max(few) - min(few) <= 1


def test_refusals_in_logical_streams():
    mixed = hfp.mix({"a": dataset(0, 90, 5), "b": dataset(1, 90, 5)}, {"a": 1, "b": 1})
    joined = concatenate_datasets([mixed, mixed])
    with pytest.raises(hfp.PackingError, match="streams: expected a mixture that was not joined with other streams"):
        hfp.pack(joined, hfp.BestFit(64), streams=2)
    half = mixed.shard(2, 0)
    assert half.num_shards == 32
    with pytest.raises(hfp.PackingError, match="streams: expected at most 32, the shards that are left of the mixture"):
        hfp.pack(half, hfp.BestFit(64), streams=64)
    halves = [hfp.pack(mixed.shard(2, number), hfp.BestFit(64), streams=3) for number in range(2)]
    names = [name for each in halves for name in names_in(each)]
    assert max(Counter(names).values()) == 1
    assert len(names) > 150
    taken = hfp.pack(mixed.take(100), hfp.BestFit(64), streams=2)
    assert sorted(names_in(taken)) == sorted(names_in(mixed.take(100)))
    state = taken.state_dict() if next(iter(taken)) else None
    other = hfp.mix({"a": dataset(0, 90, 5), "b": dataset(1, 90, 5)}, {"a": 3, "b": 1}).take(100)
    again = hfp.pack(other, hfp.BestFit(64), streams=2)
    again.load_state_dict(state)
    with pytest.raises(hfp.PackingError, match=r"of a mixture with the shares \{'a': 0.75, 'b': 0.25\}"):
        next(iter(again))


def test_other_shares_of_a_repeated_mixture():
    def make(share):
        mixed = hfp.mix({"a": dataset(0, 60, 5), "b": dataset(1, 60, 5)}, {"a": share, "b": 1 - share})
        return hfp.pack(mixed.repeat(2), hfp.BestFit(64), window_packs=2, streams=2)

    first, again, other = make(0.5), make(0.5), make(0.25)
    head = list(islice(first, 3))
    again.load_state_dict(first.state_dict())
    assert [*head, *again] == list(make(0.5))
    other.load_state_dict(first.state_dict())
    with pytest.raises(hfp.PackingError, match="tokens: expected the shares 0.5, 0.5, as in the saved state"):
        next(iter(other))


def test_a_source_that_is_read_several_times_warns():
    mixed = hfp.mix({"a": generated([[[1]]]), "b": dataset(1, 90, 5)}, {"a": 1, "b": 1}, stopping_strategy=ALL)
    with pytest.warns(
        UserWarning, match=r"pack reads streams\['a'\] of the mixture about 4 times, since 4 .* 1 shards"
    ):
        hfp.pack(mixed, hfp.BestFit(64), streams=4)


def test_shards_of_a_mixture_after_reshard():
    mixed = hfp.mix({"a": dataset(0, 90, 5), "b": dataset(1, 70, 5)}, {"a": 1, "b": 1}, stopping_strategy=ALL)
    names = [name for number in range(2) for name in names_in(mixed.shard(2, number).reshard())]
    assert sorted(names) == sorted(names_in(mixed))
    assert len(names) == 160


def test_a_state_of_another_part_of_a_mixture():
    def mixed():
        return hfp.mix({"a": dataset(0, 90, 5), "b": dataset(1, 90, 5)}, {"a": 1, "b": 1})

    def loaded(stream, state):
        stream.load_state_dict(pickle.loads(pickle.dumps(state)))
        return list(stream)

    for make in (mixed, lambda: hfp.pack(mixed(), hfp.BestFit(32), window_packs=2)):
        nodes = [split_dataset_by_node(make(), rank, 2) for rank in range(2)]
        states = []
        for stream in (make(), *nodes):
            next(iter(stream))
            states.append(stream.state_dict())
        for stream, state, message in (
            (
                nodes[0],
                states[0],
                r"the state of piece 0, 1, 2, 3, ... of 64 of a mixture, .* got the state of a whole",
            ),
            (
                nodes[1],
                states[1],
                r"the state of piece 32, .* got the state of piece 0, .* load the state that this rank",
            ),
            (make(), states[2], r"expected the state of a whole mixture, .* or pack the mixture with streams=64"),
        ):
            with pytest.raises(hfp.PackingError, match=message):
                loaded(stream, state)
        assert loaded(split_dataset_by_node(make(), 1, 2), states[2])


def shares_at_stops(make, stops, shares):
    """The rows of a stream that is killed after some rows, and goes on with the next shares; and what each part had."""
    parts, state = [], None
    for number, each in enumerate(shares):
        stream = make(each)
        if state is not None:
            stream.load_state_dict(pickle.loads(state))
        parts.append(list(islice(stream, stops[number]) if number < len(stops) else stream))
        if parts[-1]:
            state = pickle.dumps(stream.state_dict())
    return parts


@settings(max_examples=15)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    st.lists(st.sampled_from([0.2, 0.5, 0.8]), min_size=5, max_size=5),
    st.sampled_from([0, None, 1, 3]),
    st.sampled_from(sorted(CHANGES)),
)
def test_every_document_is_read_once_however_shares_change(stops, shares, streams, change):
    sources = {"a": generated([documents(0, 120, 8), documents(2, 80, 8)]), "b": dataset(1, 200, 8)}

    def make(share):
        mixed = CHANGES[change](hfp.mix(sources, {"a": share, "b": 1 - share}, stopping_strategy=ALL))
        if streams == 0:
            return mixed
        return hfp.pack(mixed, hfp.BestFit(64), window_packs=3, streams=streams)

    rows = [row for part in shares_at_stops(make, stops, shares[: len(stops) + 1]) for row in part]
    assert sorted(names_in(rows)) == sorted(name for each in sources.values() for name in names_in(each))


@pytest.mark.parametrize("streams", [None, 2])
@pytest.mark.parametrize("change", fast_only(CHANGES, "map and filter"))
def test_new_shares_count_after_what_was_read(streams, change):
    sources = {"a": dataset(0, 500, 8), "b": dataset(1, 500, 8)}

    def make(share):
        mixed = CHANGES[change](hfp.mix(sources, {"a": share, "b": 1 - share}))
        return hfp.pack(mixed, hfp.FixedLength(64), window_packs=2, streams=streams)

    whole = list(make(0.5))
    for stops in ((3,), (20, 3, 2)):
        parts = shares_at_stops(make, stops, [0.5, 0.9, 0.9, 0.2][: len(stops)] + [0.2])
        kept = parts[0]
        assert kept == whole[: len(kept)]
        share = share_of_first(parts[-1][len(parts[-1]) // 2 :])  # after the window, in which the old shares count
        assert share == pytest.approx(0.2, abs=0.03)
    parts = shares_at_stops(make, (20, 5), [0.5, 0.9, 0.9])
    killed_once = shares_at_stops(make, (20,), [0.5, 0.9])
    assert [*parts[1], *parts[2]] == killed_once[1]


@pytest.mark.parametrize("change", fast_only(CHANGES, "maps in batches"))
def test_new_shares_of_a_mixture_that_is_not_packed(change):
    sources = {"a": dataset(0, 250, 8), "b": dataset(1, 250, 8)}

    def make(share):
        return CHANGES[change](hfp.mix(sources, {"a": share, "b": 1 - share}, stopping_strategy=ALL))

    whole = sorted(names_in(make(0.5)))
    parts = shares_at_stops(make, (160, 3, 80), [0.5, 0.9, 0.2, 0.5])
    assert sorted(name for part in parts for name in names_in(part)) == whole
    after = shares_at_stops(make, (160,), [0.5, 0.9])[1][50:180]
    assert share_of_first(after) == pytest.approx(0.9, abs=0.03)


def test_shares_change_in_a_training_of_files(tmp_path):
    """Through `attach`, with a state for all ranks: no document is trained on twice."""
    files = {name: write_jsonl(tmp_path / name, [documents(source, 60, 8)] * 1) for source, name in enumerate("ab")}

    def loader(share):
        opened = {name: read_stream("json", files[name]).remove_columns("text") for name in files}
        mixed = hfp.mix(opened, {"a": share, "b": 1 - share}, stopping_strategy=ALL)
        packed = hfp.pack(mixed, hfp.BestFit(64), window_packs=2, streams=2)
        return hfp.prepare_dataloader(Accelerator(cpu=True), packed, hfp.TokenBudget(64))

    first = loader(0.5)
    seen = [batch["input_ids"][0].tolist() for batch in islice(first, 5)]
    again = loader(0.9)
    again.load_state_dict(first.state_dict())
    seen += [batch["input_ids"][0].tolist() for batch in again]
    names = Counter(token for row in seen for token in row if token >= NAMES)
    assert len(names) == 120
    assert set(names.values()) == {1}
