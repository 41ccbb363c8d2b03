"""TRL's masks of the tokens to train on, and how they become labels: the one implementation for rows and tables."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_packing.errors import PackingError

IGNORED_LABEL = -100
"""The label that transformers' losses skip. The first token of a segment has nothing before it to be predicted from."""

COMPLETION_MASK, ASSISTANT_MASKS = "completion_mask", "assistant_masks"
LOSS_MASKS = (COMPLETION_MASK, ASSISTANT_MASKS)
"""1 for a token to train on, 0 for another one. A token is trained on where all masks that are there have a 1."""


def masks_among(names: Any) -> list[str]:
    """The loss masks among column names, in a fixed order."""
    return [name for name in LOSS_MASKS if name in names]


def apply_loss_masks(labels: npt.NDArray[Any], masks: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Set labels to -100 where a mask has a 0, as TRL does.

    Args:
        labels: integers [tokens]; they are left as they are.
        masks: by column name, 0 and 1 as any numbers or booleans [tokens] each.

    Returns:
        Integers [tokens], of the type of the labels where it is signed, else int64.

    Raises:
        PackingError: a mask has something else.
    """
    masked = labels.astype(np.int64 if labels.dtype.kind == "u" else labels.dtype)
    for name, mask in masks.items():
        masked[~as_booleans(name, mask)] = IGNORED_LABEL
    return masked


def as_booleans(name: str, mask: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """A mask as booleans; None, texts and weights would pass for a 0 or a 1."""
    if len(mask) and mask.dtype.kind not in "iufb":
        raise PackingError(f"column {name!r}: expected a 0 or a 1 for each token, got {mask.tolist()[:8]}")
    wrong = (mask != 0) & (mask != 1)
    if wrong.any():
        raise PackingError(f"column {name!r}: expected a 0 or a 1 for each token, got {mask[wrong.argmax()]}")
    return mask.astype(bool)


def first_unmasked(labels: npt.NDArray[Any], masks: Mapping[str, npt.NDArray[Any]]) -> tuple[str, int] | None:
    """Find a label to train on that a mask leaves out.

    Args:
        labels: integers [tokens].
        masks: by column name, 0 and 1 as any numbers or booleans [tokens] each.

    Returns:
        The name of the mask and the place of the first such token; None where the labels agree with all masks.

    Raises:
        PackingError: a mask has something else.
    """
    for name, mask in masks.items():
        contradicting = ~as_booleans(name, mask) & (labels != IGNORED_LABEL)
        if contradicting.any():
            return name, int(contradicting.argmax())
    return None
