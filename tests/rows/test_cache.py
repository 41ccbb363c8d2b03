"""Where packed rows are cached, when they are used again, and what damaged files and killed processes do to them."""

import os
import re
import resource
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import datasets
import pyarrow as pa
import pytest
from datasets import Dataset, load_from_disk
from datasets.table import MemoryMappedTable
from tiers import fast_only
from windows_rules import follow_windows_rules

import hf_packing as hfp
import hf_packing.rows.pack as pack_module
from hf_packing.files import UNFINISHED, UNTOUCHED_FOR

ROWS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10, 11]]
DOCUMENTS = {"input_ids": ROWS, "labels": ROWS}
STRATEGY = hfp.BestFit(4)
FILES = [
    *("packing.json", "first_labels.npy", "plan/plan.json"),
    *("plan/document_length.npy", "plan/segment_document.npy", "plan/segment_start.npy", "plan/segment_length.npy"),
    *("plan/pack_offsets.npy", "plan/pack_capacity.npy", "rows.arrow"),
]


@pytest.fixture
def folder(tmp_path):
    Dataset.from_dict(DOCUMENTS).save_to_disk(tmp_path / "documents")
    return tmp_path / "documents"


def pack(folder, **options):
    packed = hfp.pack(load_from_disk(folder), STRATEGY, **options)
    return Path(packed.cache_files[0]["filename"]).parent, packed


def test_where_rows_are_cached(folder):
    source = load_from_disk(folder)
    datasets.disable_caching()
    try:
        packed = hfp.pack(source, STRATEGY)
    finally:
        datasets.enable_caching()
    assert not list(folder.glob("packed-*"))
    assert hfp.unpack(packed)["input_ids"][:] == ROWS
    on_disk, in_memory = (hfp.pack(each, STRATEGY) for each in (source, Dataset.from_dict(DOCUMENTS)))
    assert on_disk.cache_files[0]["filename"].startswith(str(folder / "packed-"))
    assert in_memory.cache_files[0]["filename"].startswith(f"{datasets.config.HF_DATASETS_CACHE}/hf_packing/packed-")
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize("lazy", [False, True])
def test_a_hit_plans_nothing(folder, monkeypatch, lazy):
    source = load_from_disk(folder)
    first = hfp.pack(source, STRATEGY, lazy=lazy)
    monkeypatch.setattr(hfp.BestFit, "plan_lengths", lambda *_: pytest.fail("planned again"))
    second = hfp.pack(source, STRATEGY, lazy=lazy)
    assert second.cache_files == first.cache_files
    assert second[:] == first[:]
    for options in ({"lazy": lazy, "load_from_cache_file": False}, {"lazy": not lazy}):
        with pytest.raises(pytest.fail.Exception, match="planned again"):
            hfp.pack(source, STRATEGY, **options)


def test_misses(folder, tmp_path, monkeypatch):
    source = load_from_disk(folder)

    def cache_file(strategy=STRATEGY, source=source, **options):
        return hfp.pack(source, strategy, **options).cache_files[0]["filename"]

    Dataset.from_dict({name: [*rows, [12]] for name, rows in DOCUMENTS.items()}).save_to_disk(tmp_path / "other")
    found = [
        *map(cache_file, (STRATEGY, hfp.BestFit(5), hfp.BestFit(4, seed=1), hfp.FirstCome(4))),
        cache_file(position_ids=False),
        *(cache_file(share_prefixes=fewest) for fewest in (2, 3)),
        *(cache_file(source=each) for each in (source.select([0, 2]), load_from_disk(tmp_path / "other"))),
    ]
    monkeypatch.setattr(hfp, "__version__", "999")
    assert len({*found, cache_file()}) == len(found) + 1


@pytest.mark.slow
def test_another_process_hits(folder):
    script = (
        "import sys, datasets, hf_packing as hfp\n"
        "plan = hfp.BestFit.plan_lengths\n"
        "hfp.BestFit.plan_lengths = lambda *given: print('planned') or plan(*given)\n"
        "packed = hfp.pack(datasets.load_from_disk(sys.argv[1]), hfp.BestFit(4))\n"
        "print(packed['input_ids'][:])\n"
    )
    command = [sys.executable, "-c", script, str(folder)]
    first, second = (subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2))
    assert first == f"planned\n{second}"


