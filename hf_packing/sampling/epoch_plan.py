"""The micro-batches of one epoch: the same rows for the same arguments, on whatever rank they are computed."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from hf_packing.planning.lengths import IntArray
from hf_packing.sampling.sizes import RowSizes


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """Which rows each rank takes at each step.

    A step is one micro-batch on every rank. Where rows do not divide evenly, some micro-batches are filled with copies
    of rows whose labels are masked: nothing is trained on twice, and all ranks have equally many micro-batches. A copy
    of row r stands as ~r, which is below zero.
    """

    world_size: int
    rows: IntArray
    """int64 [rows and copies], step by step and rank by rank."""
    offsets: IntArray
    """int64 [steps * world_size + 1]: micro-batch of rank r at step s is number s * world_size + r."""
    left_out: IntArray
    """int64 [rows of the dataset without a micro-batch]: the empty ones, and longer ones where they are dropped."""
    step_bucket: IntArray | None = None
    """int64 [steps], tokens: the bucket all ranks are in; None where there are none."""

    @property
    def num_steps(self) -> int:
        return (len(self.offsets) - 1) // self.world_size

    @property
    def num_copies(self) -> int:
        """Masked copies among the rows."""
        return int((self.rows < 0).sum())

    def micro_batch(self, step: int, rank: int) -> list[int]:
        """Rows of one micro-batch, copies as ~row."""
        number = step * self.world_size + rank
        rows: list[int] = self.rows[self.offsets[number] : self.offsets[number + 1]].tolist()
        return rows

    def micro_batches(self, rank: int, first_step: int = 0) -> Iterator[list[int]]:
        """All micro-batches of a rank, from a step on."""
        return (self.micro_batch(step, rank) for step in range(first_step, self.num_steps))

    def per_micro_batch(
        self, of_row: IntArray, counted: npt.NDArray[np.bool_] | Literal[True] = True
    ) -> npt.NDArray[np.int64]:
        """int64 [steps, world_size]: sums over every micro-batch.

        Args:
            of_row: integers [rows of the dataset].
            counted: bool [rows and copies], those to sum over.
        """
        total = np.concatenate([[0], np.cumsum(of_row[rows_of(self.rows)] * counted, dtype=np.int64)])
        return np.diff(total[self.offsets]).reshape(-1, self.world_size)

    def utilisation(self, of_row: IntArray) -> float:
        """How busy ranks are while the busiest works: mean over largest of a sum across ranks, averaged over steps.

        Copies keep a rank busy, but not with work.

        Args:
            of_row: integers [rows of the dataset]: tokens, or what attention costs.
        """
        work = self.per_micro_batch(of_row)
        of_copies = self.per_micro_batch(of_row, self.rows < 0)
        return float(((work - of_copies).mean(axis=1) / work.max(axis=1)).mean())

    def largest(self, sizes: RowSizes) -> int:
        """Tokens of the largest micro-batch."""
        return int(self.per_micro_batch(sizes.tokens).max())


def plan_of(
    rows: IntArray,
    offsets: IntArray,
    order: IntArray,
    world_size: int,
    left_out: IntArray,
    step_bucket: IntArray | None = None,
) -> EpochPlan:
    """The plan of micro-batches in an order.

    Args:
        rows: int64 [rows and copies], micro-batch by micro-batch.
        offsets: int64 [micro-batches + 1], where each begins.
        order: int64 [micro-batches]: which is which, step by step and rank by rank.
        world_size: ranks.
        left_out: int64 [rows without a micro-batch].
        step_bucket: int64 [steps], tokens.
    """
    sizes = np.diff(offsets)[order]
    ends = np.cumsum(sizes)
    place = np.arange(len(rows)) + np.repeat(offsets[:-1][order] - (ends - sizes), sizes)
    return EpochPlan(world_size, rows[place], np.concatenate([[0], ends]), left_out, step_bucket)


def as_copies(rows: IntArray) -> IntArray:
    """Rows as copies with masked labels; a copy of a copy is a copy."""
    return np.where(rows < 0, rows, ~rows)


def rows_of(rows: IntArray) -> IntArray:
    """The rows of the dataset that rows and copies are."""
    return np.where(rows < 0, ~rows, rows)
