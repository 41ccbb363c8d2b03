"""Exact attention over segments and their prefixes, in plain torch, on any device.

The tokens of a segment attend to the tokens above them, which are the segment's prefix, and to each other. A packed row
consists of segments without prefixes. torch's attention is called once for all segments of equal lengths, so a row of n
different lengths costs n calls. Compiled code calls the same function as one opaque operator.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_packing.attention.layout import Layout
from hf_packing.errors import PackingError
from hf_packing.trees.segments import Places, TreeSegments


def attend_exactly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    *,
    scale: float,
    is_causal: bool,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute attention within the documents of a single row. Windows and chunks are measured along documents.

    Args:
        query: tensor [1, heads, tokens, head_dim].
        key: tensor [1, kv_heads, tokens, head_dim]; kv_heads divides heads.
        value: tensor [1, kv_heads, tokens, value_dim].
        layout: the segments of the row.
        scale: factor by which attention scores are multiplied.
        is_causal: whether a token attends only to itself and to earlier tokens of its document, as trees require.
        window: a token attends only to tokens at a distance of less than this number; None for no limit.
        chunk: number of tokens in each chunk of a document. A token attends only to tokens in the same chunk; None for
            no chunks.
        softcap: limit of the scores, which become softcap * tanh(scores / softcap); None for unchanged scores.
        sinks: tensor [heads] with one extra score for each head. The score takes part in the softmax, but belongs to no
            token. None for no extra scores.
        dropout: probability of dropping an attention weight. Documents share what is dropped in a shared prefix.

    Returns:
        Attention output, [1, heads, tokens, value_dim].
    """
    plan = _plan_for(layout, is_causal, window, chunk, query.device)
    queries, keys, values = torch.split(query, plan.lengths, dim=2), plan.split_keys(key), plan.split_keys(value)
    outputs: list[Tensor] = [query] * len(queries)
    for runs, mask in plan.calls:
        q, k, v = (_cat([parts[run] for run in runs], 0) for parts in (queries, keys, values))
        if softcap is None and sinks is None:
            causal, gqa = is_causal and mask is None, q.shape[1] != k.shape[1]
            attended = F.scaled_dot_product_attention(
                q, k, v, mask, dropout, is_causal=causal, scale=scale, enable_gqa=gqa
            )
        else:
            attended = attend_with_scores(q, k, v, mask, scale, is_causal, softcap, sinks, dropout)
        for run, output in zip(runs, torch.split(attended, 1), strict=True):
            outputs[run] = output
    return _cat(outputs, 2)


