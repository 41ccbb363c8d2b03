"""Compute attention in a row of trees with torch's FlexAttention.

Segments are in depth-first order, so everything below a segment directly follows it. A token therefore attends to an
earlier token if it stands before the end of what is below that token's segment. No keys are gathered.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from hf_packing.attention.flex import BLOCK, LEAST_PLACES, attend_with_mask
from hf_packing.attention.layout import Layout
from hf_packing.trees.segments import TreeSegments

_NEVER = 2**31 - 1
"""An end that no token reaches. The places after the row's tokens have it, so that each attends at least to itself."""


def attend_in_trees_with_flex(
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
) -> Tensor:
    """Compute the result of `attend_along_paths` with one call of FlexAttention. The arguments are explained there."""
    asked = ("mask of FlexAttention", window, chunk, query.device)
    if asked not in row.cache:
        row.cache[asked] = tree_block_mask(row.trees, window, chunk, query.device)
    mask: BlockMask = row.cache[asked]
    return attend_with_mask(query, key, value, mask, "trees", scale=scale, softcap=softcap, sinks=sinks)


def tree_block_mask(trees: TreeSegments, window: int | None, chunk: int | None, device: torch.device) -> BlockMask:
    """Make the BlockMask of a row of trees.

    Args:
        trees: the segments of the row.
        window: a token attends only to tokens at a distance of less than this number on its path; None for no limit.
        chunk: number of tokens in each chunk of a document. A token attends only to tokens in the same chunk; None for
            no chunks.
        device: where the mask is needed.
    """
    tokens, depths = trees.tokens, trees.position_ids
    first = 0 if window is None else np.maximum(depths - (window - 1), 0)
    first = first if chunk is None else np.maximum(first, depths // chunk * chunk)
    ends = np.repeat(trees.begins[list(trees.ends_below)], trees.lengths)
    depth, least = _padded(depths, tokens, 0, device), _padded(first, tokens, 0, device)
    end = _padded(ends, tokens, _NEVER, device)

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        return (key <= query) & (query < end[key]) & (depth[key] >= least[query])

    for each in (depth, least, end):
        torch._dynamo.mark_static(each)
    partial, full = _visible_blocks(end, depth, least, tokens)
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


def _padded(values: npt.NDArray[Any] | int, tokens: int, fill: int, device: torch.device) -> Tensor:
    """Return a value for each token as int32 [places], with the value `fill` after the tokens."""
    padded = np.full(max(LEAST_PLACES, 1 << (tokens - 1).bit_length()), fill, np.int32)
    padded[:tokens] = values
    return torch.from_numpy(padded).to(device)


def _visible_blocks(end: Tensor, depth: Tensor, least: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return for each block of queries which blocks of keys are visible in part, and which are visible in full.

    A block that is visible in full is full in the mask as well, and one that is not visible at all is left out. But of
    blocks that are visible in part, the mask may hide all tokens, which costs a little time.

    Args:
        end: int32 [places]: the token after everything below each token's segment.
        depth: int32 [places]: the position of each token in its documents.
        least: int32 [places]: the first position that each token attends to.
        tokens: number of tokens in the row.

    Returns:
        bool [blocks of queries, blocks of keys], twice.
    """
    number = torch.arange(-(-tokens // BLOCK), device=end.device)
    begin, last = number * BLOCK, ((number + 1) * BLOCK).clamp(max=tokens) - 1
    is_whole = (number + 1) * BLOCK <= tokens

    def limits(values: Tensor) -> tuple[Tensor, Tensor]:
        real = values[:tokens]
        fill = real[-1:].expand(len(number) * BLOCK - tokens)
        blocks = torch.cat([real, fill]).view(-1, BLOCK)
        return blocks.amin(1), blocks.amax(1)

    (first_end, last_end), (least_depth, most_depth), (lowest, highest) = map(limits, (end, depth, least))
    seen = number <= number[:, None]
    seen &= (last_end > begin[:, None]) & (most_depth >= lowest[:, None])
    full = (number < number[:, None]) & is_whole & is_whole[:, None]
    full &= (first_end > last[:, None]) & (least_depth >= highest[:, None])
    return seen & ~full, full


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of True entries in each row, int32 [1, 1, blocks], and their indices, followed by those of the
    other entries, int32 [1, 1, blocks, blocks]."""
    order = blocks.to(torch.int8).argsort(dim=1, descending=True, stable=True).to(torch.int32)
    # of transposed blocks, argsort returns a transposed tensor, and the compiled kernel reads rows one after another
    return blocks.sum(1, dtype=torch.int32)[None, None], order.contiguous()[None, None]
