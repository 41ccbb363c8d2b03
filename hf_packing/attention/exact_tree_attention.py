"""Compute exact attention in a row of trees: every token attends to the tokens above it on its path.

Keys and values are gathered along the path of each segment (arXiv 2511.00413 computes the same with masks).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_packing.attention.exact_attention import attend_with_scores
from hf_packing.attention.layout import Layout
from hf_packing.attention.token_axes import Place


def attend_along_paths(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: Layout,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute causal attention in a single row of trees. Windows and chunks are measured along the path.

    Args:
        query: tensor [1, heads, tokens, head_dim].
        key: tensor [1, kv_heads, tokens, head_dim]; kv_heads divides heads.
        value: tensor [1, kv_heads, tokens, value_dim].
        row: the segments of the row.
        scale: factor by which attention scores are multiplied.
        window: a token attends only to tokens at a distance of less than this number on its path; None for no limit.
        chunk: number of tokens in each chunk of a document. A token attends only to tokens in the same chunk; None for
            no chunks.
        softcap: limit of the scores, which become softcap * tanh(scores / softcap); None for unchanged scores.
        sinks: tensor [heads] with one extra score for each head; None for no extra scores.
        dropout: probability of dropping an attention weight. Documents share what is dropped in a shared prefix.

    Returns:
        Attention output, [1, heads, tokens, value_dim].
    """
    outputs = []
    for segment, q in enumerate(torch.split(query, list(row.lengths), dim=2)):
        start = int(row.trees.depths[segment])
        first = first_seen(start, window, chunk)
        end = start + row.lengths[segment]
        k, v = (_along(tensor, row.place_of(segment), first) for tensor in (key, value))
        mask = _mask(row, start, first, end, window, chunk, query.device)
        if softcap is None and sinks is None:
            attended = F.scaled_dot_product_attention(
                q, k, v, mask, dropout, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        else:
            attended = attend_with_scores(q, k, v, mask, scale, True, softcap, sinks, dropout)
        outputs.append(attended)
    return torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0]


def first_seen(start: int, window: int | None, chunk: int | None) -> int:
    """Return the first position on the path that any token from position `start` on attends to."""
    first = 0 if window is None else max(start - window + 1, 0)
    return first if chunk is None else max(first, start // chunk * chunk)


def _along(tensor: Tensor, place: Place, first: int) -> Tensor:
    """Return the entries of a path from position `first` on, [1, heads, tokens of the path, dim]."""
    if isinstance(place, Tensor):
        return tensor.index_select(2, place[first:])
    return tensor[:, :, place[0] + first : place[1]]


def _mask(
    row: Layout, start: int, first: int, end: int, window: int | None, chunk: int | None, device: torch.device
) -> Tensor | None:
    """Return which of the tokens at positions first:end on a path the tokens at start:end attend to, bool [queries,
    keys]; None for a plain triangle. The layers of a model ask for the same masks, so the row keeps them."""
    is_limited = (window is not None and window < end) or (chunk is not None and chunk < end)
    if start == first and not is_limited:
        return None
    asked = (start, first, end, window, chunk)
    if asked not in row.cache:
        at, to = torch.arange(start, end, device=device)[:, None], torch.arange(first, end, device=device)
        mask = to <= at
        if window is not None:
            mask &= at - to < window
        if chunk is not None:
            mask &= to >= at // chunk * chunk
        row.cache[asked] = mask
    kept: Tensor = row.cache[asked]
    return kept
