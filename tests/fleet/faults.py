"""Faults of a fleet, drivers in processes of their own, and digests of packed rows."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fleet.fleet_rows import Here, packed_by_pack, rows_of, write_files

import hf_packing as hfp
from hf_packing.fleet.store import Store

HERE = Path(__file__).parent
CAPACITY = 128
HANGS = 240
"""Seconds after which processes are taken to hang, also on a busy machine."""


def some_slow(first, *others):
    """Return parameters of a test, of which all but the first one are slow."""
    return [
        first,
        *(pytest.param(*(each if isinstance(each, tuple) else [each]), marks=pytest.mark.slow) for each in others),
    ]


def write_shards(folder, sizes=(40, 3, 70, 0, 25, 60)):
    """Write uneven parquet files, and return their paths."""
    return [Path(file) for file in write_files(folder, sizes)]


def write_other_rows(file, folder):
    """Replace a file by one with other rows."""
    (other,) = write_files(folder, (5,), seed=99)
    shutil.copy(other, file)


def digest_of(table):
    """Return a digest of the values of all columns of a table of lists, and of the rows' borders."""
    digest = hashlib.sha256()
    for name in sorted(table.column_names):
        column = table.column(name).combine_chunks()
        digest.update(f"{name} {column.type.value_type} {len(column)}".encode())
        for values in (column.value_lengths(), column.flatten()):
            digest.update(values.to_numpy(zero_copy_only=False).tobytes())
    return digest.hexdigest()


def digest_of_pack(files, capacity=CAPACITY):
    """Return the digest of the rows of `pack`."""
    return digest_of(rows_of(packed_by_pack(files, hfp.BestFit(capacity))))


def digest_of_fleet(output, options=None):
    """Return the digest of the rows of the files that a manifest names, whose contents are as it says."""
    store = Store(str(output), options or {})
    tables = []
    for file in json.loads(store.read("manifest.json"))["files"]:
        content = store.read(file["name"])
        assert (len(content), hashlib.sha256(content).hexdigest()) == (file["size"], file["sha256"])
        tables.append(pq.read_table(pa.BufferReader(content), use_threads=False))
        assert tables[-1].num_rows == file["rows"]
    return digest_of(pa.concat_tables(tables))


def pack_here(files, output, **settings):
    """Pack in this process the files of a list or a pattern."""
    settings = {"executor": Here(), "shards": 4, **settings}
    return hfp.fleet.pack(files, hfp.BestFit(CAPACITY), output, **settings)


def names_in(output):
    """Return the files of an output folder by name, with the number and the time by which a rewritten file differs."""
    files = [path for path in Path(output).rglob("*") if path.is_file()]
    stats = {str(path.relative_to(output)): path.stat() for path in files}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}


class Faults:
    """Faults that workers suffer, and the log of their tasks."""

    def __init__(self, folder, *faults):
        folder.mkdir()
        self.folder, self.faults = folder, faults
        (folder / "faults.json").write_text(json.dumps(faults))
        (folder / "log").touch()

    @property
    def environment(self):
        return {"FLEET_FAULTS": str(self.folder), "PYTHONPATH": paths(HERE / "hook")}

    def lines(self, event):
        """Return the [stage, number, process, ...] of each event in the log."""
        lines = [line.split() for line in (self.folder / "log").read_text().splitlines()]
        return [[stage, int(number), int(pid), *more] for kind, stage, number, pid, *more in lines if kind == event]

    def tasks(self, event):
        return [(stage, number) for stage, number, *_ in self.lines(event)]

    def wait_for_hold(self, process):
        """Wait until all faults that hold a worker have happened."""
        held = sum(fault[3] == "hold" for fault in self.faults)
        wait_until(lambda: len(self.lines("hold")) == held or process.poll() is not None)
        assert process.poll() is None, process.communicate()

    def release(self):
        (self.folder / "go").touch()

    def assert_all_happened(self):
        assert len(list(self.folder.glob("fault-*"))) == len(self.faults)


def paths(*folders):
    known = [str(HERE.parent.parent), *map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.pathsep.join(known)


def start_driver(files, output, faults=None, limit=None, **settings):
    """Start a driver in a session of its own; its workers are in the same session."""
    command = [sys.executable, str(HERE / "driver_process.py"), *map(str, (files, output)), json.dumps(settings)]
    environment = os.environ | ({"PYTHONPATH": paths()} if faults is None else faults.environment)
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
        preexec_fn=limit,
    )


@contextmanager
def driver(*arguments, **settings):
    """Context manager: a driver, of whose session no process is left at the end."""
    process = start_driver(*arguments, **settings)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        wait_until(lambda: not session_of(process.pid))


def run_driver(*arguments, **settings):
    """Run a driver to its end, and return its exit code and what it printed."""
    with driver(*arguments, **settings) as process:
        out, errors = process.communicate(timeout=HANGS)
        return process.returncode, out.strip(), errors.strip()


def kill_driver(process):
    """Kill a driver and leave its workers alive, as when memory is short."""
    assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def session_of(leader):
    """Return the ids of the living processes of a session."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, _, session = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:4]
            if int(session) == leader and state != "Z":
                found.append(int(folder.name))
    return found


def wait_until(condition):
    """Wait until a condition is true, and return its value."""
    deadline = time.monotonic() + HANGS
    while not (found := condition()):
        assert time.monotonic() < deadline, "processes hang"
        time.sleep(0.005)
    return found
