"""The part of gpu.py that compares attention kernels: one layer, forward and backward, in rows and in a tree.

All sides get the same documents. Their outputs are compared with exact attention in float32: the error is the largest
difference, as a share of the largest output.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from attention import mask_of
from gpu_part import DEVICE, CannotRunError, Results, Scale, Side, compare
from gpu_training import lengths_for
from internals import KERNELS, Call, Layout, TreeLayout, TreeSegments, attend_exactly
from torch import Tensor
from transformers import LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask

EXACT = "exact attention"
HALF = torch.bfloat16
ALLOWED_ERROR = 4
"""Times that of exact attention in half precision, and one percent."""
ANSWERS = 8


def run(results: Results, scale: Scale) -> None:
    tokens = scale.tokens
    prompt, answer = tokens // 2, tokens // 2 // ANSWERS
    rows = {
        "documents of a step": first_lengths(scale),
        f"64 of {tokens // 64:,} tokens": [tokens // 64] * 64,
        f"1 of {tokens:,} tokens": [tokens],
        f"{ANSWERS} answers of {answer:,} to a prompt of {prompt:,}": TreeSegments(
            (prompt, *[answer] * ANSWERS), (-1, *[0] * ANSWERS)
        ),
    }
    scale = dataclasses.replace(scale, seconds=scale.seconds / len(rows))
    results.found["settings"] = (
        f"bfloat16, {scale.heads} heads of {scale.head_dim}, {scale.kv_heads} for keys and values, forward and backward"
    )
    for title, segments in rows.items():
        compare(results, scale, title, Row(scale, segments).sides(), reference=EXACT)


def first_lengths(scale: Scale) -> list[int]:
    """Return the lengths of the first documents that fit in a row, and the rest of the row."""
    lengths = lengths_for(scale)
    first = lengths[lengths.cumsum() <= scale.tokens].tolist()
    rest = scale.tokens - sum(first)
    return [*first, rest] if rest else first


class Row:
    """Documents, with random queries, keys and values, for all sides.

    Args:
        scale: with the sizes of a layer.
        segments: lengths of documents, or the segments of a tree.
    """

    def __init__(self, scale: Scale, segments: Sequence[int] | Any) -> None:
        self.is_tree = isinstance(segments, TreeSegments)
        self.layout = (TreeLayout if self.is_tree else Layout).of(segments, DEVICE)
        self.scale, self.scaling = scale, scale.head_dim**-0.5
        generator = torch.Generator().manual_seed(0)
        heads = (scale.heads, scale.kv_heads, scale.kv_heads)
        shapes = [(1, each, self.layout.tokens, scale.head_dim) for each in heads]
        self.tensors = [torch.randn(shape, generator=generator).to(DEVICE, HALF).requires_grad_() for shape in shapes]
        with torch.no_grad():
            q, k, v = (each.float() for each in self.tensors)
            k, v = (each.repeat_interleave(scale.heads // scale.kv_heads, 1) for each in (k, v))  # needs less memory
            self.wanted = self.attended_by(attend_exactly, q, k, v)
            self.error_of_exact = self.error(self.attended_by(attend_exactly, *self.tensors))

    def attended_by(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        return function(*tensors, self.layout, scale=self.scaling, is_causal=True)

    def sides(self) -> dict[str, Callable[[], Side]]:
        kernels = [stand_in(each) for each in KERNELS] if DEVICE.type == "cpu" else KERNELS
        makers = {each.name: partial(self.of_kernel, each) for each in kernels}
        makers |= {"sdpa with a mask": self.masked, "sdpa, padded": self.padded}
        return {EXACT: lambda: self.side(partial(self.attended_by, attend_exactly)), **makers}

    def side(
        self,
        attend: Callable[..., Tensor],
        tensors: Sequence[Tensor] | None = None,
        in_row: Callable[[Tensor], Tensor] = lambda attended: attended,
    ) -> Side:
        """Return a side that runs forward and backward.

        Args:
            attend: takes the tensors, and returns [batch, heads, tokens, head_dim].
            tensors: queries, keys and values, or else those of the row.
            in_row: returns what was attended in the order of the row.
        """
        tensors = self.tensors if tensors is None else tensors
        attended = attend(*tensors)
        weight, error = torch.ones_like(attended), self.error(in_row(attended).detach())
        if error > ALLOWED_ERROR * self.error_of_exact + 0.01:
            raise CannotRunError(f"failed: other outputs than those of exact attention, error {error:.2g}")
        del attended

        def step() -> int:
            torch.autograd.grad(attend(*tensors), tensors, weight)
            return self.layout.tokens

        return Side(step, lambda: {"error": error})

    def error(self, attended: Tensor) -> float:
        return float((attended.float() - self.wanted).abs().max() / self.wanted.abs().max())

    def of_kernel(self, kernel: Any) -> Side:
        if reason := kernel.refusal(Call(HALF, self.scale.head_dim, in_trees=self.is_tree)):
            raise CannotRunError(reason)
        return self.side(partial(self.attended_by, kernel.attend))

    def masked(self) -> Side:
        """As transformers runs a packed row on sdpa."""
        if self.is_tree:
            raise CannotRunError("takes no trees")
        mask = mask_of(Layout.of(self.layout.trees.lengths))
        mask = None if mask is None else mask.to(DEVICE)
        return self.side(partial(self.on_sdpa, mask))

    def padded(self) -> Side:
        """As transformers runs a batch of documents that are padded to the longest; those of a tree, one by one."""
        trees = self.layout.trees
        leaves = [each for each in range(len(trees.parents)) if each not in trees.parents]
        paths = [torch.as_tensor(np.asarray(trees.path_of(each))) for each in leaves]
        longest = max(map(len, paths))
        places = torch.stack([F.pad(path, (0, longest - len(path))) for path in paths]).to(DEVICE)
        attends = torch.stack([torch.arange(longest) < len(path) for path in paths]).to(DEVICE)
        config = LlamaConfig(attn_implementation="sdpa")
        mask = create_causal_mask(config, torch.empty(len(paths), longest, 1, device=DEVICE), attends.long(), None)
        real, first = places[attends], {}
        for index, place in enumerate(real.tolist()):
            first.setdefault(place, index)
        back = torch.tensor([first[place] for place in range(self.layout.tokens)], device=DEVICE)

        padded = [each.detach()[0][:, places].transpose(0, 1).requires_grad_() for each in self.tensors]

        def in_row(attended: Tensor) -> Tensor:
            return attended.transpose(1, 2)[attends][back].transpose(0, 1)[None]

        return self.side(partial(self.on_sdpa, mask), padded, in_row)

    def on_sdpa(self, mask: Tensor | None, *tensors: Tensor) -> Tensor:
        layer = Attention()
        layer.num_key_value_groups = self.scale.heads // self.scale.kv_heads
        attended, _ = sdpa_attention_forward(layer, *tensors, mask, scaling=self.scaling, is_causal=mask is None)
        return attended.transpose(1, 2)


class Attention(torch.nn.Module):
    """What transformers' sdpa reads of a layer."""

    is_causal = True
    num_key_value_groups: int


