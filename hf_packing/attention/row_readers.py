"""Run modules that turn all tokens of a document into one output, such as poolers, once for every document.

Such a module is a row reader: it gets hidden states of shape [rows, tokens, ...], and returns a tensor without an axis
of tokens. In a packed row, it has to get each document in a row of its own. In a padded batch, it may read a place in
the row, such as the first or the last one, where there is padding.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_packing.attention.by_segment import ReplacedForward
from hf_packing.attention.layout import Layout, Sharing, current_layout
from hf_packing.attention.padded import current_rows
from hf_packing.attention.token_axes import Path, leaves, map_leaves, tensors_in


class RowReader(ReplacedForward):
    """A replacement for the forward of a row reader. The replacement gives every document to the module in a row of its
    own, which begins with the document's first token.

    Args:
        module: a module that returns a tensor without an axis of tokens.
        name: the module's name in the model.
        sharing: the rule for running several documents in one call.
    """

    def __init__(self, module: nn.Module, name: str, sharing: Sharing) -> None:
        super().__init__(module, name)
        self.sharing = sharing

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layout, rows, inputs = current_layout.get(), current_rows.get(), (args, kwargs)
        if self.installed and layout is None and rows is not None:
            layout, inputs = rows.layout, rows.lay_end_to_end(inputs)
        if not self.installed or layout is None or not layout.is_unpadded or not _have_tokens(inputs, layout):
            return self.forward(*args, **kwargs)
        parts: list[dict[Path, Tensor]] = [{} for _ in layout.slices]
        output: Any = None
        for call in layout.calls(self.sharing):
            args, kwargs = into_rows(inputs, layout, [layout.slices[segment] for segment in call.segments])
            output = self.forward(*args, **kwargs)
            for path, leaf in leaves(output):
                if isinstance(leaf, Tensor):
                    for segment, part in zip(call.segments, leaf, strict=True):
                        parts[segment][path] = part

        def join(path: Path, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            joined = torch.stack([part[path] for part in parts])
            return joined if rows is None else rows.with_empty_rows(joined)

        return map_leaves(output, join)


class RowsInBackbone(ReplacedForward):
    """A replacement for the forward of the last module of a backbone that returns a value for every token. What follows
    in the backbone gets every document in a row of its own, padded on the right.

    Some backbones pool without a module: ALBERT, for example, passes `sequence_output[:, 0]` to a linear layer.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output, layout = self.forward(*args, **kwargs), current_layout.get()
        if not self.installed or layout is None or not layout.is_unpadded:
            return output
        return into_rows(output, layout, layout.slices)


def into_rows(value: Any, layout: Layout, slices: list[tuple[int, int]]) -> Any:
    """Return nested tensors, with every tensor of shape [1, tokens, ...] replaced by a tensor that has the tokens of
    each slice in a row of its own, padded on the right with zeros."""
    start, end = np.array(slices).reshape(-1, 2).T
    places = start[:, None] + np.arange((end - start).max())
    real = places < end[:, None]

    def cut(_: Path, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.shape[:2] != (1, layout.tokens) or not real.size:
            return leaf
        taken = leaf[0].index_select(0, torch.from_numpy(places[real]).to(leaf.device))
        if not real.all():
            within = torch.from_numpy(np.flatnonzero(real)).to(leaf.device)
            taken = taken.new_zeros(real.size, *taken.shape[1:]).index_copy(0, within, taken)
        return taken.view(*real.shape, *leaf.shape[2:])

    return map_leaves(value, cut)


def _have_tokens(value: Any, layout: Layout) -> bool:
    return any(tensor.ndim > 2 and tensor.shape[:2] == (1, layout.tokens) for tensor in tensors_in(value))


class _Call(NamedTuple):
    """One call of a module in a forward of the model."""

    name: str
    given: list[Tensor]
    returned: list[Tensor]
    shape: tuple[int, ...]
    """The numbers of rows and tokens that the module ran on."""


def find_row_readers(model: PreTrainedModel, forward: Callable[[], Any]) -> list[str]:
    """Return the names of a model's row readers, without row readers inside other row readers.

    Args:
        model: a patched model.
        forward: function that runs the model on a padded batch.
    """
    calls, _ = _watch([each for each in model.named_modules() if each[0]], forward)
    found: list[str] = []
    for name, given, returned, shape in calls:
        takes_tokens = any(each.is_floating_point() and each.ndim > 2 and each.shape[:2] == shape for each in given)
        pools = [each.shape[:1] == shape[:1] and shape[1] not in each.shape for each in returned]
        if takes_tokens and pools and all(pools):
            found.append(name)
    return [name for name in dict.fromkeys(found) if not any(name.startswith(f"{outer}.") for outer in found)]


def find_last_of_tokens(
    model: nn.Module, backbone: nn.Module, forward: Callable[[], Any], layout: Layout
) -> str | None:
    """Return the name of the last inner module of a backbone that returns a value for every token, if the backbone
    itself then computes something from all tokens of a packed row; otherwise, return None.

    Args:
        model: a patched model.
        backbone: the backbone of the model.
        forward: function that runs the backbone on a packed row, and returns its output.
        layout: the layout of this row.
    """
    children = set(backbone.children())
    calls, output = _watch([each for each in model.named_modules() if each[1] in children], forward)
    shape = 1, layout.tokens
    last = [call.name for call in calls if any(each.ndim == 3 and each.shape[:2] == shape for each in call.returned)]
    pools = any(
        each.ndim > 1 and layout.tokens not in each.shape and len(each) != len(layout.lengths)
        for each in tensors_in(output)
    )
    return last[-1] if pools and last else None


def _watch(modules: Iterable[tuple[str, nn.Module]], forward: Callable[[], Any]) -> tuple[list[_Call], Any]:
    """Return the calls of modules in a packed row or a padded batch during a forward, and the output of the forward."""
    calls: list[_Call] = []

    def record(name: str) -> Callable[..., None]:
        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            layout, rows = current_layout.get(), current_rows.get()
            if layout is not None:
                calls.append(_Call(name, tensors_in((args, kwargs)), tensors_in(output), (1, layout.tokens)))
            elif rows is not None:
                calls.append(_Call(name, tensors_in((args, kwargs)), tensors_in(output), rows.shape))

        return after

    hooks = [module.register_forward_hook(record(name), with_kwargs=True) for name, module in modules]
    try:
        return calls, forward()
    finally:
        for hook in hooks:
            hook.remove()
