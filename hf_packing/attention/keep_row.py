"""Keep the packed row of a forward for the backward pass, which runs checkpointed layers a second time."""

from collections.abc import Callable
from typing import Any

import torch

from hf_packing.attention.packed_row import PackedRow, current_row, use_row


class KeepRow:
    """A wrapper for an activation-checkpointing function. The backward pass runs the checkpointed layers a second time,
    after the model's forward has ended. In this second run, the packed row of the forward is again the current row.

    Args:
        checkpoint: the function to wrap.
        gives_borders: whether all layers get the borders of the row as arguments. If so, compiled layers do not need
            the current row.
    """

    def __init__(self, checkpoint: Callable[..., Any], gives_borders: bool) -> None:
        self.checkpoint = checkpoint
        self.gives_borders = gives_borders

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.gives_borders and torch.compiler.is_compiling():
            return self.checkpoint(function, *args, **kwargs)
        return self.checkpoint(_OnRow(function, current_row.get()), *args, **kwargs)


class _OnRow:
    """A wrapper for a function. During every call of the function, `row` is the current packed row."""

    def __init__(self, function: Callable[..., Any], row: PackedRow | None) -> None:
        self.function = function
        self.row = row

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with use_row(self.row):
            return self.function(*args, **kwargs)
