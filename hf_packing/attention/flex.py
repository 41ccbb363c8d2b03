"""Compute attention within each segment of a packed row with torch's FlexAttention.

FlexAttention takes a `BlockMask`, which says for each block of tokens which other blocks it attends to. torch's
`create_block_mask` evaluates the mask for all pairs of tokens. In a packed row, the tokens that a token attends to form
an interval, and its ends never move back from one token to the next. So the blocks follow from the intervals of the
first and of the last token of each block.
"""

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.utils.weak import WeakIdKeyDictionary

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
    cu_seq_lens: Tensor,
    *,
    scale: float,
    is_causal: bool,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute the result of `attend_by_segment` with one call of FlexAttention.

    On CUDA, FlexAttention is compiled at the first call, and again for the first row of another size. On a CPU, it is
    not compiled, which is slow and serves tests.

    Args:
        cu_seq_lens: cumulative segment lengths, int32 [segments + 1], on the query's device. All other arguments are
            explained in `attend_by_segment`.

    Returns:
        Attention output, [1, heads, tokens, value_dim].
    """
    mask = _block_mask_of(cu_seq_lens, value.shape[2], is_causal, window)
    return attend_with_mask(query, key, value, mask, "segments", scale=scale, softcap=softcap, sinks=sinks)


def attend_with_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    kind: str,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention in a row with one call of FlexAttention.

    Args:
        mask: which tokens each token attends to.
        kind: what the mask is made of. Masks of different kinds are compiled apart. All other arguments are explained
            in `attend_by_segment`.

    Returns:
        Attention output, [1, heads, tokens, value_dim].
    """
    value_dim = value.shape[-1]
    head_dim = max(query.shape[-1], value_dim, _LEAST_HEAD_DIM)
    head_dim = 1 << (head_dim - 1).bit_length()
    q, k, v = (pad_head_dim(tensor, head_dim) for tensor in (query, key, value))
    options: dict[str, Any] = {
        "score_mod": _scaled(scale, softcap, query),
        "block_mask": mask,
        "scale": 1.0,
        "enable_gqa": q.shape[1] != k.shape[1],
        "kernel_options": _NOT_FOR_FEW_TOKENS,
    }
    if sinks is not None:
        options["return_aux"] = AuxRequest(lse=True)
    attend = _attend
    if _needs_compiler(query):
        attend = _compiled((kind, q.dtype, q.shape[1], k.shape[1], head_dim, softcap is None, sinks is None))
    output = attend(q, k, v, options)
    if sinks is not None:
        output, aux = output
        log_sum_exp = aux.lse
        # a sink is one more score in the softmax, which leaves this share to the tokens
        share = torch.sigmoid(log_sum_exp - sinks.to(log_sum_exp.dtype).view(1, -1, 1))
        output = (output * share[..., None]).to(output.dtype)
    attended: Tensor = output[..., :value_dim]
    return attended


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
    own = FunctionType(_attend.__code__.replace(), globals())
    return torch.compile(own, fullgraph=True)


