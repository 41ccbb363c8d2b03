"""Give the poolers of a backbone, which turn all tokens of a document into one output, each document as a row.

A pooler reads a place in a row, such as the first token. In the packed row that a padded batch becomes, documents have
no rows of their own, so the last module of the backbone that returns a value for every token makes these rows. Rows
are padded on the right.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_packing.attention.by_segment import ReplacedForward
from hf_packing.attention.layout import Layout, current_layout
from hf_packing.attention.token_axes import Path, map_leaves, tensors_in


class RowsInBackbone(ReplacedForward):
    """A replacement for the forward of the last module of a backbone that returns a value for every token. What follows
    in the backbone gets every document in a row of its own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output, layout = self.forward(*args, **kwargs), current_layout.get()
        if not self.installed or layout is None or not layout.is_unpadded:
            return output
        return into_rows(output, layout)


def into_rows(value: Any, layout: Layout) -> Any:
    """Return nested tensors, with every tensor of shape [1, tokens, ...] replaced by a tensor that has the tokens of
    each segment in a row of its own, padded on the right with zeros."""
    start, end = np.array(layout.slices).T
    places = start[:, None] + np.arange(layout.longest)
    real = places < end[:, None]

    def cut(_: Path, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.shape[:2] != (1, layout.tokens):
            return leaf
        taken = leaf[0].index_select(0, torch.from_numpy(places[real]).to(leaf.device))
        if not real.all():
            within = torch.from_numpy(np.flatnonzero(real)).to(leaf.device)
            taken = taken.new_zeros(real.size, *taken.shape[1:]).index_copy(0, within, taken)
        return taken.view(*real.shape, *leaf.shape[2:])

    return map_leaves(value, cut)


def find_last_of_tokens(model: nn.Module, backbone: nn.Module, forward: Callable[[], Any], row: Layout) -> str | None:
    """Return the name of the last inner module of a backbone that returns a value for every token, if the backbone
    itself then computes something from all tokens of a packed row; otherwise, return None.

    Args:
        model: a patched model.
        backbone: the backbone of the model.
        forward: function that runs the backbone on a packed row, and returns its output.
        row: the layout of this row.
    """
    last: list[nn.Module] = []

    def record(module: nn.Module, _: Any, output: Any) -> None:
        if any(each.ndim == 3 and each.shape[:2] == (1, row.tokens) for each in tensors_in(output)):
            last[:] = [module]

    hooks = [module.register_forward_hook(record) for module in backbone.children()]
    try:
        output = forward()
    finally:
        for hook in hooks:
            hook.remove()
    pools = any(
        each.ndim > 1 and row.tokens not in each.shape and len(each) != len(row.lengths) for each in tensors_in(output)
    )
    return next((name for name, module in model.named_modules() if pools and module in last), None)
