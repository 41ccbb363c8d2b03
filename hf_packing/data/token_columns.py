"""Which columns of a dataset are packed, and their token lists as NumPy arrays.

`input_ids` and all other columns with one number for each token are packed, unless the dataset's format hides them.
"""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hf_packing.columns import ATTENTION_MASK, INPUT_IDS, LABELS, LOSS_MASKS, SEGMENT_COLUMNS
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray

TOKENS_AT_ONCE = 1 << 19
"""Columns are read, and rows written, in blocks of about this many tokens, so that memory stays bounded."""

TRAINING_COLUMNS = {LABELS: "integers", ATTENTION_MASK: "0 and 1"} | dict.fromkeys(LOSS_MASKS, "0 and 1")
"""Columns that decide what a model is trained on, and what their lists hold: packed or refused, never left out."""


class TokenColumn:
    """A list column of numbers. Its chunks are read in place, so it may have more than 2**31 values in all.

    Args:
        name: the column's name, for error messages.
        column: lists of integers, floats or booleans, without nulls.
        row_numbers: integers [rows]: the rows of the column in the wanted order; None for all rows in their own order.

    Attributes:
        length: int64 [rows]: the number of values in each row.
        type: the Arrow type of the column.

    Raises:
        PackingError: a null list or a null value.
    """

    def __init__(self, name: str, column: pa.ChunkedArray, row_numbers: IntArray | None = None) -> None:
        self.name = name
        self.type: pa.DataType = column.type
        chunks = [_read_chunk(chunk) for chunk in column.chunks]
        self._values = [chunk.values for chunk in chunks]
        none = np.zeros(0, dtype=np.int64)
        self._begin = np.concatenate([none, *(chunk.begin for chunk in chunks)])
        self.length = np.concatenate([none, *(chunk.length for chunk in chunks)])
        self._chunk = np.repeat(np.arange(len(chunks)), [len(chunk.begin) for chunk in chunks])
        missing = np.concatenate([none, *(chunk.missing for chunk in chunks)]).astype(bool)
        nulls = np.concatenate([none, *(chunk.nulls for chunk in chunks)]).astype(bool)
        if row_numbers is not None:
            self._begin = self._begin[row_numbers]
            self.length = self.length[row_numbers]
            self._chunk = self._chunk[row_numbers]
            missing, nulls = missing[row_numbers], nulls[row_numbers]
        if missing.any():
            raise PackingError(f"column {name!r}: expected a list in every row, row {int(missing.argmax())} has none")
        if nulls.any():
            raise PackingError(
                f"column {name!r}: expected a number for every token, row {int(nulls.argmax())} has a null"
            )

    def gather(self, row: IntArray, start: IntArray, length: IntArray) -> npt.NDArray[Any]:
        """Return the tokens start:start + length of the given rows, concatenated.

        Slicing and one concatenation copy at memory speed; fancy indexing and `take` are about half as fast.

        Args:
            row: integers [slices].
            start: integers [slices], tokens, within the row.
            length: integers [slices], tokens.

        Returns:
            [sum(length)], in the dtype of the column; always a copy.
        """
        begin = self._begin[row] + start
        bounds = zip(begin.tolist(), (begin + length).tolist(), strict=True)
        if len(self._values) == 1:
            values = self._values[0]
            slices = [values[a:b] for a, b in bounds]
        else:
            chunks = self._values
            slices = [chunks[c][a:b] for c, (a, b) in zip(self._chunk[row].tolist(), bounds, strict=True)]
        return np.concatenate(slices) if slices else np.zeros(0, dtype=self.type.value_type.to_pandas_dtype())


TokenColumns = dict[str, TokenColumn]
"""By name, input_ids first; their rows have the same lengths."""


def find_token_columns(table: pa.Table, row_numbers: IntArray | None = None) -> TokenColumns:
    """Read the columns of a table of documents that are packed: input_ids, and those with a number for each token.

    An attention_mask is checked and dropped: with one, transformers would not detect packed documents.

    Args:
        table: one document a row, as `with_typed_empty_lists` returns it.
        row_numbers: integers [documents]: the rows of the table in the wanted order; None for all.

    Raises:
        PackingError: no input_ids, a table that is packed already, an attention_mask with zeros, columns with other
            lengths than input_ids, labels or a mask without a number for each token.
    """
    names = table.column_names
    if packed := [name for name in SEGMENT_COLUMNS if name in names]:
        raise PackingError(
            f"column {packed[0]!r}: expected documents that are not packed yet; this dataset seems to be packed "
            "already (remove the column if it is not)"
        )
    if INPUT_IDS not in names:
        raise PackingError(
            f"column 'input_ids': expected this column in the dataset, got columns {', '.join(names) or 'none'}"
        )
    if not is_token_type(table.schema.field(INPUT_IDS).type):
        raise PackingError(f"column 'input_ids': expected lists of integers, got {table.schema.field(INPUT_IDS).type}")
    for name, values in TRAINING_COLUMNS.items():
        if name in names and not is_token_type(kind := table.schema.field(name).type):
            raise PackingError(
                f"column {name!r}: expected lists of {values}, one for each token, got {kind}; remove the column if "
                "it means something else"
            )
    others = [field.name for field in table.schema if is_token_type(field.type) and field.name != INPUT_IDS]
    columns = {name: TokenColumn(name, table.column(name), row_numbers) for name in (INPUT_IDS, *others)}
    check_same_lengths(columns)
    if (mask := columns.pop(ATTENTION_MASK, None)) is not None:
        _check_no_padding(mask)
    return columns


