"""Gradient checkpointing runs layers again in the backward pass, when the row they worked on is no longer current."""

from collections.abc import Callable
from typing import Any

from torch import nn

from hf_packing.attention.row import PackedRow, current, working_on

CHECKPOINTING = "_gradient_checkpointing_func"
"""Where transformers keeps, in every module that can be checkpointed, the function that does it."""


class KeepRow:
    """transformers' checkpointing function, with the current row kept for the second run."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.checkpoint(OnRow(function, current.get()), *args, **kwargs)


class OnRow:
    def __init__(self, function: Callable[..., Any], row: PackedRow | None) -> None:
        self.function = function
        self.row = row

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with working_on(self.row):
            return self.function(*args, **kwargs)


def keep_rows(model: nn.Module) -> None:
    """Wrap the checkpointing functions of all modules that do not have theirs wrapped yet."""
    for module in model.modules():
        checkpoint = vars(module).get(CHECKPOINTING)
        if checkpoint is not None and not isinstance(checkpoint, KeepRow):
            setattr(module, CHECKPOINTING, KeepRow(checkpoint))


def keep_rows_no_longer(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(checkpoint := vars(module).get(CHECKPOINTING), KeepRow):
            setattr(module, CHECKPOINTING, checkpoint.checkpoint)