def _scaled(scale: float, softcap: float | None, query: Tensor) -> Callable[..., Tensor]:
    """Return a function that scales scores, and limits them to the range from -softcap to softcap.

    Both numbers are tensors. torch compiles numbers into the code, and for a number that differs between two layers or
    models, it makes code that FlexAttention cannot run.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    factor = torch.full((), scale if softcap is None else scale / softcap, dtype=dtype, device=query.device)
    if softcap is None:

        def scaled(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
            return score * factor

        return scaled
    limit = torch.full((), softcap, dtype=dtype, device=query.device)

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        return limit * torch.tanh(score * factor)

    return capped


_masks: Any = WeakIdKeyDictionary()
"""The masks for borders that are in memory. The layers of a model have the same borders, and differ at most in their
windows."""


def _block_mask_of(cu_seq_lens: Tensor, tokens: int, is_causal: bool, window: int | None) -> BlockMask:
    """Return `block_mask` of the arguments. The mask is stored as long as the borders are in memory."""
    if torch.compiler.is_compiling() or cu_seq_lens.is_inference():
        return block_mask(cu_seq_lens, tokens, is_causal, window)
    of_borders = _masks.setdefault(cu_seq_lens, {})
    kind = (cu_seq_lens._version, tokens, is_causal, window)
    if kind not in of_borders:
        of_borders[kind] = block_mask(cu_seq_lens, tokens, is_causal, window)
    mask: BlockMask = of_borders[kind]
    return mask


def block_mask(cu_seq_lens: Tensor, tokens: int, is_causal: bool, window: int | None) -> BlockMask:
    """Make the BlockMask of a packed row from the borders between its segments.

    No value is read from the device, and the number of operations depends neither on the number of tokens nor on the
    number of segments.

    Args:
        cu_seq_lens: cumulative segment lengths, int32 [segments + 1].
        tokens: number of tokens in the row.
        is_causal: whether a token attends only to itself and to earlier tokens of its segment.
        window: a token attends only to tokens at a distance of less than this number; None for no limit.
    """
    places = max(LEAST_PLACES, 1 << (tokens - 1).bit_length())
    place = torch.arange(places, dtype=torch.int32, device=cu_seq_lens.device)
    segment = torch.searchsorted(cu_seq_lens[1:-1].contiguous(), place, right=True)
    first, last = cu_seq_lens[segment], cu_seq_lens[segment + 1] - 1
    if window is not None:
        first, last = torch.maximum(first, place - (window - 1)), torch.minimum(last, place + (window - 1))
    last_key, first_query = (place, place) if is_causal else (last, first)

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        return (key >= first[query]) & (key <= last_key[query])

    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static(first)
        torch._dynamo.mark_static(last_key)
    keys, queries = _visible_blocks(first, last_key, tokens), _visible_blocks(first_query, last, tokens)
    return BlockMask(
        seq_lengths=(tokens, tokens),
        kv_num_blocks=keys[0],
        kv_indices=keys[1],
        full_kv_num_blocks=keys[2],
        full_kv_indices=keys[3],
        q_num_blocks=queries[0],
        q_indices=queries[1],
        full_q_num_blocks=queries[2],
        full_q_indices=queries[3],
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=attends,
    )


def _visible_blocks(first: Tensor, last: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the blocks that are visible from each block, if an interval of tokens is visible from each token.

    The intervals of a block's tokens overlap or touch, so the visible blocks form an interval too. A pair of blocks is
    full if all tokens of one are visible from all tokens of the other. A block that the row's end cuts is never full.

    Args:
        first: int32 [places], the first token that is visible from each token; never falls.
        last: int32 [places], the last token that is visible from each token; never falls. There may be places after the
            row's tokens.
        tokens: number of tokens in the row.

    Returns:
        For each block, the number of visible blocks that are not full, int32 [1, 1, blocks]; their indices, followed by
        other indices, int32 [1, 1, blocks, blocks]; and the same for visible blocks that are full.
    """
    blocks = -(-tokens // BLOCK)
    first, last = (places[: blocks * BLOCK].view(blocks, BLOCK) for places in (first, last))
    number = torch.arange(blocks, dtype=torch.int32, device=first.device)
    is_whole = (number + 1) * BLOCK <= tokens
    end_of_row = (tokens - 1) % BLOCK  # in the last block
    first_of_last = torch.where(is_whole, first[:, -1], first[:, end_of_row])
    last_of_last = torch.where(is_whole, last[:, -1], last[:, end_of_row])
    begin, end = first[:, 0] // BLOCK, last_of_last // BLOCK + 1
    begin_full, end_full = (first_of_last + BLOCK - 1) // BLOCK, (last[:, 0] + 1) // BLOCK
    full = (end_full - begin_full).clamp(min=0) * is_whole
    skipped = torch.where(number[None] >= (begin_full - begin)[:, None], full[:, None], 0)
    indices = (begin[:, None] + number + skipped).clamp(max=blocks - 1)
    full_indices = (begin_full[:, None] + number).clamp(max=blocks - 1)
    found = (end - begin - full, indices, full, full_indices)
    partial_count, partial, full_count, full_ones = (each.to(torch.int32)[None, None] for each in found)
    return partial_count, partial, full_count, full_ones
