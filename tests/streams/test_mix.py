"""mix: shares of tokens, columns, ends of sources, and exact states."""

from collections import Counter

import datasets
import numpy as np
import pytest
from datasets import Dataset, interleave_datasets
from datasets.distributed import split_dataset_by_node
from document_streams import check_resumed, generated, stream_of
from torch.utils.data import DataLoader

import hf_packing as hfp

pytestmark = pytest.mark.filterwarnings("ignore:(pack|mix) (leaves|reads):UserWarning")

SHARES = {"short": 0.5, "middle": 0.3, "long": 0.2}
MEANS = {"short": 20, "middle": 100, "long": 500}


def sources(documents=400):
    made = {}
    for number, (name, mean) in enumerate(MEANS.items()):
        lengths = np.clip(np.random.default_rng(number).lognormal(np.log(mean) - 0.5, 1.0, documents), 1, 20 * mean)
        made[name] = stream_of([[number * 1000 + 1] * length for length in lengths.astype(int)], rows_in_table=50)
    return made


def source_of(document) -> int:
    return document["input_ids"][0] // 1000


def differences(documents):
    """The tokens of each document, by source, and how far off all so far are from their shares, both [documents, 3]."""
    by_source = np.zeros((len(documents), 3))
    by_source[np.arange(len(documents)), [source_of(each) for each in documents]] = [
        len(each["input_ids"]) for each in documents
    ]
    so_far = by_source.cumsum(0)
    return by_source, so_far - np.array(list(SHARES.values())) * so_far.sum(1, keepdims=True)


def test_shares_of_tokens():
    documents, shares = list(hfp.mix(sources(), SHARES)), np.array(list(SHARES.values()))
    by_source, off = differences(documents)
    lengths = by_source.sum(1)
    assert np.abs(off).max() <= lengths.max()
    weight = lengths / lengths.sum()  # of each document, the middle counts
    middle = off - by_source / 2 + shares * lengths[:, None] / 2
    assert np.abs(weight @ middle).max() < 0.1 * lengths.max()  # as often above as below
    drawn = list(interleave_datasets(list(sources().values()), probabilities=list(shares), seed=0))
    long = sum(len(each["input_ids"]) for each in drawn if source_of(each) == 2)
    assert abs(long / sum(len(each["input_ids"]) for each in drawn) - 0.2) > 0.3  # by documents, the long ones get most


@pytest.mark.slow
def test_shares_of_pieces():
    shards = {name: Dataset.from_list([*made]).to_iterable_dataset(8) for name, made in sources().items()}
    longest = max(len(each["input_ids"]) for made in sources().values() for each in made)
    for number in range(4):
        by_source, off = differences(list(hfp.mix(shards, SHARES, stopping_strategy="all_exhausted").shard(4, number)))
        assert by_source.sum() > 3 * longest
        assert np.abs(off).max() <= longest


