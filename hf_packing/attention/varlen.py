"""`packed_varlen`, the attention function that transformers calls in every layer of a patched model."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

from hf_packing.attention.exact_attention import attend_by_segment, attend_by_segment_compiled
from hf_packing.attention.kernels import attend_with_kernel, has_kernel
from hf_packing.attention.packed_row import borders_from_positions, check_borders, current_row
from hf_packing.errors import PackingError

NAME = "packed_varlen"

NAME_WITH_LOCAL_MASKS = "packed_varlen_local"
"""The same function for models that put windows or chunks only in their mask; there, the mask is a `LocalMask`."""

_HARMLESS = frozenset(
    ["cache_position", "deterministic", "ignore_index", "labels", "num_items_in_batch", "output_attentions"]
    + ["output_hidden_states", "output_router_logits", "past_key_values", "position_embeddings", "return_dict"]
    + ["seq_idx", "shift_labels", "use_cache"]
)
"""Arguments that some models pass to their attention function, and that do not change what it computes."""


@dataclass(frozen=True)
class LocalMask:
    """What a mask hides besides the future: tokens outside of a window, or outside of a chunk."""

    window: int | None = None
    """Tokens that a token attends to on each side, itself included."""
    chunk: int | None = None
    """Tokens in each of the chunks into which a document is cut; a token attends only to its own chunk."""

    def __str__(self) -> str:
        return f"a chunk of {self.chunk} tokens" if self.chunk else f"a window of {self.window} tokens"


@dataclass
class Observed:
    """What a model asked of `packed_varlen` while it was observed."""

    calls: int = 0
    windows: set[int] = field(default_factory=set)
    """Windows that layers passed to the attention function."""
    local_masks: set[LocalMask] = field(default_factory=set)
    """Local masks that the model asked for."""


_observed: ContextVar[Observed | None] = ContextVar("_observed", default=None)


@contextmanager
def observe() -> Iterator[Observed]:
    """Observe the calls of `packed_varlen` inside the block."""
    observed = Observed()
    token = _observed.set(observed)
    try:
        yield observed
    finally:
        _observed.reset(token)


def _observer() -> Observed | None:
    """Return the observer, or None while torch.compile traces: reading it would break the graph in every layer."""
    return None if torch.compiler.is_compiling() else _observed.get()


def packed_varlen(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | LocalMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,  # noqa: ARG001, the same as for queries
    max_length_q: int | None = None,
    max_length_k: int | None = None,  # noqa: ARG001
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend inside each segment, with the signature of transformers' AttentionInterface.

    Args:
        query: [rows, heads, tokens, head_dim].
        key: [rows, kv_heads, tokens, head_dim].
        value: [rows, kv_heads, tokens, value_dim].
        attention_mask: None, since borders take its place; or a `LocalMask`.
        sliding_window: tokens that a token attends to on each side, itself included.
        s_aux: [heads], attention sinks.
        position_ids: integers [rows, tokens]; borders are read from them if cu_seq_lens_q is missing.
        cu_seq_lens_q: int32 [segments + 1], borders in the rows laid end to end.

    Returns:
        ([rows, tokens, heads, value_dim] contiguous, None).

    Raises:
        PackingError: an argument that cannot be honored; borders that are missing or do not fit.
    """
    rows, heads, tokens, _ = query.shape
    _check_arguments(module, query, key, attention_mask, others)
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    if (observed := _observer()) is not None:
        observed.calls += 1
        observed.windows |= {sliding_window} if sliding_window is not None else set()
    chunk = None
    if isinstance(attention_mask, LocalMask):
        sliding_window, chunk = attention_mask.window, attention_mask.chunk
    borders, lengths = _borders_and_lengths(module, rows, tokens, cu_seq_lens_q, position_ids)
    if chunk is not None:
        borders, lengths, max_length_q = _cut_into_chunks(borders, chunk)
    query, key, value = _to_one_dtype(query, key, value)
    q, k, v = (_merge_rows(tensor) for tensor in (query, key, value))
    options: dict[str, Any] = {
        "scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "is_causal": is_causal,
        "window": sliding_window,
        "softcap": softcap,
        "dropout": dropout,
    }
    if query.is_cuda and has_kernel(query, value, softcap=softcap, sinks=s_aux, dropout=dropout):
        longest = int(borders.diff().max()) if max_length_q is None else int(max_length_q)
        attended = attend_with_kernel(q, k, v, borders.to(q.device, torch.int32), longest, **options)
    elif torch.compiler.is_compiling():
        attended = attend_by_segment_compiled(q, k, v, borders, s_aux, **options)
    else:
        if not lengths:
            lengths = [b - a for a, b in pairwise(check_borders(borders, rows, tokens))]
        attended = attend_by_segment(q, k, v, lengths, sinks=s_aux, **options)
    return attended[0].transpose(0, 1).reshape(rows, tokens, heads, -1).contiguous(), None


