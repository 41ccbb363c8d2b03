"""Compute exact attention within each segment of a packed row, in plain torch, on any device."""

from collections import defaultdict
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

_SHORT = 24
"""Segments of at most this many tokens are short: padding them costs less than further calls."""

_MANY_LENGTHS = 4
"""Short segments are padded if they have at least this many different lengths."""


_WORTH_A_CALL = 4096
"""Short segments are computed in two calls instead of one if this saves so many scores in each head."""


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
    """Compute attention within each segment of a single row.

    Segments of equal length are computed in one call, and so are short segments, padded to the longest of a group.

    Args:
        query: tensor [1, heads, tokens, head_dim].
        key: tensor [1, kv_heads, tokens, head_dim]; kv_heads divides heads.
        value: tensor [1, kv_heads, tokens, value_dim].
        lengths: number of tokens in each segment; the sum is the number of tokens in the row.
        scale: factor by which attention scores are multiplied.
        is_causal: whether a token attends only to itself and to earlier tokens of its segment.
        window: a token attends only to tokens at a distance of less than this number; None for no limit.
        softcap: limit of the scores, which become softcap * tanh(scores / softcap); None for unchanged scores.
        sinks: tensor [heads] with one extra score for each head. The score takes part in the softmax, but belongs to no
            token. None for no extra scores.
        dropout: probability of dropping an attention weight.

    Returns:
        Attention output, [1, heads, tokens, value_dim].
    """
    short = _short_segments(lengths, window) if softcap is None and sinks is None else []
    outputs: list[Tensor] = [query] * len(lengths)
    if short:
        attended = _attend_padded(query, key, value, tuple(lengths), tuple(short), scale, is_causal, dropout)
        if len(short) == len(lengths):
            return attended
        parts = torch.split(attended, [lengths[segment] for segment in short], dim=2)
        for segment, output in zip(short, parts, strict=True):
            outputs[segment] = output
    same_length: dict[int, list[int]] = defaultdict(list)
    for segment in sorted(set(range(len(lengths))).difference(short)):
        same_length[lengths[segment]].append(segment)
    queries, keys, values = (torch.split(tensor, lengths, dim=2) for tensor in (query, key, value))
    for length, segments in same_length.items():
        q, k, v = (_cat([parts[segment] for segment in segments], 0) for parts in (queries, keys, values))
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
    return _cat(outputs, 2)


def _short_segments(lengths: list[int], window: int | None) -> list[int]:
    """Return the segments to compute in one padded call; none if few calls are enough without padding."""
    most = _SHORT if window is None else min(_SHORT, window)
    short = [segment for segment, length in enumerate(lengths) if 0 < length <= most]
    return short if len({lengths[segment] for segment in short}) >= _MANY_LENGTHS else []


def _attend_padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: tuple[int, ...],
    segments: tuple[int, ...],
    scale: float,
    is_causal: bool,
    dropout: float,
) -> Tensor:
    """Compute attention within some segments in one or two calls, padded to the longest segment of each call.

    Args:
        query, key, value, scale, is_causal, dropout: arguments of `attend_by_segment`.
        lengths: number of tokens in each segment of the row.
        segments: the segments to compute.

    Returns:
        Attention output of these segments, one after the other, [1, heads, tokens of these segments, value_dim].
    """
    device = query.device
    layout = _padded_places(lengths, segments, is_causal)
    places, real = (torch.from_numpy(each).to(device) for each in (layout.places, layout.real))
    sizes = [segments_of_group * longest for segments_of_group, longest in layout.shapes]

    def padded(tensor: Tensor) -> list[Tensor]:
        heads, dim = tensor.shape[1], tensor.shape[3]
        rows = tensor.transpose(1, 2).reshape(-1, heads * dim).index_select(0, places)
        groups = zip(torch.split(rows, sizes), layout.shapes, strict=True)
        return [group.view(*shape, heads, dim).transpose(1, 2) for group, shape in groups]

    gqa, attended = query.shape[1] != key.shape[1], []
    for q, k, v, mask in zip(padded(query), padded(key), padded(value), layout.masks, strict=True):
        seen = torch.from_numpy(mask).to(device)
        output = F.scaled_dot_product_attention(q, k, v, seen, dropout, scale=scale, enable_gqa=gqa)
        attended.append(output.transpose(1, 2).flatten(0, 1))
    heads, dim = attended[0].shape[1:]
    rows = _cat([each.flatten(1) for each in attended], 0)
    return rows.index_select(0, real).view(1, -1, heads, dim).transpose(1, 2)


