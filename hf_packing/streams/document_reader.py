"""Read the documents of a stream in blocks of about as many tokens as wanted, and know the place in the stream."""

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hf_packing.columns import ATTENTION_MASK, INPUT_IDS
from hf_packing.errors import PackingError
from hf_packing.rows.token_columns import TokenColumn, check_no_padding, check_same_lengths, is_token_type
from hf_packing.streams import upstream

_EXAMPLES_AT_ONCE = 64
"""Examples that come one by one are made into tables of so many, so that a resumed stream reads few of them twice."""


class Place(NamedTuple):
    """A place between two documents of a stream."""

    source: dict[str, Any] | None
    """The state of the stream at this place, or shortly before it; None for the start."""
    passed: int
    """The number of documents between that state and this place."""


class DocumentReader:
    """Reads the token columns of a stream's documents, and knows the place at which reading has to go on.

    Args:
        examples: the object that reads the stream, with its state initialized.
        schema: names and types of the columns to read; lists of numbers.
        place: the place to start from.

    Attributes:
        ended: True if all documents have been read.
    """

    def __init__(self, examples: upstream.Examples, schema: pa.Schema, place: Place) -> None:
        if place.source is not None:
            examples.load_state_dict(place.source)
        self.ended = False
        self._examples, self._schema = examples, schema
        self._rest = schema.empty_table()
        self._state: dict[str, Any] = {}  # before the table whose last rows are in _rest
        self._used, self._to_pass = 0, place.passed
        self._tables = tables_of(examples, schema)

    @property
    def place(self) -> Place:
        """The place after the documents that were read."""
        if self._rest.num_rows:
            return Place(self._state, self._used)
        return Place(self._examples.state_dict(), self._to_pass)

    def read(self, tokens: int, documents: int, most_tokens: int) -> pa.Table:
        """Return the next documents: until they have so many tokens and are so many; all that are left if they are few.

        Args:
            tokens: the tokens to read at least.
            documents: the documents to read at least, unless they have `most_tokens` tokens.
            most_tokens: reading ends when the documents have so many tokens.

        Raises:
            PackingError: a column is missing, or an attention_mask has padding.
        """
        read = [self._schema.empty_table()]
        while (tokens > 0 or documents > 0) and most_tokens > 0 and (table := self.at_hand()).num_rows:
            total = np.cumsum(lengths_of(table), dtype=np.int64)
            enough = max(int(np.searchsorted(total, tokens)) + 1 if tokens > 0 else 0, documents)
            wanted = min(enough, int(np.searchsorted(total, most_tokens)) + 1, len(total))
            tokens, most_tokens = tokens - int(total[wanted - 1]), most_tokens - int(total[wanted - 1])
            documents -= wanted
            read.append(self.take(wanted))
        return pa.concat_tables(read)

    def at_hand(self) -> pa.Table:
        """Return the next documents, as many as were read together; none if the stream has ended."""
        self._fill()
        return self._rest

    def take(self, documents: int) -> pa.Table:
        """Return so many of the documents at hand, and go on after them."""
        taken, self._rest = self._rest.slice(0, documents), self._rest.slice(documents)
        self._used += documents
        return taken

    def _fill(self) -> None:
        """Read tables until a document is at hand, or the stream has ended."""
        while not self._rest.num_rows and not self.ended:
            self._state, self._used = self._examples.state_dict(), self._to_pass
            table = next(self._tables, None)
            if table is None:
                self.ended = True
                break
            passed = min(self._to_pass, table.num_rows)
            self._to_pass -= passed
            self._rest = token_columns(table.slice(passed), self._schema)


def tables_of(examples: upstream.Examples, schema: pa.Schema) -> Iterator[pa.Table]:
    """Return an iterator over the documents of a stream as tables; of a few documents if they come one by one."""
    tables = upstream.tables(examples)
    return _in_tables(upstream.rows(examples), schema) if tables is None else tables


def lengths_of(documents: pa.Table) -> npt.NDArray[np.int64]:
    """Return the number of tokens in each document, int64 [documents]."""
    lengths: npt.NDArray[Any] = pc.fill_null(pc.list_value_length(documents.column(INPUT_IDS)), 0).to_numpy()
    return lengths.astype(np.int64)


def select_columns(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the columns of a schema, of any types, and an attention_mask if there is one."""
    if missing := [name for name in schema.names if name not in table.column_names]:
        raise PackingError(
            f"column {missing[0]!r}: expected this column in all documents of the stream, got documents with the "
            f"columns {', '.join(table.column_names)}"
        )
    return table.select([*schema.names, *([ATTENTION_MASK] if ATTENTION_MASK in table.column_names else [])])


def token_columns(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the columns of a schema. An attention_mask is checked for padding; all other columns are left out."""
    table = select_columns(table, schema)
    if ATTENTION_MASK in table.column_names and is_token_type(table.schema.field(ATTENTION_MASK).type):
        columns = {name: TokenColumn(name, table.column(name)) for name in (INPUT_IDS, ATTENTION_MASK)}
        check_same_lengths(columns)
        check_no_padding(columns[ATTENTION_MASK])
    table = table.select(schema.names)
    if table.schema.equals(schema):
        return table
    try:
        return table.cast(schema)
    except pa.ArrowInvalid as error:
        raise PackingError(
            f"dataset: expected the columns {', '.join(f'{field.name} ({field.type})' for field in schema)}, got "
            f"values of other types: {error}"
        ) from error


def _in_tables(rows: Iterator[dict[str, Any]], schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield tables of a few rows each, for streams that yield rows as dicts."""
    while block := list(islice(rows, _EXAMPLES_AT_ONCE)):
        names = [name for name in (*schema.names, ATTENTION_MASK) if any(name in row for row in block)]
        arrays = {}
        for name in names:
            kind = schema.field(name).type if name in schema.names else None
            values = [_as_list(row.get(name)) for row in block]
            try:
                array = pa.array(values)  # with the type, pyarrow would cut fractions off in silence
                arrays[name] = array if kind is None else array.cast(kind)
            except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError) as error:
                expected = "lists of numbers" if kind is None else str(kind)
                raise PackingError(f"column {name!r}: expected {expected}, got the error: {error}") from error
        yield pa.table(arrays)


def _as_list(value: Any) -> Any:
    """Return a row's value as a list or an array; a value of any other kind, such as a tensor, as an array."""
    return value if value is None or isinstance(value, (list, np.ndarray)) else np.asarray(value)
