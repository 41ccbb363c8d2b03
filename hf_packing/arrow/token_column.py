"""A column of token lists, read as NumPy: where each row begins, how long it is, and any slices of it, concatenated."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray

MAX_LIST_VALUES = 2**31 - 1


def is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_token_type(kind: pa.DataType) -> bool:
    """Whether a column of this type holds one number for each token: a list of integers, floats or booleans."""
    if not is_list(kind):
        return False
    value = kind.value_type
    return bool(pa.types.is_integer(value) or pa.types.is_floating(value) or pa.types.is_boolean(value))


class TokenColumn:
    """A list column of numbers. The chunks are read where they lie, so more than 2**31 values are no matter.

    Args:
        name: the column's name, for messages.
        column: lists of integers, floats or booleans, with no null.
        row_numbers: integers [rows]: rows of the column in the order wanted; None for all, in their own order.

    Raises:
        PackingError: a null list or a null value.
    """

    def __init__(self, name: str, column: pa.ChunkedArray, row_numbers: IntArray | None = None) -> None:
        self.name = name
        self.type: pa.DataType = column.type
        self.values: list[npt.NDArray[Any]] = []
        begins, lengths, rows_before = [], [], [0]
        for chunk in column.chunks:
            values, begin, length = read_chunk(name, chunk, rows_before[-1])
            self.values.append(values)
            begins.append(begin)
            lengths.append(length)
            rows_before.append(rows_before[-1] + len(chunk))
        none = np.zeros(0, dtype=np.int64)
        self.begin, self.length = np.concatenate([none, *begins]), np.concatenate([none, *lengths])
        self.chunk = np.repeat(np.arange(len(begins)), np.diff(rows_before))
        if row_numbers is not None:
            self.begin, self.length, self.chunk = (
                self.begin[row_numbers],
                self.length[row_numbers],
                self.chunk[row_numbers],
            )

    def gather(self, row: IntArray, start: IntArray, length: IntArray) -> npt.NDArray[Any]:
        """The tokens start:start + length of each row named, one slice after the other.

        Slicing and one concatenation copy at memory speed; fancy indexing or `take` is about half as fast.

        Args:
            row: integers [slices].
            start: integers [slices], tokens, inside the row.
            length: integers [slices], tokens.

        Returns:
            the column's own dtype [sum(length)].
        """
        begin = self.begin[row] + start
        bounds = zip(begin.tolist(), (begin + length).tolist(), strict=True)
        if len(self.values) == 1:
            values = self.values[0]
            slices = [values[a:b] for a, b in bounds]
        else:
            chunks = self.values
            slices = [chunks[c][a:b] for c, (a, b) in zip(self.chunk[row].tolist(), bounds, strict=True)]
        return np.concatenate(slices) if slices else np.zeros(0, dtype=self.type.value_type.to_pandas_dtype())


def read_chunk(name: str, chunk: pa.Array, first_row: int) -> tuple[npt.NDArray[Any], IntArray, IntArray]:
    """The flat values of one chunk, and where each of its rows begins in them and how long it is."""
    if chunk.null_count:
        row = first_row + int(np.argmax(chunk.is_null().to_numpy(zero_copy_only=False)))
        raise PackingError(f"column {name!r}: expected a list in every row, row {row} has none")
    if pa.types.is_fixed_size_list(chunk.type):
        chunk = chunk.cast(pa.list_(chunk.type.value_type))
    offsets = chunk.offsets.to_numpy().astype(np.int64)
    values = chunk.values
    if values.null_count and (bad := first_null(values, offsets)) is not None:
        row = first_row + int(np.searchsorted(offsets, bad, side="right")) - 1
        raise PackingError(f"column {name!r}: expected a number for every token, row {row} has a null")
    return values.to_numpy(zero_copy_only=False), offsets[:-1], np.diff(offsets)


def first_null(values: pa.Array, offsets: IntArray) -> int | None:
    """The first null value that a row of the chunk reaches; a slice of a longer column may have some outside."""
    used = values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    if not used.null_count:
        return None
    return int(offsets[0]) + int(np.argmax(used.is_null().to_numpy(zero_copy_only=False)))


def list_array(values: npt.NDArray[Any], lengths: IntArray, large: bool = False) -> pa.Array:
    """Flat values as a list array; a LargeList where asked for, or where 32-bit offsets cannot reach.

    Args:
        values: any number type [sum(lengths)].
        lengths: integers [rows], values in each row.
        large: whether a LargeList is wanted in any case.
    """
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    flat = pa.array(values)
    if large or offsets[-1] > MAX_LIST_VALUES:
        return pa.LargeListArray.from_arrays(pa.array(offsets), flat)
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), flat)


def blocks_of_packs(pack_tokens: IntArray, tokens: int) -> Iterator[tuple[int, int]]:
    """Consecutive ranges of packs with at most `tokens` tokens each, or one pack where a single one has more."""
    end = np.cumsum(pack_tokens, dtype=np.int64)
    first = 0
    while first < len(end):
        before = int(end[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(end, before + tokens, side="right")))
        yield first, last
        first = last
