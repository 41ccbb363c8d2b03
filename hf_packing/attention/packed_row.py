"""The packed row that a patched model processes: its segments, and how borders are read from the model's inputs."""

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
"""Which segments may share a call to a module: segments of similar length, padded on the right; segments of equal
length; or no two segments."""

CALL_OVERHEAD = 8
"""Fixed cost of a call, expressed as extra segments of the call's length. A small module spends most of its time on
kernel launches, and a scan on its sequential steps, however many segments are in the batch."""

MAX_PADDING = 4
"""A segment is padded to at most this many times its own length."""


@dataclass(frozen=True, eq=False)
class PackedRow:
    """One or more rows of tokens, and the segments in them.

    Args:
        cu_seq_lens: int32 [segments + 1], cumulative segment lengths over all rows, laid end to end.
        lengths: tokens of each segment.
        rows: number of rows, all of equal length.
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
        """Tokens in each row."""
        return sum(self.lengths) // self.rows

    @cached_property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def is_one_segment_per_row(self) -> bool:
        return len(self.lengths) == self.rows

    @cached_property
    def slices(self) -> list[tuple[int, int]]:
        """(start, end) of each segment, in the rows laid end to end."""
        return list(pairwise([0, *accumulate(self.lengths)]))

    @cached_property
    def position_ids(self) -> Tensor:
        """int64 [rows, tokens], restarting at 0 in every segment."""
        starts = self._segment_start_of_tokens
        return (torch.arange(self.rows * self.tokens, device=self.cu_seq_lens.device) - starts).view(self.rows, -1)

    @cached_property
    def _segment_start_of_tokens(self) -> Tensor:
        """int64 [rows * tokens]: where the segment of each token starts."""
        return torch.repeat_interleave(
            self.cu_seq_lens[:-1].long(), self.cu_seq_lens.diff(), output_size=self.rows * self.tokens
        )

    @cached_property
    def seq_idx(self) -> Tensor:
        """int32 [rows, tokens]: the index of each token's segment."""
        indices = torch.arange(len(self.lengths), dtype=torch.int32, device=self.cu_seq_lens.device)
        repeated = torch.repeat_interleave(indices, self.cu_seq_lens.diff(), output_size=self.rows * self.tokens)
        return repeated.view(self.rows, -1)

    def calls(self, sharing: Sharing) -> list["SharedCall"]:
        """Return the calls that cover every segment once. They are computed once per row, for all its modules."""
        if sharing not in self._calls:
            self._calls[sharing] = self.calls_for(sharing, self.slices)
        return self._calls[sharing]

    @cached_property
    def _calls(self) -> dict[Sharing, list["SharedCall"]]:
        return {}

    def calls_for(self, sharing: Sharing, slices: Sequence[tuple[int, int]]) -> list["SharedCall"]:
        """Return the calls that cover these slices of the row."""
        lengths = [end - start for start, end in slices]
        if sharing == "none":
            groups = [[index] for index in range(len(slices))]
        else:
            groups = group_equal_lengths(lengths) if sharing == "equal" else group_similar_lengths(lengths)
        return [SharedCall.of(group, slices, self.cu_seq_lens.device) for group in groups]


@dataclass(frozen=True, eq=False)
class SharedCall:
    """Segments that go through a module in one call, each as a row of a batch."""

    segments: list[int]
    """Indices of the segments."""
    slices: list[tuple[int, int]]
    lengths: list[int]
    batch: PackedRow
    """What the module sees in this call: rows with one segment each."""

    @classmethod
    def of(cls, segments: list[int], slices: Sequence[tuple[int, int]], device: torch.device) -> "SharedCall":
        own = [slices[index] for index in segments]
        lengths = [end - start for start, end in own]
        return cls(segments, own, lengths, PackedRow.from_lengths([max(lengths)] * len(own), device, rows=len(own)))


