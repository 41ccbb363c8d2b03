"""Let all ranks run the same optimizer steps, until the last logical stream has ended.

Ranks do not know how many rows the other ranks have left. Before a step is run, every rank has said whether it has a
row for the step, and all have learned the largest answer. Each step is read ahead while the one before it runs, and so
runs the small reduction of the answers for it.
"""

from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Generic, TypeVar

import torch
from torch.distributed import ReduceOp, all_reduce

from hf_packing.errors import PackingError

Step = TypeVar("Step")


class Answer(IntEnum):
    """Answer of a rank for a step. The ranks act on the largest answer of all."""

    ENDED = 0
    """No row, and all logical streams of the rank have ended."""
    NO_ROW = 1
    """No row for this step, but maybe for later steps."""
    ROW = 2
    """A row."""
    FAILED = 3
    """An error."""


def in_lockstep(
    read: Callable[[], tuple[Step, Answer]], ranks: int, device: torch.device
) -> Iterator[tuple[Step, bool]]:
    """Yield the steps of this rank, in lockstep with the other ranks, until all ranks answer ENDED.

    With each step comes whether a rank has a row for it. Otherwise, all ranks pass over the step.

    Args:
        read: function that returns the next step of this rank, and the answer for it.
        ranks: number of ranks.
        device: the device for the reductions.

    Raises:
        PackingError: another rank has failed. An error of this rank is raised here; the other ranks learn of it. All
            ranks raise at the step that could not be read, after all steps before it.
    """
    coming = _NextStep(read, ranks, device)
    while (answer := coming.answer_of_all()) != Answer.ENDED:
        if coming.error is not None:
            raise coming.error
        if answer == Answer.FAILED:
            raise PackingError("dataset: expected rows on all ranks, but another rank could not read its next rows")
        now, coming = coming, _NextStep(read, ranks, device)
        assert now.step is not None
        yield now.step, answer == Answer.ROW


class _NextStep(Generic[Step]):
    """The next step of this rank, and a reduction of the answers of all ranks for it, which begins at once."""

    def __init__(self, read: Callable[[], tuple[Step, Answer]], ranks: int, device: torch.device) -> None:
        self.step: Step | None = None
        self.error: Exception | None = None
        answer = Answer.FAILED
        try:
            self.step, answer = read()
        except Exception as error:  # reading runs code of the user
            self.error = error
        self._answer = torch.tensor(answer, dtype=torch.int32, device=device if ranks > 1 else "cpu")
        self._reduction = all_reduce(self._answer, ReduceOp.MAX, async_op=True) if ranks > 1 else None

    def answer_of_all(self) -> int:
        """Return the largest answer of all ranks."""
        if self._reduction is not None:
            self._reduction.wait()
        return int(self._answer)
