"""Lazy packs: the rows of pack(), without a copy of the tokens."""

import pickle
import subprocess
import sys
import tempfile

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset, DatasetDict, concatenate_datasets, load_from_disk
from hypothesis import given, settings
from hypothesis import strategies as st
from lazy_documents import STRATEGIES, both, on_disk, same_rows

import hf_packing as hfp
from hf_packing.errors import PackingError
from hf_packing.rows.lazy.packed_tokens import number_of
from hf_packing.rows.lazy.token_files import SourceFile, StoredColumn, TokenFiles, TokenReader

pytestmark = pytest.mark.filterwarnings("ignore:pack (skips|drops|applies|leaves):UserWarning")

VIEWS = {
    "all": lambda documents: documents,
    "shuffled": lambda documents: documents.shuffle(seed=3),
    "repeated": lambda documents: documents.select([0, 1, 0, *range(len(documents) - 1, 0, -1)]),
    "a range": lambda documents: documents.select(range(len(documents) // 3, len(documents))),
    "renamed": lambda documents: documents.rename_column("weights", "input_weights"),
    "concatenated": lambda documents: concatenate_datasets([documents, documents.select(range(2))]),
}


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 25), min_size=4, max_size=25).filter(any),
    st.sampled_from(STRATEGIES),
    st.sampled_from(sorted(VIEWS)),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
)
def test_rows_are_those_of_pack(lengths, strategy, view, shards, rows_in_batch, masks, labels, position_ids):
    with tempfile.TemporaryDirectory() as folder:
        documents = VIEWS[view](on_disk(folder, lengths, shards, rows_in_batch, masks=masks, labels=labels))
        try:
            packed, warned, lazy, warned_lazily = both(documents, strategy, position_ids=position_ids)
        except PackingError as error:  # what is left is not trained on
            if "labels are left, so there would be nothing to train on" not in str(error):
                raise
            return
        assert warned == warned_lazily
        assert lazy.column_names == packed.column_names
        assert lazy[:] == packed[:]
        assert [lazy[row] for row in range(len(lazy))] == list(packed)
        kinds = {feature.values for feature in lazy.features.values() if isinstance(feature, hfp.PackedTokens)}
        assert kinds == {"int32", "float64", "bool"}
        documents = hfp.unpack(packed)
        assert hfp.unpack(lazy)[:] == documents[:]
        assert hfp.unpack(lazy).features == documents.features


def test_large_lists_small_integers_and_fixed_lengths(tmp_path):
    rows = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    halves = pa.array([np.array(row, np.float16) for row in rows], pa.list_(pa.float16()))
    kinds = {"input_ids": pa.large_list(pa.uint16()), "labels": pa.list_(pa.int64(), 3)}
    table = pa.table({name: pa.array(rows, kind) for name, kind in kinds.items()} | {"halves": halves})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    documents = Dataset.from_file(str(tmp_path / "a.arrow"))
    for view in (documents, documents.select(range(1, 3))):
        packed, _, lazy, _ = both(view, hfp.BestFit(6))
        assert same_rows(lazy, packed)
        assert hfp.unpack(lazy)[:] == hfp.unpack(packed)[:]
        assert hfp.unpack(lazy).features == hfp.unpack(packed).features


def test_rows_that_were_filtered_away_are_not_looked_at(tmp_path):
    table = pa.table({"input_ids": pa.array([[1, 2], None, [3], [4, None], [5, 6]], pa.list_(pa.int32()))})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    documents = Dataset.from_file(str(tmp_path / "a.arrow"))
    packed, _, lazy, _ = both(documents.select([2, 0, 4]), hfp.BestFit(4))
    assert same_rows(lazy, packed)
    with pytest.raises(hfp.PackingError, match="expected a number for every token, but row 0 has a null"):
        hfp.pack(documents.select([3, 2]), hfp.BestFit(4), lazy=True)


