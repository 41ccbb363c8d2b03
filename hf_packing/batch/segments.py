"""The segments of a row or a batch: read from columns, cut by extra borders, or filled up to a fixed shape."""

from collections.abc import Callable, Mapping, Sized
from typing import Any

import numpy as np
import torch
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
from hf_packing.planning.lengths import IntArray


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
    return _READERS[name](name, values, tokens, row)


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


def _from_lengths(name: str, lengths: IntArray, tokens: int, row: int) -> IntArray:
    if lengths.sum(dtype=np.int64) != tokens or (len(lengths) and lengths.min() < 1):
        raise PackingError(
            f"column {name!r}: expected positive lengths that add up to the {tokens} tokens of row {row}, "
            f"got {lengths.tolist()}"
        )
    return lengths.astype(np.int64)


def _from_cumulative_lengths(name: str, cu_seq_lens: IntArray, tokens: int, row: int) -> IntArray:
    lengths = np.diff(cu_seq_lens.astype(np.int64))
    if not len(cu_seq_lens) or cu_seq_lens[0] != 0 or cu_seq_lens[-1] != tokens or (lengths < 1).any():
        raise PackingError(
            f"column {name!r}: expected cumulative lengths that rise from 0 to the {tokens} tokens of row {row}, "
            f"got {cu_seq_lens.tolist()}"
        )
    return lengths


def _from_segment_numbers(name: str, numbers: IntArray, tokens: int, row: int) -> IntArray:
    """Return a row's segment lengths, given each token's segment number. A segment begins where the number changes."""
    check_length(name, numbers, tokens, row)
    return np.diff(_begins(numbers, step=0), append=tokens)


def _from_positions(name: str, positions: IntArray, tokens: int, row: int) -> IntArray:
    """Return a row's segment lengths, given each token's position. Segments begin where positions do not rise by 1."""
    check_length(name, positions, tokens, row)
    begin = _begins(positions.astype(np.int64, copy=False), step=1)  # differences of small dtypes would wrap around
    if (elsewhere := positions[begin] != 0).any():
        token = int(begin[elsewhere.argmax()])
        raise PackingError(
            f"column {name!r}: expected positions that restart at 0 at every segment, got {positions[token]} at token "
            f"{token} of row {row}. Remove the column, and give the length of every segment in the column "
            "'seq_lengths'; the collator then computes the positions"
        )
    return np.diff(begin, append=tokens)


def _begins(values: IntArray, step: int) -> IntArray:
    """Return the indices at which segments begin: 0, and all indices at which values do not rise by `step`."""
    inside = np.flatnonzero(np.diff(values) != step) + 1
    return np.concatenate([np.zeros(min(len(values), 1), dtype=np.int64), inside])


_READERS: dict[str, Callable[[str, IntArray, int, int], IntArray]] = {
    SEQ_LENGTHS: _from_lengths,
    **dict.fromkeys(CU_SEQ_LENS, _from_cumulative_lengths),
    SEQ_IDX: _from_segment_numbers,
    POSITION_IDS: _from_positions,
}
"""Functions (name, values, number of tokens in the row, row number) -> segment lengths, by name of the column."""


def with_segments_cut(batch: Mapping[str, Any], longest: int | None) -> dict[str, Any]:
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
    positions = batch[POSITION_IDS] % longest
    begins, is_own = positions[0] == 0, batch[SEQ_IDX][0] >= 0
    numbers = torch.where(is_own, (begins & is_own).cumsum(0) - 1, COPIED_SEGMENT + 1 - begins.cumsum(0))
    cu_seq_lens = F.pad(begins.nonzero()[:, 0], (0, 1), value=len(begins)).to(batch[CU_SEQ_LENS[0]].dtype)
    return {
        **batch,
        POSITION_IDS: positions,
        **dict.fromkeys(CU_SEQ_LENS, cu_seq_lens),
        **dict.fromkeys(MAX_LENGTHS, longest),
        SEQ_IDX: numbers[None].to(batch[SEQ_IDX].dtype),
    }


def check_shapes(tokens: Any, max_segments: Any) -> tuple[int, int]:
    """Return `tokens` and `max_segments`, the sizes of every batch of fixed shapes, which are only given together."""
    return check_whole_number("tokens", tokens), check_whole_number("max_segments", max_segments, minimum=2)


def fill_to_shape(batch: Mapping[str, Any], tokens: int, max_segments: int) -> dict[str, Any]:
    """Fill a batch up to `tokens` tokens with one segment without labels, and up to max_segments with empty segments.

    The filling repeats the first token of the batch, since a pad token changes the result of some models. Its positions
    start again before they exceed those of all documents, since some models depend on the largest position, or have no
    embedding for it. Other columns with a value for each token are filled with 0.

    Args:
        batch: a batch with one row, as PackingCollator makes it.
        tokens: number of tokens in every batch.
        max_segments: number of segments in every batch.

    Returns:
        The batch with the same columns. cu_seq_lens_q and cu_seq_lens_k are int32 [max_segments + 1], the columns with
        a value for each token are [1, tokens], and max_length_q and max_length_k are `tokens`.

    Raises:
        PackingError: the batch has more than `tokens` tokens, or more segments than max_segments.
    """
    borders = batch[CU_SEQ_LENS[0]]
    given, segments = int(borders[-1]), len(borders) - 1
    if given > tokens:
        raise PackingError(f"tokens: expected at most {tokens} tokens in the rows of a batch, got {given} tokens")
    if (needed := segments + (given < tokens)) > max_segments:
        raise PackingError(
            f"max_segments: expected at most {max_segments} segments in a batch, with the one that fills it up to "
            f"{tokens} tokens, got {needed} segments"
        )
    filling = {
        INPUT_IDS: batch[INPUT_IDS][0, 0],
        LABELS: IGNORED_LABEL,
        POSITION_IDS: torch.arange(tokens - given) % borders.diff().max(),
        SEQ_IDX: PADDING_SEGMENT,
    }
    filled = dict(batch)
    for name, values in batch.items():
        if isinstance(values, torch.Tensor) and values.shape == (1, given):
            filled[name] = values.new_empty(1, tokens)
            filled[name][:, :given] = values
            filled[name][:, given:] = filling.get(name, 0)
    empty = borders.new_full((max_segments - segments,), tokens)
    return {
        **filled,
        **dict.fromkeys(CU_SEQ_LENS, torch.cat([borders, empty])),
        **dict.fromkeys(MAX_LENGTHS, tokens),
    }
