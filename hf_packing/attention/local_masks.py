"""Describe attention masks with a sliding window or chunks, which some models express only in their mask functions."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LocalMask:
    """A description of an attention mask in which every token attends only to tokens in a window or in a chunk."""

    window: int | None = None
    """Size of the window: a token attends only to tokens at a distance of less than this number."""
    chunk: int | None = None
    """Number of tokens in each chunk of a document. A token attends only to tokens in the same chunk."""

    def __str__(self) -> str:
        return f"a chunk of {self.chunk} tokens" if self.chunk else f"a window of {self.window} tokens"


def describe_local_mask(mask_function: Any, local_size: int) -> LocalMask | None:
    """Return the window or the chunks of one of transformers' mask functions; None for another kind of local mask.

    Args:
        mask_function: a function of transformers.masking_utils, or several such functions combined.
        local_size: the size that transformers reports for the window or the chunks, in tokens.
    """
    overlays = set(_overlay_names(mask_function))
    if "chunked_overlay" in overlays:
        return LocalMask(chunk=local_size)
    if "sliding_window_bidirectional_overlay" in overlays:
        return LocalMask(window=local_size + 1)
    if "sliding_window_overlay" in overlays:
        return LocalMask(window=local_size)
    return None


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
