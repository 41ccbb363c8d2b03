"""What a forward leaves behind in the modules, such as the scale of a rotary embedding, is put back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

INNER = ("_buffers", "_modules")

KEPT = ("forward", "training")
"""What others may set on purpose while a forward runs."""


@contextmanager
def as_it_was(*modules: nn.Module) -> Iterator[None]:
    """Attributes, buffers and inner modules of these modules are put back, and new ones taken away."""
    before = [(module, dict(vars(module)), [dict(vars(module)[name]) for name in INNER]) for module in modules]
    try:
        yield
    finally:
        for module, attributes, inner in before:
            for name, known in zip(INNER, inner, strict=True):
                put_back(vars(module)[name], known)
            put_back(vars(module), attributes, KEPT)


def put_back(now: dict[str, Any], before: dict[str, Any], kept: tuple[str, ...] = ()) -> None:
    for name in now.keys() - before.keys() - set(kept):
        del now[name]
    now.update({name: value for name, value in before.items() if name not in kept})


@contextmanager
def with_weights_everywhere(model: nn.Module) -> Iterator[None]:
    """Weights that are all zero, as some projections are before training, are random for the length of the block.

    A module behind such a projection cannot be seen to leak, and will as soon as it is trained.
    """
    weights = [p for p in model.parameters() if p.ndim >= 2 and p.numel() and p.is_floating_point() and not p.is_meta]
    silent = [parameter for parameter in weights if not parameter.any()]
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for parameter in silent:
                scale = parameter[0].numel() ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        yield
    finally:
        with torch.no_grad():
            for parameter in silent:
                parameter.zero_()
