"""Describe the packed rows that a patched model processes, and read the borders between segments from model inputs."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_packing.attention.group_lengths import group_equal_lengths, group_similar_lengths
from hf_packing.attention.mask_check import refuse_hiding_mask
from hf_packing.attention.token_axes import Place, length_of
from hf_packing.columns import PADDING_SEGMENT, PARENTS, SEGMENT_LENGTHS, SEQ_LENGTHS
from hf_packing.errors import PackingError

CACHES = ("cache", "past_key_values", "cache_params", "mems", "state", "past_buckets_states")
"""Names of the arguments in which models of transformers take caches. Models have them under these names in their
outputs too. transformers 5.24 renamed past_key_values and cache_params to cache, and still takes the old names."""

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


_needs_borders: ContextVar[bool] = ContextVar("_needs_borders", default=False)
"""Whether rows without borders are refused in evaluation mode, too."""


@contextmanager
def borders_required() -> Iterator[None]:
    """Context manager: within the block, which runs models on packed rows, rows without borders are refused in every
    mode. A teacher in evaluation mode may get only some columns of a batch."""
    token = _needs_borders.set(True)
    try:
        yield
    finally:
        _needs_borders.reset(token)


def has_trees(inputs: Mapping[str, Any]) -> bool:
    """Return whether the arguments of a model's forward are a row of trees, which `read_tree_row` reads."""
    return inputs.get(PARENTS) is not None or inputs.get(SEGMENT_LENGTHS) is not None


def filled_cache(inputs: Mapping[str, Any]) -> str:
    """Return the name of the argument with a cache that may contain tokens, or an empty string if there is none."""
    return next((name for name in CACHES if inputs.get(name) is not None and _may_have_tokens(inputs[name])), "")


def _may_have_tokens(cache: Any) -> bool:
    try:
        return bool(cache.get_seq_length() > 0)
    except (AttributeError, ValueError):  # lists of states, and caches of states alone, do not count tokens
        return True


def read_row(inputs: dict[str, Any], training: bool = False) -> tuple[dict[str, Any], PackedRow]:
    """Read the segment borders of one or more packed rows from a model's inputs.

    The borders are read from cu_seq_lens_q, position_ids, seq_idx or seq_lengths.

    Args:
        inputs: keyword arguments of a model's forward, with input_ids or inputs_embeds.
        training: whether the model is in training mode. In training mode, and within `borders_required`, borders are
            required. Otherwise, a row without borders counts as a single document.

    Returns:
        The inputs without attention_mask, and a PackedRow with the borders of all rows.

    Raises:
        PackingError: input_ids and inputs_embeds are both missing; attention_mask is not all ones; a cache is not
            empty; encoder_hidden_states are given; or borders are missing where they are required, contradict each
            other, or do not fit the tokens.
    """
    tensor = inputs.get("input_ids")
    tensor = inputs.get("inputs_embeds") if tensor is None else tensor
    if tensor is None:
        raise PackingError("input_ids: expected input_ids or inputs_embeds, got neither")
    if name := filled_cache(inputs):
        raise PackingError(
            f"{name}: expected no earlier tokens on a patched model, got {type(inputs[name]).__name__}. To generate "
            "text, use model.generate, or pass the cache without borders between documents"
        )
    if inputs.get("attention_mask") is not None:
        refuse_hiding_mask(inputs["attention_mask"], tensor.shape[:2])
        inputs = {name: value for name, value in inputs.items() if name != "attention_mask"}
    if inputs.get("encoder_hidden_states") is not None:
        raise PackingError(
            "encoder_hidden_states: expected None on a patched model, got encoder states; all documents in a packed "
            "row would attend to the same encoder states"
        )
    rows, tokens = tensor.shape[:2]
    borders = find_borders(tensor.shape[:2], inputs)
    if borders is None:
        if training or _needs_borders.get():
            where = "in training mode" if training else "for packed rows of a trainer"
            raise PackingError(
                f"position_ids: expected position_ids, cu_seq_lens_q or seq_idx {where}, got none of them, so the "
                "borders between packed documents are not known. PackingCollator and SFTConfig(padding_free=True) add "
                "position_ids to every batch; pass them to all models that get the batch, such as a teacher"
            )
        return inputs, PackedRow.from_lengths([tokens] * rows, tensor.device, rows)
    lengths = tuple(b - a for a, b in pairwise(check_borders(borders, rows, tokens)))
    bound = inputs.get("max_length_q")
    bound = bound if isinstance(bound, int) and bound > max(lengths) else None
    padding = _padding(tensor.shape[:2], inputs)
    if padding not in (0, *lengths[1:][-1:]):
        raise PackingError(f"seq_idx: expected {PADDING_SEGMENT} only in the last segment, got {padding} such tokens")
    return inputs, PackedRow(borders.to(tensor.device), lengths, rows, bound, padding)


