"""Compute exact attention within each segment in code that is compiled with torch.compile.

Compiled code cannot read segment lengths from a tensor. It therefore calls a custom op, which has its own backward
pass. The op takes the lengths from the current packed row, so that it need not wait for a GPU to copy them.
"""

from typing import Any

import torch
from torch import Tensor

from hf_packing.attention.exact_attention import attend_by_segment, window_mask
from hf_packing.attention.layout import current_layout
from hf_packing.errors import PackingError


@torch.library.custom_op("hf_packing::attend_by_segment", mutates_args=())
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens: Tensor,
    sinks: Tensor | None,
    scale: float,
    is_causal: bool,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the result of `attend_by_segment`, without dropout, and the segment lengths, int64 [segments], on the CPU.
    The argument `cu_seq_lens`, int32 [segments + 1], contains the cumulative segment lengths, and takes the place of
    the list of lengths. There may be empty segments at the end."""
    row = current_layout.get()
    if row is not None and _is_same_memory(row.cu_seq_lens, cu_seq_lens):
        lengths = list(row.lengths)
    else:
        lengths = [length for length in cu_seq_lens.diff().tolist() if length]
    options: dict[str, Any] = {"scale": scale, "is_causal": is_causal, "window": window, "softcap": softcap}
    attended = attend_by_segment(query, key, value, lengths, sinks=sinks, **options).contiguous()
    return attended, torch.tensor(lengths + [0] * (len(cu_seq_lens) - 1 - len(lengths)))


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape


@torch.library.custom_op("hf_packing::attend_by_segment_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segment_lengths: Tensor,
    sinks: Tensor | None,
    scale: float,
    is_causal: bool,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients with respect to query, key, value and sinks. Without sinks, the last gradient is an empty
    tensor.

    Args:
        gradient: gradient with respect to the attention output.
        segment_lengths: the second result of the forward pass.
        query, key, value, sinks, scale, is_causal, window, softcap: arguments of the forward pass, from which attention
            is computed again.
    """
    lengths = [length for length in segment_lengths.tolist() if length]
    mask = {length: _visible(length, window, is_causal, query.device) for length in set(lengths)}
    parts = [torch.split(tensor, lengths, dim=2) for tensor in (gradient, query, key, value)]
    found = [
        _segment_gradients(g, q, k, v, mask[length], sinks, scale, softcap)
        for length, g, q, k, v in zip(lengths, *parts, strict=True)
    ]
    of_query, of_key, of_value, of_sinks = zip(*found, strict=True)
    along = [torch.cat(each, dim=2) for each in (of_query, of_key, of_value)]
    summed = query.new_empty(0) if sinks is None else torch.stack(of_sinks).sum(0).to(sinks.dtype)
    return along[0], along[1], along[2], summed


def _visible(length: int, window: int | None, is_causal: bool, device: torch.device) -> Tensor:
    return window_mask(length, length if window is None else window, is_causal, device)


def _segment_gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients with respect to query, key, value and sinks for one segment.

    The gradients are computed in float64 if the query is float64, otherwise in float32.
    """
    dtype, heads, kv_heads = torch.promote_types(query.dtype, torch.float32), query.shape[1], key.shape[1]
    q, g = query.to(dtype), gradient.to(dtype)
    k, v = (tensor.to(dtype).repeat_interleave(heads // kv_heads, dim=1) for tensor in (key, value))
    scores = q @ k.transpose(2, 3) * scale
    slope = 1.0 if softcap is None else 1 - torch.tanh(scores / softcap) ** 2
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    sink = None if sinks is None else sinks.to(dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.softmax(scores if sink is None else torch.cat([scores, sink], dim=-1), dim=-1)
    on_sink, weights = weights[..., -1:], weights[..., : scores.shape[-1]]
    of_weights = g @ v.transpose(2, 3)
    mean = (of_weights * weights).sum(-1, keepdim=True)
    of_scores = weights * (of_weights - mean) * slope * scale
    shared = [
        each.reshape(1, kv_heads, heads // kv_heads, *each.shape[2:]).sum(2)
        for each in (of_scores.transpose(2, 3) @ q, weights.transpose(2, 3) @ g)
    ]
    of_sinks = -(on_sink * mean).sum((0, 2, 3))
    return (of_scores @ k).to(query.dtype), shared[0].to(key.dtype), shared[1].to(value.dtype), of_sinks


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, cu_seq_lens: Tensor, *_: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    lengths = torch.empty(cu_seq_lens.shape[0] - 1, dtype=torch.int64, device="cpu")
    return query.new_empty(*query.shape[:-1], value.shape[-1]), lengths


@_backward.register_fake
def _(
    gradient: Tensor,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segment_lengths: Tensor,  # noqa: ARG001
    sinks: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_sinks = query.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape), of_sinks


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, _, sinks = inputs[:5]
    ctx.save_for_backward(query, key, value, output[1], sinks)
    ctx.options = inputs[5:]


def _gradients(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
    query, key, value, lengths, sinks = ctx.saved_tensors
    of_query, of_key, of_value, of_sinks = _backward(gradient, query, key, value, lengths, sinks, *ctx.options)
    return of_query, of_key, of_value, None, None if sinks is None else of_sinks, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)


def attend_by_segment_compiled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens: Tensor,
    sinks: Tensor | None,
    *,
    scale: float,
    is_causal: bool,
    window: int | None,
    softcap: float | None,
    dropout: float,
) -> Tensor:
    """Return the result of `attend_by_segment`, computed by a custom op, so that torch.compile can compile the caller.

    Args:
        cu_seq_lens: cumulative segment lengths, int32 [segments + 1], in place of the list of lengths. The last one may
            be repeated. All other arguments are explained in `attend_by_segment`.

    Raises:
        PackingError: dropout is not 0. The backward pass recomputes attention, and cannot repeat the dropout of the
            forward pass.
    """
    if dropout:
        raise PackingError(
            f"dropout: expected 0 in compiled attention on {query.device.type}, got {dropout}; set the attention "
            "dropout in the model's configuration to 0, or do not compile the model"
        )
    output: Tensor = _forward(query, key, value, cu_seq_lens, sinks, scale, is_causal, window, softcap)[0]
    return output
