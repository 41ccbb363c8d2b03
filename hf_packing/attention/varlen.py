"""`packed_varlen`: the attention function that transformers calls in every layer of a patched model."""

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

from hf_packing.attention.exact_attention import attend_by_segment, attend_in_one_node
from hf_packing.attention.kernels import attend_with_kernel, has_kernel
from hf_packing.attention.packed_row import borders_from_positions, check_borders, current
from hf_packing.errors import PackingError

NAME = "packed_varlen"

NAME_WITH_SIGHT = "packed_varlen_sight"
"""The same for models that keep windows or chunks in their mask alone: there the mask is a `Sight`."""

HARMLESS = frozenset(
    ["cache_position", "deterministic", "ignore_index", "labels", "num_items_in_batch", "output_attentions"]
    + ["output_hidden_states", "output_router_logits", "past_key_values", "position_embeddings", "return_dict"]
    + ["seq_idx", "shift_labels", "use_cache"]
)
"""Arguments that some models hand to their attention function and that do not change what it computes."""


@dataclass
class Observed:
    """What was asked of `packed_varlen` while somebody watched."""

    calls: int = 0
    windows: set[int] = field(default_factory=set)
    """Windows that layers handed to the attention function."""
    sights: set["Sight"] = field(default_factory=set)
    """What the model asked of its attention mask beside causality."""


@dataclass(frozen=True)
class Sight:
    """What a mask says beside causality: how far back a token sees, or the chunks that it sees nothing outside of."""

    window: int | None = None
    """Tokens that a token sees on each side it may look at, itself included."""
    chunk: int | None = None

    def __str__(self) -> str:
        return f"a chunk of {self.chunk} tokens" if self.chunk else f"a window of {self.window} tokens"


watching: ContextVar[Observed | None] = ContextVar("watching", default=None)


def observer() -> Observed | None:
    """Who watches; nobody does inside torch.compile, which would stop here in every layer."""
    return None if torch.compiler.is_compiling() else watching.get()


@contextmanager
def observe() -> Iterator[Observed]:
    """Watch the calls of `packed_varlen` in this block."""
    observed = Observed()
    token = watching.set(observed)
    try:
        yield observed
    finally:
        watching.reset(token)


