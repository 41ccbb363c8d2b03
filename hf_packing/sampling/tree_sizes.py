"""Measure rows of trees before training: unique tokens, documents and the cost of attention along paths."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from hf_packing.columns import ENDS, PARENTS, SEGMENT_LENGTHS, TREE_COLUMNS, TREE_INPUT_IDS
from hf_packing.data.token_columns import TokenColumn
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray
from hf_packing.sampling.epoch_plan import RowSizes
from hf_packing.sampling.tree_counts import TreeCounts


def check_tree_columns(names: Any) -> None:
    """Raise PackingError if rows of trees lack a column."""
    if missing := [name for name in TREE_COLUMNS if name not in names]:
        raise PackingError(
            f"column {missing[0]!r}: expected this column beside {TREE_INPUT_IDS}, in rows of documents that share "
            f"prefixes, got the columns {', '.join(names)}"
        )


def sizes_of_tree_table(table: pa.Table, row_numbers: IntArray | None) -> RowSizes:
    """Return the sizes of rows of trees in a table.

    Args:
        table: a table with the columns of rows of trees.
        row_numbers: integers [rows]: indices of the rows, in the wanted order; None for all rows.
    """
    columns = {name: TokenColumn(name, table.column(name), row_numbers) for name in TREE_COLUMNS}
    every = np.arange(len(columns[TREE_INPUT_IDS].length))

    def values(name: str) -> IntArray:
        column = columns[name]
        found: IntArray = column.gather(every, np.zeros_like(every), column.length)
        return found

    return _sizes_of_trees(
        columns[TREE_INPUT_IDS].length,
        (values(SEGMENT_LENGTHS), values(PARENTS), columns[SEGMENT_LENGTHS].length),
        (values(ENDS), columns[ENDS].length),
    )


def sizes_of_tree_rows(rows: Sequence[Mapping[str, Any]]) -> RowSizes:
    """Return the sizes of rows of trees that were read one by one."""

    def together(name: str) -> IntArray:
        return np.concatenate([np.zeros(0, np.int64), *(np.asarray(row[name], dtype=np.int64) for row in rows)])

    def count(name: str) -> IntArray:
        return np.array([len(row[name]) for row in rows], dtype=np.int64)

    segments = together(SEGMENT_LENGTHS), together(PARENTS), count(SEGMENT_LENGTHS)
    return _sizes_of_trees(count(TREE_INPUT_IDS), segments, (together(ENDS), count(ENDS)))


def _sizes_of_trees(
    tokens: IntArray, segments: tuple[IntArray, IntArray, IntArray], ends: tuple[IntArray, IntArray]
) -> RowSizes:
    """Return the sizes of rows of trees.

    Args:
        tokens: integers [rows]: number of tokens in each row.
        segments: the lengths and parents of all segments, integers [segments] each, and the number of segments in each
            row, integers [rows].
        ends: the segments in which all documents end, integers [documents], and the number of documents in each row,
            integers [rows].
    """
    lengths, parents, per_row = (each.astype(np.int64) for each in segments)
    last, documents = (each.astype(np.int64) for each in ends)
    offsets = np.concatenate([[0], np.cumsum(per_row)])
    first = np.repeat(offsets[:-1], per_row)
    depths = _depths(lengths, np.where(parents < 0, -1, parents + first))
    totals = np.concatenate([[[0], [0]], np.cumsum([lengths, lengths * (2 * depths + lengths)], axis=1)], axis=1)
    found, work = np.diff(totals[:, offsets])
    if (wrong := found != tokens).any():
        row = int(wrong.argmax())
        raise PackingError(
            f"column {SEGMENT_LENGTHS!r}: expected lengths that add up to the {tokens[row]} tokens of row {row}, got "
            f"{found[row]}"
        )
    of_documents = last + np.repeat(offsets[:-1], documents)
    raw = int((depths + lengths)[of_documents].sum())
    counts = TreeCounts(int(documents.sum()), raw, int(found.sum()))
    return RowSizes(found, documents, work, packed=True, trees=counts)


def _depths(lengths: IntArray, parents: IntArray) -> IntArray:
    """Return the number of tokens above each segment, int64 [segments]; `parents` count over all rows."""
    depths = np.zeros(len(lengths), dtype=np.int64)
    known = parents < 0
    while not known.all():
        ready = np.flatnonzero(~known & known[parents])
        if not len(ready):
            raise PackingError(f"column {PARENTS!r}: expected the parent of each segment before it, got a later one")
        depths[ready] = depths[parents[ready]] + lengths[parents[ready]]
        known[ready] = True
    return depths
