"""Lay the rows of a batch end to end, and put the outputs back where the tokens were."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_packing.attention.layout import Layout, on_device
from hf_packing.attention.token_axes import Path, map_tensors
from hf_packing.planning.lengths import BoolArray


@dataclass(frozen=True, eq=False)
class Rows:
    """The places of the tokens in rows of equal size.

    Args:
        real: True for every token that is not padding, bool [rows, tokens].
        device: where the batch is.
    """

    real: BoolArray
    device: torch.device

    @classmethod
    def of(cls, layout: Layout) -> "Rows":
        """Return rows that have the tokens of one segment each, with padding on the right."""
        return cls(np.arange(layout.longest) < np.array(layout.lengths)[:, None], layout.cu_seq_lens.device)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens in each row that are not padding."""
        return tuple(self.real.sum(1).tolist())

    @property
    def shape(self) -> tuple[int, ...]:
        """The numbers of rows and of tokens in each row, with padding."""
        return self.real.shape

    @property
    def has_padding(self) -> bool:
        return not self.real.all()

    @cached_property
    def kept(self) -> Tensor:
        """True for every token that is not padding, bool [rows, tokens]."""
        return on_device(self.real, self.device)

    @cached_property
    def layout(self) -> Layout:
        """The layout of the row that `lay_end_to_end` makes, in which every row is a segment."""
        return Layout.of([length for length in self.lengths if length], self.device)

    @cached_property
    def places(self) -> Tensor:
        """The index of each token in the flattened batch, int64 [tokens]."""
        return on_device(np.flatnonzero(self.real), self.device)

    def take(self, value: Any, places: Tensor) -> Any:
        """Return nested arguments, with every tensor of shape [rows, tokens, ...] replaced by its values at some places
        of the flattened batch, [*places.shape, ...]. The same is done to position ids of shape [axes, rows, tokens],
        and to all places of rows of several choices, [rows, choices, tokens, ...]."""

        def take(path: Path, leaf: Tensor) -> Tensor:
            if has_axes_first(path, leaf, self.shape):
                return leaf.flatten(1)[:, places]
            if leaf.shape == (1, self.shape[1]):  # the same for all rows
                leaf = leaf.expand(self.shape)
            if leaf.shape[:2] == self.shape:
                return leaf.flatten(0, 1)[places]
            if leaf.ndim > 2 and leaf.flatten(0, 1).shape[:2] == self.shape and places.shape == self.shape:
                return leaf.flatten(0, 2)[places].view_as(leaf)  # several choices in each row
            return leaf

        return map_tensors(value, take)

    def lay_end_to_end(self, value: Any) -> Any:
        """Return nested arguments, with every tensor of shape [rows, tokens, ...] replaced by a tensor of shape
        [1, tokens without padding, ...]."""
        return self.take(value, self.places[None])

    def put_back(self, value: Any) -> Any:
        """Return the outputs of the row in the shapes that they have for the batch, with zeros in padding.

        The result has [rows, tokens, ...] instead of [1, tokens without padding, ...], [rows * tokens, ...] instead of
        [tokens without padding, ...], and [rows, ...] instead of [documents, ...].
        """
        tokens, documents, longest = self.layout.tokens, len(self.layout.lengths), self.layout.longest

        def put(path: Path, leaf: Tensor) -> Tensor:
            if leaf.ndim < 2:
                return leaf
            if leaf.ndim > 2 and leaf.shape[:2] == (1, tokens):
                return self.spread(leaf[0])
            if leaf.ndim > 2 and leaf.shape[:2] == (documents, longest):  # `Layout.into_rows` has made rows
                return self.spread(leaf.flatten(0, 1)[Rows.of(self.layout).places])
            if len(leaf) == documents and path[:1] != ("router_logits",):
                places = on_device(np.flatnonzero(self.lengths), leaf.device)
                return leaf.new_zeros(self.shape[0], *leaf.shape[1:]).index_copy(0, places, leaf)
            return self.spread(leaf).flatten(0, 1) if len(leaf) == tokens else leaf

        return map_tensors(value, put)

    def spread(self, values: Tensor) -> Tensor:
        """Return values of the row, [tokens, ...], as [rows, tokens, ...], with zeros in padding."""
        if self.has_padding:
            values = values.new_zeros(self.real.size, *values.shape[1:]).index_copy(0, self.places, values)
        return values.view(*self.shape, *values.shape[1:])


def has_axes_first(path: Path, leaf: Tensor, shape: tuple[int, ...]) -> bool:
    """Return whether an argument has position_ids of shape [axes, rows, tokens], as models that see images have."""
    return path[-1:] == ("position_ids",) and leaf.shape[1:] == shape
