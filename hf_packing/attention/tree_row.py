"""The rows of trees that a patched model processes, in which documents share their prefixes.

A document is a path from a root down to a segment. Modules that are not segment-local run on whole paths: their inputs
are gathered along each path, and every token keeps the output that it has on the first path with this token.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hf_packing.attention.packed_row import CACHES, PackedRow, SharedCall, Sharing
from hf_packing.attention.token_axes import Place
from hf_packing.columns import CU_SEQ_LENS, ENDS, LABELS, PARENTS, SEGMENT_LENGTHS, SEQ_IDX, TRAINED, TREE_LABELS
from hf_packing.errors import PackingError
from hf_packing.trees.segments import Places, TreeSegments

MOST_TOKENS_OF_CALL = 4096
"""Paths share a call of a module up to this number of tokens. The paths of a row may have many times the tokens of the
row, and large tensors are slow: with all paths in one call, Mamba ran at a third of the speed of packed rows."""


@dataclass(frozen=True, eq=False)
class TreeRow(PackedRow):
    """The segments of a row of trees. `lengths` and `cu_seq_lens` are those of the segments, in depth-first order.

    Args:
        trees: the lengths and parents of the segments.
    """

    trees: TreeSegments = field(default_factory=lambda: TreeSegments((), ()))

    @classmethod
    def of(cls, trees: TreeSegments, device: torch.device | None = None) -> "TreeRow":
        borders = torch.tensor([0, *accumulate(trees.lengths)], dtype=torch.int32, device=device)
        return cls(borders, trees.lengths, trees=trees)

    @cached_property
    def longest(self) -> int:
        """The number of tokens of the longest path."""
        return max(int(depth) + length for depth, length in zip(self.trees.depths, self.lengths, strict=True))

    @property
    def is_one_segment_per_row(self) -> bool:
        """True if the row is a single path, so that every module may run on the row as it is."""
        return len(self.trees.leaves) == 1

    @property
    def num_parts(self) -> int:
        return len(self.trees.leaves)

    @cached_property
    def position_ids(self) -> Tensor:
        """The position of each token in its documents, int64 [1, tokens]."""
        return torch.from_numpy(self.trees.position_ids).long().to(self.cu_seq_lens.device)[None]

    def place_of(self, segment: int) -> Place:
        """Return where the tokens from a root down to a segment are: first and last + 1, or int64 [tokens]."""
        if segment not in self._places:
            self._places[segment] = _as_place(self.trees.path_of(segment), self.cu_seq_lens.device)
        return self._places[segment]

    @cached_property
    def _places(self) -> dict[int, Place]:
        return {}

    @cached_property
    def kept(self) -> dict[Any, Any]:
        """Masks and indices that attention has made for this row. The layers of a model ask for the same ones."""
        return {}

    @cached_property
    def first_places(self) -> Tensor:
        """The index of each token among the tokens of all paths, laid end to end, on the first path that has it, int64
        [tokens]."""
        paths = torch.cat([torch.from_numpy(self.trees.path_of(leaf)) for leaf in self.trees.leaves])
        first = torch.empty(self.tokens, dtype=torch.long)
        first[paths.flip(0)] = torch.arange(len(paths)).flip(0)
        return first.to(self.cu_seq_lens.device)

    def calls(self, sharing: Sharing) -> list[SharedCall]:
        """Divide all paths among module calls, and return the calls. Each path is in exactly one call."""
        if sharing not in self._calls:
            leaves, device = self.trees.leaves, self.cu_seq_lens.device
            lengths = [int(self.trees.depths[leaf]) + self.lengths[leaf] for leaf in leaves]
            groups = PackedRow.from_lengths(lengths, device).calls(sharing)
            self._calls[sharing] = [
                SharedCall.of(paths, [self.place_of(leaves[path]) for path in paths], device)
                for group in groups
                for paths in _divided(group.segments, max(MOST_TOKENS_OF_CALL // max(group.lengths), 1))
            ]
        return self._calls[sharing]


def _divided(paths: list[int], most: int) -> list[list[int]]:
    return [paths[first : first + most] for first in range(0, len(paths), most)]


def _as_place(tokens: Places, device: torch.device) -> Place:
    """Return tokens as first and last + 1 if they are next to each other, since slices are not copied."""
    if int(tokens[-1]) - int(tokens[0]) == len(tokens) - 1:
        return int(tokens[0]), int(tokens[-1]) + 1
    return torch.from_numpy(tokens).to(device)


_NOT_READ = (SEGMENT_LENGTHS, PARENTS, ENDS, TRAINED, TREE_LABELS)
"""Arguments of a row of trees that the model itself does not get."""

_takes_labels: ContextVar[bool] = ContextVar("_takes_labels", default=False)


@contextmanager
def labels_of_trees() -> Iterator[None]:
    """Context manager: within the block, models take labels of trees, since the caller replaces their cross-entropy."""
    token = _takes_labels.set(True)
    try:
        yield
    finally:
        _takes_labels.reset(token)


_REFUSED = {
    LABELS: "no model computes the loss of trees by itself; call hfp.compute_loss(model, batch)",
    "attention_mask": "a row of trees has no padding",
    **dict.fromkeys(CACHES, "a row of trees has no cache"),
    "encoder_hidden_states": "all documents in a row would attend to the same encoder states",
    **dict.fromkeys((*CU_SEQ_LENS, SEQ_IDX), f"the borders of trees are given by {SEGMENT_LENGTHS} and {PARENTS}"),
}


def read_tree_row(inputs: Mapping[str, Any]) -> tuple[dict[str, Any], PackedRow]:
    """Read the segments of a row of trees from a model's inputs.

    Args:
        inputs: keyword arguments of a model's forward, as PackingCollator makes them of rows of trees.

    Returns:
        The arguments for the model itself, and a TreeRow, or a PackedRow if no segment has a parent.

    Raises:
        PackingError: an argument is missing, does not fit the tokens, or is not supported with trees.
    """
    for name in (SEGMENT_LENGTHS, PARENTS):
        if not isinstance(inputs.get(name), Tensor):
            raise PackingError(
                f"{name}: expected a tensor of integers beside a row of trees, got {type(inputs.get(name)).__name__}"
            )
    refused = {name: reason for name, reason in _REFUSED.items() if name != LABELS or not _takes_labels.get()}
    for name, reason in refused.items():
        if inputs.get(name) is not None:
            raise PackingError(f"{name}: expected None with a row of trees, since {reason}")
    tensor = inputs.get("input_ids")
    tensor = inputs.get("inputs_embeds") if tensor is None else tensor
    if not isinstance(tensor, Tensor):
        raise PackingError("input_ids: expected input_ids or inputs_embeds, got neither")
    trees = TreeSegments.from_arrays(inputs[SEGMENT_LENGTHS].cpu(), inputs[PARENTS].cpu())
    if tensor.shape[:2] != (1, trees.tokens):
        raise PackingError(
            f"{SEGMENT_LENGTHS}: expected lengths that add up to a single row of {list(tensor.shape[:2])} tokens, got "
            f"{trees.tokens}"
        )
    device = tensor.device
    row = TreeRow.of(trees, device) if trees.has_branches else PackedRow.from_lengths(trees.lengths, device)
    positions = inputs.get("position_ids")
    if positions is not None and not torch.equal(positions.to(device), row.position_ids):
        raise PackingError(
            "position_ids: expected the depth of each token in its tree, or None, got positions that begin with "
            f"{positions.flatten().tolist()[:8]}"
        )
    return {name: value for name, value in inputs.items() if name not in _NOT_READ and name not in refused}, row
