"""Which columns of a table are packed: input_ids, and everything else that has one number for each of its tokens."""

from collections.abc import Collection

import numpy as np
import pyarrow as pa

from hf_packing.arrow.loss_masks import LOSS_MASKS
from hf_packing.arrow.segments_of_rows import READERS
from hf_packing.arrow.token_column import TOKENS_AT_ONCE, TokenColumn, blocks_of_packs, is_list, is_token_type
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray

PACKED_ONLY = tuple(READERS)
"""Columns that tell where the segments of a row are."""
INPUT_IDS, LABELS, ATTENTION_MASK = "input_ids", "labels", "attention_mask"
TOKEN_TYPE_IDS = "token_type_ids"


ABOUT_TOKENS = {LABELS: "integers", ATTENTION_MASK: "0 and 1"} | dict.fromkeys(LOSS_MASKS, "0 and 1")
"""Columns that decide what is trained on, and what their lists hold: rows packed without them would be others."""

TokenColumns = dict[str, TokenColumn]
"""By name, input_ids first; all have the same list lengths."""


def find_token_columns(table: pa.Table, row_numbers: IntArray | None = None) -> TokenColumns:
    """The columns of a table of documents that are packed: input_ids, and those like it.

    An attention_mask is checked and dropped: given to a model, it would switch the detection of packed documents off.

    Args:
        table: rows are documents; as of `with_typed_empty_lists`.
        row_numbers: integers [documents]: the table's rows in the order wanted; None for all.

    Raises:
        PackingError: no input_ids, an already packed table, an attention_mask with zeros, columns of other lengths,
            labels or a mask without a number for each token.
    """
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
    for name, values in ABOUT_TOKENS.items():
        if name in names and not is_token_type(kind := table.schema.field(name).type):
            raise PackingError(
                f"column {name!r}: expected lists of {values}, one for each token, got {kind}; remove it if it is not "
                "about tokens"
            )
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
    """Where no document has a token, Arrow cannot know that the columns about tokens are numbers."""
    lists = [field.name for field in table.schema if is_list(field.type) and pa.types.is_null(field.type.value_type)]
    if INPUT_IDS not in lists:
        lists = [name for name in lists if name in ABOUT_TOKENS]
    untyped = [field.name for field in table.schema if pa.types.is_null(field.type) and not table.num_rows]
    for name in [*lists, *(name for name in untyped if name == INPUT_IDS or name in ABOUT_TOKENS)]:
        place = table.column_names.index(name)
        table = table.set_column(place, name, table.column(name).cast(pa.list_(pa.int32())))
    return table


def left_out(schema: pa.Schema, removed: Collection[str] = ()) -> list[str]:
    """Columns without one number for each token, with their types, but for those that are to be removed anyway."""
    return [
        f"{field.name!r} ({field.type})"
        for field in schema
        if field.name not in (INPUT_IDS, *removed) and not is_token_type(field.type)
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
    for first, end in blocks_of_packs(mask.length, TOKENS_AT_ONCE):
        rows = np.arange(first, end)
        values = mask.gather(rows, np.zeros_like(rows), mask.length[rows])
        if (other := values != 1).any():
            token = int(other.argmax())
            row = int(np.repeat(rows, mask.length[rows])[token])
            hint = "several documents in a row are packed already" if values[token] else "tokenise with padding=False"
            raise PackingError(
                f"column 'attention_mask': expected documents without padding, row {row} has a {values[token]}; {hint}"
            )
