"""Names of the columns in datasets and batches, and what TRL's loss masks do to labels."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_packing.errors import PackingError

INPUT_IDS = "input_ids"
LABELS = "labels"
ATTENTION_MASK = "attention_mask"
TOKEN_TYPE_IDS = "token_type_ids"

POSITION_IDS = "position_ids"
"""The position of each token in its segment, from 0."""
SEQ_LENGTHS = "seq_lengths"
"""The number of tokens of each segment, under TRL's name."""
BUCKET = "bucket"
"""The capacity of the pack, for strategies with several capacities."""
SEQ_IDX = "seq_idx"
"""The number of the segment that each token belongs to."""
CU_SEQ_LENS = ("cu_seq_lens_q", "cu_seq_lens_k")
"""Cumulative segment lengths from 0, as FlashAttention takes them for queries and keys."""
MAX_LENGTHS = ("max_length_q", "max_length_k")
"""The length of the longest segment, as FlashAttention takes it for queries and keys."""

SEGMENT_COLUMNS = (SEQ_LENGTHS, *CU_SEQ_LENS, SEQ_IDX, POSITION_IDS)
"""Columns that say where the segments of a row are; only packed rows have them."""

COMPLETION_MASK = "completion_mask"
ASSISTANT_MASKS = "assistant_masks"
LOSS_MASKS = (COMPLETION_MASK, ASSISTANT_MASKS)
"""TRL's masks of the tokens to train on. A token is trained on if every mask that is present has a 1 for it."""

IGNORED_LABEL = -100
"""The label that the losses of transformers ignore. The first token of every segment gets it: nothing precedes it."""


def apply_loss_masks(labels: npt.NDArray[Any], masks: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Set labels to -100 where a mask has a 0, as TRL does.

    Args:
        labels: integers [tokens]; not modified.
        masks: by column name, 0 and 1 as numbers or booleans, [tokens] each.

    Returns:
        Integers [tokens], in the dtype of the labels if it is signed, else int64.

    Raises:
        PackingError: a mask with other values than 0 and 1.
    """
    masked = labels.astype(np.int64 if labels.dtype.kind == "u" else labels.dtype)
    for name, mask in masks.items():
        masked[~_as_booleans(name, mask)] = IGNORED_LABEL
    return masked


def find_unmasked_label(labels: npt.NDArray[Any], masks: Mapping[str, npt.NDArray[Any]]) -> tuple[str, int] | None:
    """Find a label that would be trained on although a mask has a 0 there.

    Args:
        labels: integers [tokens].
        masks: by column name, 0 and 1 as numbers or booleans, [tokens] each.

    Returns:
        The name of the mask and the index of the first such token; None if the labels agree with all masks.

    Raises:
        PackingError: a mask with other values than 0 and 1.
    """
    for name, mask in masks.items():
        contradicting = ~_as_booleans(name, mask) & (labels != IGNORED_LABEL)
        if contradicting.any():
            return name, int(contradicting.argmax())
    return None


def _as_booleans(name: str, mask: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Convert a mask to booleans. None, strings and weights are refused: NumPy would read them as 0 or 1."""
    if len(mask) and mask.dtype.kind not in "iufb":
        raise PackingError(f"column {name!r}: expected a 0 or a 1 for each token, got {mask.tolist()[:8]}")
    wrong = (mask != 0) & (mask != 1)
    if wrong.any():
        raise PackingError(f"column {name!r}: expected a 0 or a 1 for each token, got {mask[wrong.argmax()]}")
    return mask.astype(bool)
