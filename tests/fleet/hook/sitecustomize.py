"""Workers of a fleet log their tasks, and suffer the faults that a test asks for. Python imports this file by itself.

FLEET_FAULTS is a folder with faults.json, a list of [stage, number of the task, point, action]. Each happens once:

    points    begin     before the task
              unplaced  a file is written, but not yet in place
              half      a file is in place, the next one is begun
              placed    the task is done, but the driver does not know it yet
    actions   kill      the worker kills itself with SIGKILL
              hold      the worker waits until there is a file `go`
"""

import json
import os
import signal
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path


def watch(folder):
    """Wrap the tasks of this process."""
    from hf_packing.fleet import tasks
    from hf_packing.fleet.store import Store

    faults = json.loads((folder / "faults.json").read_text())
    current = []

    def log(event, *more):
        line = " ".join(map(str, [event, *current, os.getpid(), *more])) + "\n"
        with open(folder / "log", "a") as file:
            file.write(line)

    def reach(point):
        for number, fault in enumerate(faults):
            if fault[:3] != [*current, point]:
                continue
            with suppress(FileExistsError):
                (folder / f"fault-{number}").touch(exist_ok=False)
                log(fault[3], point)
                if fault[3] == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                while not (folder / "go").exists():
                    time.sleep(0.01)

    def watched(stage, function):
        def task(run, number):
            current[:] = [stage, number]
            log("begin")
            reach("begin")
            function(run, number)
            reach("placed")
            log("end")
            current.clear()

        return task

    create = Store.create
    placed = []

    @contextmanager
    def watched_create(self, name):
        if placed[-2:] == current and current:
            reach("half")
        with create(self, name) as fresh:
            yield fresh
            reach("unplaced")
        placed[:] = current

    Store.create = watched_create
    tasks.STAGES = {stage: watched(stage, function) for stage, function in tasks.STAGES.items()}


WORKERS = ("hf_packing.fleet.worker", "default_worker.py")  # of this machine, and of Ray
if os.environ.get("FLEET_FAULTS") and any(each.endswith(WORKERS) for each in sys.orig_argv):
    watch(Path(os.environ["FLEET_FAULTS"]))
