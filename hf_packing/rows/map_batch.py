"""Pack one batch of rows, in any form that `datasets.map` or a user's own function may pass.

`map` passes only rows to the function that it calls. This module reads the other arguments of `map`, such as
`remove_columns`, from the stack frame of `map`.
"""

import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import pyarrow as pa

from hf_packing.columns import BUCKET, INPUT_IDS, LABELS, LOSS_MASKS
from hf_packing.errors import PackingError
from hf_packing.rows.changes import changes_of, describe_changes
from hf_packing.rows.packed_rows import arrays_of_rows
from hf_packing.rows.packing import Packing
from hf_packing.rows.token_columns import (
    VALUES_OF_TOKENS,
    columns_left_out,
    find_token_columns,
    visible_columns,
    with_typed_empty_lists,
)
from hf_packing.strategies.base import Strategy


def pack_batch(batch: Any, strategy: Strategy) -> Any:
    """Pack the documents of one batch and return the packed rows.

    Args:
        batch: a pyarrow Table, a data frame, or a mapping from names to columns. In a mapping, a column is a list of
            lists, a list of arrays, or an array of arrays.
        strategy: the strategy.

    Returns:
        Packed rows, one for each pack. If the batch comes from `Dataset.map`, or is a Table or a data frame, they are a
        Table. If the batch is any other mapping, they are a dict from names to columns: lists of lists if `input_ids`
        was a list of lists, otherwise lists of arrays.

    Raises:
        PackingError: `find_token_columns` refuses the columns; the batch is a single row or has an unknown type; or
            `map` would keep columns of the documents beside packed rows, or hide columns of packed rows.
    """
    call = _current_map_call()
    if (call is not None and not call.batched) or _is_single_row(batch):
        raise PackingError(
            "batch: expected several rows, got a single row; call map with batched=True, as in "
            "map(strategy, batched=True, batch_size=10_000, remove_columns=dataset.column_names)"
        )
    table = _as_table(batch)
    mapped = None if call is None else call.dataset
    if mapped is not None:
        table = _select_visible(table, mapped, strategy)
    table = with_typed_empty_lists(table)
    packing = Packing(strategy)
    packing.check_names(table.column_names)
    columns = find_token_columns(table)
    plan, splits = packing.plan(columns)
    packed = packing.rows(columns, plan, np.arange(plan.num_packs)).table
    left_out = []
    if call is not None:
        call.check_columns(table.column_names, packed.column_names)
        left_out = columns_left_out(table.schema, call.remove_columns)
    facts = changes_of(columns, plan, splits, "overflow")
    for change in describe_changes(facts | {"empty_documents": 0}, of=" of a batch", left_out=left_out):
        warnings.warn(f"packing {change}", stacklevel=2)
    if mapped is not None or not isinstance(batch, Mapping) or hasattr(batch, "pa_table"):
        return packed
    first = next(iter(batch[INPUT_IDS]), None)
    if first is None or isinstance(first, list):
        return packed.to_pydict()
    return {name: arrays_of_rows(packed.column(name).combine_chunks()) for name in packed.column_names}


@dataclass(frozen=True)
class _MapCall:
    """The arguments of the `map` call that passed a batch to a strategy."""

    batched: bool
    remove_columns: tuple[str, ...] = ()
    dataset: Any = None
    """The Dataset whose `map` was called; None for an IterableDataset."""
    makes_tables: bool = False
    """True if `IterableDataset.map` keeps a returned table as it is, instead of adding the old columns to it."""

    def check_columns(self, given: list[str], packed: list[str]) -> None:
        """Raise PackingError if `IterableDataset.map` would remove new columns, or keep old columns beside new ones.

        Args:
            given: names of the old columns, those of the batch.
            packed: names of the new columns, those of the packed rows.
        """
        if self.dataset is not None or not self.batched:
            return
        if self.makes_tables:
            if lost := [name for name in packed if name in self.remove_columns]:
                raise PackingError(
                    f"remove_columns: expected no columns of packed rows, got {lost}. With a format such as arrow, "
                    "IterableDataset.map removes these columns after packing; leave remove_columns out"
                )
        elif kept := [name for name in given if name not in packed and name not in self.remove_columns]:
            raise PackingError(
                f"remove_columns: expected {kept} to be removed, since IterableDataset.map would keep these columns of "
                f"the documents beside packed rows; call map(strategy, batched=True, remove_columns={kept})"
            )


def _current_map_call() -> _MapCall | None:
    """Return the arguments of the `map` call that passed a batch to this package; None if the caller is not `map`.

    If a strategy is the transform of a dataset and is called for a single row, the result has batched=False.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("hf_packing", "datasets"):
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


def _is_single_row(batch: Any) -> bool:
    """Return whether a batch is a mapping with a single row's values, such as `map` passes without batched=True."""
    kind = type(batch).__name__
    if not isinstance(batch, Mapping) or kind in ("LazyBatch", "LazyRow"):
        return kind == "LazyRow"
    tokens = batch.get(INPUT_IDS, [])
    first = next(iter(tokens), None) if hasattr(tokens, "__len__") else tokens
    return isinstance(first, int) or getattr(first, "ndim", 1) == 0


def _as_table(batch: Any) -> pa.Table:
    """Return a batch as an Arrow table. A column that Arrow cannot convert, such as images, becomes nulls."""
    if hasattr(batch, "__arrow_c_stream__") and hasattr(batch, "columns"):  # a Table or a data frame
        return pa.table(batch)
    if not isinstance(batch, Mapping):
        raise PackingError(
            f"batch: expected a mapping of columns or a pyarrow Table, got {type(batch).__name__}; if you "
            "pass the strategy to Dataset.map, do not set input_columns"
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


def _select_visible(table: pa.Table, dataset: Any, strategy: Strategy) -> pa.Table:
    """Return a table without the columns that the dataset's format hides. `map` passes hidden columns too.

    If the dataset has a transform, the function warns and returns the whole table.

    Args:
        table: the batch that `map` passed.
        dataset: the Dataset whose `map` was called.
        strategy: the strategy.

    Raises:
        PackingError: the format, which `map` keeps, would hide `bucket`, or `labels` to which loss masks are applied.
            Packed rows mean something else without these columns.
    """
    if dataset.format["type"] == "custom":
        warnings.warn(
            "map keeps the transform of a dataset, so the transform would be applied to packed rows too; call "
            ".with_format(None) on the dataset that map returns",
            stacklevel=2,
        )
        return table
    visible = visible_columns(dataset)
    shown = table.select([name for name in table.column_names if name in visible])
    made = ([BUCKET] if strategy.has_buckets else []) + [LABELS for name in LOSS_MASKS if name in shown.column_names]
    if hidden := [name for name in made if name in dataset.column_names and name not in visible]:
        raise PackingError(
            f"column {hidden[0]!r}: expected no hidden column of this name, but the dataset's format shows only "
            f"{visible}. map keeps the format, so {hidden[0]!r} of packed rows would be hidden too; "
            "remove the column, or call pack, which shows all columns of packed rows"
        )
    return shown
