"""Tensors with two token axes, which have an entry for every pair of tokens: masks, biases and attention weights."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST_FINITE = 1e30
"""Values of larger magnitude count as infinite, since masks contain the most negative float in place of minus
infinity."""

LINE_TOLERANCE = 0.01
"""An attention bias counts as linear if its distance from a straight line is at most this share of its largest value.
Biases in half precision are not exact."""


def grows_along_diagonal(mask: Tensor) -> bool:
    """Return whether a mask [..., tokens, tokens] has a bias that grows with the position, as some ALiBi masks have.

    In such a mask, the top left and the bottom right quarter hide the same entries. The visible entries of the two
    quarters differ by a constant that is not 0.
    """
    size = mask.shape[-1] // 2
    first, last = mask[..., :size, :size], mask[..., -size:, -size:]
    visible = first.abs() < LARGEST_FINITE
    if not torch.equal(visible, last.abs() < LARGEST_FINITE):
        return False
    added = torch.where(visible, last - first, 0)
    most = added.abs().amax((-2, -1), keepdim=True)
    return bool(most.any()) and bool((torch.where(visible, added.abs() - most, 0).abs() <= LINE_TOLERANCE * most).all())


def block_diagonal(blocks: Sequence[Tensor], row_axis: int, column_axis: int) -> Tensor:
    """Join the parts of a tensor with two token axes, one per segment. The entries for two tokens in different segments
    are 0."""
    width = sum(block.shape[column_axis] for block in blocks)
    before = 0
    padded = []
    for block in blocks:
        after = width - before - block.shape[column_axis]
        padding = [0] * (2 * block.ndim)
        padding[2 * (block.ndim - column_axis) - 2 : 2 * (block.ndim - column_axis)] = [before, after]
        padded.append(F.pad(block, padding))
        before += block.shape[column_axis]
    return torch.cat(padded, dim=row_axis)
