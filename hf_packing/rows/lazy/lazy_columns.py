"""Columns of lazy packs, read without the formatting of datasets."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hf_packing.columns import INPUT_IDS, LABELS
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray
from hf_packing.rows.lazy.packed_tokens import PackedTokens, split_cells

_CHECK_AFTER = 1.0
"""Seconds after which it is checked again that a file of documents is as it was."""


class LazyColumn:
    """A column of lazy packs, with the interface of TokenColumn.

    Args:
        name: the column's name, for error messages.
        column: the cells.
        feature: the feature of the column.
        row_numbers: integers [rows]: indices of the rows, in the wanted order; None for all rows in stored order.

    Attributes:
        cells: int64 [rows]: the number of each row's pack; see PackedTokens.

    Raises:
        PackingError: a cell is null.
    """

    def __init__(
        self, name: str, column: pa.ChunkedArray, feature: PackedTokens, row_numbers: IntArray | None = None
    ) -> None:
        if column.null_count:
            raise PackingError(f"column {name!r}: expected a pack in every row, got nulls in {column.null_count} rows")
        self.name = name
        self._feature = feature
        cells = column.to_numpy()
        self.cells = cells if row_numbers is None else cells[row_numbers]

    @cached_property
    def length(self) -> IntArray:
        """int64 [rows]: the number of values in each row."""
        tokens = np.zeros(len(self.cells), dtype=np.int64)
        for folder, rows, packs in split_cells(self.cells):
            tokens[rows] = self._feature.packs(folder).pack_tokens[packs]
        return tokens

    def read(self, rows: Sequence[int]) -> list[npt.NDArray[Any]]:
        """Return the values of each of these rows, in arrays that may be read-only."""
        read = self._feature.read
        return [read(cell, _CHECK_AFTER) for cell in self.cells[rows].tolist()]

    def gather(self, row: IntArray, start: IntArray, length: IntArray) -> npt.NDArray[Any]:
        """Return slices of rows, concatenated; see `TokenColumn.gather`."""
        bounds = zip(self.read(row.tolist()), start.tolist(), (start + length).tolist(), strict=True)
        return np.concatenate([np.zeros(0, dtype=self._feature.values), *(values[a:b] for values, a, b in bounds)])


def copies_labels(dataset: datasets.Dataset) -> bool:
    """Return whether the labels of all rows are lazy, and are input_ids but for the first token of every segment."""
    feature = dataset.features.get(LABELS)
    if not isinstance(feature, PackedTokens) or not isinstance(dataset.features.get(INPUT_IDS), PackedTokens):
        return False
    cells = dataset.data.table.column(LABELS)
    return cells.equals(dataset.data.table.column(INPUT_IDS)) and all(
        feature.packs(folder).facts["packing"]["labels_made"] for folder, _, _ in split_cells(cells.to_numpy())
    )
