"""Concatenate rows of trees into one batch. In a row of trees, documents share their prefixes.

The columns of a batch are those that `PackingCollator` describes. A batch of trees has neither labels nor cu_seq_lens:
with these, a model would compute its own loss, in which each token predicts the next one in the row, or would treat
segments as documents.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

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
    TOKEN_TYPE_IDS,
    TRAINED,
    TREE_COLUMNS,
    TREE_INPUT_IDS,
    TREE_LABELS,
)
from hf_packing.errors import PackingError
from hf_packing.rows.trained_tokens import num_training, trained_pieces
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
        columns: the values of each row in the columns TREE_COLUMNS, and perhaps token_type_ids: integers [values].

    Returns:
        The batch, as `PackingCollator` describes it. The indices of segments and documents count on from row to row.

    Raises:
        PackingError: the rows have no tokens, or the columns of a row contradict each other.
    """
    sizes = _Sizes.of(columns)
    _check_sizes(columns)
    tokens = _joined(columns[TREE_INPUT_IDS])
    if not len(tokens):
        raise PackingError(f"rows: expected at least one token, got {len(columns[ENDS])} rows without tokens")
    labels = _joined(columns[TREE_LABELS])
    parents = _joined(columns[PARENTS])
    parents += np.where(parents >= 0, np.repeat(sizes.first_segment, sizes.segments), 0)
    trees = _segments_of(columns, parents)
    ends = _checked_ends(_joined(columns[ENDS]), sizes)
    trained = _checked_runs(_joined(columns[TRAINED]).reshape(-1, 3), ends, trees, sizes)
    _check_labels(labels, num_training(trained_pieces(trees, ends, trained), len(tokens)), trees, sizes)
    batch = {
        INPUT_IDS: tokens[None],
        POSITION_IDS: trees.position_ids[None].astype(np.int64),
        SEGMENT_LENGTHS: _joined(columns[SEGMENT_LENGTHS]),
        PARENTS: parents,
        ENDS: ends,
        TRAINED: trained,
        TREE_LABELS: labels[None],
        **{name: _joined(columns[name])[None] for name in columns.keys() & {TOKEN_TYPE_IDS}},
    }
    return {name: torch.from_numpy(values) for name, values in batch.items()}


