"""Whether what a module returned for a row and for its segments is apart by more than rounding."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_packing.attention.nested import LARGEST, TokenAxes, leaves

TOLERANCE = 1e-4
"""Largest difference that rounding alone may make in what a module returns, as a share of the largest value."""

HALF_TOLERANCE = 0.05
"""In half precision, of a token's root mean square. Rounding may also send single tokens to another expert, so there a
module is held to differ only if most of the tokens beside borders do."""


def differ(left: Any, right: Any, axes: TokenAxes | None = None, slices: Sequence[tuple[int, int]] = ()) -> bool:
    """Whether two outputs are apart by more than rounding.

    Args:
        left: nested tensors.
        right: the same nest.
        axes: of a whole row; tensors without tokens are left out then.
        slices: the row's segments; half precision is compared beside their borders then.
    """
    for (path, one), (_, other) in zip(leaves(left), leaves(right), strict=True):
        if not isinstance(one, Tensor) or (axes is not None and not axes.of(path, one)):
            continue
        if one.shape != other.shape:
            return True
        if not one.is_floating_point():
            if not torch.equal(one, other):
                return True
        elif one.dtype in (torch.float32, torch.float64) or axes is None:
            if not close(one, other):
                return True
        elif differ_beside_borders(one, other, axes.of(path, one)[0], slices):
            return True
    return False


def close(left: Tensor, right: Tensor) -> bool:
    tolerance = TOLERANCE if left.dtype in (torch.float32, torch.float64) else HALF_TOLERANCE
    numbers = left.abs() < LARGEST
    if not torch.equal(numbers, right.abs() < LARGEST):
        return False
    left, right = left[numbers].double(), right[numbers].double()
    return not left.numel() or bool((left - right).abs().max() <= tolerance * left.abs().max())


def differ_beside_borders(left: Tensor, right: Tensor, axis: int, slices: Sequence[tuple[int, int]]) -> bool:
    left, right = (tensor.double().movedim(axis, 0).flatten(1) for tensor in (left, right))
    apart = (left - right).pow(2).mean(1).sqrt() / left.pow(2).mean(1).sqrt().clamp(min=1e-12)
    differing = ~(apart <= HALF_TOLERANCE)
    first = differing[[start for start, _ in slices[1:]]]
    last = differing[[end - 1 for _, end in slices[:-1]]]
    return any(float(tokens.double().mean()) > 0.5 for tokens in (first, last))
