"""Lazy packs: the rows of pack(), without a copy of the tokens."""

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset, DatasetDict, concatenate_datasets, load_from_disk
from hypothesis import given, settings
from hypothesis import strategies as st

import hf_packing as hfp
from hf_packing.data.cache import UNTOUCHED_FOR
from hf_packing.data.lazy import stored_packs
from hf_packing.data.lazy.packed_tokens import number_of
from hf_packing.data.lazy.stored_packs import StoredPacks
from hf_packing.data.lazy.token_files import SourceFile, StoredColumn, TokenFiles, TokenReader

pytestmark = pytest.mark.filterwarnings("ignore:pack (skips|drops|applies|leaves):UserWarning")

STRATEGIES = [
    hfp.BestFit(16),
    hfp.BestFit(7, overflow="truncate", seed=None),
    hfp.BestFit(7, overflow="drop"),
    hfp.FixedLength(9),
    hfp.FirstCome(16, max_documents=3),
    hfp.Bucket((4, 8, 16)),
]

VIEWS = {
    "all": lambda documents: documents,
    "shuffled": lambda documents: documents.shuffle(seed=3),
    "repeated": lambda documents: documents.select([0, 1, 0, *range(len(documents) - 1, 0, -1)]),
    "a range": lambda documents: documents.select(range(len(documents) // 3, len(documents))),
    "renamed": lambda documents: documents.rename_column("weights", "input_weights"),
    "concatenated": lambda documents: concatenate_datasets([documents, documents.select(range(2))]),
}


def columns_of(lengths, seed=0, masks=0, labels=False):
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
    return columns


def on_disk(folder, lengths=(5, 3, 0, 9, 12, 1, 20, 4, 4, 2, 7, 30), shards=1, rows_in_batch=1000, **columns):
    """The documents, in so many files, and in record batches of so many rows."""
    table = pa.table(columns_of(lengths, **columns))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [str(folder / f"data-{number}.arrow") for number in range(shards)]
    per_file = -(-len(lengths) // shards)
    for number, path in enumerate(paths):
        with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table.slice(number * per_file, per_file), max_chunksize=rows_in_batch)
    return (
        concatenate_datasets([Dataset.from_file(path) for path in paths]) if shards > 1 else Dataset.from_file(paths[0])
    )


def both(documents, strategy=STRATEGIES[0], **options):
    """The documents packed as always, and lazily, with what was warned of."""
    packed = []
    for lazy in (False, True):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            packed.append(hfp.pack(documents, strategy, lazy=lazy, **options))
        packed.append([str(warning.message) for warning in seen])
    return packed


@pytest.fixture
def pair(tmp_path):
    """Documents on disk, packed as always, and lazily."""
    packed, _, lazy, _ = both(on_disk(tmp_path / "documents"))
    assert max(map(len, packed["seq_lengths"])) > 1
    return packed, lazy


def same_rows(lazy, packed):
    return lazy.column_names == packed.column_names and len(lazy) == len(packed) > 0 and lazy[:] == packed[:]


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
        packed, warned, lazy, warned_lazily = both(documents, strategy, position_ids=position_ids)
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


def test_a_length_schedule(tmp_path):
    schedule = {"length_schedule": hfp.planning.length_schedule.LengthSchedule(2, steps=3), "rows_per_step": 2}
    packed, _, lazy, _ = both(on_disk(tmp_path), hfp.BestFit(16), **schedule)
    assert same_rows(lazy, packed)
    assert max(packed[0]["seq_lengths"]) == 2


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
    monkeypatch.setattr("hf_packing.data.lazy.packed_tokens.number_of", lambda _: 7)
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


def source_of(dataset):
    return stored_packs.open_packs(dataset.features["input_ids"].folders[0]).facts["files"][0]["path"]


@pytest.mark.parametrize("again", [False, True], ids=["in this process", "as a new process would"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (os.utime, "lazy: expected the documents' file '.*' as it was when they were packed, .* pack them again"),
        (
            os.remove,
            "lazy: expected the documents' file '.*', from which lazy packs read .*No such file .*put the file",
        ),
        (lambda path: Path(path).write_bytes(b"other"), "as it was when they were packed, .* got 5 bytes"),
    ],
    ids=["touched", "removed", "replaced"],
)
def test_files_that_are_gone_or_have_changed(pair, change, message, again):
    packed, lazy = pair
    assert lazy[0] == packed[0]
    path = source_of(lazy)
    shutil.copy(path, path + ".new")
    os.replace(path + ".new", path)  # another file, so that writing to it does not reach what is mapped
    change(path)
    if again:
        stored_packs.open_packs.cache_clear()
    with pytest.raises(hfp.PackingError, match=message):
        lazy[0]


def test_a_plan_that_is_gone_or_damaged(pair):
    _, lazy = pair
    folder = Path(lazy.features["input_ids"].folders[0])
    for damage in (lambda: (folder / "begin.npy").write_bytes(b"x"), lambda: shutil.rmtree(folder)):
        damage()
        stored_packs.open_packs.cache_clear()
        with pytest.raises(
            hfp.PackingError, match="lazy: expected the plan of these packs in the folder .* pack the doc"
        ):
            lazy[0]


def test_a_row_of_an_unknown_folder(pair):
    _, lazy = pair
    with pytest.raises(hfp.PackingError, match="column 'labels': expected a row of .*, got one of another folder"):
        lazy.features["labels"].decode_example(1 << 32)


def test_documents_in_memory_and_streams(tmp_path):
    documents = on_disk(tmp_path)
    message = "lazy: expected documents in Arrow files, .* column '{}' is in memory, .*; call documents.save_to_disk"
    with pytest.raises(hfp.PackingError, match=message.format("input_ids")):
        hfp.pack(Dataset.from_dict({"input_ids": [[1, 2]]}), hfp.BestFit(4), lazy=True)
    added = documents.add_column("scores", [[0.0] * len(row) for row in documents["input_ids"]])
    with pytest.raises(hfp.PackingError, match=message.format("scores")):
        hfp.pack(added, hfp.BestFit(4), lazy=True)
    with pytest.raises(hfp.PackingError, match="lazy: expected False for a stream, .* got True"):
        hfp.pack(documents.to_iterable_dataset(), hfp.BestFit(4), lazy=True)
    assert not list(tmp_path.glob("cache-*"))


def test_files_that_were_replaced_before_packing(tmp_path):
    """The dataset still maps the old file, which has the same size."""
    documents = on_disk(tmp_path / "old")
    other = on_disk(tmp_path / "new", seed=1)
    path, new = (rows.cache_files[0]["filename"] for rows in (documents, other))
    assert os.path.getsize(path) == os.path.getsize(new)
    os.replace(new, path)
    with pytest.raises(hfp.PackingError, match="or its file has changed since the dataset was loaded"):
        hfp.pack(documents, STRATEGIES[0], lazy=True)


def test_columns_of_other_files(tmp_path):
    one, other = (on_disk(tmp_path / str(number), rows_in_batch=number) for number in (3, 4))
    other = other.select_columns("weights").rename_column("weights", "scores")
    with pytest.raises(hfp.PackingError, match="column 'scores' in the same record batches as input_ids.*save_to_disk"):
        hfp.pack(concatenate_datasets([one, other], axis=1), hfp.BestFit(4), lazy=True)
    same = on_disk(tmp_path / "5", rows_in_batch=3).select_columns("weights").rename_column("weights", "scores")
    with pytest.raises(hfp.PackingError, match="column 'scores' in the same record batches as input_ids"):
        hfp.pack(concatenate_datasets([one, same], axis=1), hfp.BestFit(4), lazy=True)


def test_a_compressed_file_is_in_memory(tmp_path):
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    table = pa.table(columns_of([4, 5]))
    with pa.OSFile(str(tmp_path / "a"), "wb") as file, pa.ipc.new_stream(file, table.schema, options=options) as stream:
        stream.write_table(table)
    with pytest.raises(hfp.PackingError, match="is in memory"):
        hfp.pack(Dataset.from_file(str(tmp_path / "a")), hfp.BestFit(4), lazy=True)


def test_masks_with_other_values(tmp_path):
    Dataset.from_dict({"input_ids": [[1, 2]], "completion_mask": [[1, 2]]}).save_to_disk(tmp_path)
    with pytest.raises(
        hfp.PackingError, match="column 'completion_mask': expected a 0 or a 1 for each token, got the val"
    ):
        hfp.pack(load_from_disk(tmp_path), hfp.BestFit(4), lazy=True)


def test_tokens_beyond_int32_are_refused_when_they_are_read(tmp_path):
    Dataset.from_dict({"input_ids": [[1, 2**40], [3]]}).save_to_disk(tmp_path)
    lazy = hfp.pack(load_from_disk(tmp_path), hfp.BestFit(2), lazy=True)
    with pytest.raises(hfp.PackingError, match="column 'input_ids': expected 32-bit integers, got values from 1 to"):
        lazy[:]


def test_values_cannot_be_written(pair):
    _, lazy = pair
    assert lazy.features["labels"].encode_example(np.int64(3)) == 3
    with pytest.raises(hfp.PackingError, match="column 'labels': expected the number of a pack, .* got list"):
        lazy.features["labels"].encode_example([1, 2])


def test_uploads_are_refused(pair, monkeypatch):
    _, lazy = pair
    known = SimpleNamespace(id="nobody/nothing", sha="0")
    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", lambda *_, **__: known)
    monkeypatch.setattr("huggingface_hub.HfApi.preupload_lfs_files", lambda *_, **__: pytest.fail("uploaded"))
    with pytest.raises(hfp.PackingError, match="column 'input_ids': expected tokens to upload, .* lazy=False"):
        lazy.push_to_hub("nobody/nothing")


def test_unpack_refuses_other_rows(pair):
    packed, lazy = pair
    lengths = [len(row) for row in hfp.unpack(packed)["input_ids"]]
    assert hfp.unpack(lazy, hfp.plan_packing(lengths, STRATEGIES[0]))[:] == hfp.unpack(packed)[:]
    with pytest.raises(hfp.PackingError, match="plan: expected the plan that these rows were packed with"):
        hfp.unpack(lazy, hfp.plan_packing(lengths, hfp.BestFit(16, seed=9)))
    with pytest.raises(hfp.PackingError, match="packed: expected all .* rows that were packed, in their order, got 2"):
        hfp.unpack(lazy.select(range(2)))
    with pytest.raises(hfp.PackingError, match="shuffled or selected"):
        hfp.unpack(lazy.shuffle(seed=1))
    with pytest.raises(hfp.PackingError, match="column 'n': expected the columns of lazy packs, got int64"):
        hfp.unpack(lazy.add_column("n", list(range(len(lazy)))))


def test_lazy_packs_are_not_packed_again(pair):
    _, lazy = pair
    with pytest.raises(hfp.PackingError, match="expected documents that are not packed yet"):
        hfp.pack(lazy, hfp.BestFit(4), lazy=True)


def test_what_is_on_disk(tmp_path):
    """Nothing is as large as the tokens: 12 bytes for each document, and 28 for each pack."""
    documents = on_disk(tmp_path, [40] * 4000).select_columns("input_ids")
    lazy = hfp.pack(documents, hfp.BestFit(800), lazy=True)
    folder = Path(lazy.cache_files[0]["filename"]).parent
    assert folder.parent == tmp_path
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert 12 * len(documents) < size < 12 * len(documents) + 28 * len(lazy) + 6000 < 4 * 40 * len(documents)
    assert not list(tmp_path.glob(".*"))


def test_a_hit_plans_nothing(tmp_path, monkeypatch):
    source = on_disk(tmp_path)
    first = hfp.pack(source, STRATEGIES[0], lazy=True)
    monkeypatch.setattr(hfp.BestFit, "plan_lengths", lambda *_: pytest.fail("planned again"))
    again = hfp.pack(source, STRATEGIES[0], lazy=True)
    assert again.cache_files == first.cache_files
    assert same_rows(again, first)
    with pytest.raises(pytest.fail.Exception, match="planned again"):
        hfp.pack(source, STRATEGIES[0], lazy=True, load_from_cache_file=False)
    with pytest.raises(pytest.fail.Exception, match="planned again"):
        hfp.pack(source, STRATEGIES[0])


FILES = ["packs.json", "rows.arrow", "begin.npy", "document.npy", "first_token.npy", "file_of_chunk.npy", "places.npy"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [os.remove, lambda file: file.write_bytes(file.read_bytes()[:40])])
def test_incomplete_folders_are_written_again(tmp_path, name, damage):
    documents = on_disk(tmp_path)
    lazy = hfp.pack(documents, STRATEGIES[0], lazy=True)
    rows, folder = lazy[:], Path(lazy.features["input_ids"].folders[0])
    assert sorted(file.name for file in folder.iterdir()) == sorted(FILES)
    assert StoredPacks(folder).open() is not None
    damage(folder / name)
    assert StoredPacks(folder).open() is None
    assert hfp.pack(documents, STRATEGIES[0], lazy=True)[:] == rows
    assert StoredPacks(folder).open() is not None


def test_plans_of_other_files_are_written_again(tmp_path):
    documents = on_disk(tmp_path / "a")
    rows = hfp.pack(documents, STRATEGIES[0], lazy=True)[:]
    os.utime(documents.cache_files[0]["filename"])
    assert hfp.pack(documents, STRATEGIES[0], lazy=True)[:] == rows
    documents.save_to_disk(tmp_path / "b")
    first = hfp.pack(load_from_disk(tmp_path / "b"), STRATEGIES[0], lazy=True)
    os.rename(tmp_path / "b", tmp_path / "c")
    stored_packs.open_packs.cache_clear()
    with pytest.raises(hfp.PackingError, match="expected the plan of these packs in the folder"):
        first[0]
    moved = hfp.pack(load_from_disk(tmp_path / "c"), STRATEGIES[0], lazy=True)
    assert moved[:] == rows


def test_packing_at_the_same_time(tmp_path):
    """Threads stand for processes: each writes to a folder of its own, and the first to finish wins."""
    documents, found = on_disk(tmp_path), []

    def pack():
        found.append(hfp.pack(documents, STRATEGIES[0], lazy=True, load_from_cache_file=False)[:])

    threads = [threading.Thread(target=pack) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(rows == found[0] for rows in found)
    assert not list(tmp_path.glob(".*"))


PACKING = """
import warnings; warnings.simplefilter("ignore")
import sys, datasets, hf_packing as hfp
documents = datasets.Dataset.from_file(sys.argv[1])
for turn in range(5):
    rows = hfp.pack(documents, hfp.BestFit(16), lazy=True, load_from_cache_file=bool(turn % 2))
    assert rows[:]["input_ids"] == [rows[number]["input_ids"] for number in range(len(rows))]
print(rows[:])
"""


@pytest.mark.slow
def test_processes_that_pack_at_the_same_time(pair, tmp_path):
    packed, _ = pair
    command = [sys.executable, "-c", PACKING, str(tmp_path / "documents" / "data-0.arrow")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate()[0] for process in running] == [f"{packed[:]}\n"] * 3
    assert not list((tmp_path / "documents").glob(".*"))


def test_another_process_has_packed_again(tmp_path):
    """What this process has open is of the old file, and must not be used."""
    documents = on_disk(tmp_path)
    rows = hfp.pack(documents, STRATEGIES[0], lazy=True)[:]
    os.utime(documents.cache_files[0]["filename"])
    kept = stored_packs.open_packs
    stale = kept(hfp.pack(documents, STRATEGIES[0], lazy=True).features["labels"].folders[0])
    stale._reader._files = (SourceFile("gone", 1, 1),)  # as if opened before the other process wrote
    assert hfp.pack(documents, STRATEGIES[0], lazy=True)[:] == rows


def test_what_a_killed_process_left_is_removed(tmp_path):
    documents = on_disk(tmp_path)
    left = tmp_path / ".cache-0a1b.lazy-killed"
    left.mkdir()
    long_ago = time.time() - UNTOUCHED_FOR - 10
    os.utime(left, (long_ago, long_ago))
    hfp.pack(documents, STRATEGIES[0], lazy=True)
    assert not left.exists()


@pytest.mark.parametrize("rows", [[], [0], [0, 1, 0]])
@pytest.mark.parametrize("kind", ["int32", "null"])
def test_no_tokens(tmp_path, rows, kind):
    features = datasets.Features({"input_ids": datasets.List(datasets.Value(kind))})
    Dataset.from_dict({"input_ids": [[], []]}, features=features).save_to_disk(tmp_path)
    documents = load_from_disk(tmp_path).select(rows)
    packed, warned, lazy, warned_lazily = both(documents)
    assert len(lazy) == len(packed) == 0
    assert lazy.column_names == packed.column_names
    assert warned == warned_lazily
    assert hfp.unpack(lazy)[:] == hfp.unpack(packed)[:]
    assert both(documents)[2].cache_files == lazy.cache_files


def test_without_caching(pair, tmp_path):
    datasets.disable_caching()
    try:
        documents = Dataset.from_file(str(tmp_path / "documents" / "data-0.arrow"))
        lazy = hfp.pack(documents, STRATEGIES[0], lazy=True)
    finally:
        datasets.enable_caching()
    assert not lazy.cache_files[0]["filename"].startswith(str(tmp_path))
    assert same_rows(lazy, pair[0])
