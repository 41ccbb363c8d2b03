"""Where packed rows are cached, when they are used again, and what damaged files and killed processes do to them."""

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
import hf_packing.rows.pack as pack_module
from hf_packing.rows.cache import UNTOUCHED_FOR, CachedPacks, clear_unfinished, work_folder

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


def test_beside_the_datasets_own_files(folder):
    source = load_from_disk(folder)
    packed = hfp.pack(source, hfp.BestFit(4))
    assert packed.cache_files[0]["filename"].startswith(str(folder / "cache-"))
    assert not list(folder.glob(".*"))


def test_in_memory_datasets_go_to_the_cache_of_datasets(tmp_path):
    packed = hfp.pack(Dataset.from_dict(DOCUMENTS), hfp.BestFit(4))
    assert packed.cache_files[0]["filename"].startswith(str(tmp_path / "datasets-cache" / "hf_packing" / "cache-"))


def test_a_hit_plans_nothing(folder, monkeypatch):
    source = load_from_disk(folder)
    first = hfp.pack(source, hfp.BestFit(4))
    monkeypatch.setattr(hfp.BestFit, "plan_lengths", lambda *_: pytest.fail("planned again"))
    second = hfp.pack(source, hfp.BestFit(4))
    assert second.cache_files == first.cache_files
    assert second[:] == first[:]
    with pytest.raises(pytest.fail.Exception, match="planned again"):
        hfp.pack(source, hfp.BestFit(4), load_from_cache_file=False)


def test_misses(folder, tmp_path, monkeypatch):
    def cache_file(source, strategy, **options):
        return hfp.pack(source, strategy, **options).cache_files[0]["filename"]

    source = load_from_disk(folder)
    Dataset.from_dict({name: [*rows, [12]] for name, rows in DOCUMENTS.items()}).save_to_disk(tmp_path / "other")
    first = cache_file(source, hfp.BestFit(4))
    others = [
        cache_file(source, hfp.BestFit(5)),
        cache_file(source, hfp.BestFit(4, seed=1)),
        cache_file(source, hfp.FirstCome(4)),
        cache_file(source, hfp.BestFit(4), position_ids=False),
        cache_file(source.select([0, 2]), hfp.BestFit(4)),
        cache_file(load_from_disk(tmp_path / "other"), hfp.BestFit(4)),
    ]
    monkeypatch.setattr(hfp, "__version__", "999")
    others.append(cache_file(source, hfp.BestFit(4)))
    assert len({first, *others}) == len(others) + 1


def test_caching_disabled(folder):
    source = load_from_disk(folder)
    datasets.disable_caching()
    try:
        packed = hfp.pack(source, hfp.BestFit(4))
    finally:
        datasets.enable_caching()
    assert not list(folder.glob("cache-*"))
    assert hfp.unpack(packed)["input_ids"][:] == ROWS


@pytest.mark.slow
def test_another_process_hits_and_another_version_does_not(folder):
    script = (
        "import sys, datasets, hf_packing as hfp\n"
        "plan = hfp.BestFit.plan_lengths\n"
        "hfp.BestFit.plan_lengths = lambda *given: print('planned') or plan(*given)\n"
        "hfp.__version__ = sys.argv[1]\n"
        "packed = hfp.pack(datasets.load_from_disk(sys.argv[2]), hfp.BestFit(4))\n"
        "print(packed['input_ids'][:])\n"
    )

    def run(version):
        command = [sys.executable, "-c", script, version, str(folder)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()

    first = run("1.0")
    assert first[0] == "planned"
    assert run("1.0") == first[1:]
    assert run("1.1") == first


@pytest.mark.slow
def test_two_processes_at_once(folder):
    script = (
        "import sys, datasets, hf_packing as hfp\n"
        "for _ in range(10):\n"
        "    hfp.pack(datasets.load_from_disk(sys.argv[1]), hfp.BestFit(4), load_from_cache_file=False)\n"
    )
    command = [sys.executable, "-c", script, str(folder)]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    assert [(process.communicate()[1], process.returncode)[1] for process in running] == [0, 0]
    assert hfp.unpack(hfp.pack(load_from_disk(folder), hfp.BestFit(4)))["input_ids"][:] == ROWS
    assert not list(folder.glob(".*"))


def test_rows_outlast_a_forked_process(monkeypatch):
    at_exit = []
    monkeypatch.setattr("atexit.register", lambda *call, **options: at_exit.append((call, options)))
    monkeypatch.setattr(datasets, "is_caching_enabled", lambda: False)
    file = Path(hfp.pack(Dataset.from_dict(DOCUMENTS), hfp.BestFit(4)).cache_files[0]["filename"])
    (((end, *given), options),) = at_exit
    child = os.fork()
    if child == 0:
        end(*given, **options)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert file.exists()
    end(*given, **options)
    assert not file.parent.exists()


def test_half_a_cache_is_not_used(folder, monkeypatch):
    source = load_from_disk(folder)
    monkeypatch.setattr(pack_module.Origin, "__init__", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        hfp.pack(source, hfp.BestFit(4))
    monkeypatch.undo()
    assert not list(folder.glob("*cache-*"))
    assert hfp.unpack(hfp.pack(source, hfp.BestFit(4)))["input_ids"][:] == ROWS


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
    monkeypatch.setattr(pack_module, "TOKENS_AT_ONCE", 1)
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
    with pytest.raises(hfp.PackingError, match="packed: expected the files that pack.. saved .* the documents again"):
        hfp.unpack(packed)


def test_rows_and_plan_of_two_packs(folder):
    """A strategy with a time limit may plan anew, and its process be killed before the new rows are in place."""
    cache, packed = pack(folder)
    hfp.plan_packing([3, 2, 1, 5], hfp.BestFit(4, seed=5)).save(cache.origin / "plan")
    with pytest.raises(hfp.PackingError, match="pack the documents again with load_from_cache_file=False"):
        hfp.unpack(packed)
    assert hfp.unpack(pack(folder)[1])[:] == DOCUMENTS


SCRIPT = """
import sys, time, datasets, hf_packing as hfp, hf_packing.rows.pack as made
made.TOKENS_AT_ONCE = 1
pack_rows, calls = made.Packing.rows, []

def slowly(*args, **more):
    calls.append(1)
    if len(calls) == int(sys.argv[2]):
        print("packing", flush=True)
        time.sleep(600)
    return pack_rows(*args, **more)

made.Packing.rows = slowly
made.CachedPacks.save_origin = (
    lambda save: lambda *args: (save(*args), print("packing", flush=True), time.sleep(600))
)(made.CachedPacks.save_origin)
hfp.pack(datasets.load_from_disk(sys.argv[1]), hfp.BestFit(4))
"""


def unfinished(folder):
    return sorted(file for file in folder.iterdir() if file.name.startswith("."))


@pytest.mark.slow
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


def test_what_has_a_lock_is_left_over_when_nobody_holds_it(folder):
    """The operating system releases the lock of a process that was killed."""
    place = folder / "cache-0a1b.arrow"
    with work_folder(place) as held:
        left = held.with_name(f".{place.name}-left_over")
        left.mkdir()
        (left / "lock").touch()
        pack(folder)
        assert unfinished(folder) == [held]
    assert unfinished(folder) == []


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
