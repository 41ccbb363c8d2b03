"""The attention function `packed_varlen`, which transformers calls in the attention layers of a patched model, and its
mask functions.

The function computes attention within each segment of a packed row. A segment is a document, or a part of a document.
Borders between segments replace the mask, so the mask functions return None, or describe a window or chunks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

from hf_packing.attention.choose_kernel import HUB_KERNEL, Kernel, choose_kernel
from hf_packing.attention.compiled_exact_attention import attend_by_segment_compiled
from hf_packing.attention.exact_attention import attend_by_segment
from hf_packing.attention.layout import CACHES, borders_from_positions, current_layout, layout_of
from hf_packing.attention.local_masks import LocalMask, describe_local_mask
from hf_packing.attention.tree_attention import attend_in_trees
from hf_packing.errors import PackingError

NAME = "packed_varlen"

NAME_WITH_LOCAL_MASKS = "packed_varlen_local"
"""Second name under which `packed_varlen` is registered, for models that express a sliding window or chunks only in the
attention mask. Under this name, `packed_varlen` gets a `LocalMask` as its attention_mask."""

_HARMLESS = frozenset(
    ["cache_position", "deterministic", "ignore_index", "labels", "margin", "num_items_in_batch", "output_attentions"]
    + ["output_hidden_states", "output_router_logits", "position_embeddings", "return_dict", "seq_idx"]
    + ["shift_labels", "use_cache", *CACHES]
)
"""Names of arguments that some models pass to their attention function, although attention does not depend on them."""

EXACT_ATTENTION = "exact attention, segment by segment"
"""What `kernel_of` returns for attention that runs without a kernel."""

_latest_kernels: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()
"""The kernel on which the latest call of each attention layer ran. Compiled layers do not enter their kernels here."""


def kernel_of(model: torch.nn.Module) -> str:
    """Return the kernels on which the attention layers of a patched model ran in their latest calls.

    Returns:
        The names of the kernels, such as "flash-attn 2" or "torch varlen_attn", joined by " and "; or "exact attention,
        segment by segment", or "path by path" in a row of trees. An empty string if no layer has called `packed_varlen`
        yet.
    """
    names = {_latest_kernels[module] for module in model.modules() if module in _latest_kernels}
    return " and ".join(sorted(names))


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


def _observer() -> Observed | None:
    """Return the `Observed` of the current `observe` block, or None outside such a block.

    While torch.compile traces, also return None, since reading a context variable would break the graph in every layer.
    """
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
    """Compute attention within each segment, with the signature that transformers' AttentionInterface requires.

    Args:
        module: the attention layer. If `is_causal` is None, the layer's attribute `is_causal` is used.
        query: [rows, heads, tokens, head_dim].
        key: [rows, kv_heads, tokens, head_dim].
        value: [rows, kv_heads, tokens, value_dim].
        attention_mask: None, since the borders of segments replace a mask; or a `LocalMask`.
        sliding_window: size of the window: a token attends only to tokens at a distance of less than this number.
        s_aux: [heads], attention sinks.
        position_ids: integers [rows, tokens], which restart in every segment. The borders of the segments are read from
            the positions if the borders are not known otherwise.
        cu_seq_lens_q: int32 [segments + 1], cumulative segment lengths over all rows, starting with 0.

    Returns:
        The attention output, a contiguous tensor [rows, tokens, heads, value_dim], and None in place of attention
        weights.

    Raises:
        PackingError: an argument is not supported, or the borders are missing or do not fit the tokens.
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
    query, key, value = _to_one_dtype(query, key, value)
    options: dict[str, Any] = {
        "scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "is_causal": is_causal,
        "window": sliding_window,
        "softcap": softcap,
        "dropout": dropout,
    }
    hub = getattr(module, HUB_KERNEL, None)
    row = None if torch.compiler.is_compiling() else current_layout.get()
    if row is not None and row.has_branches:
        where = type(module).__name__
        attended, name = attend_in_trees(query, key, value, row, where, chunk=chunk, hub=hub, sinks=s_aux, **options)
    else:
        borders, lengths = _borders_and_lengths(module, rows, tokens, cu_seq_lens_q, position_ids)
        if chunk is not None:
            borders, lengths, max_length_q = _cut_into_chunks(borders, chunk, rows * tokens), None, chunk
        q, k, v = (_merge_rows(tensor) for tensor in (query, key, value))
        kernel = _kernel_for(q, k, v, hub=hub, sinks=s_aux, **options)
        name = EXACT_ATTENTION if kernel is None else kernel.name
        if kernel is not None:
            known = max(lengths) if lengths and max_length_q is None else max_length_q
            longest = None if known is None else int(known)
            attended = kernel.attend(q, k, v, borders.to(q.device, torch.int32), longest, sinks=s_aux, **options)
        elif torch.compiler.is_compiling():
            attended = attend_by_segment_compiled(q, k, v, borders, s_aux, **options)
        else:
            if not lengths:
                lengths = list(layout_of(borders, rows, tokens).lengths)
            attended = attend_by_segment(q, k, v, lengths, sinks=s_aux, **options)
    if not torch.compiler.is_compiling() and _latest_kernels.get(module) is not name:
        _latest_kernels[module] = name
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
            f"attention_mask: {NAME} takes no mask, but {where} passed a mask of shape {list(attention_mask.shape)}"
            f"{_cause()}"
        )
    if query.shape[2] != key.shape[2]:
        raise PackingError(
            f"{where} has {query.shape[2]} queries for {key.shape[2]} keys; {NAME} supports neither generation nor "
            f"cross-attention{_cause()}"
        )
    if others.get("output_attentions"):
        raise PackingError(f"output_attentions: {NAME} returns no attention weights, but {where} requests them")
    for name, value in others.items():
        if value is not None and value is not False and name not in _HARMLESS:
            raise PackingError(f"{name}: {NAME} does not support this argument of {where}")


