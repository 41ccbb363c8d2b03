"""Measure rows of trees before training: unique tokens, documents and the cost of attention along paths."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from hf_packing.columns import ENDS, PARENTS, SEGMENT_LENGTHS, TREE_COLUMNS, TREE_INPUT_IDS
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray, indices_in_ranges, offsets_of
from hf_packing.rows.token_columns import TokenColumn
from hf_packing.sampling.epoch_plan import RowSizes
from hf_packing.sampling.tree_counts import TreeCounts
from hf_packing.trees.segments import attention_costs


def check_tree_columns(names: Any) -> None:
    """Raise PackingError if rows of trees lack a column."""
    if missing := [name for name in TREE_COLUMNS if name not in names]:
        raise PackingError(
            f"column {missing[0]!r}: expected this column beside {TREE_INPUT_IDS}, in rows of documents that share "
            f"prefixes, got the columns {', '.join(names)}"
        )


class _Lists(NamedTuple):
    """A column with a list of integers in each row."""

    values: IntArray
    """int64 [values of all rows], row by row."""
    per_row: IntArray
    """int64 [rows]: number of values in each row."""


def sizes_of_tree_table(table: pa.Table, row_numbers: IntArray | None) -> RowSizes:
    """Return the sizes of rows of trees in a table.

    Args:
        table: a table with the columns of rows of trees.
        row_numbers: integers [rows]: indices of the rows, in the wanted order; None for all rows.
    """
    columns = {name: TokenColumn(name, table.column(name), row_numbers) for name in TREE_COLUMNS}

    def lists(name: str) -> _Lists:
        column = columns[name]
        every = np.arange(len(column.length))
        values = column.gather(every, np.zeros_like(every), column.length)
        return _Lists(values.astype(np.int64), column.length.astype(np.int64))

    return _sizes_of_trees(columns[TREE_INPUT_IDS].length, *map(lists, (SEGMENT_LENGTHS, PARENTS, ENDS)))


def sizes_of_tree_rows(rows: Sequence[Mapping[str, Any]]) -> RowSizes:
    """Return the sizes of rows of trees that were read one by one."""

    def count(name: str) -> IntArray:
        return np.array([len(row[name]) for row in rows], dtype=np.int64)

    def lists(name: str) -> _Lists:
        values = [np.zeros(0, np.int64), *(np.asarray(row[name], dtype=np.int64) for row in rows)]
        return _Lists(np.concatenate(values), count(name))

    return _sizes_of_trees(count(TREE_INPUT_IDS), *map(lists, (SEGMENT_LENGTHS, PARENTS, ENDS)))


def _sizes_of_trees(tokens: IntArray, segments: _Lists, parents: _Lists, ends: _Lists) -> RowSizes:
    """Return the sizes of rows of trees.

    Args:
        tokens: integers [rows]: number of tokens in each row.
        segments: the lengths of the segments.
        parents: the parents of the segments, as indices in the row.
        ends: the segments in which the documents end, as indices in the row.
    """
    _check_trees(segments, parents, ends)
    lengths, offsets = segments.values, offsets_of(segments.per_row)
    first = np.repeat(offsets[:-1], segments.per_row)
    depths = _depths(lengths, np.where(parents.values < 0, -1, parents.values + first))
    totals = np.concatenate([[[0], [0]], np.cumsum([lengths, attention_costs(lengths, depths)], axis=1)], axis=1)
    found, work = np.diff(totals[:, offsets])
    if (wrong := found != tokens).any():
        row = int(wrong.argmax())
        raise PackingError(
            f"column {SEGMENT_LENGTHS!r}: expected lengths that add up to the {tokens[row]} tokens of row {row}, got "
            f"{found[row]}"
        )
    of_documents = ends.values + np.repeat(offsets[:-1], ends.per_row)
    raw = int((depths + lengths)[of_documents].sum())
    counts = TreeCounts(int(ends.per_row.sum()), raw, int(found.sum()))
    return RowSizes(found, ends.per_row, work, packed=True, trees=counts)


def _check_trees(segments: _Lists, parents: _Lists, ends: _Lists) -> None:
    """Raise PackingError unless each segment has a parent before it, and each document ends in a segment."""
    if (wrong := parents.per_row != segments.per_row).any():
        row = int(wrong.argmax())
        raise PackingError(
            f"column {PARENTS!r}: expected one parent for each of the {segments.per_row[row]} segments of row {row}, "
            f"got {parents.per_row[row]}"
        )
    segment = indices_in_ranges(0, segments.per_row)
    if (wrong := parents.values >= segment).any():
        place = int(wrong.argmax())
        raise PackingError(
            f"column {PARENTS!r}: expected the parent of each segment before it, got parent {parents.values[place]} "
            f"for segment {segment[place]} of row {_row_of(place, parents)}"
        )
    most = np.repeat(segments.per_row, ends.per_row)
    if (wrong := (ends.values < 0) | (ends.values >= most)).any():
        place = int(wrong.argmax())
        raise PackingError(
            f"column {ENDS!r}: expected segments from 0 to {most[place] - 1} in row {_row_of(place, ends)}, got "
            f"{ends.values[place]}"
        )


def _row_of(place: int, lists: _Lists) -> int:
    """Return the row that a value is in, given the value's index among the values of all rows."""
    return int(np.searchsorted(np.cumsum(lists.per_row), place, side="right"))


def _depths(lengths: IntArray, parents: IntArray) -> IntArray:
    """Return the number of tokens above each segment, int64 [segments].

    Args:
        lengths: int64 [segments]: number of tokens in each segment.
        parents: int64 [segments]: index of each segment's parent among the segments of all rows; -1 for a root.
    """
    depths = np.zeros(len(lengths), dtype=np.int64)
    known = parents < 0
    while not known.all():
        ready = np.flatnonzero(~known & known[parents])
        depths[ready] = depths[parents[ready]] + lengths[parents[ready]]
        known[ready] = True
    return depths
