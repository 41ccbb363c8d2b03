"""`PackingCollator`: flatten rows into one padding-free batch with segment borders.

Segment borders are read from any column that gives them; if several columns do, they must agree.
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
"""One row of a dataset, by column name."""


@dataclass(frozen=True)
class PackingCollator:
    """Flatten packed rows, or plain documents, into one padding-free batch.

    The segments of a row are read from `seq_lengths`, from `position_ids` that restart at 0 at every segment, from
    `seq_idx` or from `cu_seq_lens_q` (`_k`), whichever the row has; if it has several, they must agree. A row with none
    of them is one document. Columns other than these, `input_ids`, `labels` and `token_type_ids` are dropped. Loss
    masks must already be applied to the labels, as `pack` does. Trainer drops mask columns before the collator sees
    them, and would then train on prompts.

    Args:
        keep_first_labels: whether the first token of a segment keeps its label, for models that predict the
            token itself instead of the next one, such as masked language models.

    Returns, when called on a list of rows with `tokens` tokens in `segments` segments, a dict of
        input_ids, labels, position_ids: int64 [1, tokens]; labels are -100 at the first token of every segment, unless
            first labels are kept;
        token_type_ids: int64 [1, tokens], if the rows have them;
        cu_seq_lens_q, cu_seq_lens_k: int32 [segments + 1], where segments begin and end;
        max_length_q, max_length_k: int, tokens of the longest segment;
        seq_idx: int32 [1, tokens], the segment of every token.

    Raises:
        PackingError: rows without input_ids or without a token, lengths that disagree, columns with different segments,
            a column in some rows only, an attention_mask of anything but ones, a loss mask that contradicts the labels,
            batches dispatched by accelerate.

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
            raise PackingError(f"rows: expected at least one token, got {len(rows)} rows without any")
        input_ids = np.concatenate(tokens, dtype=np.int64, casting="unsafe")
        lengths = read_segment_lengths(rows, tokens)
        cu_seq_lens = np.zeros(len(lengths) + 1, dtype=np.int32)
        np.cumsum(lengths, out=cu_seq_lens[1:])
        begin = cu_seq_lens[:-1]
        labels = _read_token_column(LABELS, rows, tokens)
        labels = input_ids.copy() if labels is None else labels
        if not self.keep_first_labels:
            labels[begin] = IGNORED_LABEL
        position_ids = np.arange(len(input_ids), dtype=np.int32)  # the dtype of packed rows, to compare them quickly
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
    """Raise if a loss mask was not applied to the labels: a batch cannot carry it, so prompts would be trained on."""
    if not (names := [name for name in LOSS_MASKS if name in row]):
        return
    if LABELS not in row:
        raise PackingError(
            f"column {names[0]!r}: expected labels that are -100 where it is 0, row {number} has no labels; pack() and "
            "map(strategy) apply the mask to the labels"
        )
    labels = read_integers(LABELS, row, number)
    masks = {name: np.asarray(row[name]) for name in names}
    for name, mask in masks.items():
        if mask.shape != labels.shape:
            raise PackingError(
                f"column {name!r}: expected {len(labels)} values in row {number}, as many as labels, got shape "
                f"{mask.shape}"
            )
    if found := find_unmasked_label(labels, masks):
        name, token = found
        raise PackingError(
            f"column {name!r}: expected labels that are -100 where it is 0, token {token} of row {number} has the "
            f"label {labels[token]}; apply the mask to the labels, or remove it"
        )


def _read_token_column(name: str, rows: Sequence[Row], tokens: list[IntArray]) -> IntArray | None:
    """Return a column with one integer for each token, int64 [tokens of all rows]; None if no row has it."""
    if not any(name in row for row in rows):
        return None
    values = [read_integers(name, row, number) for number, row in enumerate(rows)]
    for number, (given, ids) in enumerate(zip(values, tokens, strict=True)):
        _check_length(name, given, len(ids), number)
    return np.concatenate(values, dtype=np.int64, casting="unsafe")


def _refuse_dispatched_batches(collator: PackingCollator) -> None:
    """Raise if accelerate reads batches in one process and slices them for the others, its default for streams.

    Accelerate would also slice cu_seq_lens, as if it had a value for each row. Accelerate is not imported here: if it
    is loaded, its active loader shows whether it dispatches the batches of this collator.
    """
    state, data_loader = (sys.modules.get(f"accelerate.{name}") for name in ("state", "data_loader"))
    if state is None or data_loader is None:
        return
    loader = state.GradientState().active_dataloader
    if isinstance(loader, data_loader.DataLoaderDispatcher) and _collator_of(loader.base_dataloader) is collator:
        raise PackingError(
            "dispatch_batches: expected False, got True, accelerate's default for streams; accelerate would slice "
            "cu_seq_lens and other borders of a packed batch as if they had a value for each row. Pass "
            "accelerator_config={'dispatch_batches': False} to TrainingArguments, or "
            "dataloader_config=DataLoaderConfiguration(dispatch_batches=False) to an Accelerator of your own"
        )


def _collator_of(loader: Any) -> Any:
    """Return the collator of a DataLoader; Trainer wraps the collator to remove columns."""
    return getattr(loader.collate_fn, "data_collator", loader.collate_fn)


