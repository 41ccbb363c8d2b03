"""Files of documents for a fleet, the rows that `pack` makes of them, and executors and drivers.

`python fleet_files.py FOLDER OUTPUT [SETTINGS AS JSON]` is a driver in a process of its own. "kill" among the settings
is [number of a task, file]; the worker that has written a part of this task's rows kills itself, unless the file is
there, which it makes before.
"""

import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import hf_packing as hfp
from hf_packing.fleet import pack_files

SIZES = (40, 0, 200, 3, 90, 60)
"""Documents of the files: uneven, and one file without any."""
STRATEGY = hfp.BestFit(128)


class Here:
    """Does tasks at once, since processes take a second to start."""

    def submit(self, function, *arguments):
        future = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future


class Together(Here):
    """Does each task at the same time as another executor of this kind."""

    def __init__(self):
        self._both = threading.Barrier(2)

    def submit(self, function, *arguments):
        self._both.wait(240)
        return super().submit(function, *arguments)


class Killed(BaseException):
    """Ends a run in this process, as a signal would."""


def write_files(folder, sizes=SIZES, *, longest=300, seed=0):
    """Write parquet files of documents with input_ids, labels, weights and a text, and return their paths."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number, documents in enumerate(sizes):
        lengths = np.minimum(rng.lognormal(3, 1.2, documents).astype(int), longest)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        ids = rng.integers(0, 50_000, offsets[-1]).astype(np.int32)
        labels = np.where(rng.random(len(ids)) < 0.3, -100, ids).astype(np.int32)
        columns = {"input_ids": ids, "labels": labels, "weights": rng.random(len(ids)).astype(np.float32)}
        arrays = {name: pa.ListArray.from_arrays(offsets, values) for name, values in columns.items()}
        files.append(str(folder / f"{number}.parquet"))
        pq.write_table(pa.table({**arrays, "note": pa.array(["text"] * documents, pa.string())}), files[-1])
    return files


def pack_here(files, output, strategy=STRATEGY, **settings):
    return hfp.fleet.pack(files, strategy, output, **{"executor": Here(), "tasks": 3, **settings})


def rows_of_pack(files, strategy=STRATEGY, **settings):
    documents = datasets.Dataset(pa.concat_tables([pq.read_table(file) for file in files]))
    packed = hfp.pack(documents, strategy, load_from_cache_file=False, **settings)
    return packed.data.table.replace_schema_metadata().combine_chunks()


def rows_of_file(file):
    return pq.read_table(file, use_threads=False).replace_schema_metadata().combine_chunks()


def contents(output):
    """Return the sha256 of all files of an output folder by name, but for unfinished files, which are hidden."""
    files = [path for path in Path(output).rglob("*") if path.is_file() and not path.name.startswith(".")]
    return {str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def check_complete(output):
    known = {file["name"]: file for file in json.loads(Path(output, "manifest.json").read_text())["files"]}
    found = contents(output)
    assert {name for name in found if name.endswith(".parquet")} == set(known)
    for name, file in known.items():
        assert found[name] == file["sha256"]
        assert pq.ParquetFile(Path(output, name)).metadata.num_rows == file["rows"]


HANGS = 240
"""Seconds after which processes are taken to hang, also on a busy machine."""

do_task = pack_files.do_task


def start_driver(files, output, **settings):
    command = [sys.executable, __file__, os.path.dirname(files[0]), str(output), json.dumps(settings)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)


def run_driver(*arguments, **settings):
    process = start_driver(*arguments, **settings)
    _, errors = process.communicate(timeout=HANGS)
    return process.returncode, errors


def dying_task(number, mark, task):
    """Do a task, in a process that dies within one task unless there is a file `mark`."""
    write_table = pack_files.pq.ParquetWriter.write_table

    def write_and_die(*arguments, **options):
        write_table(*arguments, **options)
        if task.number == number and not Path(mark).exists():
            with suppress(OSError):
                Path(mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    pack_files.pq.ParquetWriter.write_table = write_and_die
    return do_task(task)


def main(files, output, settings="{}"):
    known = {"tasks": 3, "workers": 2, **json.loads(settings)}
    warnings.simplefilter("ignore", UserWarning)
    if kill := known.pop("kill", None):
        dying = functools.partial(dying_task, *kill)  # as a function for Ray, and importable for processes
        pack_files.do_task = (lambda task: dying(task)) if known.get("executor") == "ray" else dying
    try:
        hfp.fleet.pack(files, hfp.BestFit(128), output, **known)
    except hfp.PackingError as error:
        sys.exit(f"PackingError: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