def test_tokens_beyond_32_bits(tmp_path):
    """Numbers of tokens are int64: a chunk of 5 billion tokens, which is never read, comes before."""
    path = tmp_path / "values"
    np.arange(100, dtype=np.int16).tofile(path)
    first = 5_000_000_000
    tokens = TokenFiles(
        (SourceFile.at(str(path)),),
        {"input_ids": StoredColumn("int16", True)},
        np.array([0, first, first + 40]),
        np.zeros(2, dtype=np.int32),
        np.array([[0, 60]]),
    )
    read = TokenReader(tokens).read("input_ids", np.array([first + 3, first + 38]), np.array([2, 2], dtype=np.int32))
    assert read.tolist() == [63, 64, 98, 99]


@pytest.mark.parametrize("kind", ["numpy", "torch", "pandas"])
def test_formats(pair, kind):
    packed, lazy = (dataset.with_format(kind) for dataset in pair)
    for key in (1, slice(0, 3), [2, 0]):
        one, other = lazy[key], packed[key]
        assert list(one) == list(other)
        for name in other:
            assert type(one[name]) is type(other[name])
            assert getattr(one[name], "dtype", None) == getattr(other[name], "dtype", None)
            for a, b in zip(one[name], other[name], strict=True):
                np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_arrays_are_as_narrow_as_asked_and_may_be_written_to(pair):
    packed, lazy = (dataset.with_format("numpy", dtype=np.int32) for dataset in pair)
    for name in ("input_ids", "labels", "position_ids"):
        row = lazy[0][name]
        assert row.dtype == np.int32
        row += 1
        np.testing.assert_array_equal(lazy[0][name], packed[0][name])


def test_arrow_shows_numbers_of_packs(pair):
    _, lazy = pair
    number = number_of(lazy.features["input_ids"].folders[0]) << 32
    assert lazy.with_format("arrow")[1]["labels"].to_pylist() == [number + 1]
    assert lazy.to_dict()["input_ids"][:2] == [number, number + 1]


TRANSFORMATIONS = {
    "select": lambda rows: rows.select([2, 0, 1, 2]),
    "shuffle": lambda rows: rows.shuffle(seed=1),
    "shard": lambda rows: rows.shard(2, 1),
    "filter": lambda rows: rows.filter(lambda row: row["input_ids"][0] % 2),
    "filter by a batch": lambda rows: rows.filter(
        lambda batch: [len(row) > 9 for row in batch["labels"]], batched=True
    ),
    "a new column": lambda rows: rows.map(lambda row: {"first": row["input_ids"][0]}),
    "a new column of a batch": lambda rows: rows.map(
        lambda rows: {"n": [len(row) for row in rows["labels"]]}, batched=True
    ),
    "another column": lambda rows: rows.map(lambda row: {"labels": [-100] * 3 + row["labels"][3:]}),
    "no old column": lambda rows: rows.map(lambda row: {"sum": sum(row["labels"])}, remove_columns=rows.column_names),
    "the same rows": lambda rows: rows.map(dict),
    "flatten_indices": lambda rows: rows.shuffle(seed=1).flatten_indices(),
    "train_test_split": lambda rows: rows.train_test_split(0.5, seed=1)["test"],
    "select_columns": lambda rows: rows.select_columns(["labels", "seq_lengths"]),
    "rename_column": lambda rows: rows.rename_column("input_ids", "tokens"),
    "add_column": lambda rows: rows.add_column("number", list(range(len(rows)))),
    "concatenate": lambda rows: concatenate_datasets([rows, rows.select([1])]),
    "pickle": lambda rows: pickle.loads(pickle.dumps(rows)),
    "stream": lambda rows: Dataset.from_list(list(rows.to_iterable_dataset())),
}


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
def test_what_datasets_does_with_rows(pair, transformation):
    packed, lazy = map(TRANSFORMATIONS[transformation], pair)
    assert same_rows(lazy, packed)


def test_a_column_that_no_function_reads_stays_lazy(pair):
    _, lazy = pair
    mapped = lazy.map(lambda row: {"first": row["input_ids"][0]})
    assert isinstance(mapped.features["labels"], hfp.PackedTokens)
    assert isinstance(mapped.features["input_ids"], datasets.List)


@pytest.mark.slow
def test_map_in_processes(pair):
    packed, lazy = (rows.map(lambda row: {"n": len(row["labels"])}, num_proc=2) for rows in pair)
    assert same_rows(lazy, packed)