class _Sizes(NamedTuple):
    """The numbers of segments and documents in each row, int64 [rows], and in the rows before it."""

    segments: _Integers
    first_segment: _Integers
    documents: _Integers
    first_document: _Integers
    runs: _Integers

    @classmethod
    def of(cls, columns: _Columns) -> "_Sizes":
        segments, documents, numbers = (
            np.array([len(values) for values in columns[name]], np.int64) for name in (SEGMENT_LENGTHS, ENDS, TRAINED)
        )
        before = (np.cumsum(each) - each for each in (segments, documents))
        return cls(segments, next(before), documents, next(before), numbers // 3)

    def document_in_row(self, document: int) -> str:
        row = int(np.searchsorted(self.first_document, document, side="right")) - 1
        return f"document {document - int(self.first_document[row])} of row {row}"


def _check_sizes(columns: _Columns) -> None:
    """Raise PackingError unless the columns of each row have lengths that fit together."""
    for number, (tokens, labels, lengths, parents, trained) in enumerate(
        zip(*(columns[name] for name in (TREE_INPUT_IDS, TREE_LABELS, SEGMENT_LENGTHS, PARENTS, TRAINED)), strict=True)
    ):
        check_length(TREE_LABELS, labels, len(tokens), number)
        if TOKEN_TYPE_IDS in columns:
            check_length(TOKEN_TYPE_IDS, columns[TOKEN_TYPE_IDS][number], len(tokens), number)
        if lengths.sum() != len(tokens):
            raise PackingError(
                f"column {SEGMENT_LENGTHS!r}: expected lengths that add up to the {len(tokens)} tokens of row "
                f"{number}, got a sum of {int(lengths.sum())}"
            )
        if len(parents) != len(lengths):
            raise PackingError(
                f"column {PARENTS!r}: expected one parent for each of the {len(lengths)} segments of row {number}, got "
                f"{len(parents)}"
            )
        if len(trained) % 3:
            raise PackingError(
                f"column {TRAINED!r}: expected three numbers for each run in row {number}, the document, the place at "
                f"which the run begins and the number of tokens, got {len(trained)} numbers"
            )


def _segments_of(columns: _Columns, parents: _Integers) -> TreeSegments:
    """Return the segments of all rows. If a row's segments are not trees, the error names the row."""
    try:
        return TreeSegments.from_arrays(_joined(columns[SEGMENT_LENGTHS]), parents)
    except PackingError:
        for number, row in enumerate(zip(columns[SEGMENT_LENGTHS], columns[PARENTS], strict=True)):
            with _naming(number):
                TreeSegments.from_arrays(*row)
        raise


@contextmanager
def _naming(row: int) -> Iterator[None]:
    """Context manager: within the block, errors name the row."""
    try:
        yield
    except PackingError as error:
        raise PackingError(f"{error} of row {row}") from None


def _checked_ends(ends: _Integers, sizes: _Sizes) -> _Integers:
    """Return the segments in which documents end, as indices in the batch."""
    wrong = (ends < 0) | (ends >= np.repeat(sizes.segments, sizes.documents))
    if wrong.any():
        document = int(wrong.argmax())
        row = int(np.searchsorted(sizes.first_document, document, side="right")) - 1
        raise PackingError(
            f"column {ENDS!r}: expected a segment from 0 to {sizes.segments[row] - 1}, got {ends[document]} for "
            f"{sizes.document_in_row(document)}"
        )
    counted: _Integers = ends + np.repeat(sizes.first_segment, sizes.documents)
    return counted


def _checked_runs(trained: _Integers, ends: _Integers, trees: TreeSegments, sizes: _Sizes) -> _Integers:
    """Return the runs that documents train on, int64 [runs, 3], with indices of documents in the batch."""
    documents = np.repeat(sizes.documents, sizes.runs)
    wrong = (trained[:, 0] < 0) | (trained[:, 0] >= documents)
    if wrong.any():
        run = int(wrong.argmax())
        row = int(np.searchsorted(np.cumsum(sizes.runs), run, side="right"))
        raise PackingError(
            f"column {TRAINED!r}: expected a document from 0 to {documents[run] - 1}, got {trained[run, 0]} in row "
            f"{row}"
        )
    counted = trained.copy()
    counted[:, 0] += np.repeat(sizes.first_document, sizes.runs)
    document, first, length = counted.T
    lengths = (trees.depths + np.diff(trees.begins))[ends]
    wrong = (first < 1) | (length < 1) | (length > lengths[document] - first)
    if wrong.any():
        run = int(wrong.argmax())
        raise PackingError(
            f"column {TRAINED!r}: expected runs of at least 1 token within tokens 1 to {lengths[document[run]] - 1}, "
            f"since no token predicts the first one, got {length[run]} tokens from token {first[run]} on for "
            f"{sizes.document_in_row(int(document[run]))}"
        )
    order = np.lexsort((first, document))
    document, first, length = counted[order].T
    overlaps = (document[1:] == document[:-1]) & (first[1:] < (first + length)[:-1])
    if overlaps.any():
        run = int(overlaps.argmax()) + 1
        raise PackingError(
            f"column {TRAINED!r}: expected runs that do not overlap, got a run from token {first[run]} on, within the "
            f"run before it, for {sizes.document_in_row(int(document[run]))}"
        )
    return counted


def _check_labels(labels: _Integers, training: _Integers, trees: TreeSegments, sizes: _Sizes) -> None:
    """Raise PackingError unless exactly those tokens have labels that some document trains on."""
    wrong = (labels != IGNORED_LABEL) != (training > 0)
    if wrong.any():
        token = int(wrong.argmax())
        row = int(np.searchsorted(sizes.first_segment, np.searchsorted(trees.begins, token, "right") - 1, "right")) - 1
        place = token - int(trees.begins[sizes.first_segment[row]])
        expected = "a label, since a" if training[token] else f"{IGNORED_LABEL}, since no"
        raise PackingError(
            f"column {TREE_LABELS!r}: expected {expected} document trains on the token, got {labels[token]} for token "
            f"{place} of row {row}"
        )


def _joined(values: Sequence[npt.NDArray[Any]]) -> _Integers:
    joined: _Integers = np.concatenate(values, dtype=np.int64, casting="unsafe")
    return joined
