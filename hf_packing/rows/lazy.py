"""Rows that are built when they are read, from the documents and a plan, so that no token is copied.

A dataset of `pack(..., lazy=True)` stores the number of a pack in every cell, and has a transform that builds the row.
Reading a row takes about as long as building it for `pack`: 0.2 ms for 2,048 tokens.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from datasets.formatting import get_formatter

from hf_packing.columns import INPUT_IDS, rows_of
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import Array, IntArray
from hf_packing.planning.plan import PackingPlan
from hf_packing.rows.packed_rows import Rows
from hf_packing.rows.packing import Packing
from hf_packing.rows.token_columns import TokenColumn, is_list, row_numbers, shows_table, token_columns_of

_PACK = "pack"
_CELL = pa.struct([(_PACK, pa.int64())])
"""The type of a cell. It is no number, so that nobody takes the number of a pack for a token."""


class DocumentRows:
    """The rows of a plan, by the numbers of their packs; also the transform of lazy datasets, which reads them.

    Args:
        documents: the documents, without a transform.
        packing: how documents become rows.
        plan: the plan of the documents, or the folder in which it is saved.
        names: names of the token columns to read; None for all.

    Raises:
        PackingError: the plan is gone, or is one of other documents.
    """

    def __init__(
        self,
        documents: datasets.Dataset,
        packing: Packing,
        plan: PackingPlan | Path,
        names: Collection[str] | None = None,
    ) -> None:
        columns = token_columns_of(documents)
        self.columns = {name: columns[name] for name in columns if names is None or name in names}
        self.documents, self.packing, self._stored_plan = documents, packing, plan
        self.plan = PackingPlan.load(plan) if isinstance(plan, Path) else plan
        if not np.array_equal(columns[INPUT_IDS].length, self.plan.document_length):
            raise PackingError(
                f"dataset: expected the {self.plan.num_documents:,} documents that were packed, got documents of other "
                "lengths; pack the documents again, with load_from_cache_file=False"
            )
        form = documents.format
        self._format = get_formatter(form["type"], **form["format_kwargs"])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what the rows are made from, since columns that are mapped from files would be pickled as copies."""
        return DocumentRows, (self.documents, self.packing, self._stored_plan, [*self.columns])

    def __deepcopy__(self, memo: Any) -> "DocumentRows":
        return self

    def build(self, packs: IntArray) -> Rows:
        """Build the rows of some packs."""
        return self.packing.rows(self.columns, self.plan, packs)

    def read(self, packs: IntArray) -> list[dict[str, Array]]:
        """Return the rows of some packs, as dicts of NumPy arrays."""
        table, every = self.build(packs).table, np.arange(len(packs))
        return rows_of(
            {
                name: TokenColumn(name, column).read(every) if is_list(column.type) else column.to_numpy()
                for name, column in zip(table.column_names, table.columns, strict=True)
            }
        )

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, Any]:
        """Return rows with the values of their cells, in the format of the documents; other columns stay as they are.

        Raises:
            PackingError: a column of cells was renamed.
        """
        names = [
            name
            for name, values in batch.items()
            if len(values) > 0 and isinstance(values[0], dict) and values[0].keys() == {_PACK}
        ]
        if not names:
            return batch
        table = self.build(np.array([cell[_PACK] for cell in batch[names[0]]])).table
        if unknown := [name for name in names if name not in table.column_names]:
            raise PackingError(
                f"column {unknown[0]!r}: expected one of the columns {', '.join(table.column_names)}, since "
                "columns of lazy packs cannot be renamed; rename those of the documents, and pack them again"
            )
        rows: dict[str, Any] = self._format.format_batch(table.select(names))
        return batch | rows

    def as_dataset(self, info: datasets.DatasetInfo, fingerprint: str) -> datasets.Dataset:
        """Return a dataset whose rows are those of all packs.

        Args:
            info: the description of the rows.
            fingerprint: the fingerprint of the dataset.

        Raises:
            PackingError: the documents have a format that shows tables.
        """
        if (shown := self.documents.format["type"]) in ("arrow", "pandas", "polars"):
            raise PackingError(
                f"lazy: expected documents in a format that shows lists, arrays or tensors, got {shown!r}; call "
                "with_format(None) before pack"
            )
        cells = pa.StructArray.from_arrays([pa.array(np.arange(self.plan.num_packs))], names=[_PACK])
        table = pa.table(dict.fromkeys(self.build(np.arange(0)).table.column_names, cells))
        info.features = datasets.Features.from_arrow_schema(table.schema)
        rows = datasets.Dataset(table, info=info, split=self.documents.split, fingerprint=fingerprint)
        rows.set_transform(self)
        return rows


def lazy_rows(dataset: Any) -> tuple[DocumentRows, IntArray] | None:
    """Return what builds the rows of `pack(..., lazy=True)`, and the number of each row's pack, int64 [rows].

    Returns:
        None for other datasets, and if columns were added or replaced, since their rows have to be read as they are.
    """
    transform = dataset.format["format_kwargs"].get("transform") if isinstance(dataset, datasets.Dataset) else None
    if not isinstance(transform, DocumentRows):
        return None
    first, *others = dataset.data.table.columns
    if first.type != _CELL or any(not first.equals(other) for other in others):
        return None
    packs: IntArray = first.combine_chunks().field(0).to_numpy()
    return transform, packs[row_numbers(dataset)]


def refuse_cells(dataset: Any) -> None:
    """Raise PackingError if a dataset shows the cells of lazy packs, since it has lost the transform."""
    if not shows_table(dataset):
        return
    if cells := [field.name for field in dataset.data.table.schema if field.type == _CELL]:
        raise PackingError(
            f"column {cells[0]!r}: expected the transform with which pack(..., lazy=True) returned this dataset. "
            "with_format, concatenate_datasets and load_from_disk lose it: set the format of the documents before pack "
            "and concatenate the documents, or pack with lazy=False"
        )
