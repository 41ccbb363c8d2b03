"""`PackingCollator`: flatten rows into one batch, with the borders of its segments beside it."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
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
    SEQ_IDX,
    TOKEN_TYPE_IDS,
)
from hf_packing.data.loss_masks import find_unmasked_label
from hf_packing.data.segments import Row, check_positions, read_integers, read_segment_lengths
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray


@dataclass(frozen=True)
class PackingCollator:
    """Flatten packed rows, or plain documents, into one padding-free batch.

    The segments of a row are read from `seq_lengths`, from `position_ids` that restart at 0 at every segment, from
    `seq_idx` or from `cu_seq_lens_q` (`_k`), whichever the row has; several of them must agree. A row without any is
    one document. Columns other than these, `input_ids`, `labels` and `token_type_ids` are not passed on. Loss masks
    must have been applied to the labels: `pack` does so, while Trainer drops them before a collator sees them, and
    would train on prompts.

    Args:
        keep_first_labels: whether the first token of a segment keeps its label, for models whose logits are about the
            token itself and not about the next one, such as masked language models.

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
            batches that accelerate dispatches.

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
        if ATTENTION_MASK in row and not np.asarray(row[ATTENTION_MASK]).all():
            raise PackingError(f"column 'attention_mask': expected documents without padding, row {number} has a 0")
        _check_loss_masks(row, number)


def _check_loss_masks(row: Row, number: int) -> None:
    """Raise if a loss mask was not applied to the labels: a batch cannot carry it, so prompts would be trained on."""
    if not (names := [name for name in LOSS_MASKS if name in row]):
        return
    if LABELS not in row:
        raise PackingError(
            f"column {names[0]!r}: expected labels beside it that are -100 where it is 0, row {number} has no labels; "
            "pack() and map(strategy) apply it"
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
        if len(given) != len(ids):
            raise PackingError(
                f"column {name!r}: expected {len(ids)} values in row {number}, as many as input_ids, got {len(given)}"
            )
    return np.concatenate(values, dtype=np.int64, casting="unsafe")


def _refuse_dispatched_batches(collator: PackingCollator) -> None:
    """Raise if accelerate reads batches in one process and cuts them up for the others, its default for streams.

    It would cut borders, too, as if they had a value for each row. Accelerate is not imported here: if it is loaded,
    its active loader shows whether it dispatches the batches of this collator.

    Raises:
        PackingError: it dispatches them.
    """
    state, data_loader = (sys.modules.get(f"accelerate.{name}") for name in ("state", "data_loader"))
    if state is None or data_loader is None:
        return
    loader = state.GradientState().active_dataloader
    if isinstance(loader, data_loader.DataLoaderDispatcher) and _collator_of(loader.base_dataloader) is collator:
        raise PackingError(
            "dispatch_batches: expected False, since accelerate would cut cu_seq_lens and other borders of a packed "
            "batch as if they had a value for each row, got True, its default for streams; give TrainingArguments "
            "accelerator_config={'dispatch_batches': False}, or an Accelerator of your own "
            "dataloader_config=DataLoaderConfiguration(dispatch_batches=False)"
        )


def _collator_of(loader: Any) -> Any:
    """Return the collator of a DataLoader, which Trainer wraps to remove columns."""
    return getattr(loader.collate_fn, "data_collator", loader.collate_fn)