def packed_varlen(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Sight | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,  # noqa: ARG001, those of the queries
    max_length_q: int | None = None,
    max_length_k: int | None = None,  # noqa: ARG001
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention that never crosses the border of a segment, in the signature of transformers' AttentionInterface.

    Args:
        query: [rows, heads, tokens, head_dim].
        key: [rows, kv_heads, tokens, head_dim].
        value: [rows, kv_heads, tokens, value_dim].
        attention_mask: None, since borders take its place.
        sliding_window: tokens a token sees on each side it may look at, itself included.
        s_aux: [heads], attention sinks.
        position_ids: integers [rows, tokens]; borders are read from them where cu_seq_lens_q is absent.
        cu_seq_lens_q: int32 [segments + 1], borders in the rows laid end to end.

    Returns:
        ([rows, tokens, heads, value_dim] contiguous, None).

    Raises:
        PackingError: an argument that cannot be honoured; borders that are absent or do not fit.
    """
    rows, heads, tokens, _ = query.shape
    refuse_what_cannot_be_honoured(module, query, key, attention_mask, others)
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    if (observed := observer()) is not None:
        observed.calls += 1
        observed.windows |= {sliding_window} if sliding_window is not None else set()
    chunk = None
    if isinstance(attention_mask, Sight):
        sliding_window, chunk = attention_mask.window, attention_mask.chunk
    borders, lengths = borders_of_the_row(module, rows, tokens, cu_seq_lens_q, position_ids)
    if chunk is not None:
        borders, lengths, max_length_q = in_chunks(borders, chunk)
    query, key, value = in_one_dtype(query, key, value)
    q, k, v = (laid_end_to_end(tensor) for tensor in (query, key, value))
    how: dict[str, Any] = {
        "scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "is_causal": is_causal,
        "window": sliding_window,
        "softcap": softcap,
        "dropout": dropout,
    }
    if has_kernel(query, value, softcap=softcap, sinks=s_aux, dropout=dropout):
        longest = int(borders.diff().max()) if max_length_q is None else int(max_length_q)
        attended = attend_with_kernel(q, k, v, borders.to(q.device, torch.int32), longest, **how)
    elif torch.compiler.is_compiling():
        attended = attend_in_one_node(q, k, v, borders, s_aux, **how)
    else:
        lengths = lengths or segment_lengths(borders, rows, tokens)
        attended = attend_by_segment(q, k, v, lengths, sinks=s_aux, **how)
    return attended[0].transpose(0, 1).reshape(rows, tokens, heads, -1).contiguous(), None


def borders_of_the_row(
    module: torch.nn.Module, rows: int, tokens: int, cu_seq_lens_q: Tensor | None, position_ids: Tensor | None
) -> tuple[Tensor, list[int] | None]:
    """Borders, and lengths where they are known without looking: as given, of the current row, or of positions."""
    row = None if torch.compiler.is_compiling() else current.get()
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
            f"{type(module).__name__} was given no cu_seq_lens_q and no position_ids to tell segments apart"
        )
    return borders_from_positions(position_ids.expand(rows, -1)), None


def segment_lengths(borders: Tensor, rows: int, tokens: int) -> list[int]:
    return [b - a for a, b in pairwise(check_borders(borders, rows, tokens))]


def in_chunks(borders: Tensor, chunk: int) -> tuple[Tensor, list[int], int]:
    """Borders and lengths of the chunks that segments consist of, and the longest of them."""
    known = borders.tolist()
    cuts = [start for a, b in pairwise(known) for start in range(a, b, chunk)] + known[-1:]
    lengths = [b - a for a, b in pairwise(cuts)]
    return torch.tensor(cuts, dtype=torch.int32, device=borders.device), lengths, max(lengths)


def refuse_what_cannot_be_honoured(
    module: torch.nn.Module, query: Tensor, key: Tensor, attention_mask: Tensor | Sight | None, others: dict[str, Any]
) -> None:
    where = type(module).__name__
    if isinstance(attention_mask, Tensor):
        raise PackingError(f"attention_mask: {NAME} takes none, {where} gave one of shape {list(attention_mask.shape)}")
    if query.shape[2] != key.shape[2]:
        raise PackingError(
            f"{where} has {query.shape[2]} queries for {key.shape[2]} keys; {NAME} neither generates nor attends across"
        )
    if others.get("output_attentions"):
        raise PackingError(f"output_attentions: {NAME} keeps no attention weights, {where} asks for them")
    for name, asked in others.items():
        if asked is not None and asked is not False and name not in HARMLESS:
            raise PackingError(f"{name}: {NAME} cannot honour this argument of {where}")


def in_one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As autocast would do for torch's own attention: norms and rotary embeddings may leave some of them in float32."""
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    else:
        dtype = value.dtype
    return query.to(dtype), key.to(dtype), value.to(dtype)


def laid_end_to_end(tensor: Tensor) -> Tensor:
    """[rows, heads, tokens, dim] -> [1, heads, rows * tokens, dim]."""
    if tensor.shape[0] == 1:
        return tensor
    return tensor.transpose(0, 1).flatten(1, 2)[None]


def packed_varlen_mask(
    *args: Any, local_size: int | None = None, use_vmap: bool = False, **kwargs: Any
) -> Tensor | None:
    """No mask: borders take its place. A mask with padding is passed on, to be refused by `packed_varlen`.

    Raises:
        PackingError: a mask made of custom functions, which borders cannot express.
    """
    if use_vmap or getattr(kwargs.get("mask_function"), "__name__", "") == "or_mask":
        raise PackingError(f"attention_mask: {NAME} cannot honour a mask made of custom functions")
    if (observed := observer()) is not None and local_size is not None:
        observed.sights.add(sight_of(kwargs["mask_function"], local_size))
    padding: Tensor | None = flash_attention_mask(*args, **kwargs)
    return padding


def packed_varlen_sight(*args: Any, local_size: int | None = None, **kwargs: Any) -> Tensor | Sight | None:
    """As `packed_varlen_mask`, with windows and chunks told in the mask's place."""
    padding = packed_varlen_mask(*args, **kwargs)
    return padding if padding is not None or local_size is None else sight_of(kwargs["mask_function"], local_size)


def sight_of(mask_function: Any, local_size: int) -> Sight:
    overlays = set(overlays_of(mask_function))
    if "chunked_overlay" in overlays:
        return Sight(chunk=local_size)
    if "sliding_window_bidirectional_overlay" in overlays:
        return Sight(window=local_size + 1)
    if "sliding_window_overlay" in overlays:
        return Sight(window=local_size)
    raise PackingError(f"attention_mask: {NAME} cannot tell what a mask of size {local_size} hides")


def overlays_of(mask_function: Any) -> Iterator[str]:
    """Names of the functions of transformers.masking_utils that a mask function was composed by."""
    yield mask_function.__qualname__.split(".")[0]
    for cell in mask_function.__closure__ or ():
        inside = cell.cell_contents
        for function in inside if isinstance(inside, tuple) else (inside,):
            if callable(function) and hasattr(function, "__qualname__"):
                yield from overlays_of(function)


def register() -> None:
    """Make `packed_varlen` known to transformers."""
    for name, mask in ((NAME, packed_varlen_mask), (NAME_WITH_SIGHT, packed_varlen_sight)):
        AttentionInterface.register(name, packed_varlen)
        AttentionMaskInterface.register(name, mask)
