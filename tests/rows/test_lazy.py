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
from any_strategy import few_examples
from datasets import Dataset, concatenate_datasets
from hypothesis import given
from hypothesis import strategies as st

import hf_packing as hfp
from hf_packing.errors import PackingError
from hf_packing.sampling.sizes import sizes_of

pytestmark = pytest.mark.filterwarnings("ignore:pack (skips|drops|applies|leaves|shares):UserWarning")

STRATEGIES = [
    hfp.BestFit(16),
    hfp.BestFit(7, overflow="truncate", seed=None),
    hfp.BestFit(7, overflow="drop"),
    hfp.FixedLength(9),
    hfp.FirstCome(16, max_documents=3),
    hfp.Bucket((4, 8, 16)),
]
LENGTHS = (5, 3, 0, 9, 12, 1, 20, 4, 4, 2, 7, 30)


def documents(lengths=LENGTHS, seed=0, masks=0, labels=False):
    """Documents of these lengths, with weights and flags, and with masks and labels as asked."""
    rng = np.random.default_rng(seed)
    columns = {
        "input_ids": [rng.integers(0, 1000, length).tolist() for length in lengths],
        "weights": [rng.random(length).tolist() for length in lengths],
        "flags": [(rng.random(length) < 0.5).tolist() for length in lengths],
    }
    if labels:
        columns["labels"] = [rng.integers(-100, -90, length).tolist() for length in lengths]
    for name in ("completion_mask", "assistant_masks")[:masks]:
        columns[name] = [rng.integers(0, 2, length).tolist() for length in lengths]
    kinds = {"input_ids": "int32", "weights": "float64", "flags": "bool"}
    features = {name: datasets.List(datasets.Value(kinds.get(name, "int64"))) for name in columns}
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


VIEWS = {
    "all": lambda rows: rows,
    "shuffled": lambda rows: rows.shuffle(seed=3),
    "repeated": lambda rows: rows.select([0, 1, 0, *range(len(rows) - 1, 0, -1)]),
    "concatenated": lambda rows: concatenate_datasets([rows, rows.select(range(2))]),
}


@few_examples
@given(
    st.lists(st.integers(0, 25), min_size=2, max_size=25).filter(any),
    st.sampled_from(STRATEGIES),
    st.sampled_from(sorted(VIEWS)),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
)
def test_rows_are_those_of_pack(lengths, strategy, view, masks, labels, position_ids):
    source = VIEWS[view](documents(lengths, masks=masks, labels=labels))
    try:
        packed, warned, lazy, warned_lazily = both(source, strategy, position_ids=position_ids)
    except PackingError as error:  # what is left is not trained on
        if "labels are left, so there would be nothing to train on" not in str(error):
            raise
        return
    assert warned == warned_lazily
    assert lazy.column_names == packed.column_names
    assert lazy[:] == packed[:]
    assert [lazy[row] for row in range(len(lazy))] == list(packed)
    unpacked, expected = hfp.unpack(lazy), hfp.unpack(packed)
    assert unpacked[:] == expected[:]
    assert unpacked.features == expected.features


def test_rows_of_trees():
    source = Dataset.from_dict({"input_ids": [[1, 2, 3, 4], [1, 2, 3, 5], [6, 7], [1, 2, 8]]})
    packed, warned, lazy, warned_lazily = both(source, hfp.BestFit(8), share_prefixes=2)
    assert warned == warned_lazily
    assert same_rows(lazy, packed)
    assert max(map(len, packed["segment_lengths"])) > 1
    assert hfp.unpack(lazy)[:] == hfp.unpack(packed)[:] == source[:]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_rows_have_the_format_of_the_documents(kind):
    packed, _, lazy, _ = both(documents().with_format(kind))
    for key in (1, slice(0, 3), [2, 0]):
        one, other = lazy[key], packed[key]
        assert list(one) == list(other)
        for name in other:
            assert type(one[name]) is type(other[name])
            assert getattr(one[name], "dtype", None) == getattr(other[name], "dtype", None)
            for a, b in zip(one[name], other[name], strict=True):
                np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


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
    packed, lazy = pair
    options = {"batch_size": 2, "collate_fn": hfp.PackingCollator()}
    expected = list(torch.utils.data.DataLoader(packed, **options))
    loader = torch.utils.data.DataLoader(lazy, num_workers=2, multiprocessing_context=context, **options)
    for batch, other in zip(loader, expected, strict=True):
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
def test_refusals(pair, call, error, named):
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
