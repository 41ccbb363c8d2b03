"""Run modules that turn all tokens of a document into one output, such as poolers, once for every document.

Such a module is a row reader: it gets hidden states of shape [rows, tokens, ...], and returns a tensor without an axis
of tokens. In a packed row, it has to get each document in a row of its own. In a padded batch, it may read a place in
the row, such as the first or the last one, where there is padding.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_packing.attention.by_segment import ReplacedForward
from hf_packing.attention.layout import Layout, Sharing, current_layout
from hf_packing.attention.padded import PaddedRows, current_rows
from hf_packing.attention.token_axes import map_leaves, tensors_in


class RowReader(ReplacedForward):
    """A replacement for the forward of a row reader. The replacement gives every document to the module in a row of its
    own, which begins with the document's first token.

    Args:
        module: a module that returns a tensor without an axis of tokens.
        sharing: the rule for running several documents in one call.
    """

    def __init__(self, module: nn.Module, sharing: Sharing) -> None:
        super().__init__(module)
        self.sharing = sharing

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.installed:
            return self.forward(*args, **kwargs)
        row, rows = current_layout.get(), current_rows.get()
        inputs = args, kwargs
        if row is None and rows is not None:
            row, inputs = rows.layout, rows.lay_end_to_end(inputs)
        if row is None or not row.is_unpadded or not _has_tokens(inputs, (1, row.tokens)):
            return self.forward(*args, **kwargs)
        output = self._run(row, inputs)
        return output if rows is None else map_leaves(output, lambda _, leaf: _with_empty_rows(leaf, rows))

    def _run(self, row: Layout, inputs: Any) -> Any:
        calls = row.calls(self.sharing)
        found: list[list[Tensor]] = []
        output: Any = None
        for call in calls:
            args, kwargs = into_rows(inputs, row, [row.slices[segment] for segment in call.segments])
            output = self.forward(*args, **kwargs)
            found.append(tensors_in(output))
        order = [segment for call in calls for segment in call.segments]
        place = torch.tensor(sorted(range(len(order)), key=order.__getitem__), device=found[0][0].device)
        joined = (torch.cat(parts).index_select(0, place) for parts in zip(*found, strict=True))
        return map_leaves(output, lambda _, leaf: next(joined) if isinstance(leaf, Tensor) else leaf)


class RowsInBackbone(ReplacedForward):
    """A replacement for the forward of the last module of a backbone that returns a value for every token. What follows
    in the backbone gets every document in a row of its own, padded on the right.

    Some backbones pool without a module: ALBERT, for example, passes `sequence_output[:, 0]` to a linear layer.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.forward(*args, **kwargs)
        if not self.installed or (row := current_layout.get()) is None or not row.is_unpadded:
            return output
        return into_rows(output, row, row.slices)


def into_rows(value: Any, row: Layout, slices: list[tuple[int, int]]) -> Any:
    """Return nested tensors, with every tensor of shape [1, tokens, ...] replaced by a tensor that has the tokens of
    each slice in a row of its own, padded on the right with zeros."""
    start, end = np.array(slices).reshape(-1, 2).T
    length = end - start
    longest = int(length.max())
    offset = np.arange(longest)
    real = offset < length[:, None]
    places = (start[:, None] + offset)[real]  # of the tokens in the packed row, document by document
    takes_all = len(places) == row.tokens and bool((places == np.arange(row.tokens)).all())

    def cut(_: Any, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.shape[:2] != (1, row.tokens) or not longest:
            return leaf
        taken = leaf[0] if takes_all else leaf[0].index_select(0, torch.from_numpy(places).to(leaf.device))
        if not real.all():
            within = torch.from_numpy(np.flatnonzero(real)).to(leaf.device)
            taken = taken.new_zeros(real.size, *taken.shape[1:]).index_copy(0, within, taken)
        return taken.view(*real.shape, *leaf.shape[2:])

    return map_leaves(value, cut)


def _has_tokens(value: Any, shape: tuple[int, int]) -> bool:
    return any(tensor.ndim > 2 and tensor.shape[:2] == shape for tensor in tensors_in(value))


def _with_empty_rows(leaf: Any, rows: PaddedRows) -> Any:
    return rows.with_empty_rows(leaf) if isinstance(leaf, Tensor) else leaf


def find_row_readers(model: PreTrainedModel, forward: Callable[[], Any]) -> list[str]:
    """Return the names of a model's row readers, without row readers inside other row readers.

    Args:
        model: a patched model.
        forward: function that runs the model on a padded batch.
    """
    found: list[str] = []

    def look(name: str) -> Callable[..., None]:
        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            row, rows = current_layout.get(), current_rows.get()
            if row is not None:
                shape = 1, row.tokens
            elif rows is not None:
                shape = rows.shape
            else:
                return
            given = [each for each in tensors_in((args, kwargs)) if each.is_floating_point()]
            returned = tensors_in(output)
            loses_tokens = returned and not any(shape[1] in each.shape for each in returned)
            if _has_tokens(given, shape) and loses_tokens and all(each.shape[:1] == shape[:1] for each in returned):
                found.append(name)

        return after

    hooks = [
        module.register_forward_hook(look(name), with_kwargs=True) for name, module in model.named_modules() if name
    ]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    return [name for name in dict.fromkeys(found) if not any(name.startswith(f"{outer}.") for outer in found)]


def find_last_of_tokens(model: nn.Module, backbone: nn.Module, forward: Callable[[], Any], row: Layout) -> str | None:
    """Return the name of the last inner module of a backbone that returns a value for every token, if the backbone
    itself then computes something from all tokens of a packed row; otherwise, return None.

    Args:
        model: a patched model.
        backbone: the backbone of the model.
        forward: function that runs the backbone on a packed row, and returns its output.
        row: the borders of this row.
    """
    last: list[str] = []

    def look(name: str) -> Callable[..., None]:
        def after(_: nn.Module, __: Any, output: Any) -> None:
            if any(each.ndim == 3 and each.shape[:2] == (1, row.tokens) for each in tensors_in(output)):
                last.append(name)

        return after

    children = set(backbone.children())
    named = [(name, module) for name, module in model.named_modules() if module in children]
    hooks = [module.register_forward_hook(look(name)) for name, module in named]
    try:
        output = forward()
    finally:
        for hook in hooks:
            hook.remove()
    found = [each for each in tensors_in(output) if each.ndim > 1 and row.tokens not in each.shape]
    pooled = [each for each in found if len(each) != len(row.lengths)]
    return last[-1] if pooled and last else None
