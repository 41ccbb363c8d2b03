"""Logical streams: the same rows in the same order on any number of ranks and workers."""

import pickle
from collections import Counter
from itertools import islice

import pytest
from datasets.distributed import split_dataset_by_node
from document_streams import make_documents, names_in, stream_of, write_source
from hypothesis import given
from hypothesis import strategies as st
from tiers import fast_only
from torch.utils.data import DataLoader

import hf_packing as hfp
from hf_packing.streams.reader import equal_shares

pytestmark = pytest.mark.filterwarnings("ignore:pack (leaves|reads):UserWarning")

sizes_of_shards = st.lists(st.floats(1.0, 10_000.0), min_size=1, max_size=12)


@given(sizes_of_shards, st.integers(1, 70))
def test_shares_are_equal_and_have_every_part_once(sizes, shares):
    found = equal_shares(sizes, shares)
    assert len(found) == shares
    parts = sorted((part.shard, part.first, part.end) for share in found for part in share)
    of = found[0][0].of if found[0] else next(part.of for share in found for part in share)
    for shard in range(len(sizes)):
        borders = [(first, end) for number, first, end in parts if number == shard]
        assert [first for first, _ in borders] == [0, *(end for _, end in borders[:-1])]
        assert borders[-1][1] == of
    whole = sum(sizes) / shares
    for share in found:
        size = sum(sizes[part.shard] * (part.end - part.first) / part.of for part in share)
        assert abs(size - whole) <= max(sizes) / of + 1e-6 * sum(sizes)


def turns_of(packed, rank=0, ranks=1):
    """The turns of the logical streams of a rank: (number of the stream, row or None)."""
    examples = packed._ex_iterable.shard_data_sources(ranks, rank, contiguous=False)
    return [(turn.stream, None if turn.row is None else turn.row.table.to_pylist()[0]) for turn in examples.turns()]


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


@pytest.mark.slow
def test_workers_of_a_loader_read_every_document_once(tmp_path):
    packed = hfp.pack(write_source(tmp_path, "jsonl")(), hfp.BestFit(64), window_packs=4, streams=8)
    rows = list(packed)
    for workers in (1, 2):
        read = list(DataLoader(packed, batch_size=None, num_workers=workers))
        assert Counter(names_in(read)) == Counter(range(240))
        assert read[:24] == rows[:24]


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


def test_more_streams_than_documents():
    with pytest.warns(UserWarning, match="pack reads the stream about 16 times, since 16 logical streams share 1 sh"):
        packed = hfp.pack(stream_of(make_documents(5)), hfp.BestFit(64), streams=16)
    assert sorted(names_in(packed)) == list(range(5))


def test_streams_are_packed_in_orders_of_their_own():
    documents = [[number % 5 + 1] * 7 for number in range(400)]
    packed = hfp.pack(stream_of(documents), hfp.BestFit(16), window_packs=8, streams=2)
    first, second = ([row for stream, row in turns_of(packed) if stream == number and row] for number in (0, 1))
    assert [row["input_ids"] for row in first] != [row["input_ids"] for row in second]
