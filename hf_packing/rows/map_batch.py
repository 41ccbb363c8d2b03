"""Pack one batch of rows, as `datasets.map` or a user's own function passes it."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from datasets.formatting.formatting import LazyBatch, LazyRow

from hf_packing.checks import check_type
from hf_packing.columns import INPUT_IDS
from hf_packing.errors import PackingError
from hf_packing.rows.changes import changes_of, describe_changes, warn_of_changes
from hf_packing.rows.packing import Packing
from hf_packing.rows.token_columns import VALUES_OF_TOKENS, as_array, find_token_columns, with_typed_empty_lists
from hf_packing.strategies.base import Strategy


def pack_batch(batch: Any, strategy: Strategy, keep_first_labels: bool) -> Any:
    """Pack the documents of one batch and return the packed rows.

    Args:
        batch: a pyarrow Table, a data frame, or a mapping from names to columns. All columns are packed that have one
            number for each token, also those that the format of a dataset hides, since `map` passes them, too.
        strategy: the strategy.
        keep_first_labels: whether the first token of a segment keeps its label.

    Returns:
        Packed rows, one for each pack: a dict of lists of lists if the batch is a mapping that is not from
        `Dataset.map`, else a Table.

    Raises:
        PackingError: `find_token_columns` refuses the columns, or the batch is a single row or has an unknown type.
    """
    table = with_typed_empty_lists(_as_table(batch))
    packing = Packing(strategy, keep_first_labels=keep_first_labels)
    packing.check_names(table.column_names)
    columns = find_token_columns(table)
    plan = packing.plan(columns)
    packed = packing.rows(columns, plan, np.arange(plan.num_packs)).table
    facts = changes_of(columns, plan, "overflow", keep_first_labels)
    warn_of_changes(describe_changes(facts | {"empty_documents": 0}, of=" of a batch"), "packing", stacklevel=2)
    return packed if isinstance(batch, LazyBatch) or not isinstance(batch, Mapping) else packed.to_pydict()


def _as_table(batch: Any) -> pa.Table:
    """Return a batch as an Arrow table. A column that Arrow cannot convert, such as images, becomes nulls."""
    if hasattr(batch, "__arrow_c_stream__"):  # a Table, or a data frame of a dataset in its format
        return pa.table(batch)
    accepted = "a mapping of columns or a pyarrow Table, as Dataset.map passes it without input_columns"
    check_type("batch", batch, Mapping, accepted)
    if isinstance(batch, LazyBatch) and set(batch.pa_table.column_names) == batch.keys_to_format == set(batch):
        return batch.pa_table  # nothing was read, set or deleted since `map` made it
    first = next(iter(batch.get(INPUT_IDS, ())), None)
    if isinstance(batch, LazyRow) or isinstance(first, int) or getattr(first, "ndim", 1) == 0:
        raise PackingError(
            "batch: expected several rows, got a single row; call map with batched=True, as in "
            "map(strategy, batched=True, batch_size=10_000, remove_columns=dataset.column_names)"
        )
    return pa.table({name: as_array(name, batch[name], VALUES_OF_TOKENS) for name in batch})