def stand_in(kernel: Any) -> Any:
    """Return what runs in the place of a kernel on a CPU, and takes the same calls."""
    if kernel.name == "FlexAttention":
        return ForwardOnly(kernel)
    return dataclasses.replace(kernel, name=f"{kernel.name} (stand-in)", load=lambda: looped, is_torch=False)


class ForwardOnly:
    """FlexAttention on a CPU, where it has no backward pass: its gradients are those of exact attention."""

    name = "FlexAttention (stand-in)"

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.refusal = kernel, kernel.refusal

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layout: Any, **options: Any) -> Tensor:
        exact = attend_exactly(query, key, value, layout, **options)
        flex = self.kernel.attend(query.detach(), key.detach(), value.detach(), layout, **options)
        attended: Tensor = exact + (flex - exact.detach())
        return attended


def looped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,  # noqa: ARG001
    max_seqlen_k: int,  # noqa: ARG001
    softmax_scale: float,
    causal: bool,  # noqa: ARG001
) -> Tensor:
    """Causal attention of tensors [tokens, heads, head_dim], as flash-attn has it: queries belong to the last keys."""
    outputs = []
    for q_of, k_of, v_of in zip(
        torch.tensor_split(q, cu_seqlens_q[1:-1].long().cpu()),
        *(torch.tensor_split(each, cu_seqlens_k[1:-1].long().cpu()) for each in (k, v)),
        strict=True,
    ):
        hides = torch.ones(len(q_of), len(k_of), dtype=torch.bool).tril(len(k_of) - len(q_of))
        tensors = (each.transpose(0, 1)[None] for each in (q_of, k_of, v_of))
        attended = F.scaled_dot_product_attention(*tensors, hides, scale=softmax_scale, enable_gqa=True)
        outputs.append(attended[0].transpose(0, 1))
    return torch.cat(outputs)
