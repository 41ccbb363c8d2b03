"""Engines do the tasks of a stage, in any order, on any processes. They know nothing of what tasks do."""

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from hf_packing.errors import MissingDependencyError, PackingError
from hf_packing.fleet.tasks import Task, do_task
from hf_packing.planning.lengths import check_whole_number

TRIES = 3
"""How often a task is tried whose worker dies, or whose files cannot be reached."""


class Executor(Protocol):
    """Does tasks."""

    def run(self, tasks: Iterable[Task]) -> Iterator[Task]:
        """Do tasks, and yield each when it is done, in any order.

        Raises:
            PackingError: a task cannot be done.
        """
        ...


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
        import pickle

        from hf_packing.fleet.worker import send

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


@dataclass(frozen=True)
class RayExecutor:
    """Tasks of a Ray cluster. A task whose worker or node dies is done elsewhere."""

    address: str | None

    def run(self, tasks: Iterable[Task]) -> Iterator[Task]:
        ray: Any = _load_ray()
        if not ray.is_initialized():
            # "local": with None, Ray joins a cluster of this machine, or waits for one that was killed
            ray.init(address=self.address or "local", log_to_driver=False, logging_level="error")
        remote = ray.remote(max_retries=TRIES, retry_exceptions=[OSError])(do_task)
        waiting: dict[Any, Task] = {}
        tasks = iter(tasks)
        while True:
            in_flight = max(2, 2 * int(ray.cluster_resources().get("CPU", 1)))
            while len(waiting) < in_flight and (task := next(tasks, None)) is not None:
                waiting[remote.remote(task)] = task
            if not waiting:
                return
            ready, _ = ray.wait(list(waiting), timeout=5.0)
            for each in ready:
                task = waiting.pop(each)
                try:
                    ray.get(each)
                except ray.exceptions.RayTaskError as error:
                    cause = error.cause
                    raise (
                        cause
                        if isinstance(cause, PackingError)
                        else PackingError(f"{task.stage} {task.number}: {type(cause).__name__}: {cause}")
                    ) from None
                except ray.exceptions.RayError as error:
                    raise PackingError(f"{task.stage} {task.number}: tried {TRIES} times; {error}") from None
                yield task


def local(workers: int | None = None) -> LocalExecutor:
    """Return an engine that packs with processes of this machine.

    Args:
        workers: number of processes; None for one per core.

    Example:
        >>> import hf_packing as hfp
        >>> hfp.fleet.local(2)
        LocalExecutor(workers=2)
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return LocalExecutor(cores if workers is None else check_whole_number("workers", workers))


def ray(address: str | None = None) -> RayExecutor:
    """Return an engine that packs with a Ray cluster, on whose nodes hf_packing must be installed.

    The output folder, and the files to pack, must be reachable from all nodes: on a shared file system, or in an object
    store.

    Args:
        address: address of the cluster, such as "auto"; None to start Ray on this machine, unless `ray.init` was
            called before.

    Raises:
        MissingDependencyError: Ray is not installed.
    """
    _load_ray()
    return RayExecutor(address)


def _load_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise MissingDependencyError(
            'fleet.ray needs Ray, which is not installed; run pip install "hf-packing[ray]"'
        ) from None
    return ray
