"""Compute attention in packed rows and in rows of trees with torch's FlexAttention.

FlexAttention takes a `BlockMask`, which says for each block of tokens which other blocks it attends to. torch's
`create_block_mask` evaluates the mask for all pairs of tokens. Here, blocks are compared instead of tokens, in a fixed
number of operations, which wait for nothing: a mask for 16,384 tokens takes about 1 ms on a CPU.
"""

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from hf_packing.trees.segments import TreeSegments

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

_NEVER = 2**31 - 1
"""An end that no token reaches. The places after the row's tokens have it, so that each attends at least to itself."""


def attend_with_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute the result of `attend_exactly` with one call of FlexAttention.

    On CUDA, FlexAttention is compiled at the first call, and again for the first row of another size. On a CPU, it is
    not compiled, which is slow and serves tests.

    Args:
        mask: the `block_mask` of the row. All other arguments are explained in `attend_exactly`.

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
        attend = _compiled((q.dtype, q.shape[1], k.shape[1], head_dim, softcap is None, sinks is None))
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


def block_mask(
    cu_seq_lens: Tensor,
    tokens: int,
    is_causal: bool,
    window: int | None,
    chunk: int | None = None,
    trees: TreeSegments | None = None,
) -> BlockMask:
    """Make the BlockMask of a row.

    Segments are in depth-first order, so everything below a segment directly follows it. A token is therefore on the
    path of a later one that stands before the end of what is below the token's segment. In packed rows, this is the
    segment's own end. No value is read from the device, and the number of operations for packed rows depends neither
    on the number of tokens nor on the number of segments.

    Args:
        cu_seq_lens: cumulative segment lengths, int32 [segments + 1], on the device of the mask.
        tokens: number of tokens in the row.
        is_causal: whether a token attends only to itself and to earlier tokens of its document, as trees require.
        window: a token attends only to tokens at a distance of less than this number; None for no limit.
        chunk: number of tokens in each chunk of a document. A token attends only to tokens in the same chunk; None for
            no chunks.
        trees: the segments, if some of them have parents.
    """
    places = max(LEAST_PLACES, 1 << (tokens - 1).bit_length())
    place = torch.arange(places, dtype=torch.int32, device=cu_seq_lens.device if trees is None else "cpu")
    depth, end = _in_rows(cu_seq_lens, place) if trees is None else _in_trees(trees, places)
    end = torch.where(place < tokens, end, _NEVER)
    least, stop = torch.zeros_like(depth), place + 1 if is_causal else end
    if window is not None:
        least, stop = (depth - (window - 1)).clamp(min=0), torch.minimum(stop, place + window)
    if chunk is not None:
        in_chunk = depth % chunk
        least, stop = torch.maximum(least, depth - in_chunk), torch.minimum(stop, place - in_chunk + chunk)
    first = place - depth + least if trees is None else torch.zeros_like(place)
    values = torch.stack([stop, end, depth, least, first]).to(cu_seq_lens.device)
    stop, end, depth, least, _ = values.unbind()

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        return (key < stop[query]) & (query < end[key]) & (depth[key] >= least[query])

    if not torch.compiler.is_compiling():
        for each in (stop, end, depth, least):
            torch._dynamo.mark_static(each)
    partial, full = _visible_blocks(values, tokens)
    keys, queries = (_ordered(partial), _ordered(full)), (_ordered(partial.T), _ordered(full.T))
    return BlockMask(
        seq_lengths=(tokens, tokens),
        kv_num_blocks=keys[0][0],
        kv_indices=keys[0][1],
        full_kv_num_blocks=keys[1][0],
        full_kv_indices=keys[1][1],
        q_num_blocks=queries[0][0],
        q_indices=queries[0][1],
        full_q_num_blocks=queries[1][0],
        full_q_indices=queries[1][1],
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=attends,
    )


def _in_rows(cu_seq_lens: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Return the depth of each token in its segment, and the end of its segment, int32 [places]."""
    segment = torch.searchsorted(cu_seq_lens[1:-1].contiguous(), place, right=True)
    return place - cu_seq_lens[segment], cu_seq_lens[segment + 1]


def _in_trees(trees: TreeSegments, places: int) -> tuple[Tensor, Tensor]:
    """Return the depth of each token in its documents, and the end of what is below its segment, int32 [places]."""
    ends = np.repeat(trees.begins[list(trees.ends_below)], trees.lengths)
    depth, end = (np.pad(values, (0, places - trees.tokens), mode="edge") for values in (trees.position_ids, ends))
    return torch.from_numpy(depth), torch.from_numpy(end.astype(np.int32))


def _visible_blocks(values: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return for each block of queries which blocks of keys are visible in part, and which are visible in full.

    A block that is visible in full is full in the mask as well, and one that is not visible at all is left out. In
    trees with windows or chunks, the mask may hide all tokens of a block that is visible in part, which costs a little
    time.

    Args:
        values: int32 [5, places]: for each token as a query, the token after the last one that it attends to; as a
            key, the token after the last one that may attend to it; its depth; as a query, the least depth and, in
            packed rows, the first token that it attends to.
        tokens: number of tokens in the row. A block that the row's end cuts is never full.

    Returns:
        bool [blocks of queries, blocks of keys], twice.
    """
    number = torch.arange(-(-tokens // BLOCK), device=values.device)
    begin, end, is_whole = number * BLOCK, (number + 1) * BLOCK, (number + 1) * BLOCK <= tokens
    blocks = values[:, : len(number) * BLOCK].view(len(values), -1, BLOCK)
    (stop, ending, depth, least, first), (last_stop, last_ending, deepest, most, _) = blocks.amin(2), blocks.amax(2)
    seen = (begin < last_stop[:, None]) & (last_ending > begin[:, None])
    seen &= (end > first[:, None]) & (deepest >= least[:, None])
    full = (end <= stop[:, None]) & (ending >= end[:, None]) & (depth >= most[:, None])
    full &= is_whole & is_whole[:, None]
    return seen & ~full, full


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of True entries in each row, int32 [1, 1, blocks], and their indices, followed by those of the
    other entries, int32 [1, 1, blocks, blocks]."""
    blocks = blocks.to(torch.int8).contiguous()  # so that the order is contiguous, too, as the compiled kernel reads it
    order = blocks.argsort(dim=1, descending=True, stable=True).to(torch.int32)
    return blocks.sum(1, dtype=torch.int32)[None, None], order[None, None]