def test_columns_of_sources_and_epochs():
    mixed = hfp.mix(sources(), SHARES)
    assert list(mixed.features) == ["input_ids", "source"]
    for document in mixed.take(100):
        assert document["source"] == [source_of(document)] * len(document["input_ids"])
    packed = hfp.pack(mixed, hfp.BestFit(1024), window_packs=4)
    rows = list(packed)
    for row in rows:
        assert row["source"] == [token // 1000 for token in row["input_ids"]]
    assert any(len(set(row["source"])) > 1 for row in rows)
    shards = {"few": [[[1, 1], [2]], [[3]]], "many": [[[11], [12, 12]], [[13] * 9]]}
    made = {name: generated(parts) for name, parts in shards.items()}
    mixed = hfp.mix(made, {"few": 0.6, "many": 0.4}, stopping_strategy="all_exhausted")
    assert list(mixed.features) == ["input_ids", "source", "source_epoch"]
    seen: Counter = Counter()
    for document in mixed:
        ids = document["input_ids"]
        assert document["source_epoch"] == [seen[ids[0]]] * len(ids)
        seen[ids[0]] += 1
    assert (max(seen.values()), min(seen.values())) == (5, 1)
    rows = list(hfp.pack(mixed, hfp.BestFit(16)))
    assert {epoch for row in rows for epoch in row["source_epoch"]} == set(range(5))


def test_ends_of_sources_that_may_be_read_again():
    short = Dataset.from_dict({"input_ids": [[1]] * 10})
    long = Dataset.from_dict({"input_ids": [[2, 2]] * 30})
    made, even = {"short": short, "long": long}, {"short": 1, "long": 1}

    def numbers(stopping_strategy):
        return Counter(each["input_ids"][0] for each in hfp.mix(made, even, stopping_strategy=stopping_strategy))

    assert numbers("first_exhausted") == {1: 10, 2: 5}
    assert numbers("all_exhausted_without_replacement") == {1: 10, 2: 30}
    assert numbers("all_exhausted") == {1: 60, 2: 30}
    few = stream_of([[1], [2], [3]]).take(2)
    mixed = hfp.mix(
        {"few": few, "many": Dataset.from_dict({"input_ids": [[9]] * 6})},
        {"few": 1, "many": 1},
        stopping_strategy="all_exhausted",
    )
    assert [each["input_ids"][0] for each in mixed if each["source"][0] == 0] == [1, 2, 1, 2, 1, 2]
    stream = generated([[[1], [2]], [[3], [4]]])
    mixed = hfp.mix({"a": stream, "b": stream}, {"a": 1, "b": 1}, stopping_strategy="all_exhausted_without_replacement")
    assert Counter(each["input_ids"][0] for each in mixed) == dict.fromkeys((1, 2, 3, 4), 2)


def test_a_mixture_of_mixtures():
    documents = {name: Dataset.from_dict({"input_ids": [[number]] * 64}) for number, name in enumerate("abc")}
    inner = hfp.mix({"a": documents["a"], "b": documents["b"]}, {"a": 3, "b": 1}).rename_column("source", "inner")
    third = documents["c"].add_column("inner", [[2]] * 64)

    def mixed():
        return hfp.mix({"inner": inner, "c": third}, {"inner": 1, "c": 1})

    rows = list(mixed())
    assert Counter(row["input_ids"][0] for row in rows[:64]) == {0: 24, 1: 8, 2: 32}
    check_resumed(mixed, rows, [21])


LISTS = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))})


def stream(documents, shards=3):
    return Dataset.from_dict({"input_ids": documents}, features=LISTS).to_iterable_dataset(shards)


@pytest.mark.parametrize("how", ["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"])
@pytest.mark.parametrize("streams", [None, 3])
def test_a_source_without_tokens(how, streams):
    good, even = stream([[1] * 5] * 90), {"a": 1, "b": 1}
    for bad, number in ((stream([[]] * 3).filter(lambda _: False), 0), (stream([[]] * 12), 12)):
        mixed = hfp.mix({"a": good, "b": bad}, even, stopping_strategy=how)
        with pytest.raises(hfp.PackingError, match=rf"streams\['b'\]: .* got {number} documents"):
            list(mixed if streams is None else hfp.pack(mixed, hfp.BestFit(16), streams=streams))
    late = stream([[]] * 20 + [[2] * 5] * 20, shards=1)
    mixed = hfp.mix({"a": good, "b": late}, even, stopping_strategy=how)
    numbers = [sum(each["input_ids"][:1]) for each in mixed]
    assert numbers[:20] == [0] * 20 or numbers[1:21] == [0] * 20
    assert sorted(numbers[20:60]) == [1] * 20 + [2] * 20
    assert how == "all_exhausted" or 2 not in numbers[60:]


@pytest.mark.parametrize("shards", [1, 3])
def test_workers_nodes_and_shards_read_every_document_once(shards):
    """Also those that get no shard: datasets leaves out workers beyond the number of shards."""
    parts = [[[10 * part + n] for n in range(8)] for part in range(shards)]
    mixed = hfp.mix({"a": generated(parts)}, {"a": 1})
    expected = sorted(n for part in parts for (n,) in part)

    def numbers(documents):
        return [document["input_ids"][0] for document in documents]

    assert sorted(numbers(DataLoader(mixed, batch_size=None, num_workers=2))) == expected
    assert sorted(n for index in range(4) for n in numbers(mixed.shard(4, index))) == expected
    nodes = [split_dataset_by_node(mixed, rank, 2) for rank in range(2)]
    assert sorted(n for node in nodes for n in numbers(node)) == expected
