"""Replace weights that may hide a leak between documents by random ones, for the time of a proof."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_SMALL = 0.1
"""Standard deviation of the noise that `random_where_zero` adds to gates and biases that consist of zeros."""

_SHARE_OF_KERNEL = 0.5
"""Standard deviation of the noise that `random_where_zero` adds to a convolution kernel, as a share of the root mean
square of the kernel."""

_LONGEST_KERNEL = 16
"""Largest kernel size, in tokens, of the convolutions to which `random_where_zero` adds noise. The kernel size is the
size of the last axis of the convolution's weight."""


@contextmanager
def random_where_zero(model: nn.Module) -> Iterator[None]:
    """Context manager: within the block, noise is added to weights that may hide a leak between documents.

    In an untrained model, two kinds of weights may hide a leak. A projection or gate of zeros passes on no information,
    and a convolution kernel that is the identity passes no information from one token to another. Noise is added to
    every parameter that consists of zeros, and to every short convolution kernel. After the block, the original weights
    are restored.
    """
    parameters = [p for p in model.parameters() if p.ndim and p.numel() and p.is_floating_point() and not p.is_meta]
    zero = [parameter for parameter in parameters if not parameter.any()]
    kernels = [
        (p, p.detach().clone()) for p in parameters if p.ndim == 3 and p.shape[-1] <= _LONGEST_KERNEL and p.any()
    ]
    generator = torch.Generator().manual_seed(0)

    def noise(parameter: nn.Parameter, scale: float) -> torch.Tensor:
        return (torch.randn(parameter.shape, generator=generator) * scale).to(parameter)

    try:
        with torch.no_grad():
            for parameter in zero:
                parameter.copy_(noise(parameter, parameter[0].numel() ** -0.5 if parameter.ndim > 1 else _SMALL))
            for parameter, _ in kernels:
                parameter.add_(noise(parameter, _SHARE_OF_KERNEL * float(parameter.float().square().mean().sqrt())))
        yield
    finally:
        with torch.no_grad():
            for parameter in zero:
                parameter.zero_()
            for parameter, before in kernels:
                parameter.copy_(before)
