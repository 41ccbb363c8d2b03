"""What lazy packs need on disk: files of documents that stay as they are, and a plan beside them."""

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, concatenate_datasets, load_from_disk
from lazy_documents import STRATEGIES, both, columns_of, on_disk, same_rows, source_of

import hf_packing as hfp
from hf_packing.rows.cache import UNTOUCHED_FOR
from hf_packing.rows.lazy import stored_packs
from hf_packing.rows.lazy.stored_packs import StoredPacks
from hf_packing.rows.lazy.token_files import SourceFile

pytestmark = pytest.mark.filterwarnings("ignore:pack (skips|drops|applies|leaves):UserWarning")


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
