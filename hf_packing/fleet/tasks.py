"""The tasks of a run, which any process on any machine can do: all that they need and make is in the output folder."""

import pickle
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from hf_packing.errors import PackingError
from hf_packing.fleet.count import count
from hf_packing.fleet.deal import deal
from hf_packing.fleet.gather import gather, load_packed_file
from hf_packing.fleet.parts import DamagedFileError
from hf_packing.fleet.plan import Plan, load_plan
from hf_packing.fleet.run import Run, open_run
from hf_packing.fleet.store import Store

TRIES = 3
"""How often a task is tried whose worker dies, or whose files cannot be reached."""


class Task(NamedTuple):
    """A task, to be done by any process."""

    url: str
    """The output folder."""
    options: Mapping[str, Any]
    """Arguments for its file system, if it is not local."""
    key: str
    """The run's key."""
    stage: str
    number: int


STAGES: Mapping[str, Callable[[Run, int], None]] = {"count": count, "deal": deal, "gather": gather}
"""What tasks do, by the name of their stage."""


def do_task(task: Task) -> None:
    """Do a task, unless it is done.

    Raises:
        PackingError: the task cannot be done, and another try will not help.
    """
    run = _run_of(pickle.dumps((task.url, dict(task.options))), task.key)
    if is_done(run, task.stage, task.number):
        return
    try:
        STAGES[task.stage](run, task.number)
    except DamagedFileError as error:
        raise damaged(run, error) from None


def damaged(run: Run, error: DamagedFileError) -> PackingError:
    """Return the error of a stage for which a file of an earlier stage is gone or damaged."""
    return PackingError(
        f"output: expected the file {run.store.path_of(error.name)!r} as it was written, but it is gone or damaged; "
        "run the stages before this one again"
    )


def is_done(run: Run, stage: str, number: int, plan: Plan | None = None) -> bool:
    """Return whether the result of a task is there.

    Args:
        run: the run.
        stage: the name of the task's stage.
        number: the task's number.
        plan: the run's plan, so that it is not read again; None to read it if it is needed.
    """
    if stage in ("count", "deal"):
        return run.store.exists(run.file(stage, number))
    try:
        load_packed_file(run, number, load_plan(run) if plan is None else plan)
    except DamagedFileError:
        return False
    return True


@lru_cache(maxsize=4)
def _run_of(store: bytes, key: str) -> Run:
    url, options = pickle.loads(store)  # options may hold what has no hash
    run = open_run(Store(url, options))
    if run.key != key:
        raise PackingError(f"output: expected the run {key} in {url!r}, got the run {run.key}")
    return run
