"""LengthSchedule, a limit on segments that grows during training."""

from dataclasses import dataclass

from hf_packing.checks import check_optional_number, check_whole_number, set_fields
from hf_packing.errors import PackingError


@dataclass(frozen=True)
class LengthSchedule:
    """The largest length of a segment in each optimizer step: short at first, growing until documents are whole.

    It grows by the same number of tokens in each step.

    Rows keep all their tokens. Longer documents get extra borders, so that early steps need less attention. The authors
    of SkyLadder report better models, too.

    Args:
        start: the largest number of tokens of a segment in the first step.
        steps: the number of optimizer steps during which the length grows. After that, documents are whole.
        end: the length at the end of the growth, in tokens; None for the largest length of a row or micro-batch.

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

    def __post_init__(self) -> None:
        set_fields(
            self,
            start=check_whole_number("start", self.start),
            steps=check_whole_number("steps", self.steps),
            end=check_optional_number("end", self.end),
        )
        if self.end is not None and self.end < self.start:
            raise PackingError(f"end: expected at least start={self.start}, got {self.end}")

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
        length = self.start + (end - self.start) * (step / self.steps)
        return int(length) if length < longest else None