def _check_arguments(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | LocalMask | None,
    others: dict[str, Any],
) -> None:
    where = type(module).__name__
    if isinstance(attention_mask, Tensor):
        raise PackingError(
            f"attention_mask: {NAME} takes none, {where} passed one of shape {list(attention_mask.shape)}"
        )
    if query.shape[2] != key.shape[2]:
        raise PackingError(
            f"{where} has {query.shape[2]} queries for {key.shape[2]} keys; {NAME} supports neither generation nor "
            "cross-attention"
        )
    if others.get("output_attentions"):
        raise PackingError(f"output_attentions: {NAME} keeps no attention weights, {where} requests them")
    for name, value in others.items():
        if value is not None and value is not False and name not in _HARMLESS:
            raise PackingError(f"{name}: {NAME} cannot honor this argument of {where}")


def _borders_and_lengths(
    module: torch.nn.Module, rows: int, tokens: int, cu_seq_lens_q: Tensor | None, position_ids: Tensor | None
) -> tuple[Tensor, list[int] | None]:
    """Return the borders of segments: those of the current row, else cu_seq_lens_q, else as position_ids give them.

    The second value is the lengths of the segments, or None if finding them would require reading a tensor.
    """
    row = None if torch.compiler.is_compiling() else current_row.get()
    if row is not None and (cu_seq_lens_q is None or cu_seq_lens_q is row.cu_seq_lens):
        if row.rows * row.tokens != rows * tokens:
            raise PackingError(
                f"{type(module).__name__} attends to {rows * tokens} tokens in a row of {row.rows * row.tokens}"
            )
        return row.cu_seq_lens, list(row.lengths)
    if cu_seq_lens_q is not None:
        return cu_seq_lens_q, None
    if position_ids is None or position_ids.ndim != 2:
        raise PackingError(
            f"{type(module).__name__} was given neither cu_seq_lens_q nor position_ids, so the borders of segments are "
            "not known"
        )
    return borders_from_positions(position_ids.expand(rows, -1)), None


def _cut_into_chunks(borders: Tensor, chunk: int) -> tuple[Tensor, list[int], int]:
    """Return borders, lengths and the longest length of the chunks of all segments."""
    known = borders.tolist()
    cuts = [start for a, b in pairwise(known) for start in range(a, b, chunk)] + known[-1:]
    lengths = [b - a for a, b in pairwise(cuts)]
    return torch.tensor(cuts, dtype=torch.int32, device=borders.device), lengths, max(lengths)


def _to_one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast as autocast does for torch's own attention, since norms and rotary embeddings may return float32."""
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    else:
        dtype = value.dtype
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _merge_rows(tensor: Tensor) -> Tensor:
    """Reshape [rows, heads, tokens, dim] to [1, heads, rows * tokens, dim]."""
    if tensor.shape[0] == 1:
        return tensor
    return tensor.transpose(0, 1).flatten(1, 2)[None]


def packed_varlen_mask(
    *args: Any, local_size: int | None = None, use_vmap: bool = False, **kwargs: Any
) -> Tensor | None:
    """Return no mask, since borders take its place. A mask with padding is returned, for `packed_varlen` to refuse.

    Raises:
        PackingError: a mask of custom functions, which borders cannot express.
    """
    if use_vmap or getattr(kwargs.get("mask_function"), "__name__", "") == "or_mask":
        raise PackingError(f"attention_mask: {NAME} cannot honor a mask made of custom functions")
    if (observed := _observer()) is not None and local_size is not None:
        observed.local_masks.add(_local_mask(kwargs["mask_function"], local_size))
    padding: Tensor | None = flash_attention_mask(*args, **kwargs)
    return padding


def _packed_varlen_local_mask(*args: Any, local_size: int | None = None, **kwargs: Any) -> Tensor | LocalMask | None:
    """Like `packed_varlen_mask`, with a `LocalMask` for windows and chunks."""
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
    raise PackingError(f"attention_mask: {NAME} does not know what a mask of size {local_size} hides")


def _overlay_names(mask_function: Any) -> Iterator[str]:
    """Yield the names of the functions of transformers.masking_utils that a mask function is composed of."""
    yield mask_function.__qualname__.split(".")[0]
    for cell in mask_function.__closure__ or ():
        inside = cell.cell_contents
        for function in inside if isinstance(inside, tuple) else (inside,):
            if callable(function) and hasattr(function, "__qualname__"):
                yield from _overlay_names(function)


def register() -> None:
    """Register `packed_varlen` with transformers."""
    for name, mask in ((NAME, packed_varlen_mask), (NAME_WITH_LOCAL_MASKS, _packed_varlen_local_mask)):
        AttentionInterface.register(name, packed_varlen)
        AttentionMaskInterface.register(name, mask)
