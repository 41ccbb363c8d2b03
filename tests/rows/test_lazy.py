"""Lazy rows: the rows of pack(), built from the documents when they are read."""

import os
import pickle
import shutil
import warnings
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from any_documents import any_documents, with_masks_applied
from any_strategy import few_examples
from datasets import Dataset, concatenate_datasets
from hypothesis import given
from hypothesis import strategies as st

import hf_packing as hfp
from hf_packing.errors import PackingError
from hf_packing.sampling.sizes import sizes_of

pytestmark = pytest.mark.filterwarnings("ignore:pack(ing)? (skips|drops|applies|leaves|shares):UserWarning")

STRATEGIES = [
    hfp.BestFit(16),
    hfp.BestFit(7, overflow="truncate", seed=None),
    hfp.BestFit(7, overflow="drop"),
    hfp.FixedLength(9),
    hfp.FirstCome(16, max_documents=3),
    hfp.Bucket((4, 8, 16)),
]
SHARING = [
    hfp.BestFit(9),
    hfp.ShortestPackFirst(9, overflow="truncate"),
    hfp.FirstCome(9, order="longest_first", overflow="drop"),
    hfp.Multipack(9, window=3),
    hfp.Bucket((4, 9), padding_threshold=1),
]
"""Strategies whose rows share prefixes."""
LENGTHS = (5, 3, 0, 9, 12, 1, 20, 4, 4, 2, 7, 30)


def documents(lengths=LENGTHS, seed=0):
    """Documents of these lengths, with weights and flags."""
    rng = np.random.default_rng(seed)
    columns = {
        "input_ids": [rng.integers(0, 1000, length).tolist() for length in lengths],
        "weights": [rng.random(length).tolist() for length in lengths],
        "flags": [(rng.random(length) < 0.5).tolist() for length in lengths],
    }
    kinds = {"input_ids": "int32", "weights": "float64", "flags": "bool"}
    features = {name: datasets.List(datasets.Value(kind)) for name, kind in kinds.items()}
    return Dataset.from_dict(columns, features=datasets.Features(features))