def read_segment_lengths(rows: Sequence[Row], tokens: Sequence[IntArray]) -> IntArray:
    """Return the lengths of all segments of rows: int64 [segments], tokens. A row without tokens has no segments.

    A row without a segment column is one segment. position_ids beside another segment column are not read here:
    `check_positions` compares those of all rows at once.
    """
    numbered = enumerate(zip(rows, tokens, strict=True))
    return np.concatenate(
        [_segments_of_row(row, len(ids), number, compare_positions=False) for number, (row, ids) in numbered]
    )


def check_positions(rows: Sequence[Row], tokens: Sequence[IntArray], position_ids: IntArray) -> None:
    """Raise if the position_ids of rows do not match their segments.

    Args:
        rows: packed rows or documents.
        tokens: integers [tokens], the input_ids of each row.
        position_ids: int32 [tokens of all rows], the expected positions.

    Raises:
        PackingError: position_ids that do not match; the message names the row.
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
        name: name of the column.
        row: the row, by column name.
        number: number of the row, for error messages.

    Returns:
        Integers [values]; any dtype if the column is empty.

    Raises:
        PackingError: a missing column, or one that is not a list of integers.
    """
    if name not in row:
        raise PackingError(
            f"column {name!r}: expected this column in every row, row {number} has {', '.join(row) or 'none'}"
        )
    try:
        values = _array_of_list(row[name]) if type(row[name]) is list else np.asarray(row[name])
    except ValueError as error:
        raise PackingError(
            f"column {name!r}: expected a list of integers, row {number} has values that NumPy rejects: {error}"
        ) from error
    if values.ndim != 1 or (values.dtype.kind not in "iu" and values.size):
        raise PackingError(
            f"column {name!r}: expected a list of integers, row {number} has {values.dtype} of shape {values.shape}"
        )
    return values


def _array_of_list(values: list[Any]) -> npt.NDArray[Any]:
    """Convert a list as np.asarray does, in half the time if it has integers."""
    try:
        return np.frombuffer(array("q", values), dtype=np.int64)
    except (TypeError, ValueError, OverflowError):  # an empty list raises ValueError
        return np.asarray(values)


def _segments_of_row(row: Row, tokens: int, number: int, compare_positions: bool) -> IntArray:
    """Return int64 [segments of the row]. All columns that say where segments are must agree."""
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
                    f"column {other!r}: expected the segments of {first!r} in row {number}, with lengths "
                    f"{_shown(lengths)}, got lengths {_shown(same)}; remove the column that is wrong"
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
            f"column {name!r}: expected cumulative lengths from 0, rising to the {tokens} tokens of row {row}, "
            f"got {cu_seq_lens.tolist()}"
        )
    return lengths


def _from_segment_numbers(name: str, numbers: IntArray, tokens: int, row: int) -> IntArray:
    """A segment begins wherever the number changes."""
    _check_length(name, numbers, tokens, row)
    return np.diff(_begins(numbers, step=0), append=tokens)


def _from_positions(name: str, positions: IntArray, tokens: int, row: int) -> IntArray:
    """A segment begins wherever a position is not one more than the one before; that position must be 0."""
    _check_length(name, positions, tokens, row)
    begin = _begins(positions.astype(np.int64, copy=False), step=1)  # small and unsigned integers wrap around
    if (elsewhere := positions[begin] != 0).any():
        token = int(begin[elsewhere.argmax()])
        raise PackingError(
            f"column {name!r}: expected positions that restart at 0 at every segment, row {row} has {positions[token]} "
            f"at token {token}; remove the column: positions are computed from seq_lengths, and models whose "
            "positions start at another number add that number themselves"
        )
    return np.diff(begin, append=tokens)


_READERS: dict[str, Callable[[str, IntArray, int, int], IntArray]] = {
    SEQ_LENGTHS: _from_lengths,
    **dict.fromkeys(CU_SEQ_LENS, _from_cumulative_lengths),
    SEQ_IDX: _from_segment_numbers,
    POSITION_IDS: _from_positions,
}
"""Convert each of SEGMENT_COLUMNS to segment lengths, given (name, values, tokens of the row, number of the row)."""


def _begins(values: IntArray, step: int) -> IntArray:
    """Return index 0 and the indices of all values that are not the value before plus `step`."""
    inside = np.flatnonzero(np.diff(values) != step) + 1
    return np.concatenate([np.zeros(min(len(values), 1), dtype=np.int64), inside])


def _check_length(name: str, values: IntArray, tokens: int, row: int) -> None:
    if len(values) != tokens:
        raise PackingError(
            f"column {name!r}: expected {tokens} values in row {row}, as many as input_ids, got {len(values)}"
        )


def _check_mask(mask: Any, tokens: int, row: int) -> None:
    """Raise unless the mask is all ones: zeros mean padding, and larger numbers mean rows that another tool packed."""
    values = np.asarray(mask)
    if values.shape != (tokens,):
        raise PackingError(
            f"column 'attention_mask': expected {tokens} ones in row {row}, one for each token, got shape "
            f"{values.shape}"
        )
    if not values.all():
        raise PackingError(f"column 'attention_mask': expected documents without padding, row {row} has a 0")
    if (other := values != 1).any():
        raise PackingError(
            f"column 'attention_mask': expected ones, row {row} has a {values[other.argmax()]}, which means several "
            "documents; give the lengths of documents as seq_lengths"
        )


def _shown(lengths: IntArray) -> str:
    listed = lengths[:8].tolist()
    return f"{listed}" if len(listed) == len(lengths) else f"{listed[:-1]} and {len(lengths) - 7} more"
