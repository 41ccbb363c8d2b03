"""Let all ranks run the same optimizer steps, until the last logical stream has ended.

Ranks do not know how many rows the other ranks have left. Before each step, every rank says whether it has a row for
the step, and all learn the largest answer: one reduction of 4 bytes, which begins one step ahead.
"""

from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Generic, NamedTuple, TypeVar

import torch
from torch.distributed import ReduceOp, all_reduce

from hf_packing.errors import PackingError

Step = TypeVar("Step")


class Answer(IntEnum):
    """What a rank has for the next step. The ranks act on the largest answer of all."""

    ENDED = 0
    """No row, and all logical streams of the rank have ended."""
    NO_ROW = 1
    """No row for this step, but maybe for later steps."""
    ROW = 2
    """A row."""
    FAILED = 3
    """An error."""


class Agreed(NamedTuple, Generic[Step]):
    """A step of this rank, and what the ranks have agreed on."""

    step: Step
    is_run: bool
    """True if a rank has a row for the step. Otherwise, all ranks pass over the step."""


def in_lockstep(read: Callable[[], tuple[Step, Answer]], ranks: int, device: torch.device) -> Iterator[Agreed[Step]]:
    """Yield the steps of this rank, in lockstep with the other ranks, until all ranks answer ENDED.

    Args:
        read: function that returns the next step of this rank, and the answer for it.
        ranks: number of ranks.
        device: the device for the reduction.

    Raises:
        PackingError: another rank has failed. An error of this rank is raised here; the other ranks learn of it.
    """
    ahead = _Ahead(read, ranks, device)
    while True:
        now = ahead
        answer = now.answer_of_all()
        if now.error is not None:
            raise now.error
        if answer == Answer.FAILED:
            raise PackingError("dataset: expected rows on all ranks, but another rank could not read its next rows")
        if answer == Answer.ENDED:
            return
        ahead = _Ahead(read, ranks, device)
        assert now.step is not None
        yield Agreed(now.step, answer == Answer.ROW)


class _Ahead(Generic[Step]):
    """A step that was read ahead, and the reduction that has begun for it."""

    def __init__(self, read: Callable[[], tuple[Step, Answer]], ranks: int, device: torch.device) -> None:
        self.step: Step | None = None
        self.error: Exception | None = None
        try:
            self.step, answer = read()
        except Exception as error:  # reading runs code of the user
            self.error, answer = error, Answer.FAILED
        self._answer = torch.tensor([answer], dtype=torch.int32, device=device if ranks > 1 else "cpu")
        self._reduction = all_reduce(self._answer, ReduceOp.MAX, async_op=True) if ranks > 1 else None

    def answer_of_all(self) -> int:
        """Return the largest answer of all ranks."""
        if self._reduction is not None:
            self._reduction.wait()
        return int(self._answer)
