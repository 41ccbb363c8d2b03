"""The row that a patched model is working on: where its segments are, and how they share calls."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

Sharing = Literal["ragged", "equal", "none"]
"""Which segments may go through a module in one call: those of similar length, padded on the right; those of equal
length; or none."""

CALL_OVERHEAD = 8
"""What a call costs beside its work, in segments of the same length: small modules are bound by their launches, and
scans by their steps, however many segments go through together."""

MAX_PADDING = 4
"""Segments share a call with others at most this many times as long."""


@dataclass(frozen=True, eq=False)
class PackedRow:
    """Rows of tokens and the borders of the segments in them.

    Args:
        cu_seq_lens: int32 [segments + 1], in the rows laid end to end.
        lengths: tokens of each segment.
        rows: how many rows, of equal length.
    """

    cu_seq_lens: Tensor
    lengths: tuple[int, ...]
    rows: int = 1

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | None = None, rows: int = 1) -> "PackedRow":
        borders = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        return cls(borders, tuple(lengths), rows)

    @cached_property
    def tokens(self) -> int:
        """Of one row."""
        return sum(self.lengths) // self.rows

    @cached_property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def is_one_segment_each(self) -> bool:
        return len(self.lengths) == self.rows

    @cached_property
    def slices(self) -> list[tuple[int, int]]:
        """(start, end) of each segment, in the rows laid end to end."""
        return list(pairwise([0, *accumulate(self.lengths)]))

    @cached_property
    def position_ids(self) -> Tensor:
        """int64 [rows, tokens], restarting at every segment."""
        return (torch.arange(self.rows * self.tokens, device=self.cu_seq_lens.device) - self.begins).view(self.rows, -1)

    @cached_property
    def begins(self) -> Tensor:
        """int64 [rows * tokens]: where the segment of each token begins."""
        return torch.repeat_interleave(
            self.cu_seq_lens[:-1].long(), self.cu_seq_lens.diff(), output_size=self.rows * self.tokens
        )

    @cached_property
    def seq_idx(self) -> Tensor:
        """int32 [rows, tokens]: the number of the segment of each token."""
        numbers = torch.arange(len(self.lengths), dtype=torch.int32, device=self.cu_seq_lens.device)
        repeated = torch.repeat_interleave(numbers, self.cu_seq_lens.diff(), output_size=self.rows * self.tokens)
        return repeated.view(self.rows, -1)

    def calls(self, sharing: Sharing) -> list["SharedCall"]:
        """What all segments need, kept for the next module."""
        if sharing not in self.known_calls:
            self.known_calls[sharing] = self.calls_for(sharing, self.slices)
        return self.known_calls[sharing]

    @cached_property
    def known_calls(self) -> dict[Sharing, list["SharedCall"]]:
        return {}

    def calls_for(self, sharing: Sharing, slices: Sequence[tuple[int, int]]) -> list["SharedCall"]:
        lengths = [end - start for start, end in slices]
        if sharing == "none":
            numbers = [[number] for number in range(len(slices))]
        else:
            numbers = share_if_equal(lengths) if sharing == "equal" else share_if_similar(lengths)
        return [SharedCall.of(call, slices, self.cu_seq_lens.device) for call in numbers]


@dataclass(frozen=True, eq=False)
class SharedCall:
    """Segments of a row that go through a module together, each as a row of a batch."""

    numbers: list[int]
    slices: list[tuple[int, int]]
    lengths: list[int]
    batch: PackedRow
    """What the module works on in this call: rows of one segment each."""

    @classmethod
    def of(cls, numbers: list[int], slices: Sequence[tuple[int, int]], device: torch.device) -> "SharedCall":
        own = [slices[number] for number in numbers]
        lengths = [end - start for start, end in own]
        return cls(numbers, own, lengths, PackedRow.of([max(lengths)] * len(own), device, rows=len(own)))


def share_if_equal(lengths: Sequence[int]) -> list[list[int]]:
    same: dict[int, list[int]] = {}
    for segment, length in enumerate(lengths):
        same.setdefault(length, []).append(segment)
    return list(same.values())


def share_if_similar(lengths: Sequence[int]) -> list[list[int]]:
    """Segments by length, cut into calls so that the sum of longest * (CALL_OVERHEAD + segments) is the least.

    A call of n segments does n times the work of its longest.
    """
    equal = sorted(share_if_equal(lengths), key=lambda call: lengths[call[0]])
    least = [0.0] + [float("inf")] * len(equal)
    cut = [0] * (len(equal) + 1)
    for end in range(1, len(equal) + 1):
        longest, together = lengths[equal[end - 1][0]], 0
        for start in reversed(range(end)):
            together += len(equal[start])
            if lengths[equal[start][0]] * MAX_PADDING < longest:
                break
            cost = least[start] + longest * (CALL_OVERHEAD + together)
            if cost < least[end]:
                least[end], cut[end] = cost, start
    calls = []
    end = len(equal)
    while end:
        calls.append([segment for call in equal[cut[end] : end] for segment in call])
        end = cut[end]
    return calls


current: ContextVar[PackedRow | None] = ContextVar("current", default=None)


@contextmanager
def working_on(row: PackedRow | None) -> Iterator[None]:
    """Whatever runs in this block works on this row."""
    token = current.set(row)
    try:
        yield
    finally:
        current.reset(token)
