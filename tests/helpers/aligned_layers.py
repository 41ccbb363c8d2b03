"""A stand-in for layers in FP8, which take only so many tokens that their number is a multiple."""

import torch
from torch import nn


class _Aligned(torch.autograd.Function):
    """The identity, whose gradients have a number of tokens that is a multiple."""

    @staticmethod
    def forward(ctx, values, multiple):
        ctx.multiple = multiple
        return values.view_as(values)

    @staticmethod
    def backward(ctx, gradient):
        check(gradient, ctx.multiple)
        return gradient, None


def check(values, multiple):
    if (tokens := values.shape[:-1].numel()) % multiple:
        raise RuntimeError(f"expected a multiple of {multiple} tokens, got {tokens}")


class AlignedLinear(nn.Linear):
    """A linear layer that takes a multiple of so many tokens: in the forward, too, as those of transformer-engine, or
    in the backward pass alone, as those of torchao."""

    multiple, in_forward = 16, True

    def forward(self, values):
        if self.in_forward:
            check(values, self.multiple)
        return _Aligned.apply(super().forward(values), self.multiple)


def with_aligned_layers(model, multiple=16, in_forward=True):
    """Put stand-ins in the place of all linear layers of a model but its output layer."""
    kept = model.get_output_embeddings()
    for module in model.modules():
        if type(module) is nn.Linear and module is not kept:
            module.__class__ = AlignedLinear
            module.multiple, module.in_forward = multiple, in_forward
    return model
