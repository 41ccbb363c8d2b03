"""Show how many tasks of a stage are done, and write it to the output folder from time to time."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from hf_packing.fleet.run import WORK, Run

PROGRESS = f"{WORK}/progress.json"
_SECONDS_BETWEEN_WRITES = 2.0

Bar = Callable[[str, int], Any]
"""A function (stage, number of tasks) -> context manager, which yields a function that adds tasks that are done."""


@contextmanager
def showing_progress(run: Run) -> Iterator[Bar]:
    """Context manager: show the progress of stages, and write it to the store from time to time.

    Yields:
        A context manager for a stage and its number of tasks, which yields a function that adds tasks that are done.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as shown:

        @contextmanager
        def stage_bar(stage: str, number: int) -> Iterator[Callable[[int], None]]:
            task = shown.add_task(stage, total=number)
            done, written = 0, 0.0

            def seen(more: int) -> None:
                nonlocal done, written
                done += more
                shown.advance(task, more)
                if time.monotonic() - written > _SECONDS_BETWEEN_WRITES:
                    _write_progress(run, stage, done, number)
                    written = time.monotonic()

            yield seen
            _write_progress(run, stage, done, number)

        yield stage_bar


def _write_progress(run: Run, stage: str, done: int, of: int) -> None:
    known = {"key": run.key, "stage": stage, "done": done, "of": of, "time": round(time.time())}
    with suppress(OSError):  # the rows matter more, and need no room for this file
        run.store.put(PROGRESS, json.dumps(known).encode())
