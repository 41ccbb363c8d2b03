"""A column of token lists, read as NumPy: where each row begins, how long it is, and any slices of it, concatenated."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray

MAX_LIST_VALUES = 2**31 - 1
TOKENS_AT_ONCE = 1 << 19
"""Columns are read, and rows written, in blocks of about this many tokens: memory does not depend on the dataset."""


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
        chunks = [read_chunk(chunk) for chunk in column.chunks]
        self.values = [chunk.values for chunk in chunks]
        none = np.zeros(0, dtype=np.int64)
        self.begin = np.concatenate([none, *(chunk.begin for chunk in chunks)])
        self.length = np.concatenate([none, *(chunk.length for chunk in chunks)])
        self.chunk = np.repeat(np.arange(len(chunks)), [len(chunk.begin) for chunk in chunks])
        missing = np.concatenate([none, *(chunk.missing for chunk in chunks)]).astype(bool)
        nulls = np.concatenate([none, *(chunk.nulls for chunk in chunks)]).astype(bool)
        if row_numbers is not None:
            self.begin, self.length, self.chunk = (
                self.begin[row_numbers],
                self.length[row_numbers],
                self.chunk[row_numbers],
            )
            missing, nulls = missing[row_numbers], nulls[row_numbers]
        if missing.any():
            raise PackingError(f"column {name!r}: expected a list in every row, row {int(missing.argmax())} has none")
        if nulls.any():
            raise PackingError(
                f"column {name!r}: expected a number for every token, row {int(nulls.argmax())} has a null"
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


class Chunk(NamedTuple):
    """One chunk of a list column as NumPy."""

    values: npt.NDArray[Any]
    """The flat values, with zeros for nulls."""
    begin: IntArray
    """int64 [rows]: where in the values a row begins."""
    length: IntArray
    """int64 [rows]: how many values it has."""
    missing: npt.NDArray[np.bool_]
    """bool [rows]: whether there is no list."""
    nulls: npt.NDArray[np.bool_]
    """bool [rows]: whether a value of the list is null."""


def read_chunk(chunk: pa.Array) -> Chunk:
    if pa.types.is_fixed_size_list(chunk.type):
        chunk = chunk.cast(pa.list_(chunk.type.value_type))
    missing = nulls = np.zeros(len(chunk), dtype=bool)
    if chunk.null_count:
        missing = chunk.is_null().to_numpy(zero_copy_only=False)
    offsets, values = chunk.offsets.to_numpy().astype(np.int64), chunk.values
    if values.null_count:
        nulls_before = np.concatenate([[0], np.cumsum(values.is_null().to_numpy(zero_copy_only=False))])
        nulls = np.diff(nulls_before[offsets]) > 0
        values = values.fill_null(False if pa.types.is_boolean(values.type) else 0)
    return Chunk(values.to_numpy(zero_copy_only=False), offsets[:-1], np.diff(offsets), missing, nulls)


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
