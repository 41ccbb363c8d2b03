"""The attention function `packed_varlen`, which transformers calls in the attention layers of a patched model, and its
mask function.

The function computes attention within the documents of a row, on a kernel where one can, or else exactly. The layout of
the row replaces the mask, so the mask function returns None, or describes a window or chunks.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from hf_packing.attention.exact import TracedRow, attend_exactly, attend_exactly_compiled
from hf_packing.attention.kernels import choose
from hf_packing.attention.layout import CACHES, Layout, current_layout
from hf_packing.errors import PackingError

NAME = "hf_packing_varlen"
"""The name of `packed_varlen` in the configuration of a patched model, and in errors of transformers about it."""

_HARMLESS = frozenset(
    [
        "cache_position",
        "cu_seq_lens_k",
        "deterministic",
        "ignore_index",
        "labels",
        "logits_to_keep",
        "margin",
        "max_length_k",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "seq_idx",
        "shift_labels",
        "use_cache",
        *CACHES,
    ]
)
"""Names of arguments that some models pass to their attention function, although attention does not depend on them, or
on no more than on those for queries."""


@dataclass(frozen=True)
class LocalMask:
    """An attention mask in which every token attends only to tokens in a window or in a chunk."""

    window: int | None = None
    """Size of the window: a token attends only to tokens at a distance of less than this number."""
    chunk: int | None = None
    """Number of tokens in each chunk of a document. A token attends only to tokens in the same chunk."""


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
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention within documents, with the signature that transformers' AttentionInterface requires.

    Args:
        module: the attention layer. If `is_causal` is None, the layer's attribute `is_causal` is used.
        query: [rows, heads, tokens, head_dim].
        key: [rows, kv_heads, tokens, head_dim].
        value: [rows, kv_heads, tokens, value_dim].
        attention_mask: None, since the layout of the row replaces a mask; or a `LocalMask`.
        sliding_window: size of the window: a token attends only to tokens at a distance of less than this number.
        s_aux: [heads], attention sinks.
        cu_seq_lens_q, max_length_q: cumulative segment lengths over all rows, int32 [segments + 1], and the length of
            the longest segment, or more. Compiled code reads them, since it does not know the layout.

    Returns:
        The attention output, a contiguous tensor [rows, tokens, heads, value_dim], and None in place of attention
        weights.

    Raises:
        PackingError: an argument is not supported, or no patched model runs that knows the borders.
    """
    rows, heads, tokens, _ = query.shape
    where = type(module).__name__
    row: Layout | TracedRow
    if not torch.compiler.is_compiling():
        row = _current_row(where, rows * tokens)
    elif cu_seq_lens_q is None or max_length_q is None:  # the graph breaks here
        row = _uncompiled_row(where, rows * tokens)
    else:
        row = TracedRow(cu_seq_lens_q, max_length_q)
    if isinstance(attention_mask, Tensor):
        raise PackingError(
            f"attention_mask: packed_varlen takes no mask, but {where} passed a mask of shape "
            f"{list(attention_mask.shape)}"
        )
    if tokens != key.shape[2]:
        raise PackingError(
            f"{where} has {tokens} queries for {key.shape[2]} keys; packed_varlen supports neither generation nor "
            "cross-attention"
        )
    for name, other in others.items():
        if other is not None and other is not False and name not in _HARMLESS:
            raise PackingError(
                f"{name}: packed_varlen does not support this argument of {where}; a column of the data that only the "
                "loss needs has to be taken out of the inputs in compute_loss"
            )
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    local = attention_mask if isinstance(attention_mask, LocalMask) else LocalMask(sliding_window)
    q, k, v = _one_row(query, key, value)
    options: dict[str, Any] = {
        "window": local.window,
        "chunk": local.chunk,
        "softcap": softcap,
        "sinks": s_aux,
        "dropout": dropout,
    }
    asked: dict[str, Any] = {}
    if isinstance(row, Layout):
        k, v, asked = row.gather_keys(k, v, where, is_causal, local.window, local.chunk)
    kernel = choose(module, q, v, options | asked)
    options |= {"is_causal": is_causal, "scale": query.shape[-1] ** -0.5 if scaling is None else scaling}
    exactly: Any = attend_exactly_compiled if isinstance(row, TracedRow) else attend_exactly
    attended = (exactly if kernel is None else kernel.attend)(q, k, v, row, **options)
    return attended[0].transpose(0, 1).reshape(rows, tokens, heads, -1).contiguous(), None


