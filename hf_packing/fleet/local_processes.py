"""An engine of processes of this machine. A process that dies is started again."""

import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hf_packing.errors import PackingError
from hf_packing.fleet.tasks import TRIES, Task
from hf_packing.fleet.worker import send


@dataclass(frozen=True)
class LocalExecutor:
    """Processes of this machine."""

    workers: int

    def run(self, tasks: Iterable[Task]) -> Iterator[Task]:
        waiting, done = iter(tasks), queue.SimpleQueue[Any]()
        lock, stop = threading.Lock(), threading.Event()
        processes: list[_Process] = []

        def work() -> None:
            process = _Process(self.workers)
            processes.append(process)
            try:
                while not stop.is_set():
                    with lock:
                        task = next(waiting, None)
                    if task is None:
                        break
                    process.do(task, stop)
                    done.put(task)
            except BaseException as error:
                done.put(error)
            finally:
                process.end()
                done.put(None)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(self.workers)]
        for thread in threads:
            thread.start()
        running = len(threads)
        try:
            while running:
                found = done.get()
                if found is None:
                    running -= 1
                elif isinstance(found, BaseException):
                    raise found
                else:
                    yield found
        finally:
            stop.set()
            for thread in threads:
                while thread.is_alive():  # nothing is written after an error was raised
                    for process in processes:
                        process.kill()
                    thread.join(0.1)


class _Process:
    """A worker process, which is started again if it dies."""

    def __init__(self, workers: int) -> None:
        self._cores = max(1, (os.cpu_count() or 1) // workers)
        self._process: subprocess.Popen[bytes] | None = None

    def do(self, task: Task, stop: threading.Event) -> None:
        """Do a task; try again if the process dies or files cannot be reached.

        Raises:
            PackingError: the task cannot be done.
        """
        reason = ""
        for _ in range(TRIES):
            process = self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                send(process.stdin, task)
                answer = pickle.load(process.stdout)
            except (EOFError, BrokenPipeError, pickle.UnpicklingError):
                self.end()
                reason = f"its process died with exit code {process.returncode}, as when memory is short"
            else:
                if answer is None:
                    return
                if not isinstance(answer, OSError):
                    raise answer
                reason = str(answer)
            if stop.is_set():
                return
        raise PackingError(f"{task.stage} {task.number}: tried {TRIES} times; the last time, {reason}")

    def end(self) -> None:
        """Let the process end after its task."""
        if self._process is not None:
            with suppress(OSError):
                self._process.stdin.close()  # type: ignore[union-attr]
            self._process.wait()
            with suppress(OSError):
                self._process.stdout.close()  # type: ignore[union-attr]
            self._process = None

    def kill(self) -> None:
        """End the process at once."""
        if (process := self._process) is not None:
            process.kill()

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            paths = os.pathsep.join(path for path in sys.path if path)
            cores = {name: str(self._cores) for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS")}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hf_packing.fleet.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **cores, "PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "true"},
            )
        return self._process
