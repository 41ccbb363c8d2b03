"""Let the main process read the rows of all ranks, and send every rank its own (`dispatch_batches=True`)."""

from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import torch.distributed as dist
from accelerate import Accelerator

from hf_packing.errors import PackingError

Step = TypeVar("Step")


class _Failed(NamedTuple):
    """The message to the other ranks that the main process cannot read on."""

    error: str


class Dispatched(Generic[Step], Iterator[Step]):
    """The steps of this rank, which the main process has read. All processes have to take the next step together.

    Args:
        accelerator: the accelerator, which knows the processes.
        steps: the steps of each rank, in the main process; in others, this is not used.
        rank_of: function from the index of a process to its rank.
    """

    def __init__(self, accelerator: Accelerator, steps: list[Iterator[Step]], rank_of: Callable[[int], int]) -> None:
        self._accelerator, self._steps, self._rank_of = accelerator, steps, rank_of

    def __next__(self) -> Step:
        error: Exception | None = None
        sent: list[Any] | None = None
        processes = self._accelerator.num_processes
        if self._accelerator.is_main_process:
            try:
                next_steps = [next(steps) for steps in self._steps]
                sent = [next_steps[self._rank_of(process)] for process in range(processes)]
            except Exception as failure:  # reading runs code of the user
                error, sent = failure, [_Failed(f"{type(failure).__name__}: {failure}")] * processes
        received: list[Any] = [None]
        dist.scatter_object_list(received, sent, src=0)
        if error is not None:
            raise error
        if isinstance(received[0], _Failed):
            raise PackingError(f"dataset: expected rows from the main process, which raised {received[0].error}")
        step: Step = received[0]
        return step
