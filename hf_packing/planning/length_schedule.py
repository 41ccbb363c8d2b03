"""LengthSchedule, a limit on segments that grows during training, and the plan whose segments keep to a limit."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from hf_packing.checks import check_choice, check_optional_number, check_whole_number, set_fields
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray, indices_in_ranges, offsets_of
from hf_packing.planning.plan import PackingPlan

Growth = Literal["linear", "exponential"]


@dataclass(frozen=True)
class LengthSchedule:
    """The largest length of a segment in each optimizer step: short at first, growing until documents are whole.

    Rows keep all their tokens. Longer documents get extra borders, so that early steps need less attention. The authors
    of SkyLadder report better models, too.

    Args:
        start: the largest number of tokens of a segment in the first step.
        steps: the number of optimizer steps during which the length grows. After that, documents are whole.
        end: the length at the end of the growth, in tokens; None for the largest length of a row or micro-batch.
        growth: "linear" to add the same number of tokens in each step, "exponential" to multiply by the same factor.

    Raises:
        PackingError: a bad argument, which the message names.

    Source:
        SkyLadder, arXiv 2503.15450.

    Example:
        >>> schedule = LengthSchedule(256, steps=100)
        >>> [schedule.length_at(step, 4096) for step in (0, 50, 99, 100)]
        [256, 2176, 4057, None]
    """

    start: int
    steps: int
    end: int | None = None
    growth: Growth = "linear"

    def __post_init__(self) -> None:
        set_fields(
            self,
            start=check_whole_number("start", self.start),
            steps=check_whole_number("steps", self.steps),
            end=check_optional_number("end", self.end),
        )
        if self.end is not None and self.end < self.start:
            raise PackingError(f"end: expected at least start={self.start}, got {self.end}")
        check_choice("growth", self.growth, Growth)

    def __str__(self) -> str:
        return f"{self.start:,} tokens in the first step, whole documents after {self.steps:,} steps"

    def length_at(self, step: int, longest: int) -> int | None:
        """Return the largest length of a segment in an optimizer step, in tokens; None if documents are whole.

        Args:
            step: the number of optimizer steps before this one.
            longest: the largest number of tokens of a row or micro-batch.
        """
        end = longest if self.end is None else self.end
        if step >= self.steps or self.start >= longest:
            return None
        done = step / self.steps
        length = (
            self.start * (end / self.start) ** done
            if self.growth == "exponential"
            else (self.start + (end - self.start) * done)
        )
        return int(length) if length < longest else None


@dataclass(frozen=True)
class ScheduledRows:
    """A LengthSchedule for rows that are trained on in their order."""

    schedule: LengthSchedule
    rows_per_step: int
    """The number of rows in an optimizer step."""

    def cut(self, plan: PackingPlan, longest: int, first_row: int = 0, turns: int = 1) -> PackingPlan:
        """Return the plan of some rows with extra borders.

        Args:
            plan: the plan, whose packs are the rows in their order.
            longest: the largest capacity of a row, in tokens.
            first_row: the number of the first row.
            turns: the difference of the numbers of neighboring rows.
        """
        step, row = np.unique(
            (first_row + turns * np.arange(plan.num_packs, dtype=np.int64)) // self.rows_per_step, return_inverse=True
        )
        lengths = [self.schedule.length_at(each, longest) or longest for each in step.tolist()]
        return cut_segments(plan, np.array(lengths, dtype=np.int64)[row])

    def __str__(self) -> str:
        return f"{self.schedule!r} with rows_per_step={self.rows_per_step}"


def check_schedule(length_schedule: object) -> LengthSchedule | None:
    """Return the argument `length_schedule`; raise PackingError if it is neither a LengthSchedule nor None."""
    if length_schedule is not None and not isinstance(length_schedule, LengthSchedule):
        raise PackingError(f"length_schedule: expected LengthSchedule(start, steps) or None, got {length_schedule!r}")
    return length_schedule


def scheduled_rows(length_schedule: object, rows_per_step: object) -> ScheduledRows | None:
    """Return the schedule of rows that `pack` makes, from its two arguments; None without a schedule.

    Raises:
        PackingError: one of the arguments is missing, or is not valid.
    """
    schedule = check_schedule(length_schedule)
    if schedule is None and rows_per_step is None:
        return None
    if schedule is None:
        raise PackingError(
            f"rows_per_step: expected None without length_schedule, which alone depends on it, got {rows_per_step!r}"
        )
    if rows_per_step is None:
        raise PackingError(
            "rows_per_step: expected the number of packed rows in an optimizer step, over all ranks, since "
            "length_schedule counts optimizer steps, got None"
        )
    return ScheduledRows(schedule, check_whole_number("rows_per_step", rows_per_step))


def cut_segments(plan: PackingPlan, longest: IntArray) -> PackingPlan:
    """Return the plan with extra borders, so that no segment of a pack is longer than the pack's limit.

    Args:
        plan: the plan.
        longest: integers [packs]: the largest length of a segment in each pack, in tokens.

    Example:
        >>> import hf_packing as hfp
        >>> plan = cut_segments(hfp.plan_packing([5, 3], hfp.BestFit(8, seed=None)), np.array([2]))
        >>> plan.segment_length.tolist(), plan.segment_start.tolist()
        ([2, 2, 1, 2, 1], [0, 2, 4, 0, 2])
    """
    limit = np.asarray(longest, dtype=np.int64)[plan.pack_of_segment()]
    pieces = -(-plan.segment_length // limit)
    if not (pieces > 1).any():
        return plan
    total = offsets_of(pieces)
    begin = indices_in_ranges(0, pieces) * np.repeat(limit, pieces)
    return replace(
        plan,
        segment_document=np.repeat(plan.segment_document, pieces),
        segment_start=np.repeat(plan.segment_start, pieces) + begin,
        segment_length=np.minimum(np.repeat(plan.segment_length, pieces) - begin, np.repeat(limit, pieces)),
        pack_offsets=total[plan.pack_offsets],
    )
