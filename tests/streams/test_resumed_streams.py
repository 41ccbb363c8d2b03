"""A packed stream that is stopped after any row and resumed goes on with the next row."""

import itertools
import pickle
from itertools import islice

import numpy as np
import pytest
from document_streams import (
    SOURCES,
    check_resumed,
    keep_most,
    make_documents,
    names_in,
    reverse,
    stream_of,
    tokens_in,
    write_source,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import fast_only
from torchdata.stateful_dataloader import StatefulDataLoader

import hf_packing as hfp
from hf_packing.planning.windows import choose_waiting

pytestmark = pytest.mark.filterwarnings("ignore:pack (skips|drops|leaves|reads):UserWarning")


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
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("kind", ["row groups", "jsonl", "generator"])
def test_two_hundred_kills(kind, workers, tmp_path):
    """In the nine cases, in the first, a middle and the last window, twice in a row; with maps around the packing."""
    opened, rng = write_source(tmp_path, kind, files=6), np.random.default_rng(workers)

    def loader():
        documents = opened().filter(keep_most).map(reverse)
        packed = hfp.pack(documents, hfp.BestFit(64), window_packs=5, streams=2 if workers else None)
        return StatefulDataLoader(packed.map(count_tokens), batch_size=None, num_workers=workers)

    rows = list(loader())
    assert len(rows) > 40
    assert names_in(rows) != sorted(names_in(rows))
    for begin in [0, len(rows) // 2 - 2, len(rows) - 8] * 4:
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
    assert 0 < max(oldest) <= 4
