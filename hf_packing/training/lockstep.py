"""Let all ranks run the same optimizer steps, until the last logical stream has ended.

Ranks do not know how many rows the other ranks have left. Before a step is run, every rank has said whether it has a
row for the step, and all have learned the largest answer. They say so for several steps together, which are read ahead:
one small reduction for some steps, which begins one step before it is needed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
    read: Callable[[], tuple[Step, Answer]], ranks: int, device: torch.device, most_ahead: int
) -> Iterator[tuple[Step, bool]]:
    """Yield the steps of this rank, in lockstep with the other ranks, until all ranks answer ENDED.

    With each step comes whether a rank has a row for it. Otherwise, all ranks pass over the step.

    Args:
        read: function that returns the next step of this rank, and the answer for it.
        ranks: number of ranks.
        device: the device for the reductions.
        most_ahead: number of steps to read ahead, at least 1, the same on all ranks. The first steps are read ahead one
            by one, so that the first step does not wait for many.

    Raises:
        PackingError: another rank has failed. An error of this rank is raised here; the other ranks learn of it. All
            ranks raise at the step that could not be read, after all steps before it.
    """
    coming = _Together(read, ranks, device, 1)
    coming.read_up_to(1)
    while True:
        now = coming
        coming = _Together(read, ranks, device, min(2 * now.size, most_ahead))
        for number, (step, answer) in enumerate(zip(now.steps, now.answers_of_all(), strict=True), start=1):
            if answer == Answer.FAILED:
                if step is None and now.error is not None:
                    raise now.error
                raise PackingError("dataset: expected rows on all ranks, but another rank could not read its next rows")
            if answer == Answer.ENDED:
                return
            coming.read_up_to(-(-coming.size * number // now.size))
            assert step is not None
            yield step, answer == Answer.ROW


@dataclass(eq=False)
class _Together(Generic[Step]):
    """Steps on which the ranks agree by one reduction, which begins when the last of them is read."""

    read: Callable[[], tuple[Step, Answer]]
    ranks: int
    device: torch.device
    size: int
    steps: list[Step | None] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    error: Exception | None = None

    def read_up_to(self, count: int) -> None:
        """Read on until there are this many steps, at most `size`. After an error, nothing more is read."""
        while len(self.steps) < count:
            step, answer = None, Answer.FAILED
            if self.error is None:
                try:
                    step, answer = self.read()
                except Exception as error:  # reading runs code of the user
                    self.error = error
            self.steps.append(step)
            self.answers.append(answer)
            if len(self.steps) == self.size and self.ranks > 1:
                self._of_all = torch.tensor(self.answers, dtype=torch.int32, device=self.device)
                self._reduction = all_reduce(self._of_all, ReduceOp.MAX, async_op=True)

    def answers_of_all(self) -> list[int]:
        """Return the largest answer of all ranks for each step."""
        if self.ranks == 1:
            return [*self.answers]
        self._reduction.wait()
        return self._of_all.tolist()
