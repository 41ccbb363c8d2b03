"""A fleet whose workers and drivers are killed, and whose disk is full, packs each row exactly once."""

import errno
import json
import os
import resource
import shutil
import subprocess
from collections import Counter
from functools import partial

import pyarrow.parquet as pq
import pytest
from fleet.faults import (
    HANGS,
    Faults,
    digest_of_fleet,
    driver,
    kill_driver,
    names_in,
    pack_here,
    run_driver,
    session_of,
    some_slow,
    wait_until,
)

from hf_packing.fleet.parts import read_parts
from hf_packing.fleet.store import Store
from hf_packing.fleet.tasks import TRIES

pytestmark = pytest.mark.filterwarnings("ignore:(pack|exchange):UserWarning")

STAGES = {"count": 6, "deal": 6, "gather": 4}


def pattern(shards):
    return f"{shards[0].parent}/*.parquet"


def test_workers_killed_in_every_stage(shards, digest, tmp_path):
    points = ["begin", "unplaced", "placed"]
    kills = [[stage, number, point, "kill"] for stage in STAGES for number, point in enumerate(points)]
    faults = Faults(tmp_path / "faults", *kills, ["gather", 3, "half", "kill"])
    code, key, errors = run_driver(pattern(shards), tmp_path / "out", faults, shards=4)
    assert (code, errors) == (0, "")
    assert digest_of_fleet(tmp_path / "out") == digest
    faults.assert_all_happened()
    assert len({pid for *_, pid, _ in faults.lines("kill")}) == len(faults.faults) == 10
    tries = Counter(faults.tasks("begin"))
    again = {(stage, number) for stage, number, point, _ in faults.faults if point != "placed"}
    assert tries == {(stage, each): 1 + ((stage, each) in again) for stage in STAGES for each in range(STAGES[stage])}
    assert {name for name in names_in(tmp_path / "out") if ".fleet" in name} == {".fleet/run.json"}
    assert key in (tmp_path / "out" / "manifest.json").read_text()


@pytest.mark.slow
def test_workers_killed_where_each_file_is_packed_by_itself(shards, tmp_path):
    kills = [["gather", number, point, "kill"] for number, point in enumerate(["begin", "half", "unplaced"])]
    faults = Faults(tmp_path / "faults", *kills)
    assert run_driver(pattern(shards), tmp_path / "killed", faults, exchange=False)[::2] == (0, "")
    faults.assert_all_happened()
    pack_here(shards, tmp_path / "whole", exchange=False, shards=None)
    assert digest_of_fleet(tmp_path / "killed") == digest_of_fleet(tmp_path / "whole")


@pytest.mark.slow
def test_a_task_that_always_kills_its_worker(shards, digest, tmp_path):
    faults = Faults(tmp_path / "faults", *[["deal", 2, point, "kill"] for point in ("begin", "unplaced")])
    (tmp_path / "faults" / "faults.json").write_text(json.dumps([["deal", 2, "begin", "kill"]] * TRIES))
    code, _, errors = run_driver(pattern(shards), tmp_path / "out", faults, shards=4)
    assert code == 1
    assert f"PackingError: deal 2: tried {TRIES} times; the last time, its process died with exit code -9" in errors
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert faults.tasks("begin").count(("deal", 2)) == TRIES
    pack_here(shards, tmp_path / "out")
    assert digest_of_fleet(tmp_path / "out") == digest


@pytest.mark.parametrize("stage", some_slow("deal", "count", "gather"))
def test_driver_killed_while_a_worker_does_a_task(stage, shards, digest, tmp_path):
    faults = Faults(tmp_path / "faults", [stage, 1, "unplaced", "hold"])
    with driver(pattern(shards), tmp_path / "out", faults, shards=4) as process:
        faults.wait_for_hold(process)
        kill_driver(process)
        assert session_of(process.pid)  # the worker that is held
        code, _, errors = run_driver(pattern(shards), tmp_path / "out", faults, shards=4)
        assert (code, errors) == (0, "")
        assert digest_of_fleet(tmp_path / "out") == digest
        faults.release()  # the worker goes on with a task that is done
        wait_until(lambda: not session_of(process.pid))
    assert digest_of_fleet(tmp_path / "out") == digest
    assert faults.tasks("begin").count((stage, 1)) == 2
    assert len(faults.lines("begin")) <= sum(STAGES.values()) + 2


