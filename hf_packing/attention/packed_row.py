"""The packed row that a patched model works on, and where its borders come from."""

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


def borders_from_positions(position_ids: Tensor) -> Tensor:
    """int32 [segments + 1]: a segment begins where a row does, and where a position is not one more than the last.

    Args:
        position_ids: integers [rows, tokens].
    """
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    return borders_from_begins(begins)


def borders_from_seq_idx(seq_idx: Tensor) -> Tensor:
    """int32 [segments + 1]: a segment begins where a row does, and where the number of the segment changes."""
    begins = torch.ones_like(seq_idx, dtype=torch.bool)
    begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return borders_from_begins(begins)


def borders_from_begins(begins: Tensor) -> Tensor:
    return torch.cat([begins.flatten().nonzero()[:, 0], torch.tensor([begins.numel()], device=begins.device)]).to(
        torch.int32
    )


def check_borders(borders: Tensor, rows: int, tokens: int) -> list[int]:
    """The borders as integers, or an error: they rise from 0 to all tokens and stop at the end of every row."""
    known: list[int] = borders.tolist()
    rising = all(a < b for a, b in pairwise(known))
    if borders.ndim != 1 or len(known) < 2 or known[0] != 0 or known[-1] != rows * tokens or not rising:
        raise PackingError(
            f"cu_seq_lens_q: expected lengths summed from 0, rising to {rows * tokens} tokens, got {known}"
        )
    if rows > 1 and (crossed := set(range(tokens, rows * tokens, tokens)) - set(known)):
        raise PackingError(f"cu_seq_lens_q: expected a border at the end of every row, got none at {sorted(crossed)}")
    return known


def find_borders(shape: torch.Size, inputs: dict[str, Any]) -> Tensor | None:
    """The borders that cu_seq_lens_q, position_ids and seq_idx tell of, who must agree; None where none is given."""
    rows = shape[0]
    told: dict[str, Tensor] = {}
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if (borders := inputs.get(name)) is not None:
            if not isinstance(borders, Tensor):
                raise PackingError(f"{name}: expected an int32 tensor, got {type(borders).__name__}")
            told[name] = borders.to(torch.int32, copy=True)
    position_ids, seq_idx = inputs.get("position_ids"), inputs.get("seq_idx")
    if position_ids is not None and position_ids.ndim == 2:
        told["position_ids"] = borders_from_positions(position_ids.expand(rows, -1))
    elif position_ids is not None and not told:
        raise PackingError(
            f"position_ids: expected shape [rows, tokens], or cu_seq_lens_q beside them, got {list(position_ids.shape)}"
        )
    if seq_idx is not None:
        told["seq_idx"] = borders_from_seq_idx(seq_idx.expand(rows, -1))
    if not told:
        return None
    first, *others = told
    for other in others:
        if not torch.equal(told[first], told[other].to(told[first].device)):
            raise PackingError(
                f"{other}: expected the borders of {first}, {told[first].tolist()}, got {told[other].tolist()}; "
                "positions restart at every segment"
            )
    return told[first]


def drop_full_mask(mask: Any, shape: torch.Size) -> None:
    """An attention_mask of ones says nothing; any other cannot be honoured beside borders."""
    if isinstance(mask, Tensor) and mask.shape == shape and bool((mask == 1).all()):
        return
    shown = f"one of shape {list(mask.shape)} with padding" if isinstance(mask, Tensor) else type(mask).__name__
    raise PackingError(
        f"attention_mask: expected none, or all ones, on a model that keeps packed documents apart, got {shown}; "
        "send documents without padding, as PackingCollator makes them, or call unpatch_model first"
    )


def read_row(inputs: dict[str, Any], training: bool = False) -> tuple[dict[str, Any], PackedRow]:
    """A model's inputs without what tells of no border, and the packed row, or rows, that they make.

    Args:
        inputs: keyword arguments of a model's forward, input_ids or inputs_embeds among them.
        training: whether borders must be given; otherwise rows without any are one document each.

    Raises:
        PackingError: an attention_mask with padding, a cache that is not empty, an encoder to attend to, borders that
            are missing in training, disagree, or do not fit the tokens.
    """
    given = inputs.get("input_ids")
    given = inputs.get("inputs_embeds") if given is None else given
    if given is None:
        raise PackingError("input_ids: expected input_ids or inputs_embeds, got neither")
    if (cache := inputs.get("past_key_values")) is not None and cache.get_seq_length():
        raise PackingError(
            f"past_key_values: expected no cache on a patched model, got one of {cache.get_seq_length()} tokens; "
            "to generate: with hf_packing.unpatch_model(model): model.generate(...)"
        )
    if inputs.get("attention_mask") is not None:
        drop_full_mask(inputs["attention_mask"], given.shape[:2])
        inputs = {name: value for name, value in inputs.items() if name != "attention_mask"}
    if inputs.get("encoder_hidden_states") is not None:
        raise PackingError("encoder_hidden_states: expected none on a patched model, documents would share them")
    rows, tokens = given.shape[:2]
    borders = find_borders(given.shape[:2], inputs)
    if borders is None:
        if training:
            raise PackingError(
                "position_ids: expected position_ids, cu_seq_lens_q or seq_idx in training, got none, so packed "
                "documents could not be told apart; PackingCollator, or SFTConfig(padding_free=True), sends them"
            )
        return inputs, PackedRow.of([tokens] * rows, given.device, rows)
    known = check_borders(borders, rows, tokens)
    return inputs, PackedRow(borders.to(given.device), tuple(b - a for a, b in pairwise(known)), rows)