def _current_row(where: str, tokens: int) -> Layout:
    """Return the layout that the patched model currently processes, in an attention layer of the class `where`."""
    layout = current_layout.get()
    if layout is None:
        raise PackingError(
            f"{where}: expected a call within the forward of a patched model, which knows the borders "
            "between documents. If this model is not patched, its configuration is that of a patched model: build each "
            "model from its own copy.deepcopy(config), made before patch_model, or call "
            "model.set_attn_implementation('sdpa'); copy single layers in a block `with unpatch_model(model):`"
        )
    if (known := layout.rows * layout.tokens) != tokens:
        raise PackingError(
            f"{where}: expected the {known} tokens of the row that the model currently processes, got {tokens} tokens; "
            "an argument of the model with one value for each row or document needs one for each token"
        )
    return layout


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _uncompiled_row(where: str, tokens: int) -> TracedRow:
    """Return the row that the patched model currently processes, in uncompiled code."""
    layout = _current_row(where, tokens)
    if layout.sees_others:
        raise PackingError(
            f"{where}: expected rows of trees, and rows on several ranks, in uncompiled code, but torch.compile has "
            "compiled this module by itself; compile the whole model, which runs them uncompiled"
        )
    return TracedRow(layout.cu_seq_lens, layout.max_length)


def _one_row(*tensors: Tensor) -> list[Tensor]:
    """Return query, key and value as [1, heads, rows * tokens, dim], in one dtype: the dtype of autocast if autocast is
    on, or else the dtype of the value.

    The cast is needed since norms and rotary embeddings may return float32. As in torch's own attention, autocast does
    not apply to float64.
    """
    query, _, value = tensors
    device, dtype = query.device.type, value.dtype
    if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    if len(query) > 1:
        tensors = tuple(tensor.transpose(0, 1).flatten(1, 2)[None] for tensor in tensors)
    return [tensor.to(dtype) for tensor in tensors]


_PLAIN = (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function)
"""The mask functions of transformers that hide nothing but what borders and `is_causal` hide."""

_LOCAL = (
    *_PLAIN,
    masking_utils.sliding_window_overlay(1),
    masking_utils.sliding_window_bidirectional_overlay(1),
    masking_utils.chunked_overlay(1, torch.zeros(1)),
)
"""The mask functions of which those with a window or chunks are made, with `and_masks`."""

_AND = masking_utils.and_masks()
_PLAIN_CODE, _LOCAL_CODE = ({each.__code__ for each in known} for known in (_PLAIN, _LOCAL))


def _unknown_mask(function: Any, is_local: bool) -> str:
    """Return the name of a mask function that borders, a window and chunks cannot replace; an empty string if there is
    none in `function`."""
    inner, known = [function], _PLAIN_CODE
    if torch.compiler.is_compiling():  # which cannot look into functions, and adds borders of its own
        known = _PLAIN_CODE | {_AND.__code__}
    elif is_local and function.__code__ is _AND.__code__:
        inner, known = inspect.getclosurevars(function).nonlocals["mask_functions"], _LOCAL_CODE
    return next((each.__qualname__ for each in inner if each.__code__ not in known), "")


def packed_varlen_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **others: Any,
) -> Tensor | LocalMask | None:
    """Return the attention mask that transformers passes to `packed_varlen`, with the signature of its mask functions.

    The mask is None if the batch has no padding, since the borders of segments then replace the mask, or a `LocalMask`
    if it has a window or chunks. If the batch has padding, the mask is a tensor, for which `packed_varlen` raises an
    error.

    Raises:
        PackingError: the model adds mask functions of its own, which the borders of segments cannot replace.
    """
    unknown = _unknown_mask(mask_function, local_size is not None)
    if use_vmap or unknown:  # transformers sets use_vmap for functions of the caller
        raise PackingError(
            "attention_mask: expected a mask that is causal or bidirectional, with or without the window or the chunks "
            f"of the configuration, but the model adds a function of its own, {unknown or mask_function.__qualname__}"
        )
    padding: Tensor | None = masking_utils.flash_attention_mask(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask
    )
    if padding is not None or local_size is None:
        return padding
    window, chunk = (getattr(others["config"], name, None) for name in ("sliding_window", "attention_chunk_size"))
    if (local_size == window) is (local_size == chunk):
        raise PackingError(
            f"attention_mask: expected a window of {window} tokens or chunks of {chunk}, as in the configuration, but "
            f"not both, got a local mask of {local_size} tokens"
        )
    if local_size == chunk:
        return LocalMask(chunk=local_size)
    is_bidirectional = "allow_is_bidirectional_skip" in others  # transformers then counts the tokens on each side
    return LocalMask(window=local_size + is_bidirectional)


def register() -> None:
    """Register `packed_varlen` and its mask function with transformers."""
    AttentionInterface.register(NAME, packed_varlen)
    AttentionMaskInterface.register(NAME, packed_varlen_mask)