def kill_after(process, faults, tasks):
    """Kill a driver when workers have begun so many tasks; return the stage, or None if the driver came to its end."""
    wait_until(lambda: len(faults.lines("begin")) >= tasks or process.poll() is not None)
    if process.poll() is not None:
        return None
    kill_driver(process)
    return [None, *(stage for stage, _ in faults.tasks("begin"))][-1]


@pytest.mark.slow
def test_driver_killed_at_random_moments(shards, digest, tmp_path, rng):
    """The driver is killed 20 times; a run that completes is followed by another one in a new folder."""
    killed_in, run, repeated = [], 0, 0
    while len(killed_in) < 20:
        faults, output, kills, whole = Faults(tmp_path / f"faults-{run}"), tmp_path / f"out-{run}", 0, False
        while not whole:
            there = {name: known for name, known in names_in(output).items() if "progress.json" not in name}
            moment = len(faults.lines("begin")) + (int(rng.integers(0, 5)) if len(killed_in) < 20 else HANGS)
            with driver(pattern(shards), output, faults, shards=4) as process:
                if stage := kill_after(process, faults, moment):
                    killed_in.append(stage)
                    kills += 1
                    if rng.integers(2):  # the workers end their tasks; otherwise they are killed
                        wait_until(partial(lambda leader: not session_of(leader), process.pid))
                whole = process.returncode == 0
            now = names_in(output)
            assert all(now.get(name) == there[name] for name in there if ".unfinished" not in name and not whole)
        assert digest_of_fleet(output) == digest
        tasks = Counter(faults.tasks("begin"))
        assert len(tasks) == sum(STAGES.values())
        assert tasks.total() - len(tasks) <= 2 * kills  # at most the tasks that two workers were doing
        repeated += tasks.total() - len(tasks)
        run += 1
    assert set(killed_in) == set(STAGES), killed_in
    assert repeated


def few_bytes(size):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return limit


@pytest.mark.parametrize(
    ("size", "stage"), some_slow((30_000, "deal"), (200, ""), (950, "count"), (3_500, ""), (45_000, "gather"))
)
def test_files_that_may_not_grow(size, stage, shards, digest, tmp_path):
    """A limit of the process has the effect of a full disk: a write fails in the middle of a file."""
    code, _, errors = run_driver(pattern(shards), tmp_path / "out", limit=few_bytes(size), shards=1)
    assert code == 1
    assert errors.startswith(f"PackingError: {stage} " if stage else "OSError: ")
    assert f"[Errno {errno.EFBIG}]" in errors
    assert f"{tmp_path}/out/.unfinished/" in errors
    check_only_whole_files(tmp_path / "out")
    pack_here(shards, tmp_path / "out", shards=1)
    assert digest_of_fleet(tmp_path / "out") == digest


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    if shutil.which("mount") is None or os.geteuid():
        pytest.skip("only root can mount a small disk")
    options = ["-t", "tmpfs", "-o", "size=200k", "tmpfs", str(folder)]
    if subprocess.run(["mount", *options], capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("filled", some_slow(100_000, 0, 199_000))
def test_full_disk(filled, shards, digest, small_disk):
    (small_disk / "filled").write_bytes(b"x" * filled)
    code, _, errors = run_driver(pattern(shards), small_disk / "out", shards=4)
    assert code == 1
    assert f"[Errno {errno.ENOSPC}]" in errors
    assert "No space left on device" in errors
    assert f"{small_disk}/out" in errors
    check_only_whole_files(small_disk / "out")
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    pack_here(shards, small_disk / "out")
    assert digest_of_fleet(small_disk / "out") == digest


def check_only_whole_files(output):
    """Of the files that are there, none is cut off."""
    store = Store(str(output))
    assert not store.exists("manifest.json")
    for name in names_in(output):
        content = store.read(name)
        if name.endswith(".parquet"):
            assert pq.read_table(output / name).num_rows
        elif name.endswith(".json") or "/packed-" in name:
            assert json.loads(content)
        elif ".unfinished" not in name:  # a file of parts, whose index ends where the first part begins
            assert list(read_parts(store, name, int.from_bytes(content[:8], "little") // 24))