def with_typed_empty_lists(table: pa.Table) -> pa.Table:
    """Cast token columns without any value to lists of int32; Arrow cannot infer that they hold numbers.

    If input_ids have values, only the columns that decide what is trained on are cast.
    """
    untyped = [field.name for field in table.schema if is_list(field.type) and pa.types.is_null(field.type.value_type)]
    if INPUT_IDS not in untyped:
        untyped = [name for name in untyped if name in TRAINING_COLUMNS]
    if not table.num_rows:
        of_tokens = (INPUT_IDS, *TRAINING_COLUMNS)
        untyped += [field.name for field in table.schema if pa.types.is_null(field.type) and field.name in of_tokens]
    for name in untyped:
        place = table.column_names.index(name)
        table = table.set_column(place, name, table.column(name).cast(pa.list_(pa.int32())))
    return table


def columns_left_out(schema: pa.Schema, removed: Collection[str] = ()) -> list[str]:
    """Return the columns without one number for each token, with their types, except those that are removed anyway."""
    return [
        f"{field.name!r} ({field.type})"
        for field in schema
        if field.name not in (INPUT_IDS, *removed) and not is_token_type(field.type)
    ]


def visible_columns(dataset: Any) -> list[str]:
    """Return the columns that the format of a dataset shows. A trainer sees no others, so no others are packed.

    An attention_mask counts as visible even if it is hidden: it is only checked for padding.

    Args:
        dataset: a Dataset.

    Returns:
        Column names, in the order of the dataset.

    Raises:
        PackingError: the format hides all columns that say where segments are, so packed rows would pass for documents.
    """
    form, schema = dataset.format, dataset.data.table.schema
    if form["output_all_columns"]:
        return list(schema.names)
    hidden = {name for name in schema.names if name not in form["columns"]}
    segment_columns = [name for name in SEGMENT_COLUMNS if name in schema.names]
    if segment_columns and hidden.issuperset(segment_columns):
        raise PackingError(
            f"column {segment_columns[0]!r}: expected among the columns of the dataset's format, {form['columns']}, "
            "which hides where the documents of packed rows begin; show it, or remove it if the rows are not packed"
        )
    if ATTENTION_MASK in hidden and is_token_type(schema.field(ATTENTION_MASK).type):
        hidden.remove(ATTENTION_MASK)
    return [name for name in schema.names if name not in hidden]


def row_numbers(dataset: Any) -> IntArray | None:
    """Return which rows of a Dataset's table are its rows after shuffle, select or filter; None for all in order."""
    indices = dataset._indices
    return None if indices is None else indices.column(0).to_numpy()


def is_list(kind: pa.DataType) -> bool:
    """Return whether values of this type are lists of any kind."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_token_type(kind: pa.DataType) -> bool:
    """Return whether values of this type are lists of integers, floats or booleans."""
    if not is_list(kind):
        return False
    value = kind.value_type
    return bool(pa.types.is_integer(value) or pa.types.is_floating(value) or pa.types.is_boolean(value))


def check_same_lengths(columns: TokenColumns) -> None:
    """Raise unless every row has as many values in each column as it has input_ids."""
    lengths = columns[INPUT_IDS].length
    for name, column in columns.items():
        if (other := column.length != lengths).any():
            row = int(other.argmax())
            raise PackingError(
                f"column {name!r}: expected as many values as input_ids in every row, row {row} has "
                f"{column.length[row]} for {lengths[row]} input_ids (remove the column if it is not about tokens)"
            )


def blocks_of_rows(row_tokens: IntArray, tokens: int) -> Iterator[tuple[int, int]]:
    """Yield consecutive ranges of rows with at most `tokens` tokens each; a row with more is a range by itself.

    Args:
        row_tokens: integers [rows]: the tokens of each row.
        tokens: at least 1.

    Returns:
        Pairs of the first row of a block and the first row after it.
    """
    end = np.cumsum(row_tokens, dtype=np.int64)
    first = 0
    while first < len(end):
        before = int(end[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(end, before + tokens, side="right")))
        yield first, last
        first = last


def _check_no_padding(mask: TokenColumn) -> None:
    for first, end in blocks_of_rows(mask.length, TOKENS_AT_ONCE):
        rows = np.arange(first, end)
        values = mask.gather(rows, np.zeros_like(rows), mask.length[rows])
        if (other := values != 1).any():
            token = int(other.argmax())
            row = int(np.repeat(rows, mask.length[rows])[token])
            hint = "it seems to be packed already" if values[token] else "tokenize with padding=False"
            raise PackingError(
                f"column 'attention_mask': expected documents without padding, row {row} has a {values[token]}; {hint}"
            )


class _Chunk(NamedTuple):
    """One chunk of a list column as NumPy arrays."""

    values: npt.NDArray[Any]
    """The values of all rows, concatenated, with zeros for nulls."""
    begin: IntArray
    """int64 [rows]: where each row begins in the values."""
    length: IntArray
    """int64 [rows]: the number of values in each row."""
    missing: npt.NDArray[np.bool_]
    """bool [rows]: whether the row is null."""
    nulls: npt.NDArray[np.bool_]
    """bool [rows]: whether the row has a null value."""


def _read_chunk(chunk: pa.Array) -> _Chunk:
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
    return _Chunk(values.to_numpy(zero_copy_only=False), offsets[:-1], np.diff(offsets), missing, nulls)
