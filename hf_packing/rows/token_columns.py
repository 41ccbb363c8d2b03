"""Choose the columns of a dataset to pack, and read the lists in these columns as NumPy arrays.

A token column is a column with one number for each token of a document, such as `input_ids` and `labels`. All token
columns are packed, except `attention_mask` and those that the dataset's format hides.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hf_packing.columns import (
    ATTENTION_MASK,
    INPUT_IDS,
    LABELS,
    LOSS_MASKS,
    LOSS_WEIGHT,
    LOSS_WEIGHTS,
    check_are_documents,
    rows_of,
)
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import Array, IntArray, Pieces, offsets_of
from hf_packing.rows.packing_trace import refuse_lost_borders
from hf_packing.upstream.datasets import indices_of

TOKENS_AT_ONCE = 1 << 19
"""Columns are read and rows are written in blocks of about this many tokens, so that memory use stays bounded."""

VALUES_OF_TOKENS = {
    **dict.fromkeys((INPUT_IDS, LABELS), "integers"),
    **dict.fromkeys((ATTENTION_MASK, *LOSS_MASKS), "0 and 1"),
    LOSS_WEIGHTS: "numbers",
}
"""Columns that must have a number for each token, with a description of these numbers."""
_UNREADABLE = -1
"""What stands for the length of a row that is null, or has a value that is, or a weight that is not finite."""

RowNumbers = IntArray | slice
ALL_ROWS = slice(None)
"""In place of the numbers of rows: all rows of a table, in their order."""


class TokenColumn:
    """An Arrow column with a list of numbers in each row, readable as NumPy arrays.

    The chunks of the Arrow column are not joined, and are copied only if they have nulls or booleans. The column may
    have more than 2**31 values.

    Args:
        name: the column's name, for error messages.
        column: lists of integers, floats or booleans, or of pairs of them, without nulls.
        row_numbers: integers [rows]: indices of the rows, in the wanted order; a slice for all rows in stored order.

    Attributes:
        length: int64 [rows]: the number of values in each row.

    Raises:
        PackingError: a list or a value is null.
    """

    def __init__(self, name: str, column: pa.ChunkedArray, row_numbers: RowNumbers = ALL_ROWS) -> None:
        chunks = [_read_chunk(name, chunk) for chunk in column.chunks or [pa.array([], column.type)]]
        self._values, begins, lengths = zip(*chunks, strict=True)
        self._begin, self.length = np.concatenate(begins), np.concatenate(lengths)
        self._chunk = np.repeat(np.arange(len(chunks)), [*map(len, begins)])
        self._begin, self.length, self._chunk = (each[row_numbers] for each in (self._begin, self.length, self._chunk))
        if (unreadable := np.flatnonzero(self.length == _UNREADABLE)).size:
            raise PackingError(
                f"column {name!r}: expected a list with a number for every token in every row, but row {unreadable[0]} "
                "is null or has a null, or a weight that is not finite"
            )

    def gather(self, pieces: Pieces) -> Array:
        """Return the values of pieces of rows, concatenated, in the dtype of the column; always a copy.

        Slicing and one np.concatenate are about twice as fast as fancy indexing or `take`.
        """
        return np.concatenate([self._values[0][:0], *self._slices(pieces)])

    def read(self, rows: IntArray) -> list[Array]:
        """Return the values of some rows, as arrays that share the memory of the Arrow column."""
        return self._slices(Pieces(rows, np.zeros_like(rows), self.length[rows]))

    def _slices(self, pieces: Pieces) -> list[Array]:
        begin = self._begin[pieces.document] + pieces.start
        bounds = zip(begin.tolist(), (begin + pieces.length).tolist(), strict=True)
        chunks = self._chunk[pieces.document].tolist()
        return [self._values[chunk][a:b] for chunk, (a, b) in zip(chunks, bounds, strict=True)]


class RepeatedColumn(TokenColumn):
    """A column with one number for each row, such as `loss_weight`, read as if every token of the row had it.

    Args:
        of_rows: numbers [rows]: the number of each row.
        length: int64 [rows]: the number of tokens in each row.
    """

    def __init__(self, of_rows: Array, length: IntArray) -> None:
        self.length, self._values = length, (of_rows,)

    def _slices(self, pieces: Pieces) -> list[Array]:
        repeated = np.repeat(self._values[0][pieces.document], pieces.length)
        return np.split(repeated, offsets_of(pieces.length)[1:-1])


def column_of_values(name: str, values: Array, lengths: IntArray) -> TokenColumn:
    """Return a column of numbers in memory.

    Args:
        name: name of the column.
        values: numbers [sum of the lengths]: the values of all rows, row by row.
        lengths: integers [rows]: the number of values in each row.
    """
    offsets = pa.array(offsets_of(lengths))
    return TokenColumn(name, pa.chunked_array([pa.LargeListArray.from_arrays(offsets, pa.array(values))]))


TokenColumns = dict[str, TokenColumn]
"""Token columns by name, input_ids first. A row has the same number of values in all columns."""


def find_token_columns(table: pa.Table, row_numbers: RowNumbers = ALL_ROWS) -> TokenColumns:
    """Return the columns to pack from a table of documents: input_ids, and all columns with one number for each token.

    attention_mask is checked and dropped, since transformers does not detect packed documents if a mask is passed.

    Args:
        table: a table that `with_typed_empty_lists` returned, with one document per row.
        row_numbers: integers [documents]: indices of the table's rows in the wanted order; a slice for all rows.

    Raises:
        PackingError: the table has no input_ids or is packed already; attention_mask has other values than 1; a row has
            lists of different lengths; or labels or a mask do not have one number for each token.
    """
    check_are_documents(table.column_names)
    mask = [ATTENTION_MASK] if ATTENTION_MASK in table.column_names else []
    columns = columns_in(table, [*token_names(table.schema), *mask], row_numbers)
    check_same_lengths(columns)
    if mask:
        check_no_padding(columns.pop(ATTENTION_MASK))
    return columns


def token_names(schema: pa.Schema) -> list[str]:
    """Return the names of the columns of documents from which token columns are read, without attention_mask."""
    known = (*VALUES_OF_TOKENS, LOSS_WEIGHT)
    found = [field.name for field in schema if is_token_type(field.type) or field.name in known]
    return [INPUT_IDS, *(name for name in found if name not in (INPUT_IDS, ATTENTION_MASK))]


def columns_in(table: pa.Table, names: Collection[str], row_numbers: RowNumbers) -> TokenColumns:
    """Return some columns of a table, which must have lists of numbers; LOSS_WEIGHTS for LOSS_WEIGHT."""
    for name, values in VALUES_OF_TOKENS.items():
        if name in names and not is_token_type(kind := table.schema.field(name).type):
            raise PackingError(f"column {name!r}: expected lists of {values}, one for each token, got {kind}")
    columns = {name: TokenColumn(name, table.column(name), row_numbers) for name in names if name != LOSS_WEIGHT}
    if LOSS_WEIGHT in names:
        of_rows = table.column(LOSS_WEIGHT)
        if LOSS_WEIGHTS in names or not is_number(of_rows.type):
            raise PackingError(
                f"column {LOSS_WEIGHT!r}: expected a number for each document, and no column {LOSS_WEIGHTS!r} beside "
                f"it, got {of_rows.type}; multiply the weights, or remove one of the columns"
            )
        weights = of_rows.to_numpy()[row_numbers]
        is_finite = np.isfinite(weights.astype(np.float64))  # a null is None, or not a number
        if not is_finite.all():
            row = int(is_finite.argmin())
            raise PackingError(f"column {LOSS_WEIGHT!r}: expected a finite number, got {weights[row]} in row {row}")
        columns[LOSS_WEIGHTS] = RepeatedColumn(weights, columns[INPUT_IDS].length)
    return columns


def documents_in(dataset: Any) -> pa.Table:
    """Return the columns of a Dataset that its format shows, as `find_token_columns` takes them."""
    return with_typed_empty_lists(dataset.data.table.select(visible_columns(dataset)))


def token_columns_of(dataset: Any) -> TokenColumns:
    """Return the token columns of the documents of a Dataset, which must have no transform."""
    check_no_transform(dataset)
    return find_token_columns(documents_in(dataset), row_numbers(dataset))


def columns_of(dataset: Any, names: Collection[str]) -> TokenColumns:
    """Return some columns of a Dataset, which must have lists of numbers; LOSS_WEIGHTS for LOSS_WEIGHT."""
    return columns_in(dataset.data.table, names, row_numbers(dataset))


def read_rows(columns: TokenColumns, rows: IntArray) -> list[dict[str, Array]]:
    """Return the values of some rows in each column, as arrays that share the memory of the Arrow columns."""
    return rows_of({name: column.read(rows) for name, column in columns.items()})


def with_typed_empty_lists(table: pa.Table) -> pa.Table:
    """Return a table in which token columns with nothing but empty lists are cast to lists of int32.

    Arrow gives such columns the value type null. If input_ids has another value type, only the columns of
    VALUES_OF_TOKENS are cast. If the table has no rows, these columns are also cast from the type null.
    """
    types = dict(zip(table.column_names, table.schema.types, strict=True))
    untyped = [name for name, kind in types.items() if is_list(kind) and pa.types.is_null(kind.value_type)]
    if INPUT_IDS not in untyped:
        untyped = [name for name in untyped if name in VALUES_OF_TOKENS]
    if not table.num_rows:
        untyped += [name for name in VALUES_OF_TOKENS if pa.types.is_null(types.get(name, pa.int32()))]
    if not untyped:
        return table
    return table.cast(pa.schema(types | dict.fromkeys(untyped, pa.list_(pa.int32()))))


def as_array(name: str, values: Sequence[Any], needed: Collection[str]) -> pa.Array:
    """Return the values of a column, such as lists or tensors, as an Arrow array; nulls if Arrow cannot convert them.

    Raises:
        PackingError: Arrow cannot convert the values of a needed column.
    """
    try:  # without a type, since pyarrow would cut fractions off in silence
        return pa.array([row.tolist() if hasattr(row, "tolist") else row for row in values])
    except (pa.ArrowException, TypeError, OverflowError) as error:
        if name in needed:
            raise PackingError(f"column {name!r}: expected lists of numbers, got the error: {error}") from error
        return pa.nulls(len(values))


def columns_left_out(schema: pa.Schema) -> list[str]:
    """Return names and types of the columns that do not have lists of numbers."""
    packed = (*token_names(schema), ATTENTION_MASK)
    return [f"{field.name!r} ({field.type})" for field in schema if field.name not in packed]


_FEW_VALUES = 16
"""A column has few values if it has at most so many."""


def rows_of_each_value(dataset: Any) -> list[int]:
    """Return a row for each value of the columns with few values, such as classes, those of rare values first. Of
    columns with lists, only labels count."""
    if not shows_table(dataset):
        return []
    table: pa.Table = dataset.with_format("arrow")[:]
    found: list[tuple[int, int]] = []
    for name in table.column_names:
        column, rows = table.column(name).combine_chunks(), np.arange(table.num_rows)
        if is_list(column.type) and name == LABELS:
            column, rows = column.flatten(), pc.list_parent_indices(column).to_numpy()
        if not pa.types.is_nested(column.type) and pc.count_distinct(column).as_py() <= _FEW_VALUES:
            values = column.dictionary_encode().indices.fill_null(-1).to_numpy()
            _, first, counts = np.unique(values, return_index=True, return_counts=True)
            found += zip(counts.tolist(), rows[first].tolist(), strict=True)
    return [row for _, row in sorted(found)]


def visible_columns(dataset: Any) -> list[str]:
    """Return the columns that the format of a dataset shows. `pack` skips hidden columns, since trainers skip them too.

    attention_mask is returned even if the format hides this column, since packing only checks the column for padding.

    Args:
        dataset: a Dataset.

    Returns:
        Column names, in the order of the dataset.

    Raises:
        PackingError: the dataset has lost all columns that mark segments, or its format hides them, so packed rows
            would look like documents.
    """
    form, schema = dataset.format, dataset.data.table.schema
    shown = set(schema.names if form["output_all_columns"] else form["columns"])
    if ATTENTION_MASK in schema.names and is_token_type(schema.field(ATTENTION_MASK).type):
        shown.add(ATTENTION_MASK)
    names = [name for name in schema.names if name in shown]
    refuse_lost_borders(dataset, names, stored=schema.names)
    return names


def check_no_transform(dataset: Any) -> None:
    """Raise PackingError if the dataset has a transform (set_transform).

    The output of a transform may be random, so it must not be stored; and packing must not ignore the transform.
    """
    if dataset.format["type"] == "custom":
        raise PackingError(
            "dataset: expected a dataset without a transform, since the output of a transform may differ at every "
            "read. Pass the dataset to attach or prepare_dataloader, which apply the transform at every read; or pack "
            "one output of the transform with map(strategy, batched=True, "
            "remove_columns=dataset.column_names).with_format(None); or call with_format(None) to pack without the "
            "transform"
        )


def shows_table(dataset: Any) -> bool:
    """Return whether a dataset is a Dataset without a transform, so that its rows are as they are in its table."""
    return isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom"


def row_numbers(dataset: Any) -> RowNumbers:
    """Return each row's index in the Arrow table of a Dataset; all rows if the Dataset has them in table order."""
    indices = indices_of(dataset)
    return ALL_ROWS if indices is None else indices.to_numpy()