class _PaddedPlaces(NamedTuple):
    """Places of the tokens of padded segments: where they come from, what they see, and which of them are real."""

    places: npt.NDArray[np.int64]
    """int64 [padded tokens]: places in the row, group by group. Padding repeats the first token of its segment."""
    shapes: list[tuple[int, int]]
    """The number of segments in each group, and the tokens to which they are padded."""
    masks: list[npt.NDArray[np.bool_]]
    """What the tokens of each group see, bool [segments, 1, 1 or longest, longest]."""
    real: npt.NDArray[np.int64]
    """int64 [tokens]: places among the padded tokens, in the order of the row."""


@lru_cache(maxsize=16)
def _padded_places(lengths: tuple[int, ...], segments: tuple[int, ...], is_causal: bool) -> _PaddedPlaces:
    """Return how to pad segments in at most two groups: the short ones, and the shortest of them.

    The layers of a model ask for the same row one after the other, so the answers are kept.

    Args:
        lengths: number of tokens in each segment of the row.
        segments: the segments to pad.
        is_causal: whether a token sees only itself and earlier tokens.
    """
    length = np.array(lengths)
    first = (length.cumsum() - length)[list(segments)]
    length = length[list(segments)]
    begin = length.cumsum() - length  # of each segment among the real tokens
    shapes, masks, places = [], [], []
    real_places, before = np.zeros(length.sum(), np.int64), 0
    for group in _two_groups(length):
        offset = np.arange(length[group].max())
        real = offset < length[group, None]
        mask = real[:, None, None]
        masks.append(mask & (offset[:, None] >= offset) if is_causal else mask)
        shapes.append(real.shape)
        places.append((first[group, None] + offset * real).ravel())
        real_places[(begin[group, None] + offset)[real]] = before + np.flatnonzero(real)
        before += real.size
    return _PaddedPlaces(np.concatenate(places), shapes, masks, real_places)


def _two_groups(length: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Divide segments into two groups of similar lengths, if this saves enough work; else return one group.

    Args:
        length: int64 [segments]: number of tokens in each segment.

    Returns:
        For each group, the indices of its segments, ascending.
    """
    ordered = np.sort(length)
    number = np.arange(1, len(ordered))
    work = number * ordered[:-1] ** 2 + number[::-1] * ordered[-1] ** 2
    best = int(work.argmin())
    if len(ordered) * ordered[-1] ** 2 - work[best] < _WORTH_A_CALL:
        return [np.arange(len(length))]
    return [np.flatnonzero(length <= ordered[best]), np.flatnonzero(length > ordered[best])]


def _cat(parts: list[Tensor], dim: int) -> Tensor:
    """Concatenate tensors along the axis `dim`. A single tensor is returned unchanged, without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def window_mask(length: int, window: int, is_causal: bool, device: torch.device) -> Tensor:
    """Return a boolean mask [length, length] for attention within a window. An entry is True where the query (row)
    attends to the key (column)."""
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
    """Compute attention from explicit attention scores, for segments of equal length, or for the last tokens of paths.

    Explicit scores are needed since torch's fused attention supports neither soft caps nor sinks.

    Returns:
        Attention output, [segments, heads, length, value_dim].
    """
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
