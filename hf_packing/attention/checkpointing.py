"""Gradient checkpointing runs layers again in the backward pass, when the row they worked on is no longer current."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from hf_packing.attention.row import PackedRow, current, working_on

CHECKPOINTING = ("_gradient_checkpointing_func", "checkpoint_fn")
"""Where transformers keeps, in every module that can be checkpointed, the function that does it; and where torch does,
in the wrapper that FSDP puts around such a module."""


class KeepRow:
    """A checkpointing function, with the current row kept for the second run."""

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
    for module, name, checkpoint in checkpointing_functions(model):
        if not isinstance(checkpoint, KeepRow):
            setattr(module, name, KeepRow(checkpoint))


def keep_rows_no_longer(model: nn.Module) -> None:
    for module, name, checkpoint in checkpointing_functions(model):
        if isinstance(checkpoint, KeepRow):
            setattr(module, name, checkpoint.checkpoint)


def checkpointing_functions(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    for module in model.modules():
        for name in CHECKPOINTING:
            if (checkpoint := vars(module).get(name)) is not None:
                yield module, name, checkpoint