def test_splits(tmp_path):
    documents = DatasetDict({"train": on_disk(tmp_path / "a"), "test": on_disk(tmp_path / "b", seed=1)})
    packed, _, lazy, _ = both(documents)
    assert all(same_rows(lazy[name], packed[name]) for name in documents)
    with pytest.raises(hfp.PackingError, match=r"dataset\['test'\]: lazy: expected documents in Arrow files"):
        hfp.pack(
            DatasetDict({"train": documents["train"], "test": Dataset.from_dict({"input_ids": [[1]]})}),
            STRATEGIES[0],
            lazy=True,
        )


def test_datasets_of_several_plans_are_concatenated(tmp_path):
    sources = [on_disk(tmp_path / str(seed), seed=seed) for seed in range(3)]
    packed, lazy = (
        [hfp.pack(source, strategy, lazy=lazy) for source, strategy in zip(sources, STRATEGIES[:3], strict=True)]
        for lazy in (False, True)
    )
    assert len({tuple(rows.features["labels"].folders) for rows in lazy}) == 3
    packed, lazy = (concatenate_datasets([rows[0], rows[1].shuffle(seed=1), rows[2]]) for rows in (packed, lazy))
    assert same_rows(lazy, packed)
    assert same_rows(pickle.loads(pickle.dumps(lazy)), packed)
    lazy.save_to_disk(tmp_path / "saved")
    assert same_rows(load_from_disk(tmp_path / "saved"), packed)
    with pytest.raises(hfp.PackingError, match="packed: expected all .* rows that were packed"):
        hfp.unpack(load_from_disk(tmp_path / "saved"))


def test_features_that_are_not_equal(pair):
    _, lazy = pair
    feature = lazy.features["input_ids"]
    assert feature == hfp.PackedTokens("input_ids", ["/elsewhere/cache-1.lazy"])
    assert "/elsewhere/cache-1.lazy" in feature.folders
    assert feature != hfp.PackedTokens("labels", feature.folders)
    assert feature != hfp.PackedTokens("input_ids", feature.folders, "float32")
    assert feature != datasets.Value("int64")


def test_folders_with_the_same_number_are_told_apart(monkeypatch):
    monkeypatch.setattr("hf_packing.rows.lazy.packed_tokens.number_of", lambda _: 7)
    one, other = (hfp.PackedTokens("input_ids", [f"/elsewhere/cache-{name}.lazy"]) for name in "ab")
    assert one != other
    assert one == hfp.PackedTokens("input_ids", ["/moved/cache-a.lazy"])


SAVED = """
import warnings; warnings.simplefilter("error")
{imports}
rows = datasets.load_from_disk({saved!r})
print([rows[number] for number in range(len(rows))] == datasets.load_from_disk({expected!r})[:]["rows"])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("imports", "found"),
    [
        ("import datasets, hf_packing", True),
        ("import hf_packing, datasets; from hf_packing import PackedTokens", True),
        ("import hf_packing as hfp, datasets; hfp.pack", True),
        ("import hf_packing, datasets", False),
    ],
)
def test_a_new_process_reads_what_was_saved(pair, tmp_path, imports, found):
    packed, lazy = pair
    concatenate_datasets([lazy.shuffle(seed=1), lazy]).save_to_disk(tmp_path / "saved")
    Dataset.from_dict({"rows": list(concatenate_datasets([packed.shuffle(seed=1), packed]))}).save_to_disk(
        tmp_path / "expected"
    )
    code = SAVED.format(imports=imports, saved=str(tmp_path / "saved"), expected=str(tmp_path / "expected"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if found:
        assert done.stdout == "True\n", done.stderr
    else:
        assert "Feature type 'PackedTokens' not found" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers(pair, context):
    packed, lazy = pair
    lazy[0]  # the files are open when workers begin
    options = {"batch_size": 2, "collate_fn": hfp.PackingCollator()}
    expected = list(torch.utils.data.DataLoader(packed, **options))
    loader = torch.utils.data.DataLoader(lazy, num_workers=2, multiprocessing_context=context, **options)
    for batch, other in zip(loader, expected, strict=True):
        assert all(torch.equal(torch.as_tensor(batch[name]), torch.as_tensor(other[name])) for name in other)
