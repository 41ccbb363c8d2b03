"""Keep what a forward ran under for the backward pass, which runs checkpointed layers a second time."""

from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

import torch

from hf_packing.attention.by_segment import switched_off
from hf_packing.attention.layout import current_layout, use_layout
from hf_packing.attention.padded_rows import current_rows, use_rows
from hf_packing.attention.snapshot import attention_now, use_attention

running: ContextVar[tuple[int, ...]] = ContextVar("running", default=())
"""The `id()` of each patched model whose forward is running. A patch replaces the forwards of a model and of its inner
models, but only the outermost forward reads the packed row."""


class KeepRow:
    """A wrapper for an activation-checkpointing function. The backward pass runs the checkpointed layers a second time,
    after the model's forward has ended. The second run has the same packed row or padded batch and the same attention
    settings as the first one, and the patch is switched off if it was.

    Args:
        checkpoint: the function to wrap.
        patch: the patch of the model.
        gives_borders: whether all layers get the borders of the row as arguments. If so, compiled layers do not need
            the current row.
    """

    def __init__(self, checkpoint: Callable[..., Any], patch: Any, gives_borders: bool) -> None:
        self.checkpoint = checkpoint
        self.patch = patch
        self.gives_borders = gives_borders

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.gives_borders and torch.compiler.is_compiling():
            return self.checkpoint(function, *args, **kwargs)
        return self.checkpoint(_AsNow(function, self.patch), *args, **kwargs)


class _AsNow:
    """A wrapper for a function. During every call of the function, everything that a patch changes for a while is as it
    was when the object was made."""

    def __init__(self, function: Callable[..., Any], patch: Any) -> None:
        self.function = function
        self.replaced = patch.replaced
        self.attention = attention_now(patch.attention_before)
        self.is_on = patch.replaced[0].installed
        self.row, self.rows, self.running = current_layout.get(), current_rows.get(), running.get()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        off = nullcontext() if self.is_on else switched_off(self.replaced)
        token = running.set(self.running)
        try:
            with off, use_attention(self.attention), use_layout(self.row), use_rows(self.rows):
                return self.function(*args, **kwargs)
        finally:
            running.reset(token)
