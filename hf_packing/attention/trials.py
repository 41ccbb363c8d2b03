"""What a module may do to a row that the probe's own row does not show: count along it, end, remember, rank."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_packing.attention.by_segment import BySegment
from hf_packing.attention.differ import differ
from hf_packing.attention.nested import Path, copied, leaves, rebuild
from hf_packing.attention.row import PackedRow

LONGEST_TABLE = 8192
"""Learned positions are a few hundred or thousand; a row of many more tokens costs too much to try."""

FAR = 2**20
"""A position beyond the training length of every model, where scaled rotary embeddings have changed their scale."""


def one_by_one(wrapper: BySegment, given: Any, row: PackedRow) -> Any:
    """What a module returns when it is called once for each segment."""
    return wrapper.joined(*wrapper.parts(copied(given), row.calls("none"), len(row.lengths)))


def differs_on_other_rows(wrapper: BySegment, given: Any, row: PackedRow, words: nn.Module | None) -> bool:
    """Whether a module that is segment-local on the probe's row is not so on every row.

    Args:
        wrapper: of the module.
        given: its arguments.
        row: the probe's.
        words: the model's embedding of tokens.
    """
    return counts_by_itself(wrapper, given, row) or fails_on_long_rows(wrapper, given, row, words)


def counts_by_itself(wrapper: BySegment, given: Any, row: PackedRow) -> bool:
    """Whether a module counts along the row, and what it makes of that changes far from its beginning.

    Such as a temperature of attention that grows with the position, by none in the first 8192.
    """
    if is_stack(wrapper.module):
        return False
    try:
        near = wrapper.forward(*copied(given)[0], **copied(given)[1])
        with CountingFromAfar(row.tokens):
            far = wrapper.forward(*copied(given)[0], **copied(given)[1])
    except Exception:  # what indexes by its count is no such module
        return False
    return differ(near, far, wrapper.step.returned, row.slices)


def fails_on_long_rows(wrapper: BySegment, given: Any, row: PackedRow, words: nn.Module | None) -> bool:
    """Whether a module that makes embeddings of positions fails where a row is longer than they are."""
    module = wrapper.module
    if is_stack(module):
        return False
    tables = [m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding) and m is not words]
    longest = max(tables, default=0)
    if not row.tokens < longest <= LONGEST_TABLE:
        return False

    def repeat(path: Path, leaf: Any) -> Any:
        times = longest // row.tokens + 1
        along = wrapper.step.given.of(path, leaf)
        if not isinstance(leaf, Tensor):
            return leaf * times if along else leaf
        return leaf.repeat([times if axis in along else 1 for axis in range(leaf.ndim)])

    args, kwargs = rebuild(given, repeat)
    try:
        wrapper.forward(*args, **kwargs)
    except Exception:  # whatever it raises, it is the table's end
        return True
    return False


def depends_on_far_positions(wrapper: BySegment, given: Any, row: PackedRow) -> bool:
    """Whether a far position in one segment changes what the module makes of the others.

    Rotary embeddings whose scale grows with the longest position do, and may remember it.
    """
    if next(wrapper.module.parameters(), None) is not None:
        return False
    positions = row.position_ids[0].tolist()

    def moved(_: Path, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.is_floating_point() or leaf.dtype == torch.bool or not leaf.ndim:
            return leaf
        if leaf.shape[-1] != len(positions) or leaf.flatten()[-len(positions) :].tolist() != positions:
            return leaf
        far = leaf.clone()
        far[..., -1] = FAR
        return far

    elsewhere = rebuild(given, moved)
    if all(a is b for (_, a), (_, b) in zip(leaves(given), leaves(elsewhere), strict=True)):
        return False
    wrapper.step.remembers = True
    try:
        return differ(wrapper.fresh(*elsewhere), one_by_one(wrapper, elsewhere, row), wrapper.step.returned, row.slices)
    except Exception:  # it takes no such positions, so they do not occur
        return False
    finally:
        wrapper.step.remembers = False


class CountingFromAfar(TorchFunctionMode):
    """Whoever counts as many tokens as the row has counts from a far position on."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result + FAR if function is torch.arange and result.shape == (self.tokens,) else result


def is_stack(module: nn.Module) -> bool:
    """Whether it is more than a layer: what it makes of positions, its layers are given."""
    return any(isinstance(inner, nn.ModuleList) for inner in module.modules())


class RankingTokens(TorchFunctionMode):
    """Notices who picks the best of a row's tokens: which of several equal ones depends on how many there are."""

    NAMES = ("topk", "sort", "argsort", "argmax", "argmin", "kthvalue")

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.seen = False

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in self.NAMES:
            self.seen |= any(self.tokens in tensor.shape[-1:] for tensor in args[:1])
        return function(*args, **(kwargs or {}))
