"""Compute attention with torch's FlexAttention.

FlexAttention takes a `BlockMask`, which says for each block of tokens which other blocks it attends to. torch's
`create_block_mask` evaluates the mask for all pairs of tokens. Here, a mask takes a fixed number of operations, which
wait for nothing: for 16,384 tokens, about 1 ms on a CPU. A model that torch.compile compiles makes the masks of packed
rows in its graph, so these need only arithmetic, and whole tensors: torch 2.11 compiled a search among borders that
were cut from a larger tensor into a search among the first ones of that tensor, so that an H200 computed other logits.
"""

from collections.abc import Callable, Iterable
from functools import cache, partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from hf_packing.attention.exact import TracedRow, with_gathered_keys
from hf_packing.attention.layout import Layout, once_for_all_layers
from hf_packing.upstream.torch import mark_static

BLOCK = 128
"""Number of tokens in a block, as in `create_block_mask`. It must be a multiple of FlexAttention's own tiles."""

_LEAST_HEAD_DIM = 16
"""The smallest head dimension of FlexAttention on CUDA. Up to torch 2.7, head dimensions must also be powers of 2."""

_NOT_FOR_FEW_TOKENS = {"FORCE_USE_FLEX_ATTENTION": True}
"""Kernel options that keep FlexAttention from using its decoding kernel in rows of less than 128 tokens. The decoding
kernel has limits of its own, and would have to be compiled in addition."""

LEAST_PLACES = 16384
"""The number of places in a mask's tensors with an entry for each token, or else the next power of 2. The compiled mask
contains this number, so it must not differ from row to row."""


def attend_with_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: Layout | TracedRow,
    *,
    scale: float,
    is_causal: bool,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,  # noqa: ARG001, refused
) -> Tensor:
    """Compute the result of `attend_exactly`, whose arguments these are, with one call of FlexAttention.

    On CUDA, FlexAttention is compiled at the first call, and again for the first row of another size. On a CPU, it is
    not compiled, which is slow and serves tests.
    """

    def attend(key: Tensor, value: Tensor, queries: Layout | TracedRow, keys: Layout | TracedRow) -> Tensor:
        make_mask = _kept_mask_of if isinstance(queries, Layout) else _mask_of
        of_chunks = None if row.sees_others else chunk  # a run of tokens is in one chunk
        sizes = query.shape[2], key.shape[2]
        head_dim = max(query.shape[-1], value.shape[-1], _LEAST_HEAD_DIM)
        head_dim = 1 << (head_dim - 1).bit_length()
        q, k, v = (pad_head_dim(tensor, head_dim) for tensor in (query, key, value))
        options: dict[str, Any] = {
            "score_mod": _scaled(scale, softcap, query),
            "block_mask": make_mask(queries, keys, sizes, query.device, is_causal, window, of_chunks),
            "scale": 1.0,
            "enable_gqa": q.shape[1] != k.shape[1],
            "kernel_options": _NOT_FOR_FEW_TOKENS,
        }
        if sinks is not None:
            options["return_aux"] = AuxRequest(lse=True)
        call = _attend
        if _needs_compiler(query):
            of_heads = q.dtype, q.shape[1], k.shape[1], head_dim
            call = _compiled((*of_heads, softcap is None, sinks is None, row.sees_others))
        output = call(q, k, v, options)
        if sinks is not None:
            output, aux = output
            # a sink is one more score in the softmax, which leaves this share to the tokens
            share = torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype).view(1, -1, 1))
            output = (output * share[..., None]).to(output.dtype)
        attended: Tensor = output[..., : value.shape[-1]]
        return attended

    return with_gathered_keys(attend, key, value, row, is_causal, window, chunk)


def _mask_of(
    queries: Layout | TracedRow, keys: Layout | TracedRow, sizes: tuple[int, int], device: torch.device, *how: Any
) -> BlockMask:
    own, seen = (
        Borders(each.cu_seq_lens.to(device, torch.int32), tokens)
        for each, tokens in zip((queries, keys), sizes, strict=True)
    )
    return row_mask(own, seen, *how)


_kept_mask_of: Callable[..., BlockMask] = once_for_all_layers(_mask_of)


def pad_head_dim(tensor: Tensor, head_dim: int) -> Tensor:
    """Return a tensor with its last axis padded with zeros to the size `head_dim`. If the last axis already has this
    size, return the tensor unchanged."""
    missing = head_dim - tensor.shape[-1]
    return F.pad(tensor, (0, missing)) if missing else tensor


