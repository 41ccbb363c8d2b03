"""Sum a loss over chunks of tokens, and compute its gradients in the forward pass, chunk by chunk.

Only the intermediate results of one chunk are in memory at a time. The backward pass computes no chunk again: it only
scales the stored gradients, as in the FusedLinearCrossEntropy of Liger Kernel (arXiv 2410.10989).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LossOfChunk = Callable[[Tensor, slice], Tensor]
"""A function (hidden states of a chunk, float [tokens of the chunk, width]; the chunk) -> loss, a float scalar."""


def chunks_of(tokens: int, size: int) -> list[slice]:
    """Return slices of at most `size` tokens each; one slice if there are no tokens."""
    return [slice(begin, begin + size) for begin in range(0, max(tokens, 1), size)]


def sum_of_chunks(loss_of_chunk: LossOfChunk, hidden: Tensor, size: int) -> Tensor:
    """Return the sum of the losses of all chunks, a float scalar.

    Args:
        loss_of_chunk: the function that computes the loss of one chunk.
        hidden: float [tokens, width], the hidden states of all tokens.
        size: number of tokens in a chunk.
    """
    chunks = chunks_of(len(hidden), size)
    if not torch.is_grad_enabled():
        return torch.stack([loss_of_chunk(hidden[chunk], chunk) for chunk in chunks]).sum()
    parameters = _leaves(loss_of_chunk(hidden[:1].detach(), slice(0, 1)))
    apply: Callable[..., Tensor] = _GradientsInForward.apply
    return apply(loss_of_chunk, chunks, hidden, *parameters)


class _GradientsInForward(torch.autograd.Function):
    """The sum of the losses of all chunks, whose gradients are computed in the forward pass.

    Args of forward:
        loss_of_chunk: a function (hidden states of a chunk, the chunk) -> loss.
        chunks: slices of the tokens.
        hidden: float [tokens, width], the hidden states of all tokens.
        parameters: the weights that the loss depends on.
    """

    @staticmethod
    def forward(
        ctx: Any, loss_of_chunk: LossOfChunk, chunks: list[slice], hidden: Tensor, *parameters: Tensor
    ) -> Tensor:
        of_hidden = torch.empty_like(hidden) if hidden.requires_grad else None
        # the sum over chunks in 16 bits would be less precise than the product of whole matrices
        of_parameters = [torch.zeros_like(each, dtype=_sum_type(each.dtype)) for each in parameters]

        def loss_of(chunk: slice) -> Tensor:
            with torch.enable_grad():
                tokens = hidden[chunk].detach().requires_grad_(of_hidden is not None)
                loss = loss_of_chunk(tokens, chunk)
            wanted = [*parameters, *([tokens] if of_hidden is not None else [])]
            found = torch.autograd.grad(loss, wanted) if wanted else ()
            for total, gradient in zip(of_parameters, found, strict=False):
                total += gradient
            if of_hidden is not None:
                of_hidden[chunk] = found[-1]
            return loss.detach()

        result = torch.stack([loss_of(chunk) for chunk in chunks]).sum()
        ctx.save_for_backward(of_hidden, *of_parameters)
        ctx.dtypes = [hidden.dtype, *(each.dtype for each in parameters)]
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_loss: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [
            None if each is None else (each.to(_sum_type(each.dtype)) * of_loss).to(dtype)
            for each, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return None, None, *gradients


def _sum_type(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def _leaves(result: Tensor) -> list[Tensor]:
    """Return the leaf tensors that `result` depends on and that require a gradient."""
    waiting, seen, found = [result.grad_fn], set(), []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return found
