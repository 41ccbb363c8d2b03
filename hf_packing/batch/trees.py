"""Concatenate rows of trees into one batch. In a row of trees, documents share their prefixes.

The columns of a batch are those that `PackingCollator` describes. A batch of trees has neither labels nor cu_seq_lens:
with these, a model would compute its own loss, in which each token predicts the next one in the row, or would treat
segments as documents.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hf_packing.batch.segments import check_length
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
)
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import count_ranges, offsets_of
from hf_packing.trees.segments import TreeSegments

_OF_OTHER_ROWS = (INPUT_IDS, LABELS, ATTENTION_MASK, *LOSS_MASKS, *SEGMENT_COLUMNS)
"""Columns of packed rows and documents, which have another meaning or none in a row of trees."""

_Integers = npt.NDArray[np.int64]
_Columns = Mapping[str, Sequence[npt.NDArray[Any]]]
"""The values of each row, by name of the column."""


def is_tree_row(row: Mapping[str, Any]) -> bool:
    """Return whether a row is a row of trees, perhaps one that has lost some of its columns."""
    names = row.keys() & set(TREE_COLUMNS)
    if INPUT_IDS in row:  # a document may have a column `ends` of its own
        return not names.isdisjoint((TREE_INPUT_IDS, TREE_LABELS)) or {SEGMENT_LENGTHS, PARENTS} <= names
    return bool(names)


def check_tree_row(row: Mapping[str, Any], number: int) -> None:
    """Raise PackingError unless a row has all columns of a row of trees, and none of other rows."""
    if other := [name for name in _OF_OTHER_ROWS if name in row]:
        if not is_tree_row(row):
            raise PackingError(
                f"rows: expected rows of trees only, or none, but row {number} has the columns {', '.join(row)}; put "
                "rows of trees and other rows in different batches"
            )
        raise PackingError(
            f"column {other[0]!r}: expected no such column in row {number}, which has the columns of a row of trees; "
            f"the tokens of trees are in {TREE_INPUT_IDS!r}, and the collator makes the columns for the model"
        )
    if missing := [name for name in TREE_COLUMNS if name not in row]:
        raise PackingError(
            f"column {missing[0]!r}: expected this column in row {number}, a row of trees, got the columns "
            f"{', '.join(row) or 'none'}. Trainer removes columns that the model does not take; pass "
            "remove_unused_columns=False to TrainingArguments"
        )


def collate_trees(columns: _Columns) -> dict[str, Any]:
    """Concatenate rows of trees into one batch.

    Args:
        columns: the values of each row in the columns TREE_COLUMNS: integers [values].

    Returns:
        The batch, as `PackingCollator` describes it. The indices of segments and documents count on from row to row.

    Raises:
        PackingError: the rows have no tokens, or the columns of a row contradict each other.
    """
    _check_lengths(columns)
    joined = {name: np.concatenate(values, dtype=np.int64, casting="unsafe") for name, values in columns.items()}
    tokens, labels, ends = (joined[name] for name in (TREE_INPUT_IDS, TREE_LABELS, ENDS))
    if not len(tokens):
        raise PackingError(f"rows: expected at least one token, got {len(columns[ENDS])} rows without tokens")
    in_rows = {name: np.array([len(values) for values in columns[name]]) for name in TREE_COLUMNS}
    segments, documents, runs = in_rows[PARENTS], in_rows[ENDS], in_rows[TRAINED] // 3
    first_segment, first_document = offsets_of(segments)[:-1], offsets_of(documents)[:-1]

    trees = TreeSegments.of_rows(columns[SEGMENT_LENGTHS], columns[PARENTS])
    outside = (ends < 0) | (ends >= np.repeat(segments, documents))
    _refuse(ENDS, outside, "numbers of segments of the row", ends, documents)
    ends = ends + np.repeat(first_segment, documents)
    trained = joined[TRAINED].reshape(-1, 3)
    outside = (trained[:, 0] < 0) | (trained[:, 0] >= np.repeat(documents, runs))
    _refuse(TRAINED, outside, "runs of documents of the row", trained, runs)
    owner = trained[:, 0] + np.repeat(first_document, runs)
    _check_runs(owner, trained, (trees.depths + np.diff(trees.begins))[ends], runs)
    trained[:, 0] = owner
    ranges = trees.find_runs(ends, trained)
    is_trained = count_ranges(ranges.begin, ranges.length, len(tokens)) > 0
    expected = f"a label where a document trains on the token, and otherwise {IGNORED_LABEL}"
    _refuse(TREE_LABELS, (labels != IGNORED_LABEL) != is_trained, expected, labels, in_rows[TREE_LABELS])
    batch = {
        INPUT_IDS: tokens[None],
        POSITION_IDS: trees.position_ids[None].astype(np.int64),
        SEGMENT_LENGTHS: joined[SEGMENT_LENGTHS],
        PARENTS: np.array(trees.parents, np.int64),
        ENDS: ends,
        TRAINED: trained,
        TREE_LABELS: labels[None],
    }
    return {name: torch.from_numpy(values) for name, values in batch.items()}


def _check_lengths(columns: _Columns) -> None:
    """Raise PackingError unless the columns of each row have lengths that fit together."""
    for number, tokens in enumerate(columns[TREE_INPUT_IDS]):
        check_length(TREE_LABELS, columns[TREE_LABELS][number], len(tokens), number)
        lengths, parents, trained = (columns[name][number] for name in (SEGMENT_LENGTHS, PARENTS, TRAINED))
        total, runs = int(lengths.sum()), -(-len(trained) // 3)
        for name, expected, got, what in (
            (SEGMENT_LENGTHS, len(tokens), total, "the number of tokens, as the sum"),
            (PARENTS, len(lengths), len(parents), "values, one for each segment"),
            (TRAINED, 3 * runs, len(trained), "values, three for each run"),
        ):
            if expected != got:
                raise PackingError(f"column {name!r}: expected {expected} {what}, in row {number}, got {got}")


def _check_runs(owner: _Integers, trained: _Integers, lengths: _Integers, runs: _Integers) -> None:
    """Raise PackingError unless documents train on runs of their tokens, but the first, in order and without overlaps.

    Args:
        owner: int64 [runs]: the document in the batch.
        trained: int64 [runs, 3]: document in the row, place in the document, number of tokens.
        lengths: int64 [documents]: the number of tokens in each document.
        runs: int64 [rows]: the number of runs.
    """
    _, first, length = trained.T
    wrong = (first < 1) | (length < 1) | (length > lengths[owner] - first)
    _refuse(TRAINED, wrong, "runs of tokens of the document, but the first, which no token predicts", trained, runs)
    before, after = owner[:-1], owner[1:]
    wrong[1:] = (after < before) | ((after == before) & (first[1:] < (first + length)[:-1]))
    _refuse(TRAINED, wrong, "runs in the order of the tokens that do not overlap", trained, runs)


def _refuse(name: str, wrong: npt.NDArray[np.bool_], expected: str, values: _Integers, per_row: _Integers) -> None:
    """Raise PackingError if a value is wrong; `per_row` has the number of values in each row."""
    if wrong.any():
        place = int(wrong.argmax())
        row = int(np.searchsorted(np.cumsum(per_row), place, side="right"))
        raise PackingError(f"column {name!r}: expected {expected}, got {values[place].tolist()} in row {row}")