def both(source, strategy=STRATEGIES[0], **options):
    """The documents packed as always, and lazily, with what was warned of."""
    packed = []
    for lazy in (False, True):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            packed.append(hfp.pack(source, strategy, lazy=lazy, **options))
        packed.append([str(warning.message) for warning in seen])
    return packed


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Documents on disk, packed as always, and lazily."""
    folder = str(tmp_path_factory.mktemp("documents"))
    documents().save_to_disk(folder)
    packed, _, lazy, _ = both(datasets.load_from_disk(folder))
    assert max(map(len, packed["seq_lengths"])) > 1
    return packed, lazy


def same_rows(lazy, packed):
    return lazy.column_names == packed.column_names and len(lazy) == len(packed) > 0 and lazy[:] == packed[:]


@few_examples
@given(
    any_documents(), st.one_of(st.sampled_from(STRATEGIES), st.sampled_from(SHARING)), st.booleans(), st.integers(1, 4)
)
def test_rows_and_documents_of_every_form(source, strategy, position_ids, fewest):
    """Lazy or not, with shared prefixes or without: rows are the same, and documents come back with masks applied."""
    shared = {"share_prefixes": fewest if strategy in SHARING else False}
    try:
        packed, warned, lazy, warned_lazily = both(source, strategy, position_ids=position_ids, **shared)
    except PackingError as error:  # what is left is not trained on
        if "labels are left, so there would be nothing to train on" not in str(error):
            raise
        return
    assert warned == warned_lazily
    assert (lazy.column_names, lazy[:]) == (packed.column_names, packed[:])
    assert [lazy[row] for row in range(len(lazy))] == list(packed)
    expected, unpacked = with_masks_applied(source), hfp.unpack(packed)
    assert unpacked.column_names == list(expected)
    assert unpacked[:] == hfp.unpack(lazy)[:]
    assert unpacked.features == hfp.unpack(lazy).features
    if getattr(strategy, "overflow", "split") == "split":
        assert unpacked[:] == expected
    for name, values in expected.items():
        assert all(before[: len(after)] == after for before, after in zip(values, unpacked[name], strict=True))
    if position_ids and strategy not in SHARING and len(source):  # without rows, types are unknown
        assert strategy(source[:]) == packed[:]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_rows_have_the_format_of_the_documents(kind):
    packed, _, lazy, _ = both(documents().with_format(kind))
    for key in (1, slice(0, 3), [2, 0]):
        assert repr(lazy[key]) == repr(packed[key])  # types and dtypes, too


TRANSFORMATIONS = {
    "select": lambda rows: rows.select([2, 0, 1, 2]),
    "shuffle": lambda rows: rows.shuffle(seed=1),
    "shard": lambda rows: rows.shard(2, 1),
    "filter": lambda rows: rows.filter(lambda row: row["input_ids"][0] % 2),
    "a new column": lambda rows: rows.map(lambda row: {"first": row["input_ids"][0]}),
    "another column": lambda rows: rows.map(lambda row: {"labels": [-100] * 3 + row["labels"][3:]}),
    "no old column": lambda rows: rows.map(lambda row: {"sum": sum(row["labels"])}, remove_columns=rows.column_names),
    "flatten_indices": lambda rows: rows.shuffle(seed=1).flatten_indices(),
    "train_test_split": lambda rows: rows.train_test_split(0.5, seed=1)["test"],
    "select_columns": lambda rows: rows.select_columns(["labels", "seq_lengths"]),
    "add_column": lambda rows: rows.add_column("number", list(range(len(rows)))),
    "concatenate with its own rows": lambda rows: concatenate_datasets([rows, rows.select([1])]),
    "pickle": lambda rows: pickle.loads(pickle.dumps(rows)),
}


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
def test_what_datasets_does_with_rows(pair, transformation):
    packed, lazy = map(TRANSFORMATIONS[transformation], pair)
    assert same_rows(lazy, packed)


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers(pair, context):
    options = {"batch_size": 2, "collate_fn": hfp.PackingCollator()}
    expected, *others = (
        list(torch.utils.data.DataLoader(rows, **options, **more))
        for rows, more in zip(pair, ({}, {"num_workers": 2, "multiprocessing_context": context}), strict=True)
    )
    for batch, other in zip(*others, expected, strict=True):
        assert all(torch.equal(torch.as_tensor(batch[name]), torch.as_tensor(other[name])) for name in other)


LOST = {
    "with_format": lambda one, _: one.with_format("numpy"),
    "concatenate_datasets": lambda one, other: concatenate_datasets([one, other]),
    "to_parquet": lambda one, _: Dataset.from_dict(one.to_dict(), features=one.features),
}


@pytest.mark.parametrize("way", LOST)
def test_rows_that_have_lost_their_transform_are_no_tokens(pair, way):
    """The cells that are left are dicts, and whatever of this package reads them says how they were lost."""
    _, lazy = pair
    lost = LOST[way](lazy, hfp.pack(documents(seed=1), STRATEGIES[0], lazy=True))
    assert lost[1]["input_ids"] == {"pack": 1}
    for read in (hfp.unpack, sizes_of):
        with pytest.raises(PackingError, match="expected the transform with which pack"):
            read(lost)
    with pytest.raises((PackingError, TypeError)):
        hfp.PackingCollator()(list(lost))


REFUSED = [
    (lambda lazy: lazy.save_to_disk("nowhere"), TypeError, "transform"),
    (lambda lazy: lazy.rename_column("labels", "targets")[0], PackingError, "column 'targets'"),
    (lambda lazy: hfp.pack(lazy, hfp.BestFit(4)), PackingError, "dataset: expected a dataset without a transform"),
    (lambda lazy: hfp.unpack(lazy.select(range(2))), PackingError, "packed: expected all"),
    (lambda lazy: hfp.unpack(lazy.shuffle(seed=1)), PackingError, "packed: .* shuffled or selected"),
    (lambda lazy: hfp.unpack(lazy.add_column("n", [1] * len(lazy))), PackingError, "packed: .* columns"),
    (lambda lazy: hfp.unpack(lazy, hfp.plan_packing([3], hfp.BestFit(4))), PackingError, "plan: expected"),
    (lambda _: hfp.pack(documents().to_iterable_dataset(), hfp.BestFit(4), lazy=True), PackingError, "lazy: expected"),
    (lambda _: hfp.pack(documents().with_format("arrow"), hfp.BestFit(4), lazy=True), PackingError, "lazy: expected"),
]


@pytest.mark.parametrize(("call", "error", "named"), REFUSED)
def test_refusals(pair, call, error, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=named):
        call(pair[1])


def test_documents_that_have_changed_and_a_plan_that_is_gone_are_named(tmp_path):
    documents().save_to_disk(tmp_path)
    lazy = hfp.pack(datasets.load_from_disk(tmp_path), STRATEGIES[0], lazy=True)
    as_a_worker_reads_it = pickle.dumps(lazy)
    others = documents(LENGTHS[::-1])
    shutil.copytree(tmp_path, tmp_path.with_suffix(".old"))
    others.save_to_disk(tmp_path.with_suffix(".new"))
    data = Path(datasets.load_from_disk(tmp_path).cache_files[0]["filename"]).name
    os.replace(tmp_path.with_suffix(".new") / data, tmp_path / data)
    with pytest.raises(PackingError, match="dataset: expected the 12 documents that were packed"):
        pickle.loads(as_a_worker_reads_it)
    for plan in tmp_path.glob("packed-*/plan"):
        shutil.rmtree(plan)
    with pytest.raises(PackingError, match="plan"):
        pickle.loads(as_a_worker_reads_it)


def test_no_tokens_are_written(tmp_path):
    documents([40] * 4000).select_columns("input_ids").save_to_disk(tmp_path)
    source = datasets.load_from_disk(tmp_path)
    lazy = hfp.pack(source, hfp.BestFit(800), lazy=True)
    size = sum(file.stat().st_size for file in tmp_path.glob("packed-*/**/*") if file.is_file())
    assert 12 * len(source) < size < 24 * len(source) < 4 * 40 * len(source)
    assert same_rows(lazy, hfp.pack(source, hfp.BestFit(800)))