def _cause() -> str:
    """Return why the attention function may be called outside of a patched model's forward, where it is of no use."""
    if torch.compiler.is_compiling() or current_layout.get() is not None:
        return ""
    return (
        ". If this model is not patched, its configuration is that of a patched model: build each model from its own "
        "copy.deepcopy(config), made before patch_model, or call model.set_attn_implementation('sdpa')"
    )


def _kernel_for(query: Tensor, key: Tensor, value: Tensor, *, scale: float, **options: Any) -> Kernel | None:  # noqa: ARG001
    """Return the CUDA kernel on which a call runs, or None. `options` are those of `choose_kernel`."""
    return choose_kernel(query, key, value, **options) if query.is_cuda else None


def _borders_and_lengths(
    module: torch.nn.Module, rows: int, tokens: int, cu_seq_lens_q: Tensor | None, position_ids: Tensor | None
) -> tuple[Tensor, list[int] | None]:
    """Return the borders of the segments, int32 [segments + 1], and the lengths of the segments.

    The borders are those of the packed row that the patched model currently processes. If cu_seq_lens_q is given, but
    is not the tensor of this row, cu_seq_lens_q is returned. If there is neither such a row nor cu_seq_lens_q, the
    borders are read from position_ids. If the borders are not those of the row, the lengths are None, since computing
    them requires reading the values of a tensor.
    """
    if torch.compiler.is_compiling():
        if cu_seq_lens_q is None:  # the graph breaks here, since the number of segments is not known in compiled code
            cu_seq_lens_q, _ = _uncompiled_borders_and_lengths(module, rows, tokens, None, position_ids)
        return cu_seq_lens_q, None
    row = current_layout.get()
    if row is not None and row.has_branches:
        raise PackingError(
            f"{type(module).__name__}: expected a row of trees in uncompiled code, but torch.compile has compiled this "
            "module by itself; compile the whole model, which then runs uncompiled on rows of trees"
        )
    if row is not None and (cu_seq_lens_q is None or cu_seq_lens_q is row.cu_seq_lens):
        if row.rows * row.tokens != rows * tokens:
            raise PackingError(
                f"{type(module).__name__}: expected the {row.rows * row.tokens} tokens of the packed row that the "
                f"model currently processes, got {rows * tokens} tokens"
            )
        return row.cu_seq_lens, list(row.lengths)
    if cu_seq_lens_q is not None:
        return cu_seq_lens_q, None
    if position_ids is None or position_ids.ndim != 2:
        raise PackingError(
            f"{type(module).__name__} was given neither cu_seq_lens_q nor position_ids of shape [rows, tokens], so the "
            f"borders between segments are unknown; pass one of these arguments to the model{_cause()}"
        )
    return borders_from_positions(position_ids.expand(rows, -1)), None