def group_equal_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Return groups of indices of equal length, in the order in which the lengths first occur."""
    groups: dict[int, list[int]] = {}
    for segment, length in enumerate(lengths):
        groups.setdefault(length, []).append(segment)
    return list(groups.values())


def group_similar_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Group segments of similar length so that the calls cost the least in total.

    A call with n segments costs longest * (CALL_OVERHEAD + n), since shorter segments are padded to the longest. The
    segments are sorted by length, and dynamic programming finds the best places to cut the sorted list into calls.
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
"""The row that the running forward processes."""


@contextmanager
def use_row(row: PackedRow | None) -> Iterator[None]:
    """Make this the current row inside the block."""
    token = current_row.set(row)
    try:
        yield
    finally:
        current_row.reset(token)


def read_row(inputs: dict[str, Any], training: bool = False) -> tuple[dict[str, Any], PackedRow]:
    """Read the packed row from a model's inputs.

    Args:
        inputs: keyword arguments of a model's forward, with input_ids or inputs_embeds.
        training: whether borders are required. If not, rows without borders are one document each.

    Returns:
        The inputs without an attention_mask of ones, and the row, or rows.

    Raises:
        PackingError: an attention_mask with padding; a cache that is not empty; encoder states; borders that are
            missing in training, disagree, or do not fit the tokens.
    """
    tensor = inputs.get("input_ids")
    tensor = inputs.get("inputs_embeds") if tensor is None else tensor
    if tensor is None:
        raise PackingError("input_ids: expected input_ids or inputs_embeds, got neither")
    if (cache := inputs.get("past_key_values")) is not None and cache.get_seq_length():
        raise PackingError(
            f"past_key_values: expected no cache on a patched model, got one of {cache.get_seq_length()} tokens; "
            "to generate: with hf_packing.unpatch_model(model): model.generate(...)"
        )
    if inputs.get("attention_mask") is not None:
        _check_mask_of_ones(inputs["attention_mask"], tensor.shape[:2])
        inputs = {name: value for name, value in inputs.items() if name != "attention_mask"}
    if inputs.get("encoder_hidden_states") is not None:
        raise PackingError(
            "encoder_hidden_states: expected none on a patched model, since all documents in a row would attend to them"
        )
    rows, tokens = tensor.shape[:2]
    borders = _find_borders(tensor.shape[:2], inputs)
    if borders is None:
        if training:
            raise PackingError(
                "position_ids: expected position_ids, cu_seq_lens_q or seq_idx in training, got none, so packed "
                "documents could not be told apart; PackingCollator, or SFTConfig(padding_free=True), sends them"
            )
        return inputs, PackedRow.from_lengths([tokens] * rows, tensor.device, rows)
    known = check_borders(borders, rows, tokens)
    return inputs, PackedRow(borders.to(tensor.device), tuple(b - a for a, b in pairwise(known)), rows)


def check_borders(borders: Tensor, rows: int, tokens: int) -> list[int]:
    """Return the borders as integers.

    Raises:
        PackingError: they do not rise from 0 to the number of tokens, or a row does not end with a border.
    """
    known: list[int] = borders.tolist()
    rising = all(a < b for a, b in pairwise(known))
    if borders.ndim != 1 or len(known) < 2 or known[0] != 0 or known[-1] != rows * tokens or not rising:
        raise PackingError(
            f"cu_seq_lens_q: expected cumulative lengths that rise from 0 to {rows * tokens} tokens, got {known}"
        )
    if rows > 1 and (crossed := set(range(tokens, rows * tokens, tokens)) - set(known)):
        raise PackingError(f"cu_seq_lens_q: expected a border at the end of every row, got none at {sorted(crossed)}")
    return known


def borders_from_positions(position_ids: Tensor) -> Tensor:
    """Return the borders. A segment starts with every row, and wherever a position is not the previous one plus 1.

    Args:
        position_ids: integers [rows, tokens].

    Returns:
        int32 [segments + 1].
    """
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    return _borders_from_starts(starts)


def borders_from_seq_idx(seq_idx: Tensor) -> Tensor:
    """Return the borders. A segment starts with every row, and wherever the index changes.

    Args:
        seq_idx: integers [rows, tokens].

    Returns:
        int32 [segments + 1].
    """
    starts = torch.ones_like(seq_idx, dtype=torch.bool)
    starts[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return _borders_from_starts(starts)


def _borders_from_starts(starts: Tensor) -> Tensor:
    end = torch.tensor([starts.numel()], device=starts.device)
    return torch.cat([starts.flatten().nonzero()[:, 0], end]).to(torch.int32)


def _find_borders(shape: torch.Size, inputs: dict[str, Any]) -> Tensor | None:
    """Return the borders given by cu_seq_lens_q and _k, position_ids and seq_idx, which must agree; None if none is
    given."""
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
            f"position_ids: expected shape [rows, tokens], or cu_seq_lens_q beside them, got {list(position_ids.shape)}"
        )
    if seq_idx is not None:
        given["seq_idx"] = borders_from_seq_idx(seq_idx.expand(rows, -1))
    if not given:
        return None
    first, *others = given
    for other in others:
        if not torch.equal(given[first], given[other].to(given[first].device)):
            raise PackingError(
                f"{other}: expected the same borders as {first}, {given[first].tolist()}, got {given[other].tolist()}; "
                "positions must restart at every segment"
            )
    return given[first]


def _check_mask_of_ones(mask: Any, shape: torch.Size) -> None:
    """Raise PackingError for a mask that hides something, since borders take its place."""
    if isinstance(mask, Tensor) and mask.shape == shape and bool((mask == 1).all()):
        return
    shown = f"one of shape {list(mask.shape)} with padding" if isinstance(mask, Tensor) else type(mask).__name__
    raise PackingError(
        f"attention_mask: expected none, or all ones, on a patched model, got {shown}; "
        "send documents without padding, as PackingCollator does, or call unpatch_model first"
    )
