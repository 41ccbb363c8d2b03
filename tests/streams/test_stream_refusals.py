"""Streams that cannot be packed, and states that do not fit, are refused with what to do."""

import pickle

import datasets
import pytest
from datasets import IterableDataset
from datasets.distributed import split_dataset_by_node
from document_streams import make_documents, read_stream, split_unevenly, stream_of, write_parquet, write_source

import hf_packing as hfp
from hf_packing.streams import saved_state

pytestmark = pytest.mark.filterwarnings("ignore:pack (leaves|reads):UserWarning")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_packs": 0}, "window_packs: expected an integer from 1 to 2147483647, got 0"),
        ({"streams": 0}, "streams: expected an integer from 1 to 2147483647, got 0"),
        ({"streams": 2.0}, "streams: expected an integer from 1 to 2147483647, got 2.0"),
        ({"strategy": hfp.BestFit}, "strategy: expected a strategy such as BestFit"),
    ],
)
def test_arguments(options, message):
    strategy = options.pop("strategy", hfp.BestFit(16))
    with pytest.raises(hfp.PackingError, match=message):
        hfp.pack(stream_of(make_documents(3)), strategy, **options)


@pytest.mark.parametrize("later", [lambda stream: stream, lambda stream: stream.map(lambda row: row)])
def test_a_shuffle_buffer(later):
    stream = later(stream_of(make_documents(30)).shuffle(seed=0, buffer_size=10))
    with pytest.raises(hfp.PackingError, match="without a shuffle buffer, since a saved state does not hold"):
        hfp.pack(stream, hfp.BestFit(16))


def test_streams_of_something_else():
    with pytest.raises(hfp.PackingError, match="column 'input_ids': expected this column in the dataset, got the col"):
        hfp.pack(datasets.Dataset.from_dict({"text": ["a"]}).to_iterable_dataset(), hfp.BestFit(4))
    with pytest.raises(hfp.PackingError, match="to be packed already"):
        hfp.pack(hfp.pack(stream_of(make_documents(3)), hfp.BestFit(64)), hfp.BestFit(64))
    with pytest.raises(hfp.PackingError, match="got a stream that yields no document"):
        hfp.pack(IterableDataset.from_generator(lambda: iter(())), hfp.BestFit(4))
    streams = datasets.IterableDatasetDict(train=datasets.Dataset.from_dict({"text": ["a"]}).to_iterable_dataset())
    with pytest.raises(hfp.PackingError, match=r"dataset\['train'\]: column 'input_ids'"):
        hfp.pack(streams, hfp.BestFit(4))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"labels": [[1], [2]]}, "column 'labels': expected as many values as input_ids in every row"),
        ({"attention_mask": [[1, 1], [1, 0]]}, "column 'attention_mask': expected documents without padding, got a 0"),
        ({"labels": [[1, 2], None]}, "column 'labels': expected a list in every row, but row 1 has none"),
    ],
)
def test_rows(columns, message):
    packed = hfp.pack(stream_of([[1, 2], [3, 4]], **columns), hfp.BestFit(4))
    with pytest.raises(hfp.PackingError, match=message):
        list(packed)


def test_tokens_that_do_not_fit_in_32_bits():
    with pytest.raises(hfp.PackingError, match=r"expected the columns input_ids \(list<.*int32>\), got values"):
        list(hfp.pack(stream_of([[1, 2**31]]), hfp.BestFit(4)))


def test_too_long_documents_as_configured():
    with pytest.raises(hfp.PackingError, match="5 tokens"):
        list(hfp.pack(stream_of([[1] * 5]), hfp.BestFit(4, overflow="error")))


@pytest.fixture
def state_of(tmp_path):
    """A function that packs a stream and returns its state after three rows."""

    def make(folder=tmp_path, **options):
        packed = hfp.pack(write_source(folder, "parquet")(), hfp.BestFit(64), **{"window_packs": 4, **options})
        rows = iter(packed)
        for _ in range(3):
            next(rows)
        return packed.state_dict()

    return make


@pytest.mark.parametrize("streams", [None, 4])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window_packs": 8}, "made by BestFit.* in windows of 4 packs, .*; make the stream as before"),
        ({"strategy": hfp.BestFit(64, seed=1)}, "got the state of a stream that was made by BestFit.*seed=0"),
        ({"strategy": hfp.Multipack(64)}, "by Multipack.*, got the state of a stream that was made by BestFit"),
        ({"streams": 8}, r"streams: expected (None|4), as when the state was saved, got 8; pass streams=(None|4)"),
    ],
)
def test_a_state_of_other_rows(streams, change, message, state_of, tmp_path):
    state = state_of(streams=streams)
    options = {"window_packs": 4, "streams": streams, **change}
    packed = hfp.pack(write_source(tmp_path, "parquet")(), options.pop("strategy", hfp.BestFit(64)), **options)
    packed.load_state_dict(state)
    with pytest.raises(hfp.PackingError, match=message):
        next(iter(packed))


@pytest.mark.parametrize("streams", [None, 4])
def test_a_state_of_other_files(streams, state_of, tmp_path):
    state = state_of(streams=streams)
    files = write_parquet(tmp_path / "parquet", split_unevenly(make_documents(seed=1), 4))
    packed = hfp.pack(read_stream("parquet", files), hfp.BestFit(64), window_packs=4, streams=streams)
    packed.load_state_dict(state)
    with pytest.raises(hfp.PackingError, match="expected the files with which the state was saved, but they have chan"):
        next(iter(packed))


@pytest.mark.parametrize("streams", [None, 4])
def test_a_state_of_another_format(streams, state_of, tmp_path, monkeypatch):
    state = pickle.loads(pickle.dumps(state_of(streams=streams)))
    monkeypatch.setattr(saved_state, "_FORMAT", 3)
    packed = hfp.pack(write_source(tmp_path, "parquet")(), hfp.BestFit(64), window_packs=4, streams=streams)
    packed.load_state_dict(state)
    with pytest.raises(hfp.PackingError, match="the state of a stream in format 3, got format 2; go on with"):
        next(iter(packed))


def test_a_state_of_other_ranks(tmp_path):
    def packed():
        return hfp.pack(write_source(tmp_path, "row groups")(), hfp.BestFit(64), window_packs=4, streams=4)

    node = split_dataset_by_node(packed(), 0, 2)
    next(iter(node))
    whole = packed()
    whole.load_state_dict(node.state_dict())
    with pytest.raises(hfp.PackingError, match=r"a state without \[1, 3\], which another rank or worker has read"):
        next(iter(whole))