_uncompiled_borders_and_lengths = torch.compiler.disable(_borders_and_lengths)  # type: ignore[no-untyped-call]


def _cut_into_chunks(borders: Tensor, chunk: int, tokens: int) -> Tensor:
    """Cut all segments into chunks of at most `chunk` tokens. The number of borders depends on shapes alone, so that
    compiled code can run this function.

    Args:
        borders: borders of the segments, int32 [segments + 1].
        chunk: number of tokens in a chunk.
        tokens: number of tokens in all segments together.

    Returns:
        The borders of the chunks, int32 [segments + tokens // chunk + 1], with empty chunks at the end.
    """
    index = torch.arange(tokens, dtype=torch.int32, device=borders.device)
    starts = torch.repeat_interleave(borders[:-1], borders.diff(), output_size=tokens)
    cuts = torch.where((index - starts) % chunk == 0, index, tokens).sort().values
    return F.pad(cuts, (0, borders.shape[0]), value=tokens)[: borders.shape[0] + tokens // chunk]


def _to_one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value in one dtype: the dtype of autocast if autocast is on, or else the dtype of `value`.

    The cast is needed since norms and rotary embeddings may return float32. As in torch's own attention, autocast does
    not apply to float64.
    """
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    else:
        dtype = value.dtype
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _merge_rows(tensor: Tensor) -> Tensor:
    """Reshape a tensor from [rows, heads, tokens, dim] to [1, heads, rows * tokens, dim], and return the result."""
    if tensor.shape[0] == 1:
        return tensor
    return tensor.transpose(0, 1).flatten(1, 2)[None]


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
    if (observed := _observer()) is not None and local_size is not None:
        observed.local_masks.add(_local_mask(kwargs["mask_function"], local_size))
    padding: Tensor | None = flash_attention_mask(*args, **kwargs)
    return padding


def packed_varlen_local_mask(*args: Any, local_size: int | None = None, **kwargs: Any) -> Tensor | LocalMask | None:
    """Return a `LocalMask` if the mask has a window or chunks and the batch has no padding; otherwise, return the
    result of `packed_varlen_mask`."""
    padding = packed_varlen_mask(*args, **kwargs)
    return padding if padding is not None or local_size is None else _local_mask(kwargs["mask_function"], local_size)


def _local_mask(mask_function: Any, local_size: int) -> LocalMask:
    if (local_mask := describe_local_mask(mask_function, local_size)) is None:
        raise PackingError(
            f"attention_mask: {NAME} supports sliding windows and chunks, got another kind of local mask, with a size "
            f"of {local_size} tokens"
        )
    return local_mask


def register() -> None:
    """Register `packed_varlen` and its mask functions with transformers."""
    for name, mask in ((NAME, packed_varlen_mask), (NAME_WITH_LOCAL_MASKS, packed_varlen_local_mask)):
        AttentionInterface.register(name, packed_varlen)
        AttentionMaskInterface.register(name, mask)
