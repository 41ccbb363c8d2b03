"""Exact attention over segments and their prefixes, in plain torch, on any device.

The tokens of a segment attend to the tokens above them, which are the segment's prefix, and to each other. A packed row
consists of segments without prefixes. torch's attention is called once for all segments of equal lengths, so a row of n
different lengths costs n calls, and more with windows or chunks. Compiled code calls the same function as one opaque
operator.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_packing.attention.layout import Layout, Run, on_device, once_for_all_layers
from hf_packing.attention.token_axes import cat
from hf_packing.batch.segments import lengths_between
from hf_packing.errors import PackingError


class TracedRow(NamedTuple):
    """The borders that compiled code knows of a packed row, in place of its Layout."""

    cu_seq_lens: Tensor
    max_length: int
    """Number of tokens in the longest segment, or more."""
    sees_others: bool = False


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
    is_plain = softcap is None and sinks is None
    plan = _plan(layout, is_causal, window, chunk, query.device, query.dtype)
    if plan.places is not None:
        key, value = gather_tokens(key, plan.places), gather_tokens(value, plan.places)
    of_runs = (query, plan.lengths), (key, plan.keys), (value, plan.keys)
    parts = [torch.split(each, lengths, dim=2) for each, lengths in of_runs]
    outputs = [query] * len(plan.lengths)
    for runs, mask in plan.calls:
        q, k, v = (cat([each[run] for run in runs], 0) for each in parts)
        if is_plain:
            causal = is_causal and mask is None
            attended = F.scaled_dot_product_attention(
                q, k, v, mask, dropout, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        else:
            attended = attend_with_scores(q, k, v, mask, scale, is_causal, softcap, sinks, dropout)
        for run, output in zip(runs, torch.split(attended, 1), strict=True):
            outputs[run] = output
    return cat(outputs, 2)


_LONGEST_MASKED = 512
"""The most tokens of a run in one call with a mask. Longer runs are cut, which keeps masks small, and leaves out keys
beyond the window."""


class _Plan(NamedTuple):
    """The calls of torch's attention that compute a row."""

    lengths: list[int]
    """The number of tokens of each run."""
    keys: list[int]
    """The number of keys of each run."""
    places: Tensor | None
    """Where the keys of all runs are, int64 [keys], if they have to be gathered."""
    calls: list[tuple[list[int], Tensor | None]]
    """The runs of each call, which have equal numbers of tokens and of keys; and the mask [length, keys], which is
    added to scores; None if the rule is that of torch's attention."""


@once_for_all_layers
def _plan(
    layout: Layout,
    is_causal: bool,
    window: int | None,
    chunk: int | None,
    device: torch.device,
    dtype: torch.dtype,
) -> _Plan:
    runs, places = layout.runs(is_causal, window, chunk, _LONGEST_MASKED)
    calls = defaultdict(list)
    for number, run in enumerate(runs):
        calls[run].append(number)
    given = [
        (numbers, _mask(run, is_causal, window, device, dtype) if run.needs_mask(is_causal, window) else None)
        for run, numbers in calls.items()
    ]
    lengths, keys = [run.length for run in runs], [run.keys for run in runs]
    return _Plan(lengths, keys, None if places is None else on_device(places, device), given)


