"""Check a stream of documents, and find its token columns."""

from collections.abc import Sequence
from typing import NamedTuple

import datasets
import pyarrow as pa

from hf_packing.columns import INPUT_IDS, LABELS
from hf_packing.errors import PackingError
from hf_packing.rows.packing_trace import refuse_lost_borders
from hf_packing.rows.token_columns import columns_left_out, find_token_columns
from hf_packing.streams import upstream
from hf_packing.streams.wrapped import checked


class Source(NamedTuple):
    """A stream of documents."""

    examples: upstream.Examples
    """The object that reads the documents."""
    schema: pa.Schema
    """Names and types of the token columns, without attention_mask."""
    names: list[str]
    """Names of all columns."""
    left_out: list[str]
    """Names and types of the columns that are not token columns."""


def open_source(name: str, stream: datasets.IterableDataset, unread: Sequence[str] = ()) -> Source:
    """Return the documents of a stream.

    Args:
        name: the name of the stream in error messages.
        stream: the stream.
        unread: names of columns that are not read.

    Raises:
        PackingError: the stream yields no document, has no input_ids, is packed already, or has a shuffle buffer.
    """
    known = upstream.with_known_features(name, stream)
    if not known.features:
        raise PackingError(f"{name}: expected a stream of documents, got a stream that yields no document")
    examples = checked(stream, known.features)
    if upstream.has_shuffle_buffer(examples):
        raise PackingError(
            f"{name}: expected a stream without a shuffle buffer, since a saved state does not hold the documents in "
            "the buffer, so a resumed run would lose them. Leave shuffle(buffer_size=...) out: packing puts the rows "
            "of every window in random order, and every epoch after the first reads the files in another order"
        )
    schema = known.features.arrow_schema.remove_metadata()
    refuse_lost_borders(stream, schema.names)
    columns = find_token_columns(schema.empty_table())
    read = [column for column in columns if column not in unread]
    return Source(examples, _types_to_read(schema, read), schema.names, columns_left_out(schema))


def _types_to_read(schema: pa.Schema, names: list[str]) -> pa.Schema:
    """Return some columns of a schema, with lists of any length, and with tokens and labels of 32 bits."""

    def to_read(name: str) -> pa.DataType:
        kind = schema.field(name).type
        value = pa.int32() if name in (INPUT_IDS, LABELS) else kind.value_type
        return pa.large_list(value) if pa.types.is_large_list(kind) else pa.list_(value)

    return pa.schema((name, to_read(name)) for name in names)
