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

from hf_packing.errors import PackingError

Sharing = Literal["ragged", "equal", "none"]
"""The rule for running several segments in one call of a module. "ragged": a call may contain segments of similar
length, padded on the right. "equal": a call may contain only segments of equal length. "none": a call contains only one
segment."""

CALL_OVERHEAD = 8
"""The fixed cost of a module call, expressed as a number of additional segments. A small module spends most of its time
on kernel launches, and a scan on sequential steps. Neither time depends on the number of segments in the call."""

MAX_PADDING = 4
"""A segment is padded to at most this many times its own length."""


@dataclass(frozen=True, eq=False)
class PackedRow:
    """The segment borders of one or more packed rows. The tokens themselves are not stored.

    Args:
        cu_seq_lens: int32 [segments + 1], cumulative segment lengths, starting at 0. Several rows are counted as one
            long row.
        lengths: number of tokens in each segment.
        rows: number of rows. All rows have the same number of tokens.
    """

    cu_seq_lens: Tensor
    lengths: tuple[int, ...]
    rows: int = 1

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
    def is_one_segment_per_row(self) -> bool:
        return len(self.lengths) == self.rows

    @cached_property
    def slices(self) -> list[tuple[int, int]]:
        """The token indices (start, end) of each segment, end excluded. Several rows are counted as one long row."""
        return list(pairwise([0, *accumulate(self.lengths)]))

    @cached_property
    def position_ids(self) -> Tensor:
        """The position of each token in its segment, int64 [rows, tokens]. Positions start at 0 in every segment."""
        starts = self._segment_start_of_tokens
        return (torch.arange(self.rows * self.tokens, device=self.cu_seq_lens.device) - starts).view(self.rows, -1)

    @cached_property
    def _segment_start_of_tokens(self) -> Tensor:
        """The index of the first token in each token's segment, int64 [rows * tokens]."""
        return torch.repeat_interleave(
            self.cu_seq_lens[:-1].long(), self.cu_seq_lens.diff(), output_size=self.rows * self.tokens
        )

    @cached_property
    def seq_idx(self) -> Tensor:
        """The index of the segment that contains each token, int32 [rows, tokens]."""
        indices = torch.arange(len(self.lengths), dtype=torch.int32, device=self.cu_seq_lens.device)
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
        return [SharedCall.of(group, slices, self.cu_seq_lens.device) for group in groups]


@dataclass(frozen=True, eq=False)
class SharedCall:
    """A module call that processes one or more segments. Each segment is a separate row in the batch of the call."""

    segments: list[int]
    """The indices of the segments in this call."""
    slices: list[tuple[int, int]]
    lengths: list[int]
    batch: PackedRow
    """The batch of this call, with one row for each segment, padded to the length of the longest segment."""

    @classmethod
    def of(cls, segments: list[int], slices: Sequence[tuple[int, int]], device: torch.device) -> "SharedCall":
        own = [slices[index] for index in segments]
        lengths = [end - start for start, end in own]
        return cls(segments, own, lengths, PackedRow.from_lengths([max(lengths)] * len(own), device, rows=len(own)))


def group_equal_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Group segments of equal length, and return the segment indices of each group. The groups are in the order in
    which the lengths first occur in `lengths`."""
    groups: dict[int, list[int]] = {}
    for segment, length in enumerate(lengths):
        groups.setdefault(length, []).append(segment)
    return list(groups.values())


def group_similar_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Group segments of similar length, and return the segment indices of each group.

    Each group is run in one module call, and the groups minimize the total cost of the calls. A call with n segments
    costs `longest * (CALL_OVERHEAD + n)`, since all segments are padded to the length of the longest segment. The
    segments are sorted by length, and dynamic programming finds where to cut the sorted list into groups.
    """
    equal = sorted(group_equal_lengths(lengths), key=lambda group: lengths[group[0]])
    least = [0.0] + [float("inf")] * len(equal)
    cut = [0] * (len(equal) + 1)
    for end in range(1, len(equal) + 1):
        longest, segments = lengths[equal[end - 1][0]], 0
        for start in reversed(range(end)):
            segments += len(equal[start])
            if lengths[equal[start][0]] * MAX_PADDING < longest:
                break
            cost = least[start] + longest * (CALL_OVERHEAD + segments)
            if cost < least[end]:
                least[end], cut[end] = cost, start
    groups = []
    end = len(equal)
    while end:
        groups.append([segment for group in equal[cut[end] : end] for segment in group])
        end = cut[end]
    return groups


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


