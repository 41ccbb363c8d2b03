"""Streams that cannot be packed or mixed, and states that do not fit, are refused: the argument is named."""

import pickle
import re

import datasets
import pytest
import torch
from datasets import Dataset, IterableDataset
from datasets.distributed import split_dataset_by_node
from document_streams import make_documents, read_stream, split_unevenly, stream_of, write_parquet, write_source

import hf_packing as hfp
from hf_packing.streams import state as state_module

pytestmark = pytest.mark.filterwarnings("ignore:pack (leaves|reads):UserWarning")

FEW = make_documents(3)
A, B = Dataset.from_dict({"input_ids": [[1]]}), Dataset.from_dict({"input_ids": [[1]], "labels": [[1]]})


def pack(stream, strategy=None, **options):
    return list(hfp.pack(stream, strategy or hfp.BestFit(4), **options))


def mix(streams, tokens=None, **options):
    return hfp.mix(streams, {"a": 1} if tokens is None else tokens, **options)


REFUSED = {
    "window_packs": lambda: pack(stream_of(FEW), window_packs=0),
    "streams: expected .* got 0": lambda: pack(stream_of(FEW), streams=0),
    "streams: expected .* got 2.0": lambda: pack(stream_of(FEW), streams=2.0),
    "streams: expected None for a Dataset": lambda: pack(A, streams=4),
    "window_packs: expected None for a Dataset, which has one plan,.* got 64": lambda: pack(A, window_packs=64),
    "strategy: .* BestFit": lambda: pack(stream_of(FEW), hfp.BestFit),
    "dataset: .* without a shuffle buffer": lambda: pack(stream_of(FEW).shuffle(seed=0)),
    "dataset: .* shuffle buffer, since": lambda: pack(stream_of(FEW).shuffle(seed=0).map(lambda row: row)),
    "dataset: .* no document": lambda: pack(IterableDataset.from_generator(lambda: iter(()))),
    "dataset: expected documents whose columns are lists or NumPy arrays": lambda: pack(
        IterableDataset.from_generator(lambda: iter([{"input_ids": torch.tensor([1, 2])}]))
    ),
    "to be packed already": lambda: pack(hfp.pack(stream_of(FEW), hfp.BestFit(64))),
    "column 'input_ids'": lambda: pack(Dataset.from_dict({"text": ["a"]}).to_iterable_dataset()),
    r"dataset\['train'\]: column 'input_ids'": lambda: pack(
        datasets.IterableDatasetDict(train=Dataset.from_dict({"text": ["a"]}).to_iterable_dataset())
    ),
    "column 'labels': .* as many values": lambda: pack(stream_of([[1, 2], [3, 4]], labels=[[1], [2]])),
    "column 'labels': .* row 1 is null": lambda: pack(stream_of([[1, 2], [3, 4]], labels=[[1, 2], None])),
    "column 'attention_mask'": lambda: pack(stream_of([[1, 2], [3, 4]], attention_mask=[[1, 1], [1, 0]])),
    "column 'input_ids': .*int32": lambda: pack(stream_of([[1, 2**31]])),
    "5 tokens": lambda: pack(stream_of([[1] * 5]), hfp.BestFit(4, overflow="error")),
    "padding_threshold": lambda: pack(stream_of([[1]]), hfp.Bucket((4, 8)), share_prefixes=True),
    "column 'parents'": lambda: pack(stream_of([[1]], parents=[[1]]), share_prefixes=True),
    "streams: .* got dict": lambda: mix({}, {}),
    "streams: .* got list": lambda: mix([A]),
    "tokens: .* got {'b': 1}": lambda: mix({"a": A}, {"b": 1}),
    r"tokens: .* got \[1\]": lambda: mix({"a": A}, [1]),
    r"tokens\['a'\]": lambda: mix({"a": A}, {"a": 0}),
    r"streams\['b'\]: .* token columns": lambda: mix({"a": A, "b": B}, {"a": 1, "b": 1}),
    r"streams\['a'\]: .* empty dataset": lambda: mix({"a": A.select([])}),
    r"streams\['a'\]: .* got list": lambda: mix({"a": [1]}),
    r"column 'source': .* streams\['a'\]": lambda: mix({"a": A.add_column("source", [[1]])}),
    r"column 'source_epoch': .* streams\['a'\]": lambda: mix({"a": A.add_column("source_epoch", [[1]])}),
    r"streams\['a'\]: .* shuffle buffer": lambda: mix({"a": A.to_iterable_dataset().shuffle(seed=1)}),
    "stopping_strategy": lambda: mix({"a": A}, stopping_strategy="never"),
    "seed": lambda: mix({"a": A}, seed=-1),
}


@pytest.mark.parametrize("named", REFUSED)
def test_refused(named):
    with pytest.raises(hfp.PackingError) as error:
        REFUSED[named]()
    assert re.search(named, str(error.value))


@pytest.fixture
def packed(tmp_path):
    """A function that packs a stream of four files."""

    def make(strategy=None, documents=None, **options):
        files = write_parquet(tmp_path / "parquet", split_unevenly(documents or make_documents(), 4))
        return hfp.pack(read_stream("parquet", files), strategy or hfp.BestFit(64), **{"window_packs": 4, **options})

    return make


@pytest.mark.parametrize("streams", [None, 4])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"window_packs": 8}, "state_dict: .* windows of 8 packs.* windows of 4 packs"),
        ({"strategy": hfp.BestFit(64, seed=1)}, "state_dict: .* seed=1.* seed=0"),
        ({"strategy": hfp.Multipack(64)}, "state_dict: .* Multipack.* BestFit"),
        ({"streams": 8}, "state_dict: .* in 8 logical streams, got "),
        ({"share_prefixes": True}, "state_dict: .* with share_prefixes=16"),
        ({"documents": make_documents(seed=1)}, "dataset: "),
    ],
)
def test_states_of_other_rows(streams, change, named, packed):
    first = packed(streams=streams)
    next(iter(first))
    other = packed(**{"streams": streams, **change})
    other.load_state_dict(first.state_dict())
    with pytest.raises(hfp.PackingError, match=named):
        next(iter(other))


@pytest.mark.parametrize("streams", [None, 4])
@pytest.mark.parametrize(
    ("name", "value", "named"),
    [("_FORMAT", 99, "99, with"), ("shuffles_of_numpy", lambda: "other", "7, with .* other")],
)
def test_states_of_another_format(name, value, named, streams, packed, monkeypatch):
    first, other = packed(streams=streams), packed(streams=streams)
    next(iter(first))
    state = pickle.loads(pickle.dumps(first.state_dict()))
    monkeypatch.setattr(state_module, name, value)
    other.load_state_dict(state)
    with pytest.raises(hfp.PackingError, match=f"state_dict: .* format {named} .*, got format 7, with"):
        next(iter(other))


def test_states_of_other_ranks(tmp_path):
    def packed():
        return hfp.pack(write_source(tmp_path, "row groups")(), hfp.BestFit(64), window_packs=4, streams=4)

    node, whole = split_dataset_by_node(packed(), 0, 2), packed()
    next(iter(node))
    whole.load_state_dict(node.state_dict())
    with pytest.raises(hfp.PackingError, match=r"state_dict: .* \[1, 3\]"):
        next(iter(whole))
