"""Pack one batch of rows, in whatever form `datasets.map` hands it over, and give it back in the same form."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from hf_packing.arrow.columns import INPUT_IDS, find_token_columns
from hf_packing.arrow.packed_rows import BUCKET, check_bucket_is_free, pack_rows
from hf_packing.arrow.token_column import TokenColumn, is_token_type
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray, check_lengths
from hf_packing.planning.plan import PackingPlan


def pack_batch(batch: Any, plan_lengths: Callable[[IntArray], PackingPlan], *, bucket: bool = False) -> Any:
    """The batch packed by itself.

    Args:
        batch: pyarrow Table, or a mapping of columns: lists of lists, or lists or arrays of arrays.
        plan_lengths: from checked lengths to a plan.
        bucket: whether rows carry their capacity.

    Returns:
        a Table for a Table, and for the lazy batch of `Dataset.map`, which holds one; a dict of lists of lists for
        lists; a dict of lists of arrays for everything else.

    Raises:
        PackingError: as `find_token_columns`; a batch that is no mapping, or a single row.
    """
    if isinstance(batch, pa.Table):
        return pack_table(batch, plan_lengths, bucket)
    if not isinstance(batch, Mapping):
        raise PackingError(f"batch: expected a mapping of columns or a pyarrow Table, got {type(batch).__name__}")
    if isinstance(table := getattr(batch, "pa_table", None), pa.Table):
        return pack_table(table, plan_lengths, bucket)
    first = next(iter(batch.get(INPUT_IDS, [])), None)
    if isinstance(first, (int, np.integer)) or getattr(first, "ndim", 1) == 0:
        raise PackingError("batch: expected rows of lists, got a single row; call map with batched=True")
    packed = pack_table(table_of(batch), plan_lengths, bucket)
    if first is None or isinstance(first, list):
        return packed.to_pydict()
    return {name: rows_of(packed.column(name), name) for name in packed.column_names}


def pack_table(table: pa.Table, plan_lengths: Callable[[IntArray], PackingPlan], bucket: bool) -> pa.Table:
    if bucket:
        check_bucket_is_free(table.column_names)
    columns = find_token_columns(table)
    plan = plan_lengths(check_lengths(columns[INPUT_IDS].length))
    tokens, packed = (int(lengths.sum(dtype=np.int64)) for lengths in (plan.document_length, plan.segment_length))
    if packed < tokens:
        warnings.warn(f"drops {tokens - packed:,} of the {tokens:,} tokens of a batch, as overflow asks", stacklevel=2)
    return pack_rows(columns, plan, bucket=bucket).table


def table_of(batch: Mapping[str, Any]) -> pa.Table:
    """Columns as an Arrow table. One that Arrow cannot hold, such as a list of images, becomes a column of nulls."""
    return pa.table({name: array_of(name, batch[name]) for name in batch})


def array_of(name: str, values: Any) -> pa.Array:
    try:
        return pa.array([row if isinstance(row, (list, str, bytes, dict)) else as_numpy(row) for row in values])
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, TypeError, OverflowError) as error:
        if name == INPUT_IDS:
            raise PackingError(f"column 'input_ids': expected lists of integers: {error}") from error
        return pa.nulls(len(values))


def as_numpy(row: Any) -> Any:
    """A row that Arrow takes. An empty one goes without its type: NumPy makes it float64, which the column is not."""
    if not hasattr(row, "__len__"):
        return row
    return np.asarray(row) if len(row) else []


def rows_of(column: pa.ChunkedArray, name: str) -> Any:
    if name == BUCKET and not is_token_type(column.type):
        return column.to_numpy()
    tokens = TokenColumn(name, column)
    values = tokens.gather(np.arange(len(tokens.length)), np.zeros_like(tokens.length), tokens.length)
    return np.split(values, np.cumsum(tokens.length)[:-1]) if len(tokens.length) else []
