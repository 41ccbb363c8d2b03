"""The segments of a row or a batch: read from columns, cut by extra borders, or filled up.

Filled tokens are no tokens of the dataset: they are in segments at the end of a batch.
"""

from collections.abc import Mapping, Sequence, Sized
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_packing.checks import check_whole_number
from hf_packing.columns import (
    ATTENTION_MASK,
    COPIED_SEGMENT,
    CU_SEQ_LENS,
    IGNORED_LABEL,
    INPUT_IDS,
    LABELS,
    MAX_LENGTHS,
    PADDING_SEGMENT,
    POSITION_IDS,
    SEQ_IDX,
    SEQ_LENGTHS,
)
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import BoolArray, Int64Array, IntArray, indices_in_ranges, offsets_of
from hf_packing.planning.rank_layout import RowPart
from hf_packing.upstream.torch import DynamicInt

Batch = Mapping[str, Any]
"""A batch, or the keyword arguments of a model's forward."""


class BatchSegments(NamedTuple):
    """The segments of a batch, from which all of its columns with borders follow."""

    lengths: Sequence[int]
    """The number of tokens in each segment that is not empty."""
    numbers: Sequence[int]
    """The index of each segment in seq_idx."""
    part: RowPart | None = None
    """Which part of its row the batch has, if several ranks run the row together; its segments are then pieces."""
    multiple: int = 1
    """The number of tokens was filled up to a multiple of this number."""
    first_labels: bool = False
    """Whether first tokens keep their labels, for models that do not predict the next token."""

    @property
    def fillers(self) -> int:
        """The number of segments that only fill up the batch, at its end."""
        return self.numbers.count(PADDING_SEGMENT)


class LongestSegment(DynamicInt):
    """The length of the longest segment of a batch, as an int that also knows the segments.

    A patched model then need not read the lengths from the device, which would wait for it. Everything else takes it
    for an int: Trainer and accelerate pass it on, workers pickle it, and torch.compile compiles a model once for all of
    them. (Of any other subclass of int, torch.compile compiles a model for each value, as torch 2.9 does of this one.)

    Args:
        longest: the length of the longest segment, or a constant above it in batches of fixed shapes.
        segments: the segments of the batch.
    """

    segments: BatchSegments

    def __new__(cls, longest: int, segments: BatchSegments) -> "LongestSegment":
        self = super().__new__(cls, longest)
        self.segments = segments
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return LongestSegment, (int(self), self.segments)

    __repr__ = int.__repr__


def segments_in(batch: Batch) -> BatchSegments | None:
    """Return the segments of a batch of PackingCollator; None for other batches."""
    longest = batch.get(MAX_LENGTHS[0])
    return longest.segments if isinstance(longest, LongestSegment) else None


def lengths_in_column(name: str, values: IntArray, tokens: int, row: int) -> IntArray:
    """Return a row's segment lengths, int64 [segments], in tokens.

    Args:
        name: the name of a column in SEGMENT_COLUMNS.
        values: the row's values in this column.
        tokens: number of tokens in the row.
        row: the row's number, for error messages.

    Raises:
        PackingError: the values do not describe segments that cover all tokens of the row.
    """
    if name in (SEQ_IDX, POSITION_IDS):
        check_length(name, values, tokens, row)
        begins = np.ones(tokens, dtype=bool)
        begins[1:] = values[1:] == 0 if name == POSITION_IDS else values[1:] != values[:-1]
        found = np.diff(np.flatnonzero(begins), append=tokens)
        if name == POSITION_IDS and (wrong := values != (positions := indices_in_ranges(0, found))).any():
            token = int(wrong.argmax())
            raise PackingError(
                "column 'position_ids': expected positions that restart at 0 at every segment, such as "
                f"{positions[token]} at token {token} of row {row}, got {values[token]}. Remove the column, and give "
                "the length of every segment in the column 'seq_lengths'; the collator then computes the positions"
            )
        return found
    lengths, starts = values.astype(np.int64), [0]
    expected = "positive lengths that add up"
    if name != SEQ_LENGTHS:
        lengths, starts = np.diff(lengths), lengths[:1].tolist()
        expected = "cumulative lengths that rise from 0"
    if starts != [0] or lengths.sum() != tokens or (lengths < 1).any():
        raise PackingError(
            f"column {name!r}: expected {expected} to the {tokens} tokens of row {row}, got {values.tolist()}"
        )
    return lengths


