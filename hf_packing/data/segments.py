"""Where the segments of rows begin and end: read from whichever columns say so, which must agree."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_packing.columns import ATTENTION_MASK, CU_SEQ_LENS, POSITION_IDS, SEGMENT_COLUMNS, SEQ_IDX, SEQ_LENGTHS
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray

Row = Mapping[str, Any]
"""One row of a dataset, by column name."""


def read_segment_lengths(rows: Sequence[Row], tokens: Sequence[IntArray]) -> IntArray:
    """Read the lengths of all segments of rows. A row without a column that says more is one segment.

    position_ids beside another such column are not read here: `check_positions` compares those of all rows at once.

    Args:
        rows: packed rows or documents.
        tokens: integers [tokens], the input_ids of each row.

    Returns:
        int64 [segments], tokens; rows without a token have no segment.

    Raises:
        PackingError: columns that do not fit the tokens of a row, or contradict each other.
    """
    numbered = enumerate(zip(rows, tokens, strict=True))
    return np.concatenate(
        [_segments_of_row(row, len(ids), number, compare_positions=False) for number, (row, ids) in numbered]
    )


def check_positions(rows: Sequence[Row], tokens: Sequence[IntArray], position_ids: IntArray) -> None:
    """Raise if rows have other position_ids than those of their segments.

    Args:
        rows: packed rows or documents.
        tokens: integers [tokens], the input_ids of each row.
        position_ids: int32 [tokens of all rows], as they must be.

    Raises:
        PackingError: position_ids of other segments, with the row.
    """
    having = [number for number, row in enumerate(rows) if POSITION_IDS in row]
    if len(having) == len(rows):
        given = [read_integers(POSITION_IDS, row, number) for number, row in enumerate(rows)]
        same_lengths = [*map(len, given)] == [*map(len, tokens)]
        if same_lengths and np.array_equal(np.concatenate(given) if len(given) > 1 else given[0], position_ids):
            return
    for number in having:
        _segments_of_row(rows[number], len(tokens[number]), number, compare_positions=True)


def read_integers(name: str, row: Row, number: int) -> IntArray:
    """Return a column of a row as a NumPy array; Python lists and torch tensors are converted.

    Args:
        name: of the column.
        row: with that column.
        number: of the row, for error messages.

    Returns:
        Integers [values]; of any dtype if there are none.

    Raises:
        PackingError: a missing column, or one that is not a list of integers.
    """
    if name not in row:
        raise PackingError(f"column {name!r}: expected in every row, row {number} has {', '.join(row) or 'none'}")
    try:
        values = _array_of_list(row[name]) if type(row[name]) is list else np.asarray(row[name])
    except ValueError as error:
        raise PackingError(f"column {name!r}: expected a list of integers, row {number} has {error}") from error
    if values.ndim != 1 or (values.dtype.kind not in "iu" and values.size):
        raise PackingError(
            f"column {name!r}: expected a list of integers, row {number} has {values.dtype} of shape {values.shape}"
        )
    return values


def _array_of_list(values: list[Any]) -> npt.NDArray[Any]:
    """Do what np.asarray does; for lists of integers it takes half the time."""
    try:
        return np.frombuffer(array("q", values), dtype=np.int64)
    except (TypeError, ValueError, OverflowError):  # an empty list is a ValueError
        return np.asarray(values)


def _segments_of_row(row: Row, tokens: int, number: int, compare_positions: bool) -> IntArray:
    """Return int64 [segments of the row]. All columns that say where segments are must agree.

    Args:
        row: packed row or document.
        tokens: the number of its input_ids.
        number: of the row, for error messages.
        compare_positions: whether position_ids are compared with the other columns.
    """
    found = [name for name in SEGMENT_COLUMNS if name in row]
    if ATTENTION_MASK in row:
        _check_mask(row[ATTENTION_MASK], tokens, number)
    if not found:
        return np.array([tokens] if tokens else [], dtype=np.int64)
    first, *others = found
    lengths = _READERS[first](first, read_integers(first, row, number), tokens, number)
    for other in others:
        if compare_positions or other != POSITION_IDS:
            same = _READERS[other](other, read_integers(other, row, number), tokens, number)
            if not np.array_equal(lengths, same):
                raise PackingError(
                    f"column {other!r}: expected the segments of {first!r} in row {number}, {_shown(lengths)} tokens "
                    f"long, got those of {_shown(same)} tokens; remove the column that is wrong"
                )
    return lengths


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
            f"column {name!r}: expected cumulative lengths from 0, rising to the {tokens} tokens of row {row}, "
            f"got {cu_seq_lens.tolist()}"
        )
    return lengths


def _from_segment_numbers(name: str, numbers: IntArray, tokens: int, row: int) -> IntArray:
    """A segment begins wherever the number changes."""
    _check_length(name, numbers, tokens, row)
    return np.diff(_begins(numbers, step=0), append=tokens)


def _from_positions(name: str, positions: IntArray, tokens: int, row: int) -> IntArray:
    """A segment begins wherever a position is not one more than the one before; it must be 0 there."""
    _check_length(name, positions, tokens, row)
    begin = _begins(positions.astype(np.int64, copy=False), step=1)  # small and unsigned integers wrap around
    if (elsewhere := positions[begin] != 0).any():
        token = int(begin[elsewhere.argmax()])
        raise PackingError(
            f"column {name!r}: expected positions that restart at 0 at every segment, row {row} has {positions[token]} "
            f"at token {token}; remove the column: positions are computed from seq_lengths, and models that count from "
            "another number than 0 add it themselves"
        )
    return np.diff(begin, append=tokens)


_READERS: dict[str, Callable[[str, IntArray, int, int], IntArray]] = {
    SEQ_LENGTHS: _from_lengths,
    **dict.fromkeys(CU_SEQ_LENS, _from_cumulative_lengths),
    SEQ_IDX: _from_segment_numbers,
    POSITION_IDS: _from_positions,
}
"""How each of SEGMENT_COLUMNS becomes segment lengths, given its name, its values, the row's tokens and its number."""


def _begins(values: IntArray, step: int) -> IntArray:
    """Return the indices of values that are not the value before plus a step; index 0 is one of them."""
    inside = np.flatnonzero(np.diff(values) != step) + 1
    return np.concatenate([np.zeros(min(len(values), 1), dtype=np.int64), inside])


def _check_length(name: str, values: IntArray, tokens: int, row: int) -> None:
    if len(values) != tokens:
        raise PackingError(
            f"column {name!r}: expected {tokens} values in row {row}, as many as input_ids, got {len(values)}"
        )


def _check_mask(mask: Any, tokens: int, row: int) -> None:
    """Raise unless the mask is all ones: zeros mean padding, and larger numbers count documents packed elsewhere."""
    values = np.asarray(mask)
    if values.shape != (tokens,):
        raise PackingError(
            f"column 'attention_mask': expected {tokens} ones in row {row}, one for each of input_ids, got shape "
            f"{values.shape}"
        )
    if (other := values != 1).any():
        raise PackingError(
            f"column 'attention_mask': expected ones, row {row} has a {values[other.argmax()]}, which means padding or "
            "several documents; give the lengths of documents as seq_lengths"
        )


def _shown(lengths: IntArray) -> str:
    listed = lengths[:8].tolist()
    return f"{listed}" if len(listed) == len(lengths) else f"{listed[:-1]} and {len(lengths) - 7} more"