def runs_of(trees: TreeSegments, window: int | None, chunk: int | None) -> Iterator[tuple[int, Places]]:
    """Yield the runs of a row, which are next to each other both in the row and in a document: the segments, and their
    parts in different chunks. The tokens of a run attend to its prefix and to each other.

    Args:
        trees: the segments of the row.
        window, chunk: arguments of `attend_exactly`.

    Yields:
        The number of tokens in the run, and its prefix, int64 [tokens]: the tokens above the run that it attends to.
    """
    for length, depth, parent in zip(trees.lengths, trees.depths.tolist(), trees.parents, strict=True):
        above, bottom = trees.path_of(parent) if depth else _NOTHING, depth + length
        cuts = [] if chunk is None else range((depth // chunk + 1) * chunk, bottom, chunk)
        for first, last in pairwise([depth, *cuts, bottom]):
            seen = 0 if window is None else max(first - window + 1, 0)
            seen = seen if chunk is None else max(seen, first // chunk * chunk)
            yield last - first, above[seen:]


_NOTHING = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class _Plan:
    """The calls of torch's attention that compute a row."""

    lengths: list[int]
    """The number of tokens in each run."""
    keys: list[int]
    """The number of keys of each run: its prefix, then its own tokens."""
    places: Tensor | None
    """int64 [keys of all runs]: where they are in the row; None if no run has a prefix."""
    calls: list[tuple[list[int], Tensor | None]]
    """The runs in each call, which have equal lengths and equally long prefixes, and their mask, bool [queries, keys].
    The mask is None if tokens attend to all tokens of the run, or to all before them."""

    def split_keys(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return the keys or values of each run, [1, heads, keys, dim]."""
        if self.places is not None:
            tensor = gather_tokens(tensor, self.places)
        return torch.split(tensor, self.keys, dim=2)


def _plan_for(layout: Layout, is_causal: bool, window: int | None, chunk: int | None, device: torch.device) -> _Plan:
    """Return the calls for a row, which the layers of a model share."""
    asked = ("exact attention", is_causal, window, chunk, device)
    if asked not in layout.cache:
        lengths, prefixes = zip(*runs_of(layout.trees, window, chunk), strict=True)
        calls: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number, (length, prefix) in enumerate(zip(lengths, prefixes, strict=True)):
            calls[length, len(prefix)].append(number)
        places = None
        if any(map(len, prefixes)):
            own = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
            both = (each for parts in zip(prefixes, own, strict=True) for each in parts)
            places = torch.from_numpy(np.concatenate(list(both))).to(device)
        layout.cache[asked] = _Plan(
            list(lengths),
            [length + len(prefix) for length, prefix in zip(lengths, prefixes, strict=True)],
            places,
            [(numbers, _mask(*shape, is_causal, window, device)) for shape, numbers in calls.items()],
        )
    plan: _Plan = layout.cache[asked]
    return plan


def _mask(length: int, prefix: int, is_causal: bool, window: int | None, device: torch.device) -> Tensor | None:
    """Return which keys each token of a run attends to; None if the rule is that of torch's attention."""
    is_limited = window is not None and window < prefix + length
    return visible(length, prefix, is_causal, window, device) if prefix or is_limited else None


def visible(length: int, prefix: int, is_causal: bool, window: int | None, device: torch.device) -> Tensor:
    """Return a boolean mask [length, prefix + length], which is True where a token of a run attends to the key."""
    keys = torch.arange(prefix + length, device=device)
    back, window = keys[prefix:, None] - keys, window or len(keys)
    return (back < window) & (back >= 0 if is_causal else back > -window)


def _cat(parts: list[Tensor], dim: int) -> Tensor:
    """Concatenate tensors along the axis `dim`. A single tensor is returned unchanged, without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


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
    """Compute attention of runs of equal lengths from explicit scores.

    Explicit scores are needed since torch's fused attention supports neither soft caps nor sinks.

    Returns:
        Attention output, [runs, heads, length, value_dim].
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None and is_causal:
        mask = visible(query.shape[2], 0, True, None, query.device)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = F.softmax(scores, dim=-1, dtype=torch.promote_types(query.dtype, torch.float32)).to(query.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    return F.dropout(weights, dropout) @ value


def gather_tokens(tensor: Tensor, places: Tensor) -> Tensor:
    """Return the keys or values at some places of a row, [1, heads, places, dim].

    In the backward pass, a shared token gets the sum of the gradients of all runs that attend to it. This sum is
    computed in float32.
    """
    exact = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return exact.index_select(2, places).to(tensor.dtype)


_OPTIONS = ("scale", "is_causal", "window", "chunk", "softcap")
"""The arguments of `attend_exactly` that are numbers, as the operators take them."""

_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor cu_seq_lens, Tensor? sinks, float scale, bool is_causal, "
    "SymInt? window, SymInt? chunk, float? softcap"
)


def attend_exactly_compiled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens: Tensor,
    *,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> Tensor:
    """Return the result of `attend_exactly` for a packed row, as one operator in code that torch.compile compiles.

    Args:
        cu_seq_lens: cumulative segment lengths, int32 [segments + 1], in place of the layout, which compiled code does
            not know. The last one may be repeated. All other arguments are explained in `attend_exactly`.

    Raises:
        PackingError: dropout is not 0. The backward pass computes attention again, and cannot repeat the dropout of
            the forward pass.
    """
    if dropout:
        raise PackingError(
            f"dropout: expected 0 in compiled attention on {query.device.type}, got {dropout}; set the attention "
            "dropout in the model's configuration to 0, or do not compile the model"
        )
    output: Tensor = _attend(query, key, value, cu_seq_lens, sinks, *(options.get(name) for name in _OPTIONS))
    return output


@torch.library.custom_op("hf_packing::attend_exactly", mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor")
def _attend(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_lens: Tensor, sinks: Tensor | None, *options: Any
) -> Tensor:
    return _attend_between(cu_seq_lens, options, query, key, value, sinks).contiguous()


@torch.library.custom_op(
    "hf_packing::attend_exactly_backward", mutates_args=(), schema=f"(Tensor gradient, {_ARGUMENTS}) -> Tensor[]"
)
def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens: Tensor,
    sinks: Tensor | None,
    *options: Any,
) -> list[Tensor]:
    """Return the gradients with respect to query, key, value and, if there are any, sinks.

    Attention is computed again, with autograd, which `vjp` switches on within an operator.
    """
    attend, inputs = partial(_attend_between, cu_seq_lens, options), [query, key, value]
    gradients_of = torch.func.vjp(attend, *inputs, *([] if sinks is None else [sinks]))[1]
    return [each.contiguous() for each in gradients_of(gradient)]


def _attend_between(
    cu_seq_lens: Tensor, options: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
) -> Tensor:
    layout = _layout_between(tuple(cu_seq_lens.tolist()))
    return attend_exactly(query, key, value, layout, sinks=sinks, **dict(zip(_OPTIONS, options, strict=True)))


@lru_cache(maxsize=1)
def _layout_between(borders: tuple[int, ...]) -> Layout:
    """Return the layout of the segments between borders, without those that are empty. The layers of a model share
    it."""
    return Layout.of([end - begin for begin, end in pairwise(borders) if end > begin])


@_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:  # noqa: ARG001
    return query.new_empty(*query.shape[:-1], value.shape[-1])


@_backward.register_fake
def _(
    _: Tensor, query: Tensor, key: Tensor, value: Tensor, __: Tensor, sinks: Tensor | None, *___: Any
) -> list[Tensor]:
    return [each.new_empty(each.shape) for each in (query, key, value, sinks) if each is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs[: -len(_OPTIONS)])
    ctx.options = inputs[-len(_OPTIONS) :]


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    of_query, of_key, of_value, *of_sinks = _backward(gradient, *ctx.saved_tensors, *ctx.options)
    return of_query, of_key, of_value, None, *(of_sinks or [None]), *[None] * len(_OPTIONS)


_attend.register_autograd(_gradients, setup_context=_save)
