"""Whatever dies, fills up or is damaged: the same call leaves the files of an undisturbed run, or refuses by name."""

import errno
import os
import random
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from fleet_driver import HANGS, run_driver, start_driver
from fleet_files import Killed, Together, check_complete, contents, pack_here, write_files

import hf_packing as hfp
from hf_packing.fleet import manifest, pack_files

pytestmark = pytest.mark.filterwarnings("ignore:pack :UserWarning")


@pytest.fixture(scope="module")
def complete(files, tmp_path_factory):
    output = tmp_path_factory.mktemp("undisturbed") / "out"
    with pytest.warns(UserWarning, match="pack "):
        pack_here(files, output)
    check_complete(output)
    return output


@pytest.fixture(scope="module")
def undisturbed(complete):
    return contents(complete)


OPERATIONS = {
    "write_table": pack_files.pq.ParquetWriter,
    "write_text": Path,
    "link": os,
    "mkdir": Path,
    "unlink": Path,
}
"""What changes files, and where it is."""


def dying_at(monkeypatch, number, error, names=tuple(OPERATIONS)):
    """Let the operation with this number raise an error, and return a list of the names of operations."""
    done = []

    def dying(name, function, *arguments, **options):
        done.append(name)
        if len(done) == number:
            raise error
        return function(*arguments, **options)

    for name in names:
        function = getattr(OPERATIONS[name], name)
        monkeypatch.setattr(OPERATIONS[name], name, lambda *a, _n=name, _f=function, **k: dying(_n, _f, *a, **k))
    return done


def written_as(output):
    stats = {name: (output / name).stat() for name in contents(output)}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}


def test_a_run_that_dies_at_any_operation_goes_on(files, tmp_path, undisturbed, monkeypatch):
    number, operations = 0, []
    while number <= len(operations):
        number += 1
        output = tmp_path / str(number)
        with monkeypatch.context() as patch:
            operations = dying_at(patch, number, Killed())
            try:
                pack_here(files, output)
            except Killed:
                assert contents(output).items() <= undisturbed.items()
        before = written_as(output)
        pack_here(files, output)
        assert contents(output) == undisturbed
        assert before.items() <= written_as(output).items()  # what was there is neither made again nor replaced
    assert set(operations) == set(OPERATIONS)
    assert number > 30


def test_a_full_disk(files, tmp_path, undisturbed, monkeypatch):
    for number in range(1, 9):
        output = tmp_path / str(number)
        with monkeypatch.context() as patch:
            error = OSError(errno.ENOSPC, "No space left on device")
            operations = dying_at(patch, number, error, ("write_table", "write_text"))
            with pytest.raises(hfp.PackingError, match=f"output: expected to write to '{output}', .*No space left"):
                pack_here(files, output)
            assert len(operations) >= number
        assert contents(output).items() <= undisturbed.items()
        pack_here(files, output)
        assert contents(output) == undisturbed


DAMAGES = {
    "a flipped byte": lambda file: file.write_bytes(file.read_bytes()[:-20] + b"\xff" + file.read_bytes()[-19:]),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-20]),
    "empty": lambda file: file.write_bytes(b""),
}


IN_ORDER = ["run.json", "packed-00002-of-00003.parquet", "tasks/00002.json", "manifest.json"]


@pytest.mark.parametrize(("written", "name"), [(n, name) for n in (4, 3, 2) for name in IN_ORDER[:n]])
@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_files_are_refused_by_name(files, tmp_path, complete, undisturbed, name, how, written):
    output = shutil.copytree(complete, tmp_path / "out")
    for missing in IN_ORDER[written:]:
        (output / missing).unlink()
    file = output / name
    DAMAGES[how](file)
    damaged = file.read_bytes()
    with pytest.raises(hfp.PackingError, match=f"output: .*{name}"):
        pack_here(files, output)
    assert file.read_bytes() == damaged  # nothing is replaced
    file.unlink()
    if name == "run.json":  # nothing says any more what the rows are
        with pytest.raises(hfp.PackingError, match="output: expected a new folder"):
            pack_here(files, output)
    else:
        pack_here(files, output)
        assert contents(output) == undisturbed


