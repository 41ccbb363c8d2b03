"""The mask functions of `packed_varlen`, which transformers calls in place of those that make mask tensors.

They return None, since borders between segments replace the mask, or a LocalMask, which describes a window or chunks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import flash_attention_mask

from hf_packing.errors import PackingError

NAME = "packed_varlen"

NAME_WITH_LOCAL_MASKS = "packed_varlen_local"
"""Second name under which `packed_varlen` is registered, for models that express a sliding window or chunks only in the
attention mask. Under this name, `packed_varlen` gets a `LocalMask` as its attention_mask."""


@dataclass(frozen=True)
class LocalMask:
    """A description of an attention mask in which every token attends only to tokens in a window or in a chunk."""

    window: int | None = None
    """Size of the window: a token attends only to tokens at a distance of less than this number."""
    chunk: int | None = None
    """Number of tokens in each chunk of a document. A token attends only to tokens in the same chunk."""

    def __str__(self) -> str:
        return f"a chunk of {self.chunk} tokens" if self.chunk else f"a window of {self.window} tokens"


@dataclass
class Observed:
    """A record of the calls of `packed_varlen`, with the windows and local masks that a model requested."""

    calls: int = 0
    windows: set[int] = field(default_factory=set)
    """Values of `sliding_window` that layers passed to `packed_varlen`."""
    local_masks: set[LocalMask] = field(default_factory=set)
    """Masks with a window or chunks that the model requested from its mask function."""


_observed: ContextVar[Observed | None] = ContextVar("_observed", default=None)


@contextmanager
def observe() -> Iterator[Observed]:
    """Context manager: yield an `Observed`, which records the calls of `packed_varlen` within the block."""
    observed = Observed()
    token = _observed.set(observed)
    try:
        yield observed
    finally:
        _observed.reset(token)


def observer() -> Observed | None:
    """Return the `Observed` of the current `observe` block, or None outside such a block.

    While torch.compile traces, also return None, since reading a context variable would break the graph in every layer.
    """
    return None if torch.compiler.is_compiling() else _observed.get()


def packed_varlen_mask(
    *args: Any, local_size: int | None = None, use_vmap: bool = False, **kwargs: Any
) -> Tensor | None:
    """Return the attention mask that transformers passes to `packed_varlen`.

    The mask is None if the batch has no padding, since the borders of segments then replace the mask. If the batch has
    padding, the mask is a tensor, for which `packed_varlen` raises an error.

    Raises:
        PackingError: the model adds mask functions of its own, which the borders of segments cannot replace.
    """
    if use_vmap or getattr(kwargs.get("mask_function"), "__name__", "") == "or_mask":
        raise PackingError(f"attention_mask: {NAME} does not support a mask made of custom functions")
    if (observed := observer()) is not None and local_size is not None:
        observed.local_masks.add(_local_mask(kwargs["mask_function"], local_size))
    padding: Tensor | None = flash_attention_mask(*args, **kwargs)
    return padding


def packed_varlen_local_mask(*args: Any, local_size: int | None = None, **kwargs: Any) -> Tensor | LocalMask | None:
    """Return a `LocalMask` if the mask has a window or chunks and the batch has no padding; otherwise, return the
    result of `packed_varlen_mask`."""
    padding = packed_varlen_mask(*args, **kwargs)
    return padding if padding is not None or local_size is None else _local_mask(kwargs["mask_function"], local_size)


def _local_mask(mask_function: Any, local_size: int) -> LocalMask:
    overlays = set(_overlay_names(mask_function))
    if "chunked_overlay" in overlays:
        return LocalMask(chunk=local_size)
    if "sliding_window_bidirectional_overlay" in overlays:
        return LocalMask(window=local_size + 1)
    if "sliding_window_overlay" in overlays:
        return LocalMask(window=local_size)
    raise PackingError(
        f"attention_mask: {NAME} supports sliding windows and chunks, got another kind of local mask, with a size of "
        f"{local_size} tokens"
    )


def _overlay_names(mask_function: Any) -> Iterator[str]:
    """Yield the names of the functions that built a mask function and its parts.

    These functions, such as `sliding_window_overlay`, are in transformers.masking_utils.
    """
    yield mask_function.__qualname__.split(".")[0]
    for cell in mask_function.__closure__ or ():
        inside = cell.cell_contents
        for function in inside if isinstance(inside, tuple) else (inside,):
            if callable(function) and hasattr(function, "__qualname__"):
                yield from _overlay_names(function)
