"""What is left in the cache when a file is cut short or a process is killed."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import datasets
import pytest
from datasets import Dataset, load_from_disk
from filelock import FileLock

import hf_packing as hfp
import hf_packing.dataset as dataset_module
from hf_packing.cache import CachedPacks
from hf_packing.unfinished import UNTOUCHED_FOR, clear_unfinished, work_folder

ROWS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10, 11]]
DOCUMENTS = {"input_ids": ROWS, "labels": ROWS}
FILES = [
    *("packing.json", "first_labels.npy", "plan/plan.json"),
    *("plan/document_length.npy", "plan/segment_document.npy", "plan/segment_start.npy", "plan/segment_length.npy"),
    *("plan/pack_offsets.npy", "plan/pack_capacity.npy", "rows"),
]


@pytest.fixture
def folder(tmp_path):
    Dataset.from_dict(DOCUMENTS).save_to_disk(tmp_path / "documents")
    return tmp_path / "documents"


def pack(folder, **options):
    packed = hfp.pack(load_from_disk(folder), hfp.BestFit(4), **options)
    return CachedPacks(Path(packed.cache_files[0]["filename"])), packed


def cut(file, how):
    if how == "missing":
        file.unlink()
    elif how == "zeros":
        file.write_bytes(bytes(file.stat().st_size))
    else:
        file.write_bytes(file.read_bytes()[: 0 if how == "empty" else file.stat().st_size // 2])


@pytest.mark.parametrize("how", ["half", "empty", "missing", "zeros"])
def test_every_file_cut_short_is_packed_again(folder, how):
    cache, packed = pack(folder)
    before = packed[:]
    files = {str(file.relative_to(cache.origin)) for file in cache.origin.rglob("*") if file.is_file()}
    assert files == set(FILES) - {"rows"}
    for name in FILES:
        del packed  # its file is about to be cut under it
        cut(cache.rows if name == "rows" else cache.origin / name, how)
        assert cache.open() is None
        again, packed = pack(folder)
        assert again == cache
        assert packed[:] == before
        assert cache.open() is not None
        assert hfp.unpack(packed)[:] == DOCUMENTS


@pytest.mark.parametrize("text", ["{}", "[]", "null", "1", '{"strategy": "BestFit(4)"}', "\ufffd\x00"])
def test_facts_that_are_not_those_of_a_pack(folder, text):
    cache, _ = pack(folder)
    (cache.origin / "packing.json").write_text(text)
    assert hfp.unpack(pack(folder)[1])[:] == DOCUMENTS


def test_no_stream_that_was_cut_short_passes(folder, tmp_path, monkeypatch):
    """An Arrow stream that ends between two of its blocks of rows can be read, and has fewer."""
    monkeypatch.setattr(dataset_module, "TOKENS_AT_ONCE", 1)
    cache, packed = pack(folder)
    assert packed.data.column("input_ids").num_chunks == len(packed) == 3
    content, copy = cache.rows.read_bytes(), CachedPacks(tmp_path / cache.rows.name)
    shutil.copytree(cache.origin, copy.origin)
    readable = 0
    for size in range(0, len(content), 8):
        copy.rows.write_bytes(content[:size])
        rows = copy.open()
        assert rows is None or rows.num_rows == 3
        readable += rows is not None
    assert readable <= 1  # only the mark at the very end is missing
    copy.rows.write_bytes(content)
    assert copy.open() is not None


def test_unpack_of_damaged_files_says_what_to_do(folder):
    cache, packed = pack(folder)
    cut(cache.origin / "packing.json", "half")
    with pytest.raises(hfp.PackingError, match="packed: expected what pack has saved .* pack again"):
        hfp.unpack(packed)


def test_rows_and_plan_of_two_packs(folder):
    """A strategy with a time limit may plan anew, and its process be killed before the new rows are in place."""
    cache, _ = pack(folder)
    hfp.plan_packing([3, 2, 1, 5], hfp.BestFit(4, seed=5)).save(cache.origin / "plan")
    assert hfp.unpack(pack(folder)[1])[:] == DOCUMENTS


SCRIPT = """
import sys, time, datasets, hf_packing as hfp, hf_packing.dataset as made
made.TOKENS_AT_ONCE = 1
pack_rows, calls = made.pack_rows, []

