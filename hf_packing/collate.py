"""Define `PackingCollator`, which flattens rows into one padding-free batch with segment borders.

Several columns can give the segment borders of a row. If a row has several such columns, the borders must be the same.
"""

import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hf_packing.columns import (
    ATTENTION_MASK,
    CU_SEQ_LENS,
    IGNORED_LABEL,
    INPUT_IDS,
    LABELS,
    LOSS_MASKS,
    MAX_LENGTHS,
    POSITION_IDS,
    SEGMENT_COLUMNS,
    SEQ_IDX,
    SEQ_LENGTHS,
    TOKEN_TYPE_IDS,
    find_unmasked_label,
)
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray

Row = Mapping[str, Any]
"""One row of a dataset, as a mapping from column name to value."""


@dataclass(frozen=True)
class PackingCollator:
    """Flatten packed rows, or plain documents, into one padding-free batch.

    The segments of a row are read from `seq_lengths`, from `position_ids` that restart at 0 at every segment, from
    `seq_idx` or from `cu_seq_lens_q` (`_k`). A row with several of these columns must have the same segments in all of
    them. A row with none of these columns is one document. The collator also uses `input_ids`, `labels` and
    `token_type_ids`, and drops all other columns. Loss masks must already be applied to the labels, as `pack` does.
    Otherwise a Trainer would train on prompts, since Trainer drops mask columns before the collator runs.

    Args:
        keep_first_labels: True to keep the label of a segment's first token, for models that predict the token itself
            instead of the next token, such as masked language models.

    Returns:
        A call with rows that have `tokens` tokens in `segments` segments returns a dict with these entries:
        input_ids, labels, position_ids: int64 [1, tokens]; labels are -100 at the first token of every segment, unless
            keep_first_labels is True.
        token_type_ids: int64 [1, tokens], if the rows have this column.
        cu_seq_lens_q, cu_seq_lens_k: int32 [segments + 1], cumulative segment lengths, starting with 0.
        max_length_q, max_length_k: int, the number of tokens in the longest segment.
        seq_idx: int32 [1, tokens], the index of each token's segment.

    Raises:
        PackingError: the rows have no tokens or no input_ids; lengths disagree; two columns give different segments;
            labels or token_type_ids are in some rows only; an attention_mask has a value other than 1; a loss mask
            contradicts the labels; or accelerate dispatches the batches.

    Example:
        >>> import hf_packing as hfp
        >>> batch = hfp.PackingCollator()([{"input_ids": [5, 6, 7], "seq_lengths": [2, 1]}, {"input_ids": [8, 9]}])
        >>> batch["position_ids"].tolist(), batch["cu_seq_lens_q"].tolist()
        ([[0, 1, 0, 0, 1]], [0, 2, 3, 5])
        >>> batch["labels"].tolist()
        [[-100, 6, -100, -100, 9]]
    """

    keep_first_labels: bool = False

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        _refuse_dispatched_batches(self)
        _check_rows(rows)
        tokens = [read_integers(INPUT_IDS, row, number) for number, row in enumerate(rows)]
        if not any(map(len, tokens)):
            raise PackingError(f"rows: expected at least one token, got {len(rows)} rows without tokens")
        input_ids = np.concatenate(tokens, dtype=np.int64, casting="unsafe")
        lengths = read_segment_lengths(rows, tokens)
        cu_seq_lens = np.zeros(len(lengths) + 1, dtype=np.int32)
        np.cumsum(lengths, out=cu_seq_lens[1:])
        begin = cu_seq_lens[:-1]
        labels = _read_token_column(LABELS, rows, tokens)
        labels = input_ids.copy() if labels is None else labels
        if not self.keep_first_labels:
            labels[begin] = IGNORED_LABEL
        position_ids = np.arange(len(input_ids), dtype=np.int32)  # packed rows are int32: compared fast
        position_ids -= np.repeat(begin, lengths)
        check_positions(rows, tokens, position_ids)
        seq_idx = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        token_types = _read_token_column(TOKEN_TYPE_IDS, rows, tokens)
        batch: dict[str, Any] = {
            INPUT_IDS: torch.from_numpy(input_ids)[None],
            LABELS: torch.from_numpy(labels)[None],
            POSITION_IDS: torch.from_numpy(position_ids.astype(np.int64))[None],
            **dict.fromkeys(CU_SEQ_LENS, torch.from_numpy(cu_seq_lens)),
            **dict.fromkeys(MAX_LENGTHS, int(lengths.max())),
            SEQ_IDX: torch.from_numpy(seq_idx)[None],
        }
        if token_types is not None:
            batch[TOKEN_TYPE_IDS] = torch.from_numpy(token_types)[None]
        return batch


def _check_rows(rows: Any) -> None:
    if not isinstance(rows, Sequence) or not all(isinstance(row, Mapping) for row in rows):
        raise PackingError(
            f"rows: expected a list of mappings with input_ids, got {type(rows).__name__}: {str(rows)[:80]}"
        )
    for number, row in enumerate(rows):
        _check_loss_masks(row, number)


