"""Rows -> one flat batch with the borders of its segments beside it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_packing.arrow.loss_masks import IGNORED_LABEL, first_unmasked, masks_among
from hf_packing.arrow.segments_of_rows import Row, check_positions, integers, segment_lengths
from hf_packing.dispatched import refuse_dispatched_batches
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray


@dataclass(frozen=True)
class PackingCollator:
    """Flatten packed rows, or plain documents, into one padding-free batch.

    A row's segments are read from `seq_lengths`, from `position_ids` that restart at 0 at every segment, from `seq_idx`
    or from `cu_seq_lens_q` (`_k`): whichever it has, and where it has several, they must agree. A row without any is
    one document. Other columns than these, `input_ids`, `labels` and `token_type_ids` are not passed on. Trainer drops
    loss masks before a collator sees them, so that prompts would be trained on: `pack` applies them.

    Args:
        keep_first_labels: whether the first token of a segment keeps its label, for models whose logits are about the
            token itself and not about the next one, such as masked language models.

    Returns, when called on a list of rows with `tokens` tokens in `segments` segments, a dict of
        input_ids, labels, position_ids: int64 [1, tokens]; labels are -100 at the first token of every segment, unless
            first labels are kept;
        token_type_ids: int64 [1, tokens], where rows have them;
        cu_seq_lens_q, cu_seq_lens_k: int32 [segments + 1], where segments begin and end;
        max_length_q, max_length_k: int, tokens of the longest segment;
        seq_idx: int32 [1, tokens], the segment of every token.

    Raises:
        PackingError: rows without input_ids or without a token, lengths that disagree, columns that tell of other
            segments, a column in some rows only, an attention_mask of anything but ones, a loss mask that labels do not
            agree with, batches that accelerate dispatches.

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
        refuse_dispatched_batches(self)
        check_rows(rows)
        tokens = [integers("input_ids", row, number) for number, row in enumerate(rows)]
        if not any(map(len, tokens)):
            raise PackingError(f"rows: expected at least one token, got {len(rows)} rows without any")
        input_ids = np.concatenate(tokens, dtype=np.int64, casting="unsafe")
        lengths = segment_lengths(rows, tokens)
        cu_seq_lens = np.zeros(len(lengths) + 1, dtype=np.int32)
        np.cumsum(lengths, out=cu_seq_lens[1:])
        begin = cu_seq_lens[:-1]
        labels = of_tokens("labels", rows, tokens)
        labels = input_ids.copy() if labels is None else labels
        if not self.keep_first_labels:
            labels[begin] = IGNORED_LABEL
        position_ids = np.arange(len(input_ids), dtype=np.int32)  # as most rows have them
        position_ids -= np.repeat(begin, lengths)
        check_positions(rows, tokens, position_ids)
        seq_idx = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        borders, longest = torch.from_numpy(cu_seq_lens), int(lengths.max())
        types = of_tokens("token_type_ids", rows, tokens)
        return {
            "input_ids": torch.from_numpy(input_ids)[None],
            "labels": torch.from_numpy(labels)[None],
            "position_ids": torch.from_numpy(position_ids.astype(np.int64))[None],
            "cu_seq_lens_q": borders,
            "cu_seq_lens_k": borders,
            "max_length_q": longest,
            "max_length_k": longest,
            "seq_idx": torch.from_numpy(seq_idx)[None],
            **({} if types is None else {"token_type_ids": torch.from_numpy(types)[None]}),
        }


def check_rows(rows: Any) -> None:
    if not isinstance(rows, Sequence) or not all(isinstance(row, Mapping) for row in rows):
        raise PackingError(
            f"rows: expected a list of mappings with input_ids, got {type(rows).__name__}: {str(rows)[:80]}"
        )
    for number, row in enumerate(rows):
        if "attention_mask" in row and not np.asarray(row["attention_mask"]).all():
            raise PackingError(f"column 'attention_mask': expected documents without padding, row {number} has a 0")
        check_loss_masks(row, number)


def check_loss_masks(row: Row, number: int) -> None:
    """Refuse a mask that was not applied to labels: a batch has no place for it, so prompts would be trained on."""
    if not (names := masks_among(row)):
        return
    if "labels" not in row:
        raise PackingError(
            f"column {names[0]!r}: expected labels beside it that are -100 where it is 0, row {number} has no labels; "
            "pack() and map(strategy) apply it"
        )
    labels = integers("labels", row, number)
    masks = {name: np.asarray(row[name]) for name in names}
    for name, mask in masks.items():
        if mask.shape != labels.shape:
            raise PackingError(
                f"column {name!r}: expected {len(labels)} values in row {number}, as many as labels, got shape "
                f"{mask.shape}"
            )
    if found := first_unmasked(labels, masks):
        name, token = found
        raise PackingError(
            f"column {name!r}: expected labels that are -100 where it is 0, token {token} of row {number} has the "
            f"label {labels[token]}; apply it to the labels, or remove it"
        )


def of_tokens(name: str, rows: Sequence[Row], tokens: list[IntArray]) -> IntArray | None:
    """int64 [tokens]: a column with one integer for each token; None where no row has it."""
    if not any(name in row for row in rows):
        return None
    values = [integers(name, row, number) for number, row in enumerate(rows)]
    for number, (given, ids) in enumerate(zip(values, tokens, strict=True)):
        if len(given) != len(ids):
            raise PackingError(
                f"column {name!r}: expected {len(ids)} values in row {number}, as many as input_ids, got {len(given)}"
            )
    return np.concatenate(values, dtype=np.int64, casting="unsafe")
