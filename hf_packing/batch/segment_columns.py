"""Read the segment lengths of a row from a column that gives segment borders, and check columns of its tokens."""

from collections.abc import Callable
from typing import Any

import numpy as np

from hf_packing.columns import CU_SEQ_LENS, POSITION_IDS, SEQ_IDX, SEQ_LENGTHS
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


def check_length(name: str, values: IntArray, tokens: int, row: int) -> None:
    """Raise PackingError if a column does not have one value for each token of a row."""
    if len(values) != tokens:
        raise PackingError(
            f"column {name!r}: expected {tokens} values in row {row}, one for each token, got {len(values)}"
        )


def check_mask(mask: Any, tokens: int, row: int) -> None:
    """Raise PackingError unless an attention_mask is all ones. A 0 means padding; larger values number documents."""
    values = np.asarray(mask)
    if values.shape != (tokens,):
        raise PackingError(
            f"column 'attention_mask': expected shape ({tokens},) in row {row}, a 1 per token, got shape {values.shape}"
        )
    if not values.all():
        raise PackingError(f"column 'attention_mask': expected documents without padding, got a 0 in row {row}")
    if (other := values != 1).any():
        raise PackingError(
            f"column 'attention_mask': expected only ones, got a {values[other.argmax()]} in row {row}; if the values "
            "number the documents of the row, replace this column by a column 'seq_lengths' with the documents' lengths"
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
