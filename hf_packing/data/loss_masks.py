"""TRL's loss masks, applied to labels: the one implementation, for single rows and for whole tables."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_packing.columns import IGNORED_LABEL
from hf_packing.errors import PackingError


def apply_loss_masks(labels: npt.NDArray[Any], masks: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Set labels to -100 where a mask has a 0, as TRL does.

    Args:
        labels: integers [tokens]; they are not changed.
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