def is_list(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is a list, a large list or a fixed-size list."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_token_type(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is a list of integers, floats or booleans."""
    return is_list(kind) and is_number(kind.value_type)


def is_number(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is one of integers, floats or booleans."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def check_same_lengths(columns: Mapping[str, TokenColumn]) -> None:
    """Raise PackingError unless every row has as many values in every column as in input_ids."""
    lengths = columns[INPUT_IDS].length
    for name, column in columns.items():
        if (other := column.length != lengths).any():
            row = int(other.argmax())
            raise PackingError(
                f"column {name!r}: expected as many values as input_ids in every row, but row {row} has "
                f"{column.length[row]} for {lengths[row]} input_ids; remove the column if it does not describe tokens"
            )


def blocks_of_rows(row_tokens: IntArray, tokens: int) -> Iterator[tuple[int, int]]:
    """Yield consecutive ranges of rows with at most `tokens` tokens per range. A row with more is a range by itself.

    Args:
        row_tokens: integers [rows]: the number of tokens in each row.
        tokens: the most tokens in a range of several rows, at least 1.

    Yields:
        Pairs (start, stop) of row indices.
    """
    end = np.cumsum(row_tokens, dtype=np.int64)
    first = 0
    while first < len(end):
        before = int(end[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(end, before + tokens, side="right")))
        yield first, last
        first = last


def check_no_padding(mask: TokenColumn) -> None:
    """Raise PackingError if an attention_mask has a value other than 1."""
    for first, end in blocks_of_rows(mask.length, TOKENS_AT_ONCE):
        rows = np.arange(first, end)
        values = np.concatenate(mask.read(rows))
        for token in np.flatnonzero(values != 1)[:1]:
            row = np.repeat(rows, mask.length[rows])[token]
            raise PackingError(
                f"column 'attention_mask': expected documents without padding, got a {values[token]} in row {row}; "
                "tokenize with padding=False, and pack documents once"
            )


def _read_chunk(name: str, chunk: pa.Array) -> tuple[Array, IntArray, IntArray]:
    """Return the values of a chunk, with zeros for nulls; and where each row begins in them, and its length."""
    if pa.types.is_fixed_size_list(chunk.type):
        chunk = chunk.cast(pa.list_(chunk.type.value_type))
    offsets, values = chunk.offsets.to_numpy().astype(np.int64), chunk.values
    length = np.diff(offsets)
    if values.null_count and not is_list(values.type):
        nulls_before = offsets_of(values.is_null().to_numpy(zero_copy_only=False))
        length[np.diff(nulls_before[offsets]) > 0] = _UNREADABLE
        values = values.fill_null(False if pa.types.is_boolean(values.type) else 0)
    if chunk.null_count:
        length[chunk.is_null().to_numpy(zero_copy_only=False)] = _UNREADABLE
    if is_list(values.type):
        sizes, values = pc.list_value_length(values), values.flatten()
        if values.null_count or sizes.null_count or pc.any(pc.not_equal(sizes, 2)).as_py():
            raise PackingError(f"column {name!r}: expected pairs of integers in lists of lists, got other lists")
    numbers = values.to_numpy(zero_copy_only=False)
    if name == LOSS_WEIGHTS:
        length[np.diff(offsets_of(~np.isfinite(numbers))[offsets]) > 0] = _UNREADABLE
    return numbers if is_token_type(chunk.type) else numbers.reshape(-1, 2), offsets[:-1], length
