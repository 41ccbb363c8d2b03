"""Pack one batch of rows, in whatever form `datasets.map` hands it over, and give it back in the same form."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from hf_packing.arrow.columns import (
    ABOUT_TOKENS,
    INPUT_IDS,
    LABELS,
    find_token_columns,
    left_out,
    with_typed_empty_lists,
)
from hf_packing.arrow.loss_masks import masks_among
from hf_packing.arrow.map_call import current_map_call
from hf_packing.arrow.packed_rows import BUCKET, check_bucket_is_free, pack_rows
from hf_packing.arrow.token_column import TokenColumn, is_token_type
from hf_packing.arrow.visible import check_made_columns_are_shown, visible_columns
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray, check_lengths
from hf_packing.planning.plan import PackingPlan


def pack_batch(batch: Any, plan_lengths: Callable[[IntArray], PackingPlan], *, bucket: bool = False) -> Any:
    """The batch packed by itself.

    Args:
        batch: pyarrow Table or data frame, or a mapping of columns: lists of lists, or lists or arrays of arrays.
        plan_lengths: from checked lengths to a plan.
        bucket: whether rows carry their capacity.

    Returns:
        a Table to `Dataset.map`, and for a Table or a data frame; a dict of lists of lists for lists; a dict of lists
        of arrays for everything else.

    Raises:
        PackingError: as `find_token_columns`; a batch that is no mapping, a single row, or a `map` that would keep
            columns of documents beside packed rows.
    """
    call = current_map_call()
    if (call is not None and not call.batched) or is_single_row(batch):
        raise PackingError(
            "batch: expected rows of lists, got a single row; call map with batched=True, as in "
            "map(strategy, batched=True, batch_size=10_000, remove_columns=dataset.column_names)"
        )
    table = table_of(batch)
    if call is not None and call.dataset is not None:
        table = as_formatted(table, call.dataset)
        made = [*([LABELS] if masks_among(table.column_names) else []), *([BUCKET] if bucket else [])]
        check_made_columns_are_shown(call.dataset, made)
    table = with_typed_empty_lists(table)
    packed = pack_table(table, plan_lengths, bucket)
    if call is not None:
        call.check_columns(table.column_names, packed.column_names)
        if without := left_out(table.schema, call.remove_columns):
            warnings.warn(
                f"map leaves out columns without one number for each token: {', '.join(without)}", stacklevel=2
            )
    if not isinstance(batch, Mapping) or hasattr(batch, "pa_table") or (call is not None and call.dataset is not None):
        return packed
    first = next(iter(batch[INPUT_IDS]), None)
    if first is None or isinstance(first, list):
        return packed.to_pydict()
    return {name: rows_of(packed.column(name), name) for name in packed.column_names}


def is_single_row(batch: Any) -> bool:
    """Whether it is what `map` hands out where it is not batched. A Table does not tell."""
    if not isinstance(batch, Mapping) or type(batch).__name__ == "LazyBatch":
        return False
    if type(batch).__name__ == "LazyRow":
        return True
    tokens = batch.get(INPUT_IDS, [])
    if hasattr(tokens, "ndim") and getattr(getattr(tokens, "dtype", None), "kind", "i") in "iufb":
        return bool(tokens.ndim < 2)
    first = next(iter(tokens), None) if hasattr(tokens, "__iter__") else tokens
    return isinstance(first, (int, np.integer)) or getattr(first, "ndim", 1) == 0


def as_formatted(table: pa.Table, dataset: Any) -> pa.Table:
    """What the format of the dataset shows of a batch; `map` hands out all columns."""
    if dataset.format["type"] != "custom":
        visible = visible_columns(dataset)
        return table.select([name for name in table.column_names if name in visible])
    warnings.warn(
        "map keeps the transform of a dataset, for packed rows as well: call .with_format(None) on what it returns",
        stacklevel=2,
    )
    return table


def pack_table(table: pa.Table, plan_lengths: Callable[[IntArray], PackingPlan], bucket: bool) -> pa.Table:
    if bucket:
        check_bucket_is_free(table.column_names)
    columns = find_token_columns(table)
    plan = plan_lengths(check_lengths(columns[INPUT_IDS].length))
    tokens, packed = (int(lengths.sum(dtype=np.int64)) for lengths in (plan.document_length, plan.segment_length))
    if packed < tokens:
        warnings.warn(f"drops {tokens - packed:,} of the {tokens:,} tokens of a batch, as overflow asks", stacklevel=2)
    if masks := masks_among(columns):
        warnings.warn(f"applies {' and '.join(masks)} to labels: tokens with a 0 are not trained on", stacklevel=2)
    return pack_rows(columns, plan, bucket=bucket).table


def table_of(batch: Any) -> pa.Table:
    """Columns as an Arrow table. One that Arrow cannot hold, such as a list of images, becomes a column of nulls."""
    if isinstance(batch, pa.Table):
        return batch
    if isinstance(batch, Mapping) and is_untouched(batch):
        return batch.pa_table  # type: ignore[attr-defined]
    if hasattr(batch, "__arrow_c_stream__") and hasattr(batch, "columns"):
        return pa.table(batch)
    if not isinstance(batch, Mapping):
        raise PackingError(
            f"batch: expected a mapping of columns or a pyarrow Table, got {type(batch).__name__}; with map, leave "
            "input_columns out"
        )
    return pa.table({name: array_of(name, batch[name]) for name in batch})


def is_untouched(batch: Any) -> bool:
    """Whether the batch is the table that `map` reads it from: no column of it was read, set or deleted."""
    table = getattr(batch, "pa_table", None)
    return isinstance(table, pa.Table) and set(table.column_names) == batch.keys_to_format == set(batch)


def array_of(name: str, values: Any) -> pa.Array:
    try:
        return pa.array([row if isinstance(row, (list, str, bytes, dict)) else as_numpy(row) for row in values])
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, TypeError, OverflowError) as error:
        if values_expected := {INPUT_IDS: "integers", **ABOUT_TOKENS}.get(name):
            raise PackingError(f"column {name!r}: expected lists of {values_expected}: {error}") from error
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