def check_length(name: str, values: Sized, tokens: int, row: int) -> None:
    """Raise PackingError if a column does not have one value for each token of a row."""
    if len(values) != tokens:
        raise PackingError(
            f"column {name!r}: expected {tokens} values in row {row}, one for each token, got {len(values)}"
        )


def check_mask(mask: Any, tokens: int, row: int) -> None:
    """Raise PackingError unless an attention_mask is all ones. A 0 means padding; larger values number documents."""
    values = np.atleast_1d(np.asarray(mask))
    check_length(ATTENTION_MASK, values, tokens, row)
    if (other := values != 1).any():
        raise PackingError(
            f"column 'attention_mask': expected documents without padding, got a {values[other.argmax()]} in row "
            f"{row}; if the values number the documents of the row, replace this column by a column 'seq_lengths' with "
            "the documents' lengths"
        )


def read_borders(rows: int, inputs: Batch) -> Tensor | None:
    """Read the segment borders of a batch from cu_seq_lens_q, cu_seq_lens_k, seq_idx, seq_lengths and position_ids.

    Args:
        rows: number of rows in the batch.
        inputs: keyword arguments of a model's forward, or a batch.

    Returns:
        Cumulative segment lengths, integers [segments + 1]; None if `inputs` contains none of these arguments.

    Raises:
        PackingError: an argument has a wrong shape, or two arguments have different borders.
    """
    seq_idx, lengths, positions = (inputs.get(name) for name in (SEQ_IDX, SEQ_LENGTHS, POSITION_IDS))
    found = {name: torch.as_tensor(inputs[name]).flatten() for name in CU_SEQ_LENS if inputs.get(name) is not None}
    if seq_idx is not None:
        found[SEQ_IDX] = borders_from_positions(seq_idx.expand(rows, -1), step=0)
    if lengths is not None:
        found[SEQ_LENGTHS] = F.pad(torch.as_tensor(lengths).flatten().cumsum(0), (1, 0))
    if positions is not None and positions.ndim == 2:
        found[POSITION_IDS] = borders_from_positions(positions.expand(rows, -1))
    elif positions is not None and not found:
        raise PackingError(
            f"position_ids: expected shape [rows, tokens], got shape {list(positions.shape)}; if the model needs "
            "position_ids of the latter shape, also pass cu_seq_lens_q"
        )
    if not found:
        return None
    (first, borders), *_ = found.items()
    fillers = fillers_in(inputs, borders.tolist())
    for name, each in found.items():
        given, expected = lengths_between(each.tolist()), lengths_between(borders.tolist())
        if fillers and name in (SEQ_IDX, POSITION_IDS):
            # these have one number for several fillers, and positions that begin again in a filler
            expected = expected[:-fillers]
            given = given[: len(expected)]
        if given != expected:
            raise PackingError(
                f"{name}: expected segments of the same lengths as in {first}, {expected}, got {given}; "
                "position_ids, if given, must restart in every segment"
            )
    return borders


def borders_from_positions(position_ids: Tensor, step: int = 1) -> Tensor:
    """Find the segment borders from position_ids or, with a step of 0, from seq_idx. A new segment starts at the first
    token of every row, and at every token whose value is not the value of the previous token plus `step`.

    Args:
        position_ids: positions of the tokens, or indices of their segments, integers [rows, tokens].

    Returns:
        Cumulative segment lengths, int32 [segments + 1]. Several rows are counted as one long row.
    """
    starts = F.pad(position_ids.diff(dim=1) != step, (1, 0), value=True)
    return F.pad(starts.flatten().nonzero()[:, 0], (0, 1), value=starts.numel()).to(torch.int32)


