"""An engine of tasks of a Ray cluster. Only this module imports Ray."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hf_packing.errors import MissingDependencyError, PackingError
from hf_packing.fleet.tasks import TRIES, Task, do_task


@dataclass(frozen=True)
class RayExecutor:
    """Tasks of a Ray cluster. A task whose worker or node dies is done elsewhere."""

    address: str | None

    def run(self, tasks: Iterable[Task]) -> Iterator[Task]:
        ray: Any = load_ray()
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


def load_ray() -> Any:
    """Return the module `ray`.

    Raises:
        MissingDependencyError: Ray is not installed.
    """
    try:
        import ray
    except ImportError:
        raise MissingDependencyError(
            'fleet.ray needs Ray, which is not installed; run pip install "hf-packing[ray]"'
        ) from None
    return ray