def read_row(inputs: dict[str, Any], training: bool = False) -> tuple[dict[str, Any], PackedRow]:
    """Read the segment borders of one or more packed rows from a model's inputs.

    The borders are read from cu_seq_lens_q, position_ids or seq_idx.

    Args:
        inputs: keyword arguments of a model's forward, with input_ids or inputs_embeds.
        training: whether the model is in training mode. In training mode, borders are required. In evaluation mode, a
            row without borders counts as a single document.

    Returns:
        The inputs without attention_mask, and a PackedRow with the borders of all rows.

    Raises:
        PackingError: input_ids and inputs_embeds are both missing; attention_mask is not all ones; past_key_values is
            not empty; encoder_hidden_states are given; or borders are missing in training mode, contradict each other,
            or do not fit the tokens.
    """
    tensor = inputs.get("input_ids")
    tensor = inputs.get("inputs_embeds") if tensor is None else tensor
    if tensor is None:
        raise PackingError("input_ids: expected input_ids or inputs_embeds, got neither")
    if (cache := inputs.get("past_key_values")) is not None and cache.get_seq_length():
        raise PackingError(
            f"past_key_values: expected no cache on a patched model, got a cache of {cache.get_seq_length()} tokens. "
            "To generate text, use `with hf_packing.unpatch_model(model): model.generate(...)`"
        )
    if inputs.get("attention_mask") is not None:
        _check_mask_of_ones(inputs["attention_mask"], tensor.shape[:2])
        inputs = {name: value for name, value in inputs.items() if name != "attention_mask"}
    if inputs.get("encoder_hidden_states") is not None:
        raise PackingError(
            "encoder_hidden_states: expected None on a patched model, got encoder states; all documents in a packed "
            "row would attend to the same encoder states"
        )
    rows, tokens = tensor.shape[:2]
    borders = _find_borders(tensor.shape[:2], inputs)
    if borders is None:
        if training:
            raise PackingError(
                "position_ids: expected position_ids, cu_seq_lens_q or seq_idx in training mode, got none of them, so "
                "the borders between packed documents are not known. PackingCollator and SFTConfig(padding_free=True) "
                "add position_ids to every batch"
            )
        return inputs, PackedRow.from_lengths([tokens] * rows, tensor.device, rows)
    known = check_borders(borders, rows, tokens)
    return inputs, PackedRow(borders.to(tensor.device), tuple(b - a for a, b in pairwise(known)), rows)


def check_borders(borders: Tensor, rows: int, tokens: int) -> list[int]:
    """Check the segment borders of a batch, and return them as a list of integers.

    Args:
        borders: cumulative segment lengths, integers [segments + 1]. Several rows are counted as one long row.
        rows: number of rows in the batch.
        tokens: number of tokens in each row.

    Raises:
        PackingError: the borders do not rise from 0 to `rows * tokens`, or the end of a row is not a border.
    """
    known: list[int] = borders.tolist()
    rising = all(a < b for a, b in pairwise(known))
    if borders.ndim != 1 or len(known) < 2 or known[0] != 0 or known[-1] != rows * tokens or not rising:
        raise PackingError(
            f"cu_seq_lens_q: expected cumulative lengths that rise from 0 to {rows * tokens} tokens, got {known}"
        )
    if rows > 1 and (crossed := set(range(tokens, rows * tokens, tokens)) - set(known)):
        raise PackingError(
            f"cu_seq_lens_q: expected a segment border at the end of every row of {tokens} tokens, got no border at "
            f"{sorted(crossed)}"
        )
    return known


