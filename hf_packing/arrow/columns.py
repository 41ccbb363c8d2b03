"""Which columns of a table are packed: input_ids, and everything else that has one number for each of its tokens."""

import numpy as np
import pyarrow as pa

from hf_packing.arrow.token_column import TokenColumn, is_list, is_token_type
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray

PACKED_ONLY = ("seq_lengths", "position_ids")
INPUT_IDS, LABELS, ATTENTION_MASK = "input_ids", "labels", "attention_mask"
TOKEN_TYPE_IDS = "token_type_ids"


TokenColumns = dict[str, TokenColumn]
"""By name, input_ids first; all have the same list lengths."""


def find_token_columns(table: pa.Table, row_numbers: IntArray | None = None) -> TokenColumns:
    """The columns of a table of documents that are packed: input_ids, and those like it.

    An attention_mask is checked and dropped: given to a model, it would switch the detection of packed documents off.

    Args:
        table: rows are documents.
        row_numbers: integers [documents]: the table's rows in the order wanted; None for all.

    Raises:
        PackingError: no input_ids, an already packed table, an attention_mask with zeros, columns of other lengths.
    """
    table = with_typed_empty_lists(table)
    names = table.column_names
    if packed := [name for name in PACKED_ONLY if name in names]:
        raise PackingError(
            f"column {packed[0]!r}: expected documents that are not packed yet; this dataset seems to be packed "
            "already (remove the column if it is not)"
        )
    if INPUT_IDS not in names:
        raise PackingError(f"column 'input_ids': expected among the columns, got {', '.join(names) or 'none'}")
    if not is_token_type(table.schema.field(INPUT_IDS).type):
        raise PackingError(f"column 'input_ids': expected lists of integers, got {table.schema.field(INPUT_IDS).type}")
    wanted = [
        INPUT_IDS,
        *(field.name for field in table.schema if is_token_type(field.type) and field.name != INPUT_IDS),
    ]
    columns = {name: TokenColumn(name, table.column(name), row_numbers) for name in wanted}
    check_same_lengths(columns)
    if (mask := columns.pop(ATTENTION_MASK, None)) is not None:
        check_no_padding(mask)
    return columns


def with_typed_empty_lists(table: pa.Table) -> pa.Table:
    """Where no document has a token, Arrow cannot know that input_ids are integers."""
    if INPUT_IDS not in table.column_names:
        return table
    kind = table.schema.field(INPUT_IDS).type
    if (is_list(kind) and pa.types.is_null(kind.value_type)) or (pa.types.is_null(kind) and not table.num_rows):
        place = table.column_names.index(INPUT_IDS)
        return table.set_column(place, INPUT_IDS, table.column(INPUT_IDS).cast(pa.list_(pa.int32())))
    return table


def left_out(schema: pa.Schema) -> list[str]:
    """The columns that have no number for each token, with their types."""
    return [
        f"{field.name!r} ({field.type})"
        for field in schema
        if field.name != INPUT_IDS and not is_token_type(field.type)
    ]


def check_same_lengths(columns: TokenColumns) -> None:
    lengths = columns[INPUT_IDS].length
    for name, column in columns.items():
        if (other := column.length != lengths).any():
            row = int(other.argmax())
            raise PackingError(
                f"column {name!r}: expected as many values as input_ids in every row, "
                f"row {row} has {column.length[row]} for {lengths[row]} input_ids (remove it if it is not about tokens)"
            )


def check_no_padding(mask: TokenColumn) -> None:
    rows = np.arange(len(mask.length))
    nonempty = rows[mask.length > 0]
    values = mask.gather(nonempty, np.zeros_like(nonempty), mask.length[nonempty])
    if (values == 0).any():
        token = int((values == 0).argmax())
        row = int(nonempty[np.searchsorted(np.cumsum(mask.length[nonempty]), token, side="right")])
        raise PackingError(
            f"column 'attention_mask': expected documents without padding, row {row} has a 0; "
            "tokenise with padding=False"
        )
