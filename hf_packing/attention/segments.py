"""Exact attention segment by segment: what a kernel computes, in plain torch, on any device and in any dtype."""

from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import Tensor


def attend_by_segment(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: list[int],
    *,
    scale: float,
    is_causal: bool,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention inside each segment of a flat row. Segments of equal length share one call.

    Args:
        query: [1, heads, tokens, head_dim].
        key: [1, kv_heads, tokens, head_dim]; kv_heads divides heads.
        value: [1, kv_heads, tokens, value_dim].
        lengths: tokens of each segment; they add up to the row.
        scale: factor of the scores.
        is_causal: whether a token sees only itself and what precedes it.
        window: tokens that a token sees on each side it may look at, itself included; None for all.
        softcap: scores become softcap * tanh(scores / softcap); None for none.
        sinks: [heads], a score of each head that takes part in the softmax and attends to nothing; None for none.
        dropout: probability of dropping an attention weight.

    Returns:
        [1, heads, tokens, value_dim].
    """
    same_length: dict[int, list[int]] = defaultdict(list)
    for segment, length in enumerate(lengths):
        same_length[length].append(segment)
    queries, keys, values = (torch.split(tensor, lengths, dim=2) for tensor in (query, key, value))
    outputs: list[Tensor] = [query] * len(lengths)
    for length, segments in same_length.items():
        q, k, v = (cat([parts[segment] for segment in segments], 0) for parts in (queries, keys, values))
        mask = None if window is None or window >= length else window_mask(length, window, is_causal, query.device)
        if softcap is None and sinks is None:
            causal = is_causal and mask is None
            gqa = q.shape[1] != k.shape[1]
            attended = F.scaled_dot_product_attention(
                q, k, v, mask, dropout, is_causal=causal, scale=scale, enable_gqa=gqa
            )
        else:
            attended = attend_with_scores(q, k, v, mask, scale, is_causal, softcap, sinks, dropout)
        for segment, output in zip(segments, torch.split(attended, 1), strict=True):
            outputs[segment] = output
    return cat(outputs, 2)


def cat(parts: list[Tensor], dim: int) -> Tensor:
    """torch.cat copies a single tensor too."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def window_mask(length: int, window: int, is_causal: bool, device: torch.device) -> Tensor:
    """bool [length, length]: which keys (columns) each query (rows) sees."""
    back = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (back < window) & (back >= 0 if is_causal else back > -window)


def attend_with_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    is_causal: bool,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
) -> Tensor:
    """Attention with its scores written out, for what torch's fused attention does not know: soft caps and sinks."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None and is_causal:
        mask = window_mask(query.shape[2], query.shape[2], True, query.device)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = F.softmax(scores, dim=-1, dtype=torch.promote_types(query.dtype, torch.float32)).to(query.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    return F.dropout(weights, dropout) @ value