def borders_from_positions(position_ids: Tensor) -> Tensor:
    """Find the segment borders from position_ids. A new segment starts at the first token of every row, and at every
    token whose position is not the position of the previous token plus 1.

    Args:
        position_ids: positions of the tokens, integers [rows, tokens].

    Returns:
        Cumulative segment lengths, int32 [segments + 1]. Several rows are counted as one long row.
    """
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    return _borders_from_starts(starts)


def borders_from_seq_idx(seq_idx: Tensor) -> Tensor:
    """Find the segment borders from seq_idx. A new segment starts at the first token of every row, and at every token
    whose index differs from the index of the previous token.

    Args:
        seq_idx: index of each token's segment, integers [rows, tokens].

    Returns:
        Cumulative segment lengths, int32 [segments + 1]. Several rows are counted as one long row.
    """
    starts = torch.ones_like(seq_idx, dtype=torch.bool)
    starts[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return _borders_from_starts(starts)


def _borders_from_starts(starts: Tensor) -> Tensor:
    end = torch.tensor([starts.numel()], device=starts.device)
    return torch.cat([starts.flatten().nonzero()[:, 0], end]).to(torch.int32)


def _find_borders(shape: torch.Size, inputs: dict[str, Any]) -> Tensor | None:
    """Read the segment borders of a batch from cu_seq_lens_q, cu_seq_lens_k, position_ids and seq_idx.

    Args:
        shape: numbers of rows and tokens in the batch, (rows, tokens).
        inputs: keyword arguments of a model's forward.

    Returns:
        Cumulative segment lengths, int32 [segments + 1]; None if `inputs` contains none of these arguments.

    Raises:
        PackingError: an argument has a wrong type or shape, or two arguments have different borders.
    """
    rows = shape[0]
    given: dict[str, Tensor] = {}
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if (borders := inputs.get(name)) is not None:
            if not isinstance(borders, Tensor):
                raise PackingError(f"{name}: expected an int32 tensor, got {type(borders).__name__}")
            given[name] = borders.to(torch.int32, copy=True)
    position_ids, seq_idx = inputs.get("position_ids"), inputs.get("seq_idx")
    if position_ids is not None and position_ids.ndim == 2:
        given["position_ids"] = borders_from_positions(position_ids.expand(rows, -1))
    elif position_ids is not None and not given:
        raise PackingError(
            f"position_ids: expected shape [rows, tokens], got shape {list(position_ids.shape)}; if the model needs "
            "position_ids of the latter shape, also pass cu_seq_lens_q"
        )
    if seq_idx is not None:
        given["seq_idx"] = borders_from_seq_idx(seq_idx.expand(rows, -1))
    if not given:
        return None
    first, *others = given
    for other in others:
        if not torch.equal(given[first], given[other].to(given[first].device)):
            raise PackingError(
                f"{other}: expected the same segment borders as in {first}, {given[first].tolist()}, got "
                f"{given[other].tolist()}; position_ids, if given, must restart in every segment"
            )
    return given[first]


def _check_mask_of_ones(mask: Any, shape: torch.Size) -> None:
    """Raise PackingError if an attention mask is not a tensor of ones with the given shape. A patched model uses the
    borders between segments instead of a mask."""
    if isinstance(mask, Tensor) and mask.shape == shape and bool((mask == 1).all()):
        return
    shown = f"a mask of shape {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
    raise PackingError(
        f"attention_mask: expected None or a mask of ones on a patched model, got {shown}, which may hide tokens; "
        "pass documents without padding, as PackingCollator does, or call unpatch_model first"
    )