def _check_loss_masks(row: Row, number: int) -> None:
    """Raise PackingError if a loss mask is not applied to the labels: prompts would then be trained on."""
    if not (names := [name for name in LOSS_MASKS if name in row]):
        return
    if LABELS not in row:
        raise PackingError(
            f"column {names[0]!r}: expected labels that are -100 where the mask is 0, but row {number} has no labels; "
            "pack() and map(strategy) apply the mask to the labels"
        )
    labels = read_integers(LABELS, row, number)
    masks = {name: np.asarray(row[name]) for name in names}
    for name, mask in masks.items():
        if mask.shape != labels.shape:
            raise PackingError(
                f"column {name!r}: expected {len(labels)} values in row {number}, one for each label, got shape "
                f"{mask.shape}"
            )
    if found := find_unmasked_label(labels, masks):
        name, token = found
        raise PackingError(
            f"column {name!r}: expected labels that are -100 where the mask is 0, but token {token} of row {number} "
            f"has the label {labels[token]}; apply the mask to the labels, or remove the mask"
        )


def _read_token_column(name: str, rows: Sequence[Row], tokens: list[IntArray]) -> IntArray | None:
    """Return a column's values in all rows, int64 [tokens of all rows], or None if no row has the column."""
    if not any(name in row for row in rows):
        return None
    values = [read_integers(name, row, number) for number, row in enumerate(rows)]
    for number, (given, ids) in enumerate(zip(values, tokens, strict=True)):
        _check_length(name, given, len(ids), number)
    return np.concatenate(values, dtype=np.int64, casting="unsafe")


def _refuse_dispatched_batches(collator: PackingCollator) -> None:
    """Raise PackingError if accelerate reads batches in one process and sends slices to the others.

    Accelerate does so by default for streams, and would also slice cu_seq_lens. This function does not import
    accelerate: if accelerate is loaded, the active loader shows whether the collator's batches are dispatched.
    """
    state, data_loader = (sys.modules.get(f"accelerate.{name}") for name in ("state", "data_loader"))
    if state is None or data_loader is None:
        return
    loader = state.GradientState().active_dataloader
    if isinstance(loader, data_loader.DataLoaderDispatcher) and _collator_of(loader.base_dataloader) is collator:
        raise PackingError(
            "dispatch_batches: expected False, got True, which is accelerate's default for streams. Accelerate would "
            "slice cu_seq_lens and other borders of a packed batch as if each row had one value. Pass "
            "accelerator_config={'dispatch_batches': False} to TrainingArguments, or "
            "dataloader_config=DataLoaderConfiguration(dispatch_batches=False) to your own Accelerator"
        )


def _collator_of(loader: Any) -> Any:
    """Return the collator of a DataLoader, without the wrapper by which Trainer removes columns."""
    return getattr(loader.collate_fn, "data_collator", loader.collate_fn)


def read_segment_lengths(rows: Sequence[Row], tokens: Sequence[IntArray]) -> IntArray:
    """Return the lengths of all segments in the rows, int64 [segments], in tokens.

    A row without tokens has no segments; any other row without a segment column is one segment. If a row with
    position_ids has another segment column, the position_ids are not read here: `check_positions` compares all rows.
    """
    numbered = enumerate(zip(rows, tokens, strict=True))
    return np.concatenate(
        [_segments_of_row(row, len(ids), number, compare_positions=False) for number, (row, ids) in numbered]
    )


def check_positions(rows: Sequence[Row], tokens: Sequence[IntArray], position_ids: IntArray) -> None:
    """Check that the position_ids of the rows match the rows' segments.

    Args:
        rows: packed rows or documents.
        tokens: the input_ids of each row, integers [tokens of the row].
        position_ids: int32 [tokens of all rows], the expected positions.

    Raises:
        PackingError: the position_ids of a row do not match; the message names the row.
    """
    having = [number for number, row in enumerate(rows) if POSITION_IDS in row]
    if len(having) == len(rows):
        given = [read_integers(POSITION_IDS, row, number) for number, row in enumerate(rows)]
        same_lengths = [*map(len, given)] == [*map(len, tokens)]
        if same_lengths and np.array_equal(np.concatenate(given) if len(given) > 1 else given[0], position_ids):
            return
    for number in having:
        _segments_of_row(rows[number], len(tokens[number]), number, compare_positions=True)


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
    try:
        values = _array_of_list(row[name]) if type(row[name]) is list else np.asarray(row[name])
    except ValueError as error:
        raise PackingError(
            f"column {name!r}: expected a list of integers, but NumPy rejects the values of row {number}: {error}"
        ) from error
    if values.ndim != 1 or (values.dtype.kind not in "iu" and values.size):
        raise PackingError(
            f"column {name!r}: expected a list of integers, got {values.dtype} of shape {values.shape} in row {number}"
        )
    return values


def _array_of_list(values: list[Any]) -> npt.NDArray[Any]:
    """Convert a list to an array as np.asarray does, but in half the time for a list of integers."""
    try:
        return np.frombuffer(array("q", values), dtype=np.int64)
    except (TypeError, ValueError, OverflowError):  # an empty list raises ValueError
        return np.asarray(values)


