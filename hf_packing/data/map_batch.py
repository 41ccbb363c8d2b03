"""Pack one batch of rows, in whatever form `datasets.map` or a user's own function passes it.

`map` passes only rows to its function. Its other arguments, such as `remove_columns`, are read from its stack frame.
"""

import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import pyarrow as pa

from hf_packing.columns import BUCKET, INPUT_IDS, LABELS, LOSS_MASKS
from hf_packing.data.packed_rows import check_bucket_is_free, pack_rows
from hf_packing.data.token_columns import (
    TRAINING_COLUMNS,
    TokenColumn,
    columns_left_out,
    find_token_columns,
    is_token_type,
    visible_columns,
    with_typed_empty_lists,
)
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray, check_lengths
from hf_packing.planning.plan import PackingPlan


def pack_batch(batch: Any, plan_lengths: Callable[[IntArray], PackingPlan], *, bucket: bool = False) -> Any:
    """Pack the documents of one batch.

    Args:
        batch: a pyarrow Table, a data frame, or a mapping of columns: lists of lists, or lists or arrays of arrays.
        plan_lengths: returns the plan for checked lengths.
        bucket: whether rows get a column with the capacity of their pack.

    Returns:
        One row for each pack: a Table for `Dataset.map`, for a Table and for a data frame; a dict of lists of lists
        for lists; a dict of lists of arrays for anything else.

    Raises:
        PackingError: as `find_token_columns`; a batch that is not a mapping, a single row, or a `map` that would keep
            columns of the documents beside packed rows.
    """
    call = _current_map_call()
    if (call is not None and not call.batched) or _is_single_row(batch):
        raise PackingError(
            "batch: expected rows of lists, got a single row; call map with batched=True, as in "
            "map(strategy, batched=True, batch_size=10_000, remove_columns=dataset.column_names)"
        )
    table = _as_table(batch)
    mapped = None if call is None else call.dataset
    if mapped is not None:
        table = _select_visible(table, mapped)
        _check_made_columns_are_visible(mapped, table.column_names, bucket)
    table = with_typed_empty_lists(table)
    packed = _pack_table(table, plan_lengths, bucket)
    if call is not None:
        call.check_columns(table.column_names, packed.column_names)
        if left_out := columns_left_out(table.schema, call.remove_columns):
            warnings.warn(
                f"map leaves out columns without one number for each token: {', '.join(left_out)}", stacklevel=2
            )
    if mapped is not None or not isinstance(batch, Mapping) or hasattr(batch, "pa_table"):
        return packed
    first = next(iter(batch[INPUT_IDS]), None)
    if first is None or isinstance(first, list):
        return packed.to_pydict()
    return {name: _rows_of_arrays(packed.column(name), name) for name in packed.column_names}


@dataclass(frozen=True)
class _MapCall:
    """The arguments of the `map` that calls a strategy."""

    batched: bool
    remove_columns: tuple[str, ...] = ()
    dataset: Any = None
    """The Dataset that is mapped; None for an IterableDataset."""
    makes_tables: bool = False
    """Whether an IterableDataset keeps the returned table as it is; otherwise it adds the new columns to the old."""

    def check_columns(self, given: list[str], packed: list[str]) -> None:
        """Raise if IterableDataset.map would remove packed columns, or keep columns of documents beside them.

        Args:
            given: columns of the batch.
            packed: columns of its packed rows.
        """
        if self.dataset is not None or not self.batched:
            return
        if self.makes_tables:
            if lost := [name for name in packed if name in self.remove_columns]:
                raise PackingError(
                    f"remove_columns: expected none of the packed rows' columns, got {lost}; in formats such as arrow, "
                    "IterableDataset.map would remove them after packing: leave remove_columns out"
                )
        elif kept := [name for name in given if name not in packed and name not in self.remove_columns]:
            raise PackingError(
                f"remove_columns: expected {kept} among them, since IterableDataset.map would keep these columns of "
                f"documents beside packed rows; call map(strategy, batched=True, remove_columns={kept})"
            )


