"""Gather keys along the paths of a row of trees, for kernels that take other borders for keys than for queries.

The tokens of a segment and of its first child, its first child, and so on are next to each other, both in the row and
on a path. Such a run of tokens is one sequence for a kernel: its queries are its own tokens, and its keys are those of
the whole path down to its last token. So the queries belong to the last keys.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_packing.attention.exact_tree_attention import first_seen
from hf_packing.attention.layout import Layout
from hf_packing.trees.segments import Places, TreeSegments

MOST_KEYS = 32768
"""A call of a kernel gathers at most this many keys, unless a single path has more. With 8 heads of 128 numbers in
bfloat16, these keys and their values take 128 MiB, while a call of this size is long enough to keep a GPU busy."""


@dataclass(frozen=True, eq=False)
class PathKeys:
    """The runs that one call of a kernel computes, and the places of their keys."""

    begin: int
    """The first token of these runs, whose queries are next to each other in the row."""
    end: int
    """The last token, plus 1."""
    places: Tensor
    """int64 [keys]: for each key, the index of its token in the row."""
    cu_seq_lens_q: Tensor
    """int32 [runs + 1]: cumulative numbers of queries."""
    cu_seq_lens_k: Tensor
    """int32 [runs + 1]: cumulative numbers of keys."""
    longest_q: int
    longest_k: int

    @classmethod
    def of(cls, runs: Sequence["Run"], device: torch.device) -> "PathKeys":
        queries, keys = [run.end - run.begin for run in runs], [len(run.keys) for run in runs]
        places = torch.from_numpy(np.concatenate([run.keys for run in runs])).to(device)
        of_queries, of_keys = (
            torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device) for lengths in (queries, keys)
        )
        return cls(runs[0].begin, runs[-1].end, places, of_queries, of_keys, max(queries), max(keys))


@dataclass(frozen=True, eq=False)
class Run:
    """Tokens that are next to each other, both in the row and on a path."""

    begin: int
    end: int
    """The last token, plus 1."""
    keys: Places
    """int64 [keys]: indices of the tokens on the path that the run attends to, from the first to its own last token."""


def runs_of(trees: TreeSegments, window: int | None, chunk: int | None) -> Iterator[Run]:
    """Yield the runs of a row, in the order of its tokens. A run is also cut where a chunk ends, so that all its tokens
    are in the same chunk.

    Args:
        window: a token attends only to tokens at a distance of less than this number on its path; None for no limit.
        chunk: number of tokens in each chunk of a document; None for no chunks.
    """
    heads = [segment for segment, parent in enumerate(trees.parents) if parent < 0 or parent != segment - 1]
    for head, next_head in zip(heads, [*heads[1:], len(trees.lengths)], strict=True):
        begin, end, depth = (int(each) for each in (trees.begins[head], trees.begins[next_head], trees.depths[head]))
        own = np.arange(begin, end)
        path = own if trees.parents[head] < 0 else np.concatenate([trees.path_of(trees.parents[head]), own])
        cuts = [] if chunk is None else range((depth // chunk + 1) * chunk, len(path), chunk)
        for first, last in zip([depth, *cuts], [*cuts, len(path)], strict=True):
            yield Run(begin + first - depth, begin + last - depth, path[first_seen(first, window, chunk) : last])


def gather_plan(row: Layout, window: int | None, chunk: int | None, device: torch.device) -> list[PathKeys]:
    """Return the calls of a kernel that compute a row, and keep them with the row.

    Args:
        row: the segments of the row.
        window, chunk: arguments of `runs_of`.
        device: where the calls run.
    """
    asked = ("keys", window, chunk, device)
    if asked not in row.cache:
        groups: list[list[Run]] = [[]]
        keys = 0
        for run in runs_of(row.trees, window, chunk):
            keys += len(run.keys)
            if groups[-1] and keys > MOST_KEYS:
                groups.append([])
                keys = len(run.keys)
            groups[-1].append(run)
        row.cache[asked] = [PathKeys.of(group, device) for group in groups]
    plan: list[PathKeys] = row.cache[asked]
    return plan


def gather_keys(tensor: Tensor, places: Tensor) -> Tensor:
    """Return the keys or values at some places of a row, [1, heads, places, dim].

    In the backward pass, a shared token gets the sum of the gradients of all runs that attend to it. This sum is
    computed in float32.
    """
    gathered: Tensor = _Gather.apply(tensor, places)  # type: ignore[no-untyped-call]
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.shape = tensor.shape
        return tensor.index_select(2, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        summed = torch.zeros(ctx.shape, dtype=dtype, device=gradient.device)
        return summed.index_add_(2, places, gradient.to(dtype)).to(gradient.dtype), None
