"""Concatenate rows of trees into one batch. In a row of trees, documents share their prefixes.

The columns of a batch are those that `PackingCollator` describes. A batch of trees has neither labels nor cu_seq_lens:
with these, a model would compute its own loss, in which each token predicts the next one in the row, or would treat
segments as documents.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hf_packing.columns import (
    ATTENTION_MASK,
    ENDS,
    IGNORED_LABEL,
    INPUT_IDS,
    LABELS,
    LOSS_MASKS,
    PARENTS,
    POSITION_IDS,
    SEGMENT_COLUMNS,
    SEGMENT_LENGTHS,
    TRAINED,
    TREE_COLUMNS,
    TREE_INPUT_IDS,
    TREE_LABELS,
    check_columns,
    refuse_columns,
)
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import Array, BoolArray, IntArray, count_ranges, join_rows, offsets_of, sums_of
from hf_packing.trees.segments import TreeSegments, check_segments

_OF_OTHER_ROWS = (INPUT_IDS, LABELS, ATTENTION_MASK, *LOSS_MASKS, *SEGMENT_COLUMNS)
"""Columns of packed rows and documents, which have another meaning or none in a row of trees."""

MARKS_OF_TREES = frozenset((TREE_INPUT_IDS, TREE_LABELS, SEGMENT_LENGTHS))
"""Columns that only rows of trees have. Documents may have columns `ends`, `parents` or `trained` of their own."""

Columns = Mapping[str, Sequence[Array]]
"""The values of each row, by name of the column."""


def check_tree_row(row: Mapping[str, Any], number: int) -> None:
    """Raise PackingError unless a row has all columns of a row of trees, and none of other rows."""
    if MARKS_OF_TREES.isdisjoint(row):
        raise PackingError(
            f"rows: expected rows of trees only, or none, but row {number} has the columns {', '.join(row)}; put rows "
            "of trees and other rows in different batches"
        )
    refuse_columns(
        _OF_OTHER_ROWS,
        row,
        f"no such column in row {number}, which has the columns of a row of trees; the tokens of trees are in "
        f"{TREE_INPUT_IDS!r}, and the collator makes the columns for the model",
    )
    removed = (
        ". Trainer removes columns that the model does not take; pass remove_unused_columns=False to TrainingArguments"
    )
    check_columns(TREE_COLUMNS, row, f"in row {number}, a row of trees", removed)


def collate_trees(columns: Columns) -> dict[str, Any]:
    """Concatenate rows of trees into one batch.

    Args:
        columns: the values of each row in the columns TREE_COLUMNS: integers [values].

    Returns:
        The batch, as `PackingCollator` describes it. The indices of segments and documents count on from row to row.

    Raises:
        PackingError: the rows have no tokens, or the columns of a row contradict each other.
    """
    tokens, in_rows = join_rows(columns[TREE_INPUT_IDS])
    labels, labels_in_rows = join_rows(columns[TREE_LABELS])
    trained, numbers_in_rows = join_rows(columns[TRAINED])
    if not len(tokens):
        raise PackingError(f"rows: expected at least one token, got {len(in_rows)} rows without tokens")
    _refuse(TREE_LABELS, labels_in_rows != in_rows, "one value for each token", labels_in_rows)
    _refuse(TRAINED, numbers_in_rows % 3 > 0, "three values for each run", numbers_in_rows)
    trees, ends, documents = read_tree_rows(columns, in_rows)
    trained, runs = trained.reshape(-1, 3), numbers_in_rows // 3
    document, first, length = trained.T
    outside = (document < 0) | (document >= np.repeat(documents, runs))
    _refuse(TRAINED, outside, "runs of documents of the row", trained, runs)
    document += np.repeat(offsets_of(documents)[:-1], runs)
    begins = offsets_of((trees.depths + np.diff(trees.begins))[ends])  # of the documents, laid end to end
    begin = begins[document] + first
    wrong = (first < 1) | (length < 1) | (begin + length > begins[document + 1])
    wrong[1:] |= begin[1:] < (begin + length)[:-1]
    expected = "runs of tokens of the documents, in order, without overlap, and without the first token of a document"
    _refuse(TRAINED, wrong, expected, trained, runs)
    ranges = trees.find_runs(ends, trained)
    is_trained = count_ranges(ranges.begin, ranges.length, len(tokens)) > 0
    expected = f"a label where a document trains on the token, and otherwise {IGNORED_LABEL}"
    _refuse(TREE_LABELS, (labels != IGNORED_LABEL) != is_trained, expected, labels, in_rows)
    batch = {
        INPUT_IDS: tokens[None],
        POSITION_IDS: trees.position_ids[None].astype(np.int64),
        SEGMENT_LENGTHS: np.array(trees.lengths, np.int64),
        PARENTS: np.array(trees.parents, np.int64),
        ENDS: ends,
        TRAINED: trained,
        TREE_LABELS: labels[None],
    }
    return {name: torch.from_numpy(values) for name, values in batch.items()}


def read_tree_rows(columns: Columns, tokens: IntArray) -> tuple[TreeSegments, IntArray, IntArray]:
    """Read the segments and documents of rows of trees, which are counted on from row to row.

    Args:
        columns: the values of each row in the columns SEGMENT_LENGTHS, PARENTS and ENDS: integers [values].
        tokens: integers [rows]: the number of tokens in each row.

    Returns:
        The segments; int64 [documents], the segment in which each document ends; int64 [rows], the number of documents
        in each row.

    Raises:
        PackingError: the columns of a row contradict each other; the error names the row.
    """
    lengths, segments = join_rows(columns[SEGMENT_LENGTHS])
    above, parents = join_rows(columns[PARENTS])
    ends, documents = join_rows(columns[ENDS])
    _refuse(PARENTS, parents != segments, "one value for each segment", parents)
    first_segment = offsets_of(segments)
    found = sums_of(lengths, first_segment)
    _refuse(SEGMENT_LENGTHS, found != tokens, "lengths that add up to the tokens", found)
    outside = (ends < 0) | (ends >= np.repeat(segments, documents))
    _refuse(ENDS, outside, "numbers of segments of the row", ends, documents)
    above[above >= 0] += np.repeat(first_segment[:-1], segments)[above >= 0]
    try:
        trees = TreeSegments.from_arrays(lengths, above)
    except PackingError:
        for number, row in enumerate(zip(columns[SEGMENT_LENGTHS], columns[PARENTS], strict=True)):
            check_segments(*row, f" of row {number}")
        raise
    return trees, ends + np.repeat(first_segment[:-1], documents), documents


def _refuse(name: str, wrong: BoolArray, expected: str, values: IntArray, per_row: IntArray | None = None) -> None:
    """Raise PackingError if a value is wrong; `per_row` has the number of values in each row, None for one."""
    if wrong.any():
        place = int(wrong.argmax())
        row = place if per_row is None else int(np.searchsorted(np.cumsum(per_row), place, side="right"))
        raise PackingError(f"column {name!r}: expected {expected}, got {values[place].tolist()} in row {row}")