def _segments_of_row(row: Row, tokens: int, number: int, compare_positions: bool) -> IntArray:
    """Return the lengths of the row's segments, int64 [segments]; refuse a row whose segment columns disagree."""
    found = [name for name in SEGMENT_COLUMNS if name in row]
    if ATTENTION_MASK in row:
        _check_mask(row[ATTENTION_MASK], tokens, number)
    if not found:
        return np.array([tokens] if tokens else [], dtype=np.int64)
    first, *others = found
    lengths = _READERS[first](first, read_integers(first, row, number), tokens, number)
    for other in others:
        if compare_positions or other != POSITION_IDS:
            same = _READERS[other](other, read_integers(other, row, number), tokens, number)
            if not np.array_equal(lengths, same):
                raise PackingError(
                    f"column {other!r}: expected the same segments as column {first!r} in row {number}, with lengths "
                    f"{_shown(lengths)}, got lengths {_shown(same)}; remove the wrong column"
                )
    return lengths


def _from_lengths(name: str, lengths: IntArray, tokens: int, row: int) -> IntArray:
    if lengths.sum(dtype=np.int64) != tokens or (len(lengths) and lengths.min() < 1):
        raise PackingError(
            f"column {name!r}: expected positive lengths that add up to the {tokens} tokens of row {row}, "
            f"got {lengths.tolist()}"
        )
    return lengths.astype(np.int64)


def _from_cumulative_lengths(name: str, cu_seq_lens: IntArray, tokens: int, row: int) -> IntArray:
    lengths = np.diff(cu_seq_lens.astype(np.int64))
    if not len(cu_seq_lens) or cu_seq_lens[0] != 0 or cu_seq_lens[-1] != tokens or (lengths < 1).any():
        raise PackingError(
            f"column {name!r}: expected cumulative lengths that rise from 0 to {tokens}, the length of row {row}, "
            f"got {cu_seq_lens.tolist()}"
        )
    return lengths


def _from_segment_numbers(name: str, numbers: IntArray, tokens: int, row: int) -> IntArray:
    """Return segment lengths; a segment begins wherever the segment number changes."""
    _check_length(name, numbers, tokens, row)
    return np.diff(_begins(numbers, step=0), append=tokens)


def _from_positions(name: str, positions: IntArray, tokens: int, row: int) -> IntArray:
    """Return segment lengths; a segment begins wherever a position is not the previous position plus 1."""
    _check_length(name, positions, tokens, row)
    begin = _begins(positions.astype(np.int64, copy=False), step=1)  # differences of small integers wrap around
    if (elsewhere := positions[begin] != 0).any():
        token = int(begin[elsewhere.argmax()])
        raise PackingError(
            f"column {name!r}: expected positions that restart at 0 at every segment, got {positions[token]} at token "
            f"{token} of row {row}. Remove the column: positions are computed from seq_lengths, and a model whose "
            "positions start at another number adds that number itself"
        )
    return np.diff(begin, append=tokens)


_READERS: dict[str, Callable[[str, IntArray, int, int], IntArray]] = {
    SEQ_LENGTHS: _from_lengths,
    **dict.fromkeys(CU_SEQ_LENS, _from_cumulative_lengths),
    SEQ_IDX: _from_segment_numbers,
    POSITION_IDS: _from_positions,
}
"""For each of SEGMENT_COLUMNS, a function (name, values, tokens of the row, row number) -> segment lengths."""


def _begins(values: IntArray, step: int) -> IntArray:
    """Return index 0 and the index of every value that differs from the preceding value plus `step`."""
    inside = np.flatnonzero(np.diff(values) != step) + 1
    return np.concatenate([np.zeros(min(len(values), 1), dtype=np.int64), inside])


def _check_length(name: str, values: IntArray, tokens: int, row: int) -> None:
    if len(values) != tokens:
        raise PackingError(
            f"column {name!r}: expected {tokens} values in row {row}, one for each token, got {len(values)}"
        )


def _check_mask(mask: Any, tokens: int, row: int) -> None:
    """Refuse a mask with other values than 1: a 0 marks padding, and larger values mark documents of a packed row."""
    values = np.asarray(mask)
    if values.shape != (tokens,):
        raise PackingError(
            f"column 'attention_mask': expected shape ({tokens},) in row {row}, a 1 for each token, got {values.shape}"
        )
    if not values.all():
        raise PackingError(f"column 'attention_mask': expected documents without padding, got a 0 in row {row}")
    if (other := values != 1).any():
        raise PackingError(
            f"column 'attention_mask': expected only ones, got a {values[other.argmax()]} in row {row}, which marks "
            "several documents; give the lengths of documents in a column 'seq_lengths'"
        )


def _shown(lengths: IntArray) -> str:
    listed = lengths[:8].tolist()
    return f"{listed}" if len(listed) == len(lengths) else f"{listed[:-1]} and {len(lengths) - 7} more"
