"""Where the segments of rows begin and end, by whichever columns tell; columns that disagree are refused."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray

Row = Mapping[str, Any]


def integers(name: str, row: Row, number: int) -> IntArray:
    """A column of one row as an array; Python lists and torch tensors are converted."""
    if name not in row:
        raise PackingError(f"column {name!r}: expected in every row, row {number} has {', '.join(row) or 'none'}")
    try:
        values = integers_of_a_list(row[name]) if type(row[name]) is list else np.asarray(row[name])
    except ValueError as error:
        raise PackingError(f"column {name!r}: expected a list of integers, row {number} has {error}") from error
    if values.ndim != 1 or (values.dtype.kind not in "iu" and values.size):
        raise PackingError(
            f"column {name!r}: expected a list of integers, row {number} has {values.dtype} of shape {values.shape}"
        )
    return values


def integers_of_a_list(values: list[Any]) -> npt.NDArray[Any]:
    """As NumPy makes of them, in half the time where they are integers."""
    try:
        return np.frombuffer(array("q", values), dtype=np.int64)
    except (TypeError, ValueError, OverflowError):  # also of no values
        return np.asarray(values)


def segment_lengths(rows: Sequence[Row], tokens: list[IntArray]) -> IntArray:
    """int64 [segments]; empty rows have none. Positions beside another column are left to `check_positions`, which
    compares those of all rows at once.

    Args:
        rows: packed, or documents.
        tokens: integers [tokens] of each row.

    Raises:
        PackingError: columns that do not fit a row's tokens, or contradict each other.
    """
    known = zip(rows, tokens, strict=True)
    return np.concatenate([segments_of(row, len(ids), number, False) for number, (row, ids) in enumerate(known)])


def segments_of(row: Row, tokens: int, number: int, positions: bool) -> IntArray:
    """int64 [segments of the row]; `positions`: whether position_ids are compared with another column."""
    told = [name for name in READERS if name in row]
    if "attention_mask" in row:
        check_mask(row["attention_mask"], tokens, number)
    if not told:
        return np.array([tokens] if tokens else [], dtype=np.int64)
    first, *others = told
    lengths = READERS[first](first, integers(first, row, number), tokens, number)
    for other in others:
        if positions or other != "position_ids":
            found = READERS[other](other, integers(other, row, number), tokens, number)
            check_same(first, lengths, other, found, number)
    return lengths


def check_positions(rows: Sequence[Row], tokens: list[IntArray], position_ids: IntArray) -> None:
    """Refuse rows whose positions are others than those of their segments.

    Args:
        rows: packed, or documents.
        tokens: integers [tokens] of each row.
        position_ids: int32 [tokens of all rows]: what they have to be.
    """
    having = [number for number, row in enumerate(rows) if "position_ids" in row]
    if len(having) == len(rows):
        given = [integers("position_ids", row, number) for number, row in enumerate(rows)]
        same_lengths = [*map(len, given)] == [*map(len, tokens)]
        if same_lengths and np.array_equal(np.concatenate(given) if len(given) > 1 else given[0], position_ids):
            return
    for number in having:
        segments_of(rows[number], len(tokens[number]), number, True)


def check_same(first: str, lengths: IntArray, other: str, found: IntArray, row: int) -> None:
    if not np.array_equal(lengths, found):
        raise PackingError(
            f"column {other!r}: expected the segments of {first!r} in row {row}, {shown(lengths)} tokens long, got "
            f"those of {shown(found)} tokens; remove the column that is wrong"
        )


def from_lengths(name: str, lengths: IntArray, tokens: int, row: int) -> IntArray:
    if lengths.sum(dtype=np.int64) != tokens or (len(lengths) and lengths.min() < 1):
        raise PackingError(
            f"column {name!r}: expected positive lengths that add up to the {tokens} tokens of row {row}, "
            f"got {lengths.tolist()}"
        )
    return lengths.astype(np.int64)


def from_positions(name: str, positions: IntArray, tokens: int, row: int) -> IntArray:
    """A segment begins wherever a position is not one more than the last; there it has to be 0."""
    check_length(name, positions, tokens, row)
    begin = begins(positions.astype(np.int64, copy=False), step=1)  # small and unsigned integers wrap around
    if (elsewhere := positions[begin] != 0).any():
        token = int(begin[elsewhere.argmax()])
        raise PackingError(
            f"column {name!r}: expected positions that restart at 0 at every segment, row {row} has {positions[token]} "
            f"at token {token}; remove the column, since positions are made of seq_lengths, and models that count from "
            "another number than 0 do so by themselves"
        )
    return np.diff(begin, append=tokens)


def from_numbers(name: str, numbers: IntArray, tokens: int, row: int) -> IntArray:
    """A segment begins wherever the number of the segment is another one."""
    check_length(name, numbers, tokens, row)
    return np.diff(begins(numbers, step=0), append=tokens)


def from_borders(name: str, borders: IntArray, tokens: int, row: int) -> IntArray:
    """Lengths summed from 0."""
    lengths = np.diff(borders.astype(np.int64))
    if not len(borders) or borders[0] != 0 or borders[-1] != tokens or (lengths < 1).any():
        raise PackingError(
            f"column {name!r}: expected lengths summed from 0 and rising to the {tokens} tokens of row {row}, "
            f"got {borders.tolist()}"
        )
    return lengths


READERS: dict[str, Callable[[str, IntArray, int, int], IntArray]] = {
    "seq_lengths": from_lengths,
    "cu_seq_lens_q": from_borders,
    "cu_seq_lens_k": from_borders,
    "seq_idx": from_numbers,
    "position_ids": from_positions,
}
"""Columns that tell where the segments of a row are, and what reads them."""


def begins(values: IntArray, step: int) -> IntArray:
    """Where a value is not that of the last token and a step more."""
    inside = np.flatnonzero(np.diff(values) != step) + 1
    return np.concatenate([np.zeros(min(len(values), 1), dtype=np.int64), inside])


def check_length(name: str, values: IntArray, tokens: int, row: int) -> None:
    if len(values) != tokens:
        raise PackingError(
            f"column {name!r}: expected {tokens} values in row {row}, as many as input_ids, got {len(values)}"
        )


def check_mask(mask: Any, tokens: int, row: int) -> None:
    """Masks of other numbers than 1 tell of padding, or number the documents of a row that others have packed."""
    values = np.asarray(mask)
    if values.shape != (tokens,):
        raise PackingError(
            f"column 'attention_mask': expected {tokens} ones in row {row}, one for each of input_ids, got shape "
            f"{values.shape}"
        )
    if (other := values != 1).any():
        raise PackingError(
            f"column 'attention_mask': expected ones, row {row} has a {values[other.argmax()]}; it tells of padding, "
            "or of several documents in a row, which are told in seq_lengths here"
        )


def shown(lengths: IntArray) -> str:
    listed = lengths[:8].tolist()
    return f"{listed}" if len(listed) == len(lengths) else f"{listed[:-1]} and {len(lengths) - 7} more"