def lengths_between(borders: Sequence[int]) -> list[int]:
    """Return the lengths of segments, without the empty ones at the end of a batch of fixed shapes."""
    lengths = [end - start for start, end in pairwise(borders)]
    while lengths[-1:] == [0]:
        lengths.pop()
    return lengths


def fillers_in(inputs: Batch, borders: Sequence[int]) -> int:
    """Return the number of segments that only fill up a batch, as PackingCollator marks them.

    Args:
        inputs: keyword arguments of a model's forward, or a batch.
        borders: cumulative segment lengths.
    """
    seq_idx, total = inputs.get(SEQ_IDX), max(borders, default=0)
    filled = 0 if seq_idx is None or len(seq_idx) > 1 else int((seq_idx == PADDING_SEGMENT).sum())
    return sum(total - filled <= begin < total for begin in borders)


def positions_of(lengths: Sequence[int], fillers: int) -> Int64Array:
    """Return the position of each token in its segment, int64 [tokens].

    Positions of filled tokens start again before they exceed all others: some models depend on the largest position, or
    have no embedding for it.

    Args:
        lengths: number of tokens in each segment.
        fillers: number of segments at the end that only fill up the batch.

    Example:
        >>> positions_of([3, 2, 5], fillers=1).tolist()
        [0, 1, 2, 0, 1, 0, 1, 2, 0, 1]
    """
    positions: Int64Array = indices_in_ranges(0, np.array(lengths))
    return positions % max(lengths[: len(lengths) - fillers] or lengths)


def columns_of(
    segments: BatchSegments, longest: int | None = None, device: torch.device | None = None, empty: int = 0
) -> dict[str, Any]:
    """Return the columns of a batch with the borders between its segments.

    Args:
        segments: the segments.
        longest: the value of max_length_q/k; by default, the length of the longest segment.
        device: where the columns are needed.
        empty: number of empty segments after them.
    """
    borders = torch.from_numpy(offsets_of([*segments.lengths, *[0] * empty]).astype(np.int32)).to(device)
    positions, numbers = positions_of(segments.lengths, segments.fillers), np.array(segments.numbers, np.int32)
    return {
        POSITION_IDS: torch.from_numpy(positions[None]).to(device),
        **dict.fromkeys(CU_SEQ_LENS, borders),
        **dict.fromkeys(MAX_LENGTHS, LongestSegment(longest or max(segments.lengths), segments)),
        SEQ_IDX: torch.from_numpy(np.repeat(numbers, segments.lengths)[None]).to(device),
    }


def number_segments(is_own: BoolArray) -> list[int]:
    """Number the segments of a batch, from 0; but copies of rows from COPIED_SEGMENT down.

    Args:
        is_own: bool [segments]: False for copies.
    """
    numbers: list[int] = np.where(is_own, is_own.cumsum() - 1, COPIED_SEGMENT + 1 - (~is_own).cumsum()).tolist()
    return numbers


def with_segments_cut(batch: Batch, longest: int | None) -> dict[str, Any]:
    """Return a copy of a batch in which no segment is longer than a limit.

    Only the columns that give the borders differ. The last token of a piece still predicts the first token of the next
    piece, since both are of one document; so no label is lost.

    Args:
        batch: a batch of a `PackingCollator`, without fixed shapes.
        longest: the largest length of a segment, in tokens; None for no limit.

    Example:
        >>> import hf_packing as hfp
        >>> batch = hfp.PackingCollator()([{"input_ids": [5, 6, 7, 8, 9]}, {"input_ids": [1, 2]}])
        >>> cut = with_segments_cut(batch, 2)
        >>> cut["cu_seq_lens_q"].tolist(), cut["position_ids"].tolist(), cut["labels"].tolist()
        ([0, 2, 4, 5, 7], [[0, 1, 0, 1, 0, 0, 1]], [[-100, 6, 7, 8, 9, -100, 2]])
    """
    if longest is None or batch[MAX_LENGTHS[0]] <= longest:
        return dict(batch)
    whole: BatchSegments = batch[MAX_LENGTHS[0]].segments
    lengths = [[min(length - begin, longest) for begin in range(0, length, longest)] for length in whole.lengths]
    numbers = number_segments(np.repeat(np.array(whole.numbers) >= 0, [*map(len, lengths)]))
    cut = whole._replace(lengths=[*chain(*lengths)], numbers=numbers)
    return {**batch, **columns_of(cut, longest, batch[INPUT_IDS].device)}