def _current_map_call() -> _MapCall | None:
    """Find the `map` call on the stack that passed the batch; return None if anything else calls the strategy.

    If a formatted dataset calls the strategy as its transform for one row, that counts as a map without batched=True.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _package_of(frame) == "hf_packing":
        frame = frame.f_back
    while frame is not None and _package_of(frame) == "datasets":
        name, known = frame.f_code.co_name, frame.f_locals
        mapped: Any = known.get("self")
        if name == "_map_single" and known.keys() >= {"batched", "remove_columns", "shard"}:
            return _MapCall(known["batched"], tuple(known["remove_columns"] or ()), known["shard"])
        if type(mapped).__name__ == "MappedExamplesIterable":
            tables = mapped.formatting is not None and mapped.formatting.is_table
            return _MapCall(mapped.batched, tuple(mapped.remove_columns or ()), makes_tables=tables)
        if name == "format_row":
            return _MapCall(batched=False)
        frame = frame.f_back
    return None


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).split(".")[0]


def _is_single_row(batch: Any) -> bool:
    """Return whether this is a single row, as `map` passes without batched=True. A Table does not show it."""
    if not isinstance(batch, Mapping) or type(batch).__name__ == "LazyBatch":
        return False
    if type(batch).__name__ == "LazyRow":
        return True
    tokens = batch.get(INPUT_IDS, [])
    if hasattr(tokens, "ndim") and getattr(getattr(tokens, "dtype", None), "kind", "i") in "iufb":
        return bool(tokens.ndim < 2)
    first = next(iter(tokens), None) if hasattr(tokens, "__iter__") else tokens
    return isinstance(first, (int, np.integer)) or getattr(first, "ndim", 1) == 0


def _as_table(batch: Any) -> pa.Table:
    """Convert a batch to an Arrow table. A column that Arrow cannot hold, such as images, becomes nulls."""
    if isinstance(batch, pa.Table):
        return batch
    if isinstance(batch, Mapping) and _is_untouched(batch):
        return batch.pa_table  # type: ignore[attr-defined]
    if hasattr(batch, "__arrow_c_stream__") and hasattr(batch, "columns"):
        return pa.table(batch)
    if not isinstance(batch, Mapping):
        raise PackingError(
            f"batch: expected a mapping of columns or a pyarrow Table, got {type(batch).__name__}; with map, leave "
            "input_columns out"
        )
    return pa.table({name: _as_array(name, batch[name]) for name in batch})


def _is_untouched(batch: Any) -> bool:
    """Return whether a batch is still the table that `map` reads it from: no column was read, set or deleted."""
    table = getattr(batch, "pa_table", None)
    return isinstance(table, pa.Table) and set(table.column_names) == batch.keys_to_format == set(batch)


def _as_array(name: str, values: Any) -> pa.Array:
    try:
        return pa.array([row if isinstance(row, (list, str, bytes, dict)) else _as_numpy(row) for row in values])
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, TypeError, OverflowError) as error:
        if expected := {INPUT_IDS: "integers", **TRAINING_COLUMNS}.get(name):
            raise PackingError(f"column {name!r}: expected lists of {expected}: {error}") from error
        return pa.nulls(len(values))


def _as_numpy(row: Any) -> Any:
    """Convert a row to a type that Arrow takes. An empty row loses its dtype: NumPy would make it float64."""
    if not hasattr(row, "__len__"):
        return row
    return np.asarray(row) if len(row) else []


def _select_visible(table: pa.Table, dataset: Any) -> pa.Table:
    """Select what the format of the dataset shows; `map` passes all columns."""
    if dataset.format["type"] != "custom":
        visible = visible_columns(dataset)
        return table.select([name for name in table.column_names if name in visible])
    warnings.warn(
        "map keeps the transform of a dataset, which would be applied to packed rows too: call .with_format(None) on "
        "the dataset that map returns",
        stacklevel=2,
    )
    return table


def _check_made_columns_are_visible(dataset: Any, visible: list[str], bucket: bool) -> None:
    """Raise if the dataset's format, which `map` keeps, would hide a column that packing makes.

    Only columns that change the meaning of packed rows matter: labels with loss masks applied, and capacities.

    Args:
        dataset: the Dataset that is mapped.
        visible: the columns of the batch that its format shows.
        bucket: whether packing makes that column.
    """
    form = dataset.format
    if form["type"] == "custom" or form["output_all_columns"]:
        return
    made = [LABELS] if any(name in visible for name in LOSS_MASKS) else []
    made += [BUCKET] if bucket else []
    if hidden := [name for name in made if name in dataset.column_names and name not in form["columns"]]:
        raise PackingError(
            f"column {hidden[0]!r}: expected none of that name, or one that the format of the dataset shows; map keeps "
            f"the format, {form['columns']}, which would hide {hidden[0]!r} of packed rows too: remove the column, "
            "or call pack, which shows all columns that it makes"
        )


def _pack_table(table: pa.Table, plan_lengths: Callable[[IntArray], PackingPlan], bucket: bool) -> pa.Table:
    if bucket:
        check_bucket_is_free(table.column_names)
    columns = find_token_columns(table)
    plan = plan_lengths(check_lengths(columns[INPUT_IDS].length))
    tokens, packed = (int(lengths.sum(dtype=np.int64)) for lengths in (plan.document_length, plan.segment_length))
    if packed < tokens:
        warnings.warn(
            f"packing drops {tokens - packed:,} of the {tokens:,} tokens of a batch, as configured by overflow",
            stacklevel=2,
        )
    if masks := [name for name in LOSS_MASKS if name in columns]:
        warnings.warn(
            f"packing applies {' and '.join(masks)} to labels: tokens with a 0 are not trained on", stacklevel=2
        )
    return pack_rows(columns, plan, bucket=bucket).table


def _rows_of_arrays(column: pa.ChunkedArray, name: str) -> Any:
    """Return a column as a list of arrays, one for each row, or as one array of capacities."""
    if name == BUCKET and not is_token_type(column.type):
        return column.to_numpy()
    tokens = TokenColumn(name, column)
    values = tokens.gather(np.arange(len(tokens.length)), np.zeros_like(tokens.length), tokens.length)
    return np.split(values, np.cumsum(tokens.length)[:-1]) if len(tokens.length) else []
