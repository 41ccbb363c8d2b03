"""A fleet on a Ray cluster packs each row exactly once, also if workers, a node or the driver are killed."""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from fleet.faults import (
    CAPACITY,
    HERE,
    Faults,
    digest_of,
    digest_of_fleet,
    driver,
    kill_driver,
    names_in,
    run_driver,
    wait_until,
)
from fleet.related_documents import literal_rows, write_related

import hf_packing as hfp

pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:(pack|exchange):UserWarning")]

STAGES = {"count": 6, "deal": 6, "gather": 4}


@pytest.fixture(autouse=True)
def own_folder(monkeypatch):
    """Ray has a folder of its own, so that no later cluster is looked for where this one was killed."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:  # short: it has sockets
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield


def read_of_all(name):
    """Yield the id of each process, and the content of a file that /proc has for it."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            yield int(process.name), (process / name).read_bytes()


def processes_of(faults):
    """Return the ids of all processes that were started with these faults, at any distance."""
    mark = f"FLEET_FAULTS={faults.folder}\0".encode()
    return [process for process, environment in read_of_all("environ") if mark in environment]


def children_of(parent):
    """Return the ids of a process's children."""
    fields = {process: stat.rsplit(b")", 1)[1].split() for process, stat in read_of_all("stat")}
    return [process for process, (_, parent_of, *_) in fields.items() if int(parent_of) == parent]


def kill(processes):
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@contextmanager
def ended(faults):
    """Context manager: no process that was started with these faults is left at the end."""
    try:
        yield
    finally:
        wait_until(lambda: kill(processes_of(faults)) or not processes_of(faults))


@contextmanager
def cluster(nodes, faults):
    """Context manager: yield the address of a Ray cluster, and the id of the last node's raylet."""
    command = [sys.executable, str(HERE / "cluster_process.py"), str(nodes)]
    environment = os.environ | faults.environment
    with (
        ended(faults),
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        ) as process,
    ):
        try:
            _, address, raylet = next(line for line in process.stdout if line.startswith("cluster ")).split()
            yield address, int(raylet)
        finally:
            process.kill()


def check_done(output, digest, faults, done):
    assert done[::2] == (0, ""), done
    assert digest_of_fleet(output) == digest
    faults.assert_all_happened()
    assert {name for name in names_in(output) if ".fleet" in name} == {".fleet/run.json"}


def test_ray_on_this_machine_whose_workers_are_killed(shards, digest, tmp_path):
    kills = [("count", 1, "unplaced"), ("deal", 0, "begin"), ("deal", 5, "unplaced"), ("gather", 2, "half")]
    faults = Faults(tmp_path / "faults", *[[*each, "kill"] for each in kills])
    with ended(faults):
        done = run_driver(f"{shards[0].parent}/*.parquet", tmp_path / "out", faults, shards=4, ray="")
        check_done(tmp_path / "out", digest, faults, done)
    assert all(faults.tasks("begin").count((stage, number)) == 2 for stage, number, _ in kills)


def test_ray_packs_documents_that_share_prefixes(tmp_path):
    files = write_related(tmp_path / "files")
    faults = Faults(tmp_path / "faults", ["count", 2, "half", "kill"], ["gather", 1, "half", "kill"])
    with ended(faults):
        done = run_driver(
            f"{tmp_path}/files/*.parquet", tmp_path / "out", faults, shards=4, share_prefixes=True, ray=""
        )
        check_done(tmp_path / "out", digest_of(literal_rows(files, hfp.BestFit(CAPACITY))), faults, done)


@pytest.mark.parametrize("stage", STAGES)
def test_a_node_of_two_is_killed(stage, shards, digest, tmp_path):
    """Each node has a worker in the middle of a task; one node is killed, and the other one does all that is left."""
    faults = Faults(tmp_path / "faults", *[[stage, number, "unplaced", "hold"] for number in (0, 1)])
    with cluster(2, faults) as (address, raylet):
        known = {"shards": 4, "ray": address}
        with driver(f"{shards[0].parent}/*.parquet", tmp_path / "out", faults, **known) as process:
            faults.wait_for_hold(process)
            (held,) = {pid for *_, pid, _ in faults.lines("hold")} & set(children_of(raylet))
            kill([raylet, *children_of(raylet)])
            wait_until(lambda: held not in children_of(raylet) and not Path(f"/proc/{held}/exe").exists())
            faults.release()
            out, errors = process.communicate()
        check_done(tmp_path / "out", digest, faults, (process.returncode, out, errors.strip()))
    (lost,) = [(each, number) for each, number, pid, _ in faults.lines("hold") if pid == held]
    assert faults.tasks("begin").count(lost) == 2
    assert len(faults.lines("begin")) <= sum(STAGES.values()) + 2


@pytest.mark.parametrize("stage", STAGES)
def test_the_driver_is_killed(stage, shards, digest, tmp_path):
    faults = Faults(tmp_path / "faults", [stage, 1, "unplaced", "hold"])
    files, output = f"{shards[0].parent}/*.parquet", tmp_path / "out"
    with cluster(2, faults) as (address, _):
        with driver(files, output, faults, shards=4, ray=address) as process:
            faults.wait_for_hold(process)
            kill_driver(process)
        ((*_, held, _),) = faults.lines("hold")
        wait_until(lambda: not Path(f"/proc/{held}/exe").exists())  # Ray ends the tasks of a driver that is gone
        before = {name: known for name, known in names_in(output).items() if "-0" in name and "unfinished" not in name}
        assert before or stage == "count"
        begun = len(faults.lines("begin"))
        with driver(files, output, faults, shards=4, ray=address) as process:
            out, errors = process.communicate()
        check_done(output, digest, faults, (process.returncode, out, errors.strip()))
    repeated = set(faults.tasks("begin")[:begun]) & set(faults.tasks("begin")[begun:])
    assert (stage, 1) in repeated
    assert len(repeated) <= 2  # at most the tasks that two nodes were doing
    assert all(names_in(output).get(name) == before[name] for name in before if name.startswith("packed-"))
