"""A driver of a fleet in a process of its own, whose workers die where a test asks for it.

python fleet_driver.py FOLDER OUTPUT [SETTINGS AS JSON]

"kill" among the settings is [number of a task, file]; the worker that has written a part of this task's rows kills
itself, unless the file is there, which it makes before.
"""

import functools
import json
import os
import signal
import subprocess
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import hf_packing as hfp
from hf_packing.fleet import pack_files

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