def check_borders(borders: Tensor, rows: int, tokens: int) -> list[int]:
    """Check the segment borders of a batch, and return them as a list of integers, without empty segments at the end.

    Args:
        borders: cumulative segment lengths, integers [segments + 1]. Several rows are counted as one long row.
            The last border may be repeated, as PackingCollator does for fixed shapes.
        rows: number of rows in the batch.
        tokens: number of tokens in each row.

    Raises:
        PackingError: the borders do not rise from 0 to `rows * tokens`, or the end of a row is not a border.
    """
    known: list[int] = borders.tolist()
    while borders.ndim == 1 and len(known) > 2 and known[-1] == known[-2]:
        known.pop()
    rising = borders.ndim == 1 and all(a < b for a, b in pairwise(known))
    if not rising or len(known) < 2 or known[0] != 0 or known[-1] != rows * tokens:
        raise PackingError(
            f"cu_seq_lens_q: expected cumulative lengths that rise from 0 to {rows * tokens} tokens, got "
            f"{borders.tolist()}"
        )
    if rows > 1 and (crossed := set(range(tokens, rows * tokens, tokens)) - set(known)):
        raise PackingError(
            f"cu_seq_lens_q: expected a segment border at the end of every row of {tokens} tokens, got no border at "
            f"{sorted(crossed)}"
        )
    return known


def borders_from_positions(position_ids: Tensor, step: int = 1) -> Tensor:
    """Find the segment borders from position_ids or, with a step of 0, from seq_idx. A new segment starts at the first
    token of every row, and at every token whose value is not the value of the previous token plus `step`.

    Args:
        position_ids: positions of the tokens, or indices of their segments, integers [rows, tokens].

    Returns:
        Cumulative segment lengths, int32 [segments + 1]. Several rows are counted as one long row.
    """
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + step
    end = torch.tensor([starts.numel()], device=starts.device)
    return torch.cat([starts.flatten().nonzero()[:, 0], end]).to(torch.int32)


def find_borders(shape: torch.Size, inputs: Mapping[str, Any]) -> Tensor | None:
    """Read the segment borders of a batch from cu_seq_lens_q, cu_seq_lens_k, position_ids, seq_idx and seq_lengths.

    Args:
        shape: numbers of rows and tokens in the batch, (rows, tokens).
        inputs: keyword arguments of a model's forward, or a batch.

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
        if padding := _padding(shape, inputs):
            of_documents = borders_from_positions(position_ids[:, : shape[1] - padding])
            given["position_ids"] = F.pad(of_documents, (0, 1), value=shape[1])
    elif position_ids is not None and not given:
        raise PackingError(
            f"position_ids: expected shape [rows, tokens], got shape {list(position_ids.shape)}; if the model needs "
            "position_ids of the latter shape, also pass cu_seq_lens_q"
        )
    if seq_idx is not None:
        given["seq_idx"] = borders_from_positions(seq_idx.expand(rows, -1), step=0)
    if (lengths := inputs.get(SEQ_LENGTHS)) is not None:
        if not isinstance(lengths, Tensor):
            raise PackingError(
                f"seq_lengths: expected a tensor, got {type(lengths).__name__}; pass cu_seq_lens_q instead"
            )
        given[SEQ_LENGTHS] = F.pad(lengths.flatten().cumsum(0), (1, 0)).to(torch.int32)
    if not given:
        return None
    first, *others = given
    for other in others:
        if not _same_segments(given[first], given[other].to(given[first].device)):
            raise PackingError(
                f"{other}: expected the same segment borders as in {first}, {given[first].tolist()}, got "
                f"{given[other].tolist()}; position_ids, if given, must restart in every segment"
            )
    return given[first]


def _padding(shape: torch.Size, inputs: Mapping[str, Any]) -> int:
    """Return the number of tokens at the end that only fill a batch of fixed shapes, as PackingCollator marks them.

    A batch of fixed shapes has a single row, and a max_length_q that is not less than its number of tokens.
    """
    seq_idx, max_length = inputs.get("seq_idx"), inputs.get("max_length_q")
    if shape[0] > 1 or not isinstance(seq_idx, Tensor) or (isinstance(max_length, int) and max_length < shape[1]):
        return 0
    return int((seq_idx == PADDING_SEGMENT).sum())


def _same_segments(borders: Tensor, others: Tensor) -> bool:
    """Return whether two tensors of borders have the same segments, apart from empty segments at the end."""
    if borders.shape == others.shape or borders.ndim != 1 or others.ndim != 1:
        return torch.equal(borders, others)
    shorter, longer = sorted((borders, others), key=len)
    common = len(shorter)
    return common > 0 and torch.equal(longer[:common], shorter) and bool((longer[common:] == shorter[-1]).all())
