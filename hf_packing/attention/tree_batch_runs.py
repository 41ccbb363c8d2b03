"""Run a model on a training batch of trees: as it is, with some segments replaced, and on single documents alone."""

from collections.abc import Mapping
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from hf_packing.attention.batch_runs import BatchRuns
from hf_packing.attention.layout import Layout, read_layout
from hf_packing.columns import ENDS, PARENTS, SEGMENT_LENGTHS
from hf_packing.trees.segments import TreeSegments

_FEW = 4
"""Of fewer segments than this number, every second one is replaced."""


class TreeBatchRuns(BatchRuns):
    """A model and a training batch of trees, with methods that run the model on the batch.

    A document is the path from a root to the segment in which the document ends. Documents share tokens, so segments
    are replaced, not documents, together with everything below them. Only one document of each tree has gradients,
    since gradients at shared tokens would be sums over documents.
    """

    def __init__(self, model: nn.Module, batch: Mapping[str, Any], training: bool) -> None:
        self._trees = TreeSegments.from_arrays(batch[SEGMENT_LENGTHS].cpu(), batch[PARENTS].cpu())
        ends = batch.get(ENDS)
        self._ends = [*self._trees.leaves] if ends is None else [*dict.fromkeys(ends.tolist())]
        super().__init__(model, batch, training)

    def _read_row(self, given: dict[str, Any]) -> Layout:
        return read_layout(given)[1]

    @property
    def lengths(self) -> list[int]:
        return [int(self._trees.depths[end]) + self._trees.lengths[end] for end in self._ends]

    @cached_property
    def _is_replaced(self) -> list[bool]:
        """Flags of the segments that are replaced, or below a replaced one, with at most half of all tokens."""
        trees, segments = self._trees, len(self._trees.lengths)
        replaced = [False] * segments
        left = trees.tokens // 2
        for segment, parent in enumerate(trees.parents):
            is_chosen = segment % 2 == 1 if segments < _FEW else segment.bit_count() % 2 == 0
            below = int(trees.begins[trees.ends_below[segment]] - trees.begins[segment])
            if parent >= 0 and replaced[parent]:
                replaced[segment] = True
            elif is_chosen and below <= left:
                replaced[segment] = True
                left -= below
        return replaced

    @property
    def replaced(self) -> list[int]:
        return [number for number, end in enumerate(self._ends) if self._is_replaced[end]]

    @cached_property
    def kept(self) -> Tensor:
        replaced = torch.tensor(self._is_replaced).repeat_interleave(torch.tensor(self._trees.lengths))
        return (~replaced).nonzero()[:, 0].to(self.row.cu_seq_lens.device)

    @cached_property
    def graded_documents(self) -> set[int]:
        sampled = list(chain.from_iterable(self.sampled_documents())) or [0]
        return set({self._trees.segments_of(self._ends[number])[0]: number for number in reversed(sampled)}.values())

    @cached_property
    def graded(self) -> Tensor:
        return torch.cat([self.tokens_of(number) for number in sorted(self.graded_documents)])

    @property
    def positions(self) -> Tensor:
        return torch.from_numpy(self._trees.position_ids).long().to(self.row.cu_seq_lens.device)

    def tokens_of(self, document: int) -> Tensor:
        return torch.from_numpy(self._trees.path_of(self._ends[document])).to(self.row.cu_seq_lens.device)