def _attend(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Any:
    return flex_attention(query, key, value, **options)


def _needs_compiler(tensor: Tensor) -> bool:
    """Return whether FlexAttention has to be compiled: on CUDA, unless torch.compile already traces the model."""
    return tensor.is_cuda and not torch.compiler.is_compiling()


@cache
def _compiled(kind: tuple[Any, ...]) -> Callable[..., Any]:  # noqa: ARG001
    """Return a compiled function that does what `_attend` does, another one for each kind of call.

    torch counts how often it compiles a code object, and after 8 times it runs the slow version, or with `fullgraph`
    raises an error. So each kind of call has a code object of its own.
    """
    return torch.compile(FunctionType(_attend.__code__.replace(), globals()), fullgraph=True)


def _scaled(scale: float, softcap: float | None, query: Tensor) -> Callable[..., Tensor]:
    """Return a function that scales scores, and limits them to the range from -softcap to softcap.

    Both numbers are tensors. torch compiles numbers into the code, and for a number that differs between two layers or
    models, it makes code that FlexAttention cannot run.
    """
    number = partial(torch.full, (), dtype=torch.promote_types(query.dtype, torch.float32), device=query.device)
    factor = number(scale if softcap is None else scale / softcap)
    limit = None if softcap is None else number(softcap)

    def scaled(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        return score * factor if limit is None else limit * torch.tanh(score * factor)

    return scaled


class Borders(NamedTuple):
    """The borders between the runs of some tokens."""

    cu_lens: Tensor
    """Cumulative numbers of tokens, int32 [runs + 1]."""
    tokens: int


def row_mask(
    queries: Borders, keys: Borders, is_causal: bool, window: int | None, chunk: int | None = None
) -> BlockMask:
    """Make the BlockMask of a row, in which the keys that a query attends to form an interval.

    Args:
        queries, keys: the runs of queries, and those of their keys. The last query of a run belongs to its last key. In
            a packed row, both are the segments. All other arguments are explained in `attend_exactly`.
    """
    near = None if window is None else window - 1
    ahead = 0 if is_causal else near
    first, last = _intervals(queries, keys, near, ahead, chunk)

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        return (key >= first[query]) & (key <= last[query])

    if not torch.compiler.is_compiling():
        mark_static(first)
        mark_static(last)
    first_query, last_query = _intervals(keys, queries, ahead, near, chunk)
    blocks = (
        *_blocks_between(first, last, queries.tokens, keys.tokens),
        *_blocks_between(first_query, last_query, keys.tokens, queries.tokens),
    )
    arguments: Any = (queries.tokens, keys.tokens), *[each[None, None] for each in blocks], (BLOCK, BLOCK), attends
    return BlockMask(*arguments)


def _intervals(
    own: Borders, others: Borders, back: int | None, ahead: int | None, chunk: int | None
) -> tuple[Tensor, Tensor]:
    """Return the first and the last of the other tokens that see, or are seen from, each token, int32 [places]. The
    places after the tokens repeat the last token.

    Args:
        back, ahead: the largest distances to earlier and to later tokens; None for no limit.
    """
    places = max(LEAST_PLACES, 1 << (own.tokens - 1).bit_length())
    place = torch.arange(places, dtype=torch.int32, device=own.cu_lens.device).clamp(max=own.tokens - 1)
    run = torch.searchsorted(own.cu_lens, place, right=True) - 1
    first, end = others.cu_lens[run], others.cu_lens[run + 1]
    same, last = place + (end - own.cu_lens[run + 1]), end - 1
    if chunk is not None:
        first = same - (same - first) % chunk
        last = torch.minimum(last, first + (chunk - 1))
    if back is not None:
        first = torch.maximum(first, same - back)
    if ahead is not None:
        last = torch.minimum(last, same + ahead)
    return first, last


def _blocks_between(first: Tensor, last: Tensor, tokens: int, others: int) -> Iterable[Tensor]:
    """Return the blocks that are visible from each block, if an interval of tokens is visible from each token.

    The intervals of a block's tokens overlap or touch, so the visible blocks form an interval too. A pair of blocks is
    full if all tokens of one are visible from all tokens of the other. A block that the row's end cuts is never full.

    Args:
        first, last: what `_intervals` returns; neither ever falls.
        tokens, others: the numbers of tokens, and of those that are visible from them.

    Returns:
        For each block, the number of other blocks that are visible in part, int32 [blocks]; their indices, followed by
        other indices, int32 [blocks, other blocks]; and the same for those visible in full.
    """
    blocks = -(-tokens // BLOCK)
    first, last = (places[: blocks * BLOCK].view(blocks, BLOCK) for places in (first, last))
    number, other = (
        torch.arange(-(-each // BLOCK), dtype=torch.int32, device=first.device) for each in (tokens, others)
    )
    begin, end = first[:, 0] // BLOCK, last[:, -1] // BLOCK + 1
    begin_full, end_full = (first[:, -1] + BLOCK - 1) // BLOCK, (last[:, 0] + 1) // BLOCK
    full = (end_full - begin_full).clamp(min=0) * ((number + 1) * BLOCK <= tokens)
    skipped = torch.where(other[None] >= (begin_full - begin)[:, None], full[:, None], 0)
    indices = (begin[:, None] + other + skipped).clamp(max=len(other) - 1)
    full_indices = (begin_full[:, None] + other).clamp(max=len(other) - 1)
    return end - begin - full, indices, full, full_indices
