"""Describe the packed rows that a patched model processes, and read the borders between segments from model inputs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from hf_packing.attention.group_lengths import group_equal_lengths, group_similar_lengths
from hf_packing.attention.token_axes import Place, length_of
from hf_packing.columns import CU_SEQ_LENS

Sharing = Literal["ragged", "equal", "none"]
"""The rule for running several segments in one call of a module. "ragged": a call may contain segments of similar
length, padded on the right. "equal": a call may contain only segments of equal length. "none": a call contains only one
segment."""


@dataclass(frozen=True, eq=False)
class PackedRow:
    """The segment borders of one or more packed rows. The tokens themselves are not stored.

    Args:
        cu_seq_lens: int32 [segments + 1], cumulative segment lengths, starting at 0. Several rows are counted as one
            long row. In a batch of fixed shapes, the last border is repeated, which makes empty segments at the end.
        lengths: number of tokens in each segment that is not empty.
        rows: number of rows. All rows have the same number of tokens.
        bound: the max_length of a batch of fixed shapes, which is the same in every batch and may be larger than the
            longest segment; None for a batch of any shape.
        padding: number of tokens at the end that only fill a batch of fixed shapes. They are the last segment.
        is_unpadded: whether the segments are the rows of a padded batch.
    """

    cu_seq_lens: Tensor
    lengths: tuple[int, ...]
    rows: int = 1
    bound: int | None = None
    padding: int = 0
    is_unpadded: bool = False

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device | None = None, rows: int = 1) -> "PackedRow":
        borders = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        return cls(borders, tuple(lengths), rows)

    @cached_property
    def tokens(self) -> int:
        """The number of tokens in each row."""
        return sum(self.lengths) // self.rows

    @cached_property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def max_length(self) -> int:
        """The value of max_length_q/k for the model: the length of the longest segment, or a constant above it."""
        return self.longest if self.bound is None else self.bound

    @property
    def has_fixed_shape(self) -> bool:
        """True for a batch of fixed shapes, which has a constant max_length or empty segments at the end."""
        return self.bound is not None or len(self.lengths) < len(self.cu_seq_lens) - 1

    @cached_property
    def mask(self) -> Tensor:
        """1 for tokens of documents and 0 for padding, int64 [rows, tokens]."""
        real = torch.arange(self.rows * self.tokens, device=self.cu_seq_lens.device)
        return (real < self.rows * self.tokens - self.padding).long().view(self.rows, -1)

    @property
    def is_one_segment_per_row(self) -> bool:
        return len(self.lengths) == self.rows

    @property
    def num_parts(self) -> int:
        """The number of parts on which modules run that are not segment-local."""
        return len(self.lengths)

    @cached_property
    def slices(self) -> list[tuple[int, int]]:
        """The token indices (start, end) of each segment, end excluded. Several rows are counted as one long row."""
        return list(pairwise([0, *accumulate(self.lengths)]))

    @cached_property
    def position_ids(self) -> Tensor:
        """The position of each token in its segment, int64 [rows, tokens]. Positions start at 0 in every segment. In
        padding, they start again before they exceed those of all documents: some models depend on the largest one."""
        starts = self._segment_start_of_tokens
        positions = torch.arange(self.rows * self.tokens, device=self.cu_seq_lens.device) - starts
        if self.padding:
            positions %= max(self.lengths[:-1])
        return positions.view(self.rows, -1)

    @cached_property
    def _segment_start_of_tokens(self) -> Tensor:
        """The index of the first token in each token's segment, int64 [rows * tokens]."""
        return torch.repeat_interleave(
            self.cu_seq_lens[:-1].long(), self.cu_seq_lens.diff(), output_size=self.rows * self.tokens
        )

    @cached_property
    def seq_idx(self) -> Tensor:
        """The index of the segment that contains each token, int32 [rows, tokens]."""
        indices = torch.arange(len(self.cu_seq_lens) - 1, dtype=torch.int32, device=self.cu_seq_lens.device)
        repeated = torch.repeat_interleave(indices, self.cu_seq_lens.diff(), output_size=self.rows * self.tokens)
        return repeated.view(self.rows, -1)

    def calls(self, sharing: Sharing) -> list["SharedCall"]:
        """Divide all segments of the row among module calls, and return the calls. Each segment is in exactly one call.

        The calls are cached, since all modules with the same `sharing` rule use the same calls.

        Args:
            sharing: the rule for running several segments in one call.
        """
        if sharing not in self._calls:
            self._calls[sharing] = self.calls_for(sharing, self.slices)
        return self._calls[sharing]

    @cached_property
    def _calls(self) -> dict[Sharing, list["SharedCall"]]:
        return {}

    def calls_for(self, sharing: Sharing, slices: Sequence[tuple[int, int]]) -> list["SharedCall"]:
        """Divide the given slices among module calls, and return the calls. Each slice is in exactly one call.

        Args:
            sharing: the rule for running several slices in one call.
            slices: token indices (start, end) of each slice, with end excluded.
        """
        lengths = [end - start for start, end in slices]
        if sharing == "none":
            groups = [[index] for index in range(len(slices))]
        else:
            groups = group_equal_lengths(lengths) if sharing == "equal" else group_similar_lengths(lengths)
        return [SharedCall.of(group, [slices[index] for index in group], self.cu_seq_lens.device) for group in groups]


@dataclass(frozen=True, eq=False)
class SharedCall:
    """A module call that processes one or more segments. Each segment is a separate row in the batch of the call."""

    segments: list[int]
    """The indices of the segments, or of the paths of a row of trees, in this call."""
    places: Sequence[Place]
    """Where the tokens of each segment are."""
    lengths: list[int]
    batch: PackedRow
    """The batch of this call, with one row for each segment, padded to the length of the longest segment."""

    @classmethod
    def of(cls, segments: list[int], places: Sequence[Place], device: torch.device) -> "SharedCall":
        lengths = list(map(length_of, places))
        batch = PackedRow.from_lengths([max(lengths)] * len(lengths), device, rows=len(lengths))
        return cls(segments, places, lengths, batch)


current_row: ContextVar[PackedRow | None] = ContextVar("current_row", default=None)
"""The packed row that a patched model's forward is processing; None if no such forward is running."""


@contextmanager
def use_row(row: PackedRow | None) -> Iterator[None]:
    """Context manager: within the block, the value of `current_row` is `row`."""
    token = current_row.set(row)
    try:
        yield
    finally:
        current_row.reset(token)


def mark_changing_sizes(inputs: dict[str, Any], tokens: int) -> None:
    """Tell torch.compile that the numbers of tokens and segments change from batch to batch. Otherwise it would compile
    the model for the first batch alone, and once more for the second one."""
    for name, value in inputs.items():
        if isinstance(value, Tensor) and tokens > 1:  # a size of 1 is always compiled by itself
            changing = [axis for axis, size in enumerate(value.shape) if size == tokens or name in CU_SEQ_LENS]
            torch._dynamo.maybe_mark_dynamic(value, changing)
