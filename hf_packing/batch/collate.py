"""`PackingCollator` concatenates rows into one batch without padding, and adds the lengths of the segments.

A segment is a document, or a part of a document, in a row. All columns that describe a row's segments must agree.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hf_packing.batch.loader import refuse_dispatched_batches
from hf_packing.batch.segments import (
    Batch,
    BatchSegments,
    check_length,
    check_mask,
    check_shapes,
    columns_of,
    fill_up,
    lengths_in_column,
    number_segments,
)
from hf_packing.batch.trees import MARKS_OF_TREES, check_tree_row, collate_trees
from hf_packing.checks import check_whole_number, check_whole_numbers, expect
from hf_packing.columns import (
    ATTENTION_MASK,
    COPIED_SEGMENT,
    IGNORED_LABEL,
    INPUT_IDS,
    KNOWN_COLUMNS,
    LABELS,
    LOSS_WEIGHT,
    LOSS_WEIGHTS,
    PARENTS,
    SEGMENT_COLUMNS,
    SEQ_IDX,
    TOKEN_TYPE_IDS,
    TREE_COLUMNS,
    TREE_INPUT_IDS,
    TREE_LABELS,
    apply_loss_masks,
    loss_masks_in,
    spread_weight,
)
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import Array, IntArray, offsets_of
from hf_packing.rows.packing_trace import LOST_FIRST_LABELS

Row = Mapping[str, Any]
"""One row of a dataset, as a mapping from column name to value."""


@dataclass(frozen=True)
class PackingCollator:
    """A data collator that concatenates packed rows, or plain documents, into one batch without padding.

    A segment is a document, or a part of one, in a row. The segments of a row are read from `seq_lengths`, `seq_idx`,
    `cu_seq_lens_q`, `cu_seq_lens_k` or from `position_ids`, which restart at 0 at every segment. If a row has several
    of these columns, all must give the same segments. If a row has none of them, the row is one document; it is an
    error if a DataLoader has read it from a dataset that `pack` returned. The collator also uses `input_ids`, `labels`,
    `token_type_ids`, and the weights of labels in the loss, `loss_weights` or `loss_weight`. Other columns with one
    number for each token are joined in the same way, and all further columns are dropped. Loss masks must be applied to
    the labels, as in the rows that `pack` returns, since Trainer drops mask columns before the collator runs.

    With `tokens` and `max_segments`, every batch has the same shapes, so that torch.compile compiles a model once. One
    segment without labels fills the batch up to `tokens`. It repeats the first token of the batch, since a pad token
    changes the result of some models, and its positions are not larger than those of the longest document.

    With `align_tokens`, the number of tokens in the batch is a multiple of this number, as FP8 and tensor parallelism
    need it. One segment at the end fills the batch up, with the same tokens and positions. Filled tokens have no labels
    and seq_idx -1.

    Rows of trees, which `pack(..., share_prefixes=True)` returns, have columns of their own, and make batches of their
    own. In such a row, a prefix that documents share stands once. The rest of a document is in segments, each of which
    follows its parent.

    Args:
        keep_first_labels: True to keep the label of a segment's first token, for models that predict the token itself
            instead of the next token, such as masked language models.
        tokens: number of tokens in every batch; None for as many as the rows have. Pass it with max_segments.
        max_segments: number of segments in every batch, including the one that fills the batch and empty segments at
            the end; at least 2.
        align_tokens: the number of tokens in the batch is a multiple of this number; not for rows of trees.

    Returns:
        A call with a list of rows returns this dict, in which `tokens` and `segments` are totals over all rows:
        input_ids, labels, position_ids: int64 [1, tokens]; labels are -100 at the first token of every segment, unless
            keep_first_labels is True.
        token_type_ids: int64 [1, tokens], if the rows have this column.
        loss_weights: float64 [1, tokens], if any label has a weight other than 1.
        further columns of numbers: int64, float32 or bool [1, tokens]; 0 for tokens that only fill up the batch.
        cu_seq_lens_q, cu_seq_lens_k: int32 [segments + 1], cumulative segment lengths, starting with 0. With
            max_segments, int32 [max_segments + 1]: after the last segment, all values are `tokens`.
        max_length_q, max_length_k: int, the number of tokens in the longest segment, or `tokens` if this is given.
        seq_idx: int32 [1, tokens], the index of each token's segment; -1 for tokens that only fill up the batch, and
            less for the segments of a row that is only a copy, whose own seq_idx is less than -1.
        Rows of trees make this dict, which has neither labels nor cu_seq_lens, so that no model computes a loss of its
        own; use `compute_loss`:
        input_ids, position_ids: int64 [1, tokens]; a position is the number of tokens before it in its documents.
        token_type_ids, loss_weights and further columns of numbers: [1, tokens], as above.
        segment_lengths, parents: int64 [segments], the number of tokens and the parent of each segment; -1 for none.
        ends: int64 [documents], the segment in which each document ends.
        trained: int64 [runs, 3], the tokens to train on: document, place in the document, number of tokens.
        tree_labels: int64 [1, tokens], the label of each token that any document trains on, and otherwise -100.

    Raises:
        PackingError: the rows have no tokens or no input_ids; the columns of a row have different lengths or give
            different segments; only some rows have labels, token_type_ids or another column of numbers; a weight is not
            finite; an attention_mask has a value other than 1; a loss mask contradicts the labels; the rows have more
            than `tokens` tokens, or more segments than max_segments; accelerate splits batches between processes
            (dispatch_batches); or only some rows are rows of trees, they lack a column or have columns that contradict
            each other, or an argument does not apply to them.

    Example:
        >>> import hf_packing as hfp
        >>> batch = hfp.PackingCollator()([{"input_ids": [5, 6, 7], "seq_lengths": [2, 1]}, {"input_ids": [8, 9]}])
        >>> batch["position_ids"].tolist(), batch["cu_seq_lens_q"].tolist()
        ([[0, 1, 0, 0, 1]], [0, 2, 3, 5])
        >>> batch["labels"].tolist()
        [[-100, 6, -100, -100, 9]]
    """

    keep_first_labels: bool = False
    tokens: int | None = None
    max_segments: int | None = None
    align_tokens: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        check_whole_number("align_tokens", self.align_tokens)
        if self.tokens is not None or self.max_segments is not None:
            tokens, _ = check_shapes(self.tokens, self.max_segments)
            if tokens % self.align_tokens:
                raise PackingError(f"tokens: expected a multiple of align_tokens={self.align_tokens}, got {tokens}")

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        refuse_dispatched_batches(self)
        if not isinstance(rows, Sequence) or not all(issubclass(kind, Mapping) for kind in set(map(type, rows))):
            raise PackingError(
                f"rows: expected a list of mappings with input_ids, got {type(rows).__name__}: {str(rows)[:80]}"
            )
        are_trees = not MARKS_OF_TREES.isdisjoint(set().union(*rows))
        batch = self._batch_of_trees(rows) if are_trees else self._flat_batch(rows)
        return batch if torch.utils.data.get_worker_info() is None else WorkerBatch(batch)

    def _batch_of_trees(self, rows: Sequence[Row]) -> dict[str, Any]:
        causal = "for rows of trees, which are for models that predict the next token"
        expect(False, causal, keep_first_labels=self.keep_first_labels)
        expect(None, "for rows of trees, which have no fixed shapes", tokens=self.tokens)
        expect(1, "for rows of trees", align_tokens=self.align_tokens)
        for number, row in enumerate(rows):
            check_tree_row(row, number)
        columns = {name: _read_column(name, rows) for name in TREE_COLUMNS}
        batch, tokens = collate_trees(columns), columns[TREE_INPUT_IDS]
        weights = _weights_of(rows, tokens, batch[TREE_LABELS][0].numpy())
        return {**batch, **weights, **_passed_on(rows, tokens)}

    def _flat_batch(self, rows: Sequence[Row]) -> dict[str, Any]:
        tokens = _read_column(INPUT_IDS, rows)
        if not any(map(len, tokens)):
            raise PackingError(f"rows: expected at least one token, got {len(rows)} rows without tokens")
        input_ids = np.concatenate(tokens, dtype=np.int64, casting="unsafe")
        lengths = read_segment_lengths(rows, tokens)
        begin = offsets_of(lengths)[:-1]
        labels = _labels_of(rows, tokens)
        if self.keep_first_labels:
            refuse_missing_first_labels(input_ids, labels, begin[lengths > 1])
        else:
            labels[begin] = IGNORED_LABEL
        is_copy = [next(iter(row.get(SEQ_IDX, ())), 0) <= COPIED_SEGMENT for row in rows]
        numbers = number_segments(~np.repeat(is_copy, [*map(len, tokens)])[begin])
        batch: dict[str, Any] = {
            INPUT_IDS: torch.from_numpy(input_ids[None]),
            LABELS: torch.from_numpy(labels[None]),
            **columns_of(BatchSegments(lengths.tolist(), numbers, first_labels=self.keep_first_labels)),
            **_weights_of(rows, tokens, labels),
            **_passed_on(rows, tokens),
        }
        return fill_up(batch, self.align_tokens, self.tokens, self.max_segments)


def _labels_of(rows: Sequence[Row], tokens: Sequence[IntArray]) -> IntArray:
    """Return the labels of the rows, int64 [tokens of all rows], which are the tokens if no row has labels.

    Raises:
        PackingError: a loss mask is not applied to the labels, so that masked tokens would be trained on.
    """
    labels = _read_column(LABELS, rows) if any(LABELS in row for row in rows) else tokens
    joined = _join(LABELS, labels, tokens)
    for number, (row, given) in enumerate(zip(rows, labels, strict=True)):
        for name in loss_masks_in(row):
            if LABELS not in row:
                raise PackingError(
                    f"column {name!r}: expected labels that are -100 where the mask is 0, but row {number} has no "
                    "labels; pack() and map(strategy) apply the mask to the labels"
                )
            mask = np.asarray(row[name]).ravel()
            check_length(name, mask, len(given), number)
            for token in np.flatnonzero(apply_loss_masks(given, {name: mask}) != given)[:1]:
                raise PackingError(
                    f"column {name!r}: expected labels that are -100 where the mask is 0, but token {token} of row "
                    f"{number} has the label {given[token]}; apply the mask to the labels, or remove the mask"
                )
    return joined


def _weights_of(rows: Sequence[Row], tokens: Sequence[IntArray], labels: IntArray) -> dict[str, torch.Tensor]:
    """Return the weights of the labels of the rows, float64 [1, tokens of all rows]; none if all labels have weight 1.

    Raises:
        PackingError: a weight is no finite number, or only some rows have weights.
    """
    given = [spread_weight(row).get(LOSS_WEIGHTS) for row in rows]
    if all(each is None for each in given):
        return {}
    read = [*map(numbers_in, given)]
    for number, values in enumerate(read):
        if values is None or not np.isfinite(values).all():
            raise PackingError(
                f"column {LOSS_WEIGHTS!r} or {LOSS_WEIGHT!r}: expected one of them, with finite numbers, in every row, "
                f"got {str(given[number])[:80]} in row {number}, which begins with the tokens "
                f"{tokens[number][:8].tolist()}"
            )
    joined = _join(LOSS_WEIGHTS, read, tokens, np.float64)
    if (joined[labels != IGNORED_LABEL] == 1).all():
        return {}
    exact = torch.from_numpy(joined[None])
    return {LOSS_WEIGHTS: exact.float() if torch.backends.mps.is_available() else exact}


_UNLIKELY = 20.0
"""Labels are lost if it would be less likely than exp(-20) that no segment has one at its first token."""


def refuse_missing_first_labels(input_ids: IntArray, labels: IntArray, begin: IntArray) -> None:
    """Raise PackingError if no segment has a label at its first token, though many have one at the second.

    Segments that all begin with the same token, such as [CLS], need no label there.

    Args:
        input_ids: integers [tokens].
        labels: integers [tokens].
        begin: where the segments of several tokens begin.
    """
    if not len(begin) or (labels[begin] != IGNORED_LABEL).any() or len(np.unique(input_ids[begin])) < 2:
        return
    share = min(float(np.mean(labels[begin + 1] != IGNORED_LABEL)), 0.999)
    if -len(begin) * np.log1p(-share) > _UNLIKELY:
        found = f"{len(begin)} segments without one, of which {share:.0%} have one at the second token"
        raise PackingError(LOST_FIRST_LABELS.format(found))


def is_tree_batch(batch: Batch) -> bool:
    """Return whether a batch of a `PackingCollator` is made of rows of trees."""
    return PARENTS in batch


def read_integers(name: str, row: Row, number: int) -> IntArray:
    """Return a column of a row as a NumPy array; Python lists and torch tensors are converted.

    Args:
        name: the column's name.
        row: the row, as a mapping from column name to value.
        number: the row's number, for error messages.

    Returns:
        Integers [values]; an empty column may have any dtype.

    Raises:
        PackingError: the row does not have the column, or the column is not a list of integers.
    """
    if name not in row:
        raise PackingError(
            f"column {name!r}: expected this column in every row; columns of row {number}: {', '.join(row) or 'none'}"
        )
    return check_whole_numbers(f"column {name!r}, row {number}", row[name])


def _read_column(name: str, rows: Sequence[Row]) -> list[IntArray]:
    """Return the integers of each row in a column that all rows must have."""
    return [read_integers(name, row, number) for number, row in enumerate(rows)]


def _join(name: str, values: Sequence[Any], tokens: Sequence[IntArray], dtype: Any = np.int64) -> Array:
    """Return the values of all rows, of which each must have as many as tokens."""
    for number, (given, ids) in enumerate(zip(values, tokens, strict=True)):
        check_length(name, given, len(ids), number)
    return np.concatenate(values, dtype=dtype, casting="unsafe")


def _passed_on(rows: Sequence[Row], tokens: Sequence[IntArray]) -> dict[str, torch.Tensor]:
    """Return token_type_ids, and the columns of numbers that nothing here knows, such as weights of the tokens.

    Columns of anything else, such as texts or lists of lists, are dropped.

    Args:
        rows: packed rows, rows of trees or documents.
        tokens: the tokens of each row.

    Returns:
        Tensors [1, tokens of all rows], by column name: int64, float32 or bool.

    Raises:
        PackingError: a row does not have one number for each token in a column that has numbers in other rows.
    """
    names, found = set().union(*rows), {}
    if TOKEN_TYPE_IDS in names:
        found[TOKEN_TYPE_IDS] = _join(TOKEN_TYPE_IDS, _read_column(TOKEN_TYPE_IDS, rows), tokens)
    for name in sorted(names - KNOWN_COLUMNS):
        of_rows = [numbers_in(row.get(name)) for row in rows]
        if any(values is not None for values in of_rows):
            kinds = {values.dtype.kind for values in of_rows if values is not None and len(values)}
            dtype = np.float32 if "f" in kinds else np.bool_ if kinds == {"b"} else np.int64
            found[name] = _join(name, [() if values is None else values for values in of_rows], tokens, dtype)
    return {name: torch.from_numpy(values[None]) for name, values in found.items()}


def numbers_in(values: Any) -> Array | None:
    """Return a list of numbers or booleans as a NumPy array; None for anything else."""
    try:
        found = np.asarray(values)
    except ValueError:  # lists of different lengths
        return None
    return found if found.ndim == 1 and found.dtype.kind in "iufb" else None


def read_segment_lengths(rows: Sequence[Row], tokens: Sequence[IntArray]) -> IntArray:
    """Return the lengths of all segments in the rows, int64 [segments], in tokens.

    A row without tokens has no segments; any other row without segment columns is one segment.

    Raises:
        PackingError: the columns of a row disagree.
    """
    numbered = enumerate(zip(rows, tokens, strict=True))
    return np.concatenate([_segments_of_row(row, len(ids), number) for number, (row, ids) in numbered])


def _segments_of_row(row: Row, tokens: int, number: int) -> IntArray:
    """Return a row's segment lengths, int64 [segments]; raise PackingError if the row's segment columns disagree."""
    if ATTENTION_MASK in row:
        check_mask(row[ATTENTION_MASK], tokens, number)
    found = [name for name in SEGMENT_COLUMNS if name in row]
    if not found:
        return np.array([tokens] if tokens else [], dtype=np.int64)
    first, *others = found
    lengths = lengths_in_column(first, read_integers(first, row, number), tokens, number)
    for other in others:
        same = lengths_in_column(other, read_integers(other, row, number), tokens, number)
        if not np.array_equal(lengths, same):
            raise PackingError(
                f"column {other!r}: expected segments of lengths {lengths.tolist()} in row {number}, as in column "
                f"{first!r}, got lengths {same.tolist()}; remove the wrong column"
            )
    return lengths


class WorkerBatch(dict[str, Any]):
    """A dict of tensors that are pickled as bytes; the unpickled copy is a plain dict with equal tensors.

    Otherwise, torch moves every tensor to its own shared memory, and the main process asks the worker for each file
    descriptor. For the tensors of a batch, this takes longer than to read and collate its rows
    (`python benchmarks/loader.py`).
    """

    def __reduce__(self) -> tuple[Any, ...]:
        arrays = {name: value.numpy() for name, value in self.items() if isinstance(value, torch.Tensor)}
        return _restored, ({**self, **arrays},)


def _restored(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch in which arrays are tensors again."""
    return {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in batch.items()}