def test_files_that_change_are_refused(files, tmp_path, monkeypatch):
    files = [shutil.copy(file, tmp_path) for file in files]
    output = tmp_path / "out"
    pack_here(files, output)
    before = contents(output)
    os.utime(files[2], ns=(0, 0))
    with pytest.raises(hfp.PackingError, match=f"output: .*{files[2]}.*; choose another folder"):
        pack_here(files, output)
    os.remove(files[2])
    with pytest.raises(hfp.PackingError, match=f"files: expected files to pack, got none in '{files[2]}'"):
        pack_here(files, output)
    assert contents(output) == before
    del files[2]
    read = pack_files._read_table
    monkeypatch.setattr(pack_files, "_read_table", lambda name: (read(name), os.utime(name, ns=(0, 0)))[0])
    with pytest.raises(hfp.PackingError, match=rf"{tmp_path}/\d.parquet: expected the file as it was"):
        pack_here(files, tmp_path / "again")
    assert not (tmp_path / "again" / "manifest.json").exists()


def test_two_drivers_at_once(files, tmp_path, undisturbed):
    """They do each task at the same time, and begin and end together."""
    executor = Together()
    with ThreadPoolExecutor(2) as threads:
        drivers = [threads.submit(pack_here, files, tmp_path / "out", executor=executor) for _ in range(2)]
        assert str(drivers[0].result()) == str(drivers[1].result())
    assert contents(tmp_path / "out") == undisturbed


def test_abandoned_files_are_removed(files, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    for name, age in (("old", 2 * manifest._ABANDONED), ("new", 0)):
        (output / f".unfinished-{name}").touch()
        os.utime(output / f".unfinished-{name}", (time.time() - age,) * 2)
    pack_here(files, output)
    assert [path.name for path in output.glob(".*")] == [".unfinished-new"]


def has_ended(leader):
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, _, session = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:4]
            if int(session) == leader and state != "Z":
                return False
    return True


def wait_until(condition):
    deadline = time.monotonic() + HANGS
    while not condition():
        assert time.monotonic() < deadline, "processes hang"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"executor": "ray"}], ids=str)
def test_a_worker_is_killed(files, tmp_path, undisturbed, settings):
    code, errors = run_driver(files, tmp_path / "out", kill=[2, str(tmp_path / "killed")], **settings)
    assert code == 0, errors
    assert (tmp_path / "killed").exists()
    assert contents(tmp_path / "out") == undisturbed


@pytest.mark.slow
def test_a_task_that_always_kills_its_process(files, tmp_path):
    code, errors = run_driver(files, tmp_path / "out", kill=[2, str(tmp_path / "no folder" / "killed")])
    assert code == 1
    assert "PackingError: executor: a process died 3 times" in errors
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.slow
def test_the_driver_is_killed_ten_times(tmp_path):
    files = write_files(tmp_path / "files", (60,) * 24)
    settings = {"tasks": 24}
    pack_here(files, tmp_path / "undisturbed", **settings)
    began = time.monotonic()
    assert run_driver(files, tmp_path / "timed", **settings)[0] == 0
    took = time.monotonic() - began
    chance = random.Random(0)
    for _ in range(10):
        process = start_driver(files, tmp_path / "out", **settings)
        time.sleep(chance.uniform(0.1, 0.9 * took))
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        wait_until(partial(has_ended, process.pid))  # its workers, too
        assert contents(tmp_path / "out").items() <= contents(tmp_path / "undisturbed").items()
    assert run_driver(files, tmp_path / "out", **settings)[0] == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


@pytest.mark.slow
def test_two_processes_are_drivers_at_once(files, tmp_path, undisturbed):
    drivers = [start_driver(files, tmp_path / "out") for _ in range(2)]
    assert [driver.communicate(timeout=HANGS)[1] for driver in drivers] == ["", ""]
    assert contents(tmp_path / "out") == undisturbed
