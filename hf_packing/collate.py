"""Rows -> one flat batch with the borders of its segments beside it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_packing.arrow.packed_rows import IGNORED_LABEL
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray

Row = Mapping[str, Any]

LOSS_MASKS = ("completion_mask", "assistant_masks")
"""TRL's columns of tokens to train on. Leaving them out would train on the prompts."""


@dataclass(frozen=True)
class PackingCollator:
    """Flatten packed rows, or plain documents, into one padding-free batch.

    A row's segments are read from `seq_lengths`; without it from `position_ids`, which restart at every segment; with
    neither, the row is one document. Other columns than these, `input_ids`, `labels` and `token_type_ids` are not
    passed on.

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
        PackingError: rows without input_ids or without a token, lengths that disagree, a column in some rows only, an
            attention_mask with zeros, a mask of what to train on that is not in the labels yet.

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
        position_ids = np.arange(len(input_ids))
        position_ids -= np.repeat(begin, lengths)
        seq_idx = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        borders, longest = torch.from_numpy(cu_seq_lens), int(lengths.max())
        types = of_tokens("token_type_ids", rows, tokens)
        return {
            "input_ids": torch.from_numpy(input_ids)[None],
            "labels": torch.from_numpy(labels)[None],
            "position_ids": torch.from_numpy(position_ids)[None],
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
        if masks := [name for name in LOSS_MASKS if name in row]:
            raise PackingError(f"column {masks[0]!r}: expected labels with -100 in its place, row {number} has it")


def integers(name: str, row: Row, number: int) -> IntArray:
    """A column of one row as an array; Python lists and torch tensors are converted."""
    if name not in row:
        raise PackingError(f"column {name!r}: expected in every row, row {number} has {', '.join(row) or 'none'}")
    try:
        array = np.asarray(row[name])
    except ValueError as error:
        raise PackingError(f"column {name!r}: expected a list of integers, row {number} has {error}") from error
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise PackingError(
            f"column {name!r}: expected a list of integers, row {number} has {array.dtype} of shape {array.shape}"
        )
    return array


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


def segment_lengths(rows: Sequence[Row], tokens: list[IntArray]) -> IntArray:
    """int64 [segments]; empty rows have none."""
    lengths = []
    for number, (row, ids) in enumerate(zip(rows, tokens, strict=True)):
        if "seq_lengths" in row:
            segments = integers("seq_lengths", row, number).astype(np.int64)
            if segments.sum() != len(ids) or (len(segments) and segments.min() < 1):
                raise PackingError(
                    f"column 'seq_lengths': expected positive lengths that add up to the {len(ids)} tokens of "
                    f"row {number}, got {segments.tolist()}"
                )
        elif "position_ids" in row:
            segments = lengths_from_positions(integers("position_ids", row, number), len(ids), number)
        else:
            segments = np.array([len(ids)] if len(ids) else [], dtype=np.int64)
        lengths.append(segments)
    return np.concatenate(lengths)


def lengths_from_positions(position_ids: IntArray, tokens: int, row: int) -> IntArray:
    """A segment begins wherever a position is not one more than the last."""
    if position_ids.shape != (tokens,):
        raise PackingError(
            f"column 'position_ids': expected {tokens} values in row {row}, as many as input_ids, "
            f"got shape {position_ids.shape}"
        )
    begin = (
        np.flatnonzero(np.diff(position_ids, prepend=position_ids[:1]) != 1) if tokens else np.zeros(0, dtype=np.int64)
    )
    return np.diff(begin, append=tokens)