def slowly(*args, **more):
    calls.append(1)
    if len(calls) == int(sys.argv[2]):
        print("packing", flush=True)
        time.sleep(600)
    return pack_rows(*args, **more)

made.pack_rows = slowly
made.CachedPacks.save_origin = (
    lambda save: lambda *args: (save(*args), print("packing", flush=True), time.sleep(600))
)(made.CachedPacks.save_origin)
hfp.pack(datasets.load_from_disk(sys.argv[1]), hfp.BestFit(4))
"""


def unfinished(folder):
    return sorted(file for file in folder.iterdir() if file.name.startswith("."))


@pytest.mark.parametrize("stop_at", [3, 99], ids=["while writing rows", "with the plan in place"])
def test_what_a_killed_process_has_left(folder, stop_at):
    running = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), str(stop_at)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert running.stdout.readline() == "packing\n"
        (live,) = unfinished(folder)
        hfp.pack(load_from_disk(folder), hfp.BestFit(5))
        assert unfinished(folder) == [live]
        assert [file.name for file in live.glob("*.arrow")]
    finally:
        running.kill()
        running.communicate()
    assert unfinished(folder) == [live]
    assert hfp.unpack(pack(folder)[1])[:] == DOCUMENTS
    assert unfinished(folder) == []


def test_what_has_no_lock_is_left_over_when_nobody_writes_to_it(folder):
    file, plan = folder / ".cache-0a1b.arrow.4711-140", folder / ".cache-0a1b.plan-x_y1"
    others = [folder / ".cache", folder / ".cache-notes.txt", folder / ".cache-xyz.arrow.1-1"]
    plan.mkdir()
    for each in (file, plan / "packing.json", *others):
        each.touch()
    pack(folder)
    assert unfinished(folder) == sorted([file, plan, *others])
    old = time.time() - UNTOUCHED_FOR - 10
    for each in (file, plan, *others):
        os.utime(each, (old, old))
    pack(folder)
    assert unfinished(folder) == sorted([plan, *others])  # its file was touched just now
    os.utime(plan / "packing.json", (old, old))
    pack(folder)
    assert unfinished(folder) == sorted(others)


def test_file_systems_without_locks(folder, monkeypatch):
    monkeypatch.setattr("filelock.FileLock.acquire", lambda *_, **__: (_ for _ in ()).throw(NotImplementedError))
    assert hfp.unpack(pack(folder)[1])[:] == DOCUMENTS
    assert unfinished(folder) == []


def test_a_folder_that_is_cleared_before_it_is_locked(folder, monkeypatch):
    acquire, cleared = FileLock.acquire, []

    def clear_and_acquire(lock, *args, **more):
        if not cleared:
            cleared.append(Path(lock.lock_file).parent)
            cleared[0].rmdir()
        return acquire(lock, *args, **more)

    monkeypatch.setattr("filelock.FileLock.acquire", clear_and_acquire)
    with work_folder(folder / "cache-0a1b.arrow") as work:
        assert (work / "lock").is_file()
        clear_unfinished(folder)
        assert unfinished(folder) == [work]
    assert len(cleared) == 1
    assert unfinished(folder) == []


@pytest.mark.filterwarnings("ignore:pack skips:UserWarning")
@pytest.mark.parametrize("columns", [{"input_ids": ROWS}, {"input_ids": [[]], "labels": [[]]}])
def test_what_was_packed_without_labels_or_rows(columns):
    features = datasets.Features({name: datasets.List(datasets.Value("int32")) for name in columns})
    packed = hfp.pack(Dataset.from_dict(columns, features=features), hfp.BestFit(4))
    assert CachedPacks(Path(packed.cache_files[0]["filename"])).open() is not None
    assert hfp.unpack(packed)[:] == columns
