"""Refuse attention masks that hide tokens: a patched model uses the borders between segments instead of a mask."""

from typing import Any

import torch
from torch import Tensor

from hf_packing.errors import PackingError


def refuse_hiding_mask(mask: Any, shape: torch.Size) -> None:
    """Raise PackingError if an attention mask is not a tensor of ones with the given shape."""
    if isinstance(mask, Tensor) and mask.shape == shape and bool((mask == 1).all()):
        return
    shown = f"a mask of shape {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
    raise PackingError(
        f"attention_mask: expected None or a mask of ones on a patched model, got {shown}, which may hide tokens; "
        "pass documents without padding, as PackingCollator does, or call unpatch_model first"
    )