@pytest.mark.slow
def test_two_processes_at_once(folder):
    script = (
        "import sys, datasets, hf_packing as hfp\n"
        "for _ in range(10):\n"
        "    hfp.pack(datasets.load_from_disk(sys.argv[1]), hfp.BestFit(4), load_from_cache_file=False)\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", script, str(folder)]) for _ in range(2)]
    assert [process.wait() for process in running] == [0, 0]
    assert hfp.unpack(pack(folder)[1])["input_ids"][:] == ROWS
    assert not list(folder.glob(".*"))


def cut(file, how):
    if how == "missing":
        file.unlink()
    elif how == "zeros":
        file.write_bytes(bytes(file.stat().st_size))
    else:
        file.write_bytes(file.read_bytes()[: 0 if how == "empty" else file.stat().st_size // 2])


@pytest.mark.parametrize("how", fast_only(["half", "empty", "missing", "zeros"], "half", "zeros"))
def test_every_file_cut_short_is_packed_again(folder, how):
    stored, packed = pack(folder)
    before = packed[:]
    assert {str(file.relative_to(stored)) for file in stored.rglob("*") if file.is_file()} == set(FILES)
    for name in FILES:
        whole = (stored / name).read_bytes()
        del packed  # its file is about to be cut under it
        cut(stored / name, how)
        again, packed = pack(folder)
        assert again == stored
        assert packed[:] == before
        assert (stored / name).read_bytes() == whole
        assert hfp.unpack(packed)[:] == DOCUMENTS


def test_half_a_cache_is_not_used(folder, monkeypatch):
    source = load_from_disk(folder)
    monkeypatch.setattr(pack_module.Origin, "save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        hfp.pack(source, STRATEGY)
    monkeypatch.undo()
    assert not list(folder.glob("*pack*"))
    assert hfp.unpack(hfp.pack(source, STRATEGY))["input_ids"][:] == ROWS
    stored, packed = pack(folder, share_prefixes=1)
    (stored / "plan" / "segment_shared.npy").unlink()
    assert pack(folder, share_prefixes=1)[1][:] == packed[:]
    assert (stored / "plan" / "segment_shared.npy").exists()


@pytest.mark.parametrize("text", ["{}", "[]", "null", "1", '{"strategy": "BestFit(4)"}', "\ufffd\x00"])
def test_facts_that_are_not_those_of_a_pack(folder, text):
    stored, _ = pack(folder)
    (stored / "packing.json").write_text(text)
    assert hfp.unpack(pack(folder)[1])[:] == DOCUMENTS


def test_a_stream_that_ends_between_two_blocks_is_packed_again(folder, monkeypatch):
    """An Arrow stream that ends between two of its blocks of rows can be read, and has fewer."""
    monkeypatch.setattr(pack_module, "TOKENS_AT_ONCE", 1)
    stored, packed = pack(folder)
    assert packed.data.column("input_ids").num_chunks == len(packed) == 3
    content, shorter = (stored / "rows.arrow").read_bytes(), []
    for size in range(0, len(content) - 8, 8):
        (stored / "rows.arrow").write_bytes(content[:size])
        with suppress(OSError, pa.ArrowException):
            if MemoryMappedTable.from_file(str(stored / "rows.arrow")).num_rows in (1, 2):
                shorter.append(size)
    for size in (shorter[0], shorter[-1]):
        (stored / "rows.arrow").write_bytes(content[:size])
        assert len(pack(folder)[1]) == 3


def test_unpack_says_what_is_damaged_or_of_other_rows(folder):
    stored, packed = pack(folder)
    cut(stored / "packing.json", "half")
    with pytest.raises(hfp.PackingError, match="packed: expected the files that pack.. saved .* the documents again"):
        hfp.unpack(packed)
    stored, packed = pack(folder)
    hfp.plan_packing([3, 2, 1, 5], hfp.BestFit(4, seed=5)).save(stored / "plan")
    with pytest.raises(hfp.PackingError, match="plan: expected the plan that these rows were packed with"):
        hfp.unpack(packed)


def unfinished(folder):
    return sorted(file for file in folder.iterdir() if file.name.startswith("."))


def make_old(*files):
    for file in files:
        for each in (file, *file.rglob("*")):
            os.utime(each, (time.time() - UNTOUCHED_FOR - 10,) * 2)


def test_unfinished_folders_are_removed_an_hour_after_the_last_write(folder):
    left, other = folder / f"{UNFINISHED}{uuid4().hex}", folder / f"{UNFINISHED}list"
    left.mkdir()
    (left / "rows.arrow").touch()
    other.touch()
    make_old(left, other)
    (left / "rows.arrow").touch()
    pack(folder)
    assert unfinished(folder) == sorted([other, left])
    make_old(left)
    pack(folder)
    assert unfinished(folder) == [other]


def test_the_rules_of_windows_are_followed_in_the_tests_below(tmp_path, monkeypatch):
    follow_windows_rules(monkeypatch)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(b"1")
    with (tmp_path / "a" / "file").open("rb"), pytest.raises(PermissionError):
        (tmp_path / "a").rename(tmp_path / "b")
    mapped = pa.memory_map(str(tmp_path / "a" / "file"))
    for change in (lambda: (tmp_path / "a").rename(tmp_path / "b"), lambda: shutil.rmtree(tmp_path / "a")):
        with pytest.raises(PermissionError):
            change()
    mapped.close()
    (tmp_path / "a").rename(tmp_path / "b")
    shutil.rmtree(tmp_path / "b")


@pytest.mark.parametrize("lazy", [False, True])
def test_rows_are_cached_under_the_rules_of_windows(folder, monkeypatch, lazy):
    follow_windows_rules(monkeypatch)
    stored, packed = pack(folder)
    assert hfp.unpack(packed)[:] == DOCUMENTS
    before, source = packed[:], load_from_disk(folder)
    hfp.pack(source, STRATEGY, lazy=lazy)
    # rows that are read cannot be replaced
    with pytest.raises(hfp.PackingError, match=f"^dataset: expected to write to '{stored}', got the error: .*denied"):
        hfp.pack(source, STRATEGY, load_from_cache_file=False)
    assert unfinished(folder) == []
    del packed
    again, packed = pack(folder, load_from_cache_file=False)
    assert (again, packed[:]) == (stored, before)
    del packed
    (stored / "packing.json").write_text("{}")
    assert pack(folder)[1][:] == before
    assert hfp.pack(source, STRATEGY, lazy=True)[:] == before


def test_rows_that_another_process_has_packed_meanwhile_are_used_under_the_rules_of_windows(folder, monkeypatch):
    follow_windows_rules(monkeypatch)
    plan, others = hfp.BestFit.plan_lengths, []

    def plan_while_another_packs(*given):
        if not others:
            others.append(None)
            others[0] = pack(folder)[1]
        return plan(*given)

    monkeypatch.setattr(hfp.BestFit, "plan_lengths", plan_while_another_packs)
    _, packed = pack(folder)
    assert packed.cache_files == others[0].cache_files
    assert hfp.unpack(packed)[:] == DOCUMENTS
    assert unfinished(folder) == []


@pytest.fixture
def full_disk(folder):
    """No file may have more than 700 bytes: more than the files of a plan of four documents, and less than rows."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, before[1]))
    yield folder
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_is_an_error_that_names_the_place_and_leaves_nothing(folder):
    before = sorted(folder.rglob("*"))
    source = load_from_disk(folder)
    with pytest.raises(
        hfp.PackingError, match=f"^dataset: expected to write to '{folder}/packed-.*; datasets.disable_"
    ):
        hfp.pack(source, STRATEGY)
    assert sorted(folder.rglob("*")) == before
    assert len(hfp.pack(source, STRATEGY, lazy=True)) == 3


def test_where_rows_go_if_the_folder_of_the_documents_cannot_be_written_to(folder, tmp_path, monkeypatch):
    source = load_from_disk(folder)
    monkeypatch.setattr(os, "access", lambda *_: False)
    packed = hfp.pack(source, STRATEGY)
    assert packed.cache_files[0]["filename"].startswith(f"{datasets.config.HF_DATASETS_CACHE}/hf_packing/packed-")
    (tmp_path / "file").touch()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "file" / "cache")
    place = re.escape(str(tmp_path / "file" / "cache" / "hf_packing"))
    with pytest.raises(
        hfp.PackingError, match=f"^dataset: expected to write to '{place}', got the error: .*; datasets"
    ):
        hfp.pack(source, STRATEGY)
    datasets.disable_caching()  # as the message says
    try:
        assert hfp.pack(source, STRATEGY)[:] == packed[:]
    finally:
        datasets.enable_caching()


def test_rows_that_another_process_replaces_in_the_moment_they_are_opened(folder, monkeypatch):
    source, opened = load_from_disk(folder), []

    class Replaced(MemoryMappedTable):
        @classmethod
        def from_file(cls, path):
            opened.append(path)
            if len(opened) == 1:  # the other process has moved the folder, and not yet put its own there
                raise FileNotFoundError(path)
            return MemoryMappedTable.from_file(path)

    monkeypatch.setattr(pack_module, "MemoryMappedTable", Replaced)
    assert hfp.unpack(hfp.pack(source, STRATEGY))["input_ids"][:] == ROWS
    assert len(opened) == 2
