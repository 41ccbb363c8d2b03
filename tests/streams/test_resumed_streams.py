"""A packed stream that is stopped after any row goes on with the next one, whatever was done to it before packing."""

import itertools
import pickle
import re
from itertools import islice
from pathlib import Path

import datasets
import numpy as np
import pytest
from datasets import IterableDataset
from document_streams import (
    NAMES,
    SOURCES,
    check_resumed,
    keep_most,
    make_documents,
    names_in,
    read_stream,
    reverse,
    stream_of,
    tokens_in,
    write_jsonl,
    write_parquet,
    write_source,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import fast_only, rarely
from torchdata.stateful_dataloader import StatefulDataLoader

import hf_packing as hfp
from hf_packing.planning.windows import MOST_WINDOWS, choose_waiting
from hf_packing.streams.reader import sizes_of_shards
from hf_packing.upstream.datasets import examples_of, has_exact_states

pytestmark = pytest.mark.filterwarnings("ignore:(pack|mix) (skips|drops|leaves|reads):UserWarning")


def count_tokens(row) -> dict:
    return {"tokens": len(row["input_ids"])}


ALTERNATELY = zip(SOURCES, itertools.cycle([None, 3]), strict=False)


@pytest.mark.parametrize(("kind", "streams"), fast_only(itertools.product(SOURCES, [None, 3]), *ALTERNATELY))
def test_every_kind_of_source_killed_and_resumed_twice(kind, streams, tmp_path, rng):
    opened = write_source(tmp_path, kind)

    def make():
        return hfp.pack(opened(), hfp.BestFit(64), window_packs=5, streams=streams).with_format(None)

    rows, documents = list(make()), list(opened().with_format(None))
    assert sorted(names_in(rows)) == sorted(names_in(documents))
    assert 1.04 * tokens_in(documents) / 64 + 3 > len(rows) > 45
    for first in [0, int(rng.integers(1, len(rows) - 1)), len(rows) - 1]:
        check_resumed(make, rows, [first, int(rng.integers(0, len(rows) - first + 1))])


@settings(max_examples=20)
@given(st.integers(0, 100), st.integers(0, 100), st.sampled_from([None, 1, 4]), st.integers(1, 4))
def test_any_strategy_and_a_map_after(first, second, streams, number):
    documents = make_documents(40)
    strategies = [hfp.Bucket((16, 64)), hfp.FixedLength(32), hfp.FirstCome(32), hfp.Multipack(32, window=9)]

    def make():
        packed = hfp.pack(stream_of(documents), strategies[number - 1], window_packs=3, streams=streams)
        return packed.map(count_tokens)

    rows = list(make())
    check_resumed(make, rows, [first % (len(rows) + 1), second % (len(rows) + 1 - first % (len(rows) + 1))])


@pytest.mark.parametrize("form", ["arrow", "numpy", "torch"])
def test_formats(form):
    def make(form=form):
        return hfp.pack(stream_of(make_documents(60)), hfp.BestFit(32), window_packs=3).with_format(form)

    def tokens(rows):
        column = [row["input_ids"] for row in rows]
        return [np.asarray(values[0].as_py() if form == "arrow" else values).tolist() for values in column]

    expected = [row["input_ids"] for row in make(None)]
    for stop in (0, 3, len(expected)):
        stream, again = make(), make()
        head = tokens(islice(stream, stop))
        again.load_state_dict(stream.state_dict())
        assert head + tokens(again) == expected


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        *(("row groups", workers) for workers in (0, 1, 2)),
        *(("jsonl", 1), ("generator", 2)),
        *rarely([("jsonl", 0), ("jsonl", 2), ("generator", 0), ("generator", 1)]),
    ],
)
def test_a_hundred_kills(kind, workers, tmp_path):
    """In the nine cases, in the first, a middle and the last window, twice in a row; with maps around the packing."""
    opened, rng = write_source(tmp_path, kind, files=6), np.random.default_rng(workers)

    def loader():
        documents = opened().filter(keep_most).map(reverse)
        packed = hfp.pack(documents, hfp.BestFit(64), window_packs=5, streams=2 if workers else None)
        return StatefulDataLoader(packed.map(count_tokens), batch_size=None, num_workers=workers)

    rows = list(loader())
    assert len(rows) > 40
    assert names_in(rows) != sorted(names_in(rows))
    for begin in [0, len(rows) // 2 - 2, len(rows) - 8] * 2:
        stops = [begin + int(rng.integers(1, 5))]
        if workers < 2 or begin < len(rows) - 8:  # datasets repeats the rows of workers that read none after a resume
            stops.append(int(rng.integers(workers, min(len(rows) - stops[0], 20))))
        check_resumed(loader, rows, stops)


def test_states_are_small_and_no_document_waits_long(monkeypatch):
    window_packs, length = 8, 512
    documents = stream_of(make_documents(2000, median=60))
    examples = hfp.pack(documents, hfp.BestFit(length), window_packs=window_packs)._ex_iterable
    examples._init_state_dict()
    sizes = [len(pickle.dumps(examples.state_dict())) for _ in examples]
    assert max(sizes) < window_packs * length * 4 / 4 + 2048  # tokens of 4 bytes
    assert max(sizes) > 4000  # or nothing waits
    oldest = []

    def noting(window, age, size):
        oldest.append(int(age.max()))
        return choose_waiting(window, age, size)

    monkeypatch.setattr("hf_packing.streams.packed.choose_waiting", noting)
    documents = [[1] * length for length in [*[9, 9, 9, 9] * 600]]  # packs of 16 never fill
    list(hfp.pack(stream_of(documents), hfp.BestFit(16), window_packs=12))
    assert 0 < max(oldest) <= MOST_WINDOWS


DOCUMENTS = make_documents(90)
UNEVEN = [DOCUMENTS[:60], DOCUMENTS[60:70], DOCUMENTS[70:75], DOCUMENTS[75:]]


CHANGES = {
    "take": lambda stream: stream.take(40),
    "skip": lambda stream: stream.skip(40),
    "take, then repeat": lambda stream: stream.take(40).repeat(2),
    "map after take": lambda stream: stream.take(40).map(lambda row: row),
    "by index": lambda stream: stream.filter(lambda _, number: number < 45, with_indices=True),
    "interleaved": lambda stream: datasets.interleave_datasets([stream, stream.take(20)]),
    "without the last batch": lambda stream: stream.map(
        lambda batch: batch, batched=True, batch_size=37, drop_last_batch=True
    ),
    "repeat": lambda stream: stream.repeat(3),
    "the end of one and the beginning": lambda stream: datasets.concatenate_datasets([stream.skip(70), stream.take(9)]),
}


@pytest.fixture
def stream(tmp_path):
    return read_stream("json", write_jsonl(tmp_path / "files", UNEVEN))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("streams", fast_only([None, 1, 3], None, 3))
def test_documents_are_those_of_the_plain_stream(stream, change, streams):
    changed = CHANGES[change](stream)
    expected = names_in(changed)
    packed = hfp.pack(changed, hfp.BestFit(64), window_packs=2, streams=streams)
    assert sorted(names_in(packed)) == sorted(expected)
    assert len(expected) not in (0, 90)


def halves(stream):
    return {"first": stream.filter(lambda _, number: number < 45, with_indices=True), "last": stream.skip(45)}


PICKED = {
    **{name: CHANGES[name] for name in CHANGES if name != "interleaved"},
    "the ends of two": lambda stream: datasets.concatenate_datasets([stream.skip(30), stream.skip(70).map(reverse)]),
    "by index, and all": lambda stream: datasets.concatenate_datasets([halves(stream)["first"], stream]),
    "interleaved to the end": lambda stream: datasets.interleave_datasets(
        [*halves(stream).values()], stopping_strategy="all_exhausted_without_replacement"
    ),
    "mixed": lambda stream: hfp.mix(
        halves(stream), {"first": 1, "last": 1}, stopping_strategy="all_exhausted_without_replacement"
    ),
    "mixed by index": lambda stream: hfp.mix(
        {"all": stream}, {"all": 1}, stopping_strategy="all_exhausted_without_replacement"
    ).filter(lambda _, number: number < 45, with_indices=True),
}


@pytest.mark.parametrize("change", PICKED)
@pytest.mark.parametrize("streams", fast_only([None, 3], None))
def test_documents_that_are_picked_by_place_are_those_of_every_epoch(stream, change, streams):
    """Also of parts of a stream, and though epochs have their shards in another order where this changes nothing."""
    changed = PICKED[change](stream)
    expected = sorted(names_in(changed))
    packed = hfp.pack(changed, hfp.BestFit(64), window_packs=2, streams=streams)
    rows = []
    for epoch in range(3):
        packed.set_epoch(epoch)
        rows.append(list(packed))
        assert sorted(names_in(rows[-1])) == expected
    assert rows[0] != rows[1]


@pytest.mark.parametrize("streams", [None, 3])
def test_sources_that_are_picked_by_place_and_read_again_have_the_same_documents(stream, streams):
    sources = halves(stream) | {"joined": datasets.concatenate_datasets([stream.skip(80), stream.skip(80)])}
    expected = {number: set(names_in(source)) for number, source in enumerate(sources.values())}
    mixed = hfp.mix(sources, {"first": 0.8, "last": 0.1, "joined": 0.1}, stopping_strategy="all_exhausted")
    packed = mixed if streams is None else hfp.pack(mixed, hfp.BestFit(1000, overflow="error"), streams=streams)
    for epoch in range(2):
        packed.set_epoch(epoch)
        names = ("input_ids", "source", "source_epoch")
        tokens = [each for row in packed for each in zip(*(row[name] for name in names), strict=True)]
        assert max(passes for *_, passes in tokens) > 0
        for number, documents in expected.items():
            read = {token - NAMES for token, source, _ in tokens if source == number and token >= NAMES}
            assert read == documents


@pytest.mark.parametrize("streams", [None, 2])
def test_an_endless_stream_reads_every_document(stream, streams):
    packed = hfp.pack(stream.repeat(None), hfp.BestFit(64), window_packs=2, streams=streams)
    assert set(names_in(islice(packed, 120))) == set(range(90))


def generated(row_of):
    return IterableDataset.from_generator(lambda: (row_of(n, ids) for n, ids in enumerate(DOCUMENTS)))


def more(ids, **columns):
    return {"input_ids": ids, **columns}


LATER = {
    "'labels': expected ": lambda ids: more(ids, labels=[-100] * len(ids)),
    "'completion_mask': expected ": lambda ids: more(ids, completion_mask=np.zeros(len(ids), dtype=np.int64)),
    "'attention_mask': expected ": lambda ids: more(ids, attention_mask=[0, *[1] * (len(ids) - 1)]),
    "'weights'.* 0.5.* truncated": lambda ids: more(ids, weights=[0.5] * len(ids)),
    "'input_ids'.* truncated": lambda ids: more(np.array(ids) + 0.5),
    "'input_ids'.* not in range": lambda ids: more([token + 2**33 for token in ids]),
}


@pytest.mark.parametrize("named", LATER)
@pytest.mark.parametrize("change", [lambda stream: stream, lambda stream: stream.map(lambda row: row)])
def test_other_columns_and_values_of_later_documents_are_refused(named, change):
    def row_of(n, ids):
        first = more(ids, weights=[1] * len(ids)) if "weights" in named else more(ids)
        return LATER[named](ids) if n > 20 else first

    with pytest.raises(hfp.PackingError, match=f"column {named}"):
        list(hfp.pack(change(generated(row_of)), hfp.BestFit(64)))


def test_other_columns_of_later_documents_do_no_harm():
    made = generated(lambda n, ids: more(ids, note="late") if n > 20 else more(ids))
    assert sorted(names_in(hfp.pack(made, hfp.BestFit(64)))) == list(range(90))


def test_sizes_of_files_and_copies(tmp_path):
    files = write_jsonl(tmp_path / "files", UNEVEN)
    assert sizes_of_shards(examples_of(read_stream("json", files))) == [Path(file).stat().st_size for file in files]
    (file,) = write_parquet(tmp_path / "parquet", [DOCUMENTS], rows_in_group=10)
    groups = read_stream("parquet", [file]).reshard()
    assert groups.num_shards == (9 if has_exact_states() else 1)  # an older datasets does not divide files
    shares = [Path(file).stat().st_size / groups.num_shards] * groups.num_shards
    assert sizes_of_shards(examples_of(groups)) == shares
    assert sizes_of_shards(examples_of(generated(lambda _, ids: {"input_ids": ids}))) == [1]

    def packed(folder, files):
        return hfp.pack(read_stream("json", write_jsonl(tmp_path / folder, files)), hfp.BestFit(64))

    stream = packed("files", UNEVEN)
    rows = list(stream)
    for _ in islice(stream, 3):
        pass
    copies, others = packed("copies", UNEVEN), packed("others", UNEVEN[::-1])
    for each in (copies, others):
        each.load_state_dict(stream.state_dict())
    assert list(copies) == rows[3:]
    with pytest.raises(hfp.PackingError, match="dataset: expected the files with which the state was saved"):
        list(others)


def test_numbers_in_errors_tell_the_place_in_the_stream():
    rows = [{"input_ids": ids, "labels": ids if n != 70 else ids[1:]} for n, ids in enumerate(make_documents(90, 1))]
    packed = hfp.pack(IterableDataset.from_generator(lambda: iter(rows)), hfp.BestFit(64), window_packs=1)
    with pytest.raises(hfp.PackingError, match="column 'labels'.*row") as error:
        list(packed)
    found = re.search(
        r"but row (\d+) has .*: (\d+) that have waited, then those from document (\d+) on", str(error.value)
    )
    row, waited, first = map(int, found.groups())
    assert first > 0
    assert first + row - waited == 70