def part_in(batch: Batch) -> RowPart | None:
    """Return which part of a row a batch is, if several ranks run the row together; else None."""
    segments = segments_in(batch)
    return segments and segments.part


def check_shapes(tokens: Any, max_segments: Any) -> tuple[int, int]:
    """Return `tokens` and `max_segments`, the sizes of every batch of fixed shapes, which are only given together."""
    return check_whole_number("tokens", tokens), check_whole_number("max_segments", max_segments, minimum=2)


def fill_up(
    batch: Batch,
    align_tokens: int = 1,
    tokens: int | None = None,
    max_segments: int | None = None,
) -> dict[str, Any]:
    """Fill up the batch to a multiple of align_tokens or to fixed shapes.

    The batch is filled up by one segment without labels and, with max_segments, by empty segments.

    Args:
        batch: a batch with one row, as PackingCollator makes it.
        align_tokens: the number of tokens is made a multiple of this number.
        tokens: number of tokens in every batch of fixed shapes; None for the smallest possible number.
        max_segments: number of segments in every batch of fixed shapes; None for any number.

    Returns:
        The batch with the same columns. With fixed shapes, cu_seq_lens_q and cu_seq_lens_k are int32 [max_segments +
        1], and max_length_q and max_length_k are `tokens`.

    Raises:
        PackingError: the batch has more than `tokens` tokens, or more segments than max_segments.
    """
    given, segments = int(batch[CU_SEQ_LENS[0]][-1]), len(batch[MAX_LENGTHS[0]].segments.lengths)
    missing = -given % align_tokens if tokens is None else tokens - given
    if missing < 0:
        raise PackingError(f"tokens: expected at most {tokens} tokens in the rows of a batch, got {given} tokens")
    fillers = [missing] * bool(missing)
    needed = segments + len(fillers)
    if max_segments is not None and needed > max_segments:
        raise PackingError(
            f"max_segments: expected at most {max_segments} segments in a batch, with the one that fills it up to "
            f"{tokens} tokens, got {needed} segments"
        )
    if tokens is None and max_segments is None and align_tokens == 1:
        return dict(batch)
    return with_fillers(batch, fillers, (max_segments or needed) - needed, tokens, align_tokens)


def with_fillers(
    batch: Batch, fillers: Sequence[int], empty: int = 0, longest: int | None = None, multiple: int = 1
) -> dict[str, Any]:
    """Return a batch with segments of so many tokens at the end, which are no documents.

    Filled tokens repeat the first token of the batch, since a pad token changes the result of some models. They have
    the label -100, the index PADDING_SEGMENT, and 0 in other columns.

    Args:
        batch: a batch with one row, as PackingCollator makes it.
        fillers: number of tokens in each of these segments.
        empty: number of empty segments after them.
        longest: the max_length of the batch; by default, the length of the longest segment.
        multiple: the number of tokens is now a multiple of this number.
    """
    known: BatchSegments = batch[MAX_LENGTHS[0]].segments
    filled = known._replace(
        lengths=[*known.lengths, *fillers],
        numbers=[*known.numbers, *[PADDING_SEGMENT] * len(fillers)],
        multiple=multiple,
    )
    first: dict[str, int] = {INPUT_IDS: int(batch[INPUT_IDS][0, 0]), LABELS: IGNORED_LABEL}
    values = {
        name: F.pad(each, (0, sum(fillers)), value=first.get(name, 0)) if fillers else each
        for name, each in batch.items()
        if name not in OF_SEGMENTS
    }
    return {**batch, **values, **columns_of(filled, longest, empty=empty)}


OF_SEGMENTS = (*CU_SEQ_LENS, *MAX_LENGTHS)
"""The entries of a batch that do not have a value for each token."""