def _mask(run: Run, is_causal: bool, window: int | None, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the mask of a run, [length, keys]. What a token sees depends on distances alone."""
    place = torch.arange(run.before, run.before + run.length, device=device)[:, None]
    key = torch.arange(run.keys, device=device)
    window = window or run.keys
    hidden = (place - key >= window) | (key - place >= (1 if is_causal else window))
    return torch.zeros(hidden.shape, device=device, dtype=dtype).masked_fill(hidden, -math.inf)


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
        mask = torch.full_like(scores[0, 0], -math.inf).triu(1)
    if mask is not None:
        scores = scores + mask
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
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)).index_select(2, places).to(tensor.dtype)


MOST_KEYS = 32768
"""The most keys that are gathered along paths and kept for the backward pass. With 8 heads of 128 numbers in bfloat16,
these keys and their values take 128 MiB in every layer."""


def with_gathered_keys(
    attend: Callable[..., Tensor],
    key: Tensor,
    value: Tensor,
    row: Layout | TracedRow,
    is_causal: bool,
    window: int | None,
    chunk: int | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return what a kernel computes for a row, given attend(key, value, queries, keys), which calls it.

    In trees and on several ranks, keys and values are gathered for each run of queries. If these are many, they are
    gathered again in the backward pass, so that those of only one layer are in memory.
    """
    if not row.sees_others:
        return attend(key, value, row, row)
    places, queries, keys = keys_along_paths(row, is_causal, window, chunk, key.device)

    def gather_and_attend() -> Tensor:
        return attend(gather_tokens(key, places), gather_tokens(value, places), queries, keys)

    if len(places) <= MOST_KEYS or not torch.is_grad_enabled():
        return gather_and_attend()
    gathered_again: Tensor = checkpoint(gather_and_attend, use_reentrant=False, preserve_rng_state=dropout > 0)
    return gathered_again


@once_for_all_layers
def keys_along_paths(
    row: Layout, is_causal: bool, window: int | None, chunk: int | None, device: torch.device
) -> tuple[Tensor, Layout, Layout]:
    """Return the keys of the runs of a row whose segments see others: where each is among the keys that attention gets,
    int64 [keys]; the layout of the runs' queries; and that of their keys."""
    runs, places = row.runs(is_causal, window, chunk)
    assert places is not None
    queries, keys = (Layout.of([*lengths], device) for lengths in zip(*(run[:2] for run in runs), strict=True))
    return on_device(places, device), queries, keys


_OPTIONS = ("scale", "is_causal", "window", "chunk", "softcap")
"""The arguments of `attend_exactly` that are numbers, as the operators take them."""

_ARGUMENTS = (
    "Tensor[] inputs, Tensor cu_seq_lens, float scale, bool is_causal, SymInt? window, SymInt? chunk, float? softcap"
)
"""The arguments of both operators. The inputs are query, key, value and, if there are any, sinks."""


def attend_exactly_compiled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: TracedRow,
    *,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> Tensor:
    """Return the result of `attend_exactly` for a packed row, as one operator in code that torch.compile compiles.

    Args:
        row: the borders, in place of the layout, which compiled code does not know. The last border may be repeated.
            All other arguments are explained in `attend_exactly`.

    Raises:
        PackingError: dropout is not 0. The backward pass computes attention again, and cannot repeat the dropout of
            the forward pass.
    """
    if dropout:
        raise PackingError(
            f"dropout: expected 0 in compiled attention on {query.device.type}, got {dropout}; set the attention "
            "dropout in the model's configuration to 0, or do not compile the model"
        )
    inputs = [query, key, value] if sinks is None else [query, key, value, sinks]
    output: Tensor = _attend(inputs, row.cu_seq_lens, *(options.get(name) for name in _OPTIONS))
    return output


@torch.library.custom_op("hf_packing::attend_exactly", mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor")
def _attend(inputs: list[Tensor], cu_seq_lens: Tensor, *options: Any) -> Tensor:
    return _attend_between(cu_seq_lens, options, *inputs).contiguous()


@torch.library.custom_op(
    "hf_packing::attend_exactly_backward", mutates_args=(), schema=f"(Tensor gradient, {_ARGUMENTS}) -> Tensor[]"
)
def _backward(gradient: Tensor, inputs: list[Tensor], cu_seq_lens: Tensor, *options: Any) -> list[Tensor]:
    """Return the gradients with respect to the inputs. Attention is computed again, with autograd, which `vjp` switches
    on within an operator."""
    gradients_of = torch.func.vjp(partial(_attend_between, cu_seq_lens, options), *inputs)[1]
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
    return Layout.of(lengths_between(borders))


@_attend.register_fake
def _(inputs: list[Tensor], *_: Any) -> Tensor:
    return inputs[0].new_empty(*inputs[0].shape[:-1], inputs[2].shape[-1])


@_backward.register_fake
def _(_: Tensor, inputs: list[Tensor], *__: Any) -> list[Tensor]:
    return [each.new_empty(each.shape) for each in inputs]


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs[0], inputs[1])
    ctx.options = inputs[2:]


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    *inputs, cu_seq_lens = ctx.saved_tensors
    return _backward(gradient, inputs, cu_seq_lens, *ctx.options), *[None] * (1 + len(_OPTIONS))


_attend.register_autograd(_gradients, setup_context=_save)
