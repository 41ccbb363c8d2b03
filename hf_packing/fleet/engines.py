"""Engines do the tasks of a stage, in any order, on any processes. They know nothing of what tasks do."""

import os
from collections.abc import Iterable, Iterator
from typing import Protocol

from hf_packing.checks import check_whole_number
from hf_packing.fleet.local_processes import LocalExecutor
from hf_packing.fleet.ray_tasks import RayExecutor, load_ray
from hf_packing.fleet.tasks import Task


class Executor(Protocol):
    """Does tasks."""

    def run(self, tasks: Iterable[Task]) -> Iterator[Task]:
        """Do tasks, and yield each when it is done, in any order.

        Raises:
            PackingError: a task cannot be done.
        """
        ...


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
    load_ray()
    return RayExecutor(address)
