"""Pack one batch of rows, in any form that `datasets.map` or a user's own function may pass."""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from hf_packing.columns import INPUT_IDS
from hf_packing.errors import PackingError
from hf_packing.rows.changes import changes_of, describe_changes
from hf_packing.rows.packed_rows import arrays_of
from hf_packing.rows.packing import Packing
from hf_packing.rows.token_columns import VALUES_OF_TOKENS, find_token_columns, with_typed_empty_lists
from hf_packing.strategies.base import Strategy


def pack_batch(batch: Any, strategy: Strategy) -> Any:
    """Pack the documents of one batch and return the packed rows.

    Args:
        batch: a pyarrow Table, a data frame, or a mapping from names to columns. In a mapping, a column is a list of
            lists, a list of arrays, or an array of arrays. All columns are packed that have one number for each token,
            also those that the format of a dataset hides, since `map` passes them, too.
        strategy: the strategy.

    Returns:
        Packed rows, one for each pack. If the batch comes from `Dataset.map`, or is a Table or a data frame, they are a
        Table. If the batch is any other mapping, they are a dict from names to columns: lists of lists if `input_ids`
        was a list of lists, otherwise lists of arrays.

    Raises:
        PackingError: `find_token_columns` refuses the columns, or the batch is a single row or has an unknown type.
    """
    table = with_typed_empty_lists(_as_table(batch))
    packing = Packing(strategy)
    packing.check_names(table.column_names)
    columns = find_token_columns(table)
    plan, splits = packing.plan(columns)
    packed = packing.rows(columns, plan, np.arange(plan.num_packs)).table
    facts = changes_of(columns, plan, splits, "overflow")
    for change in describe_changes(facts | {"empty_documents": 0}, of=" of a batch"):
        warnings.warn(f"packing {change}", stacklevel=2)
    if not isinstance(batch, Mapping) or hasattr(batch, "pa_table"):
        return packed
    first = next(iter(batch[INPUT_IDS]), None)
    return packed.to_pydict() if first is None or isinstance(first, list) else arrays_of(packed)


def _is_single_row(batch: Mapping[str, Any]) -> bool:
    """Return whether a mapping has a single row's values, such as `map` passes without batched=True."""
    if (kind := type(batch).__name__) in ("LazyBatch", "LazyRow"):
        return kind == "LazyRow"
    tokens = batch.get(INPUT_IDS, [])
    first = next(iter(tokens), None) if hasattr(tokens, "__len__") else tokens
    return isinstance(first, int) or getattr(first, "ndim", 1) == 0


def _as_table(batch: Any) -> pa.Table:
    """Return a batch as an Arrow table. A column that Arrow cannot convert, such as images, becomes nulls."""
    if hasattr(batch, "__arrow_c_stream__"):  # a Table or a data frame
        return pa.table(batch)
    if not isinstance(batch, Mapping):
        raise PackingError(
            f"batch: expected a mapping of columns or a pyarrow Table, got {type(batch).__name__}; if you "
            "pass the strategy to Dataset.map, do not set input_columns"
        )
    if _is_single_row(batch):
        raise PackingError(
            "batch: expected several rows, got a single row; call map with batched=True, as in "
            "map(strategy, batched=True, batch_size=10_000, remove_columns=dataset.column_names)"
        )
    if _is_untouched(batch):
        return batch.pa_table  # type: ignore[attr-defined]
    return pa.table({name: _as_array(name, batch[name]) for name in batch})


def _is_untouched(batch: Any) -> bool:
    """Return whether a batch from `map` is unchanged since `map` made it: no column was read, set or deleted."""
    table = getattr(batch, "pa_table", None)
    return isinstance(table, pa.Table) and set(table.column_names) == batch.keys_to_format == set(batch)


def _as_array(name: str, values: Any) -> pa.Array:
    try:
        return pa.array([row if isinstance(row, (list, str, bytes, dict)) else _as_numpy(row) for row in values])
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, TypeError, OverflowError) as error:
        if expected := VALUES_OF_TOKENS.get(name):
            raise PackingError(f"column {name!r}: expected lists of {expected}, got the error: {error}") from error
        return pa.nulls(len(values))


def _as_numpy(row: Any) -> Any:
    """Return one row's value as an array. An empty value becomes a list, since NumPy would make it float64."""
    if not hasattr(row, "__len__"):
        return row
    return np.asarray(row) if len(row) else []
