"""Batchings that keep to fixed shapes: `within_shapes` for training, and FilledInOrder for evaluation."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from hf_packing.batch.fixed_shapes import check_shapes
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray
from hf_packing.sampling.bucket_batches import BucketBatches
from hf_packing.sampling.epoch_plan import Batching, Epoch, EpochPlan, FittedRows, RowSizes, keep_rows
from hf_packing.sampling.sampler import plan_in_order
from hf_packing.sampling.token_budget import TokenBudget

Shapes = tuple[int | None, int | None]
"""The numbers of tokens and segments in every batch of fixed shapes; (None, None) for batches of any shape."""


def within_shapes(batching: Batching, tokens: int | None, max_segments: int | None) -> Batching:
    """Return a batching whose micro-batches fit into fixed shapes. One segment is left for the padding.

    Args:
        batching: a TokenBudget or a BucketBatches.
        tokens: number of tokens in every batch.
        max_segments: number of segments in every batch.

    Raises:
        PackingError: the two numbers are not valid, or the batching allows more tokens or documents, or cannot be
            limited.
    """
    check_shapes(tokens, max_segments)
    assert tokens is not None
    assert max_segments is not None
    if not isinstance(batching, (TokenBudget, BucketBatches)):
        raise PackingError(
            f"tokens: expected None with {type(batching).__name__}, since only TokenBudget and BucketBatches form "
            f"batches of fixed shapes, got {tokens}"
        )
    name = "max_tokens" if isinstance(batching, TokenBudget) else "tokens_per_batch"
    most = getattr(batching, name)
    if most > tokens:
        raise PackingError(f"tokens: expected at least {most}, the {name} of the batching, got {tokens}")
    if isinstance(batching, TokenBudget) and batching.length_schedule is not None:
        raise PackingError(
            "length_schedule: expected None for batches of fixed shapes, since extra borders change the number of "
            f"segments, got {batching.length_schedule!r}"
        )
    if batching.max_documents is not None and batching.max_documents >= max_segments:
        raise PackingError(
            f"max_segments: expected more than {batching.max_documents}, the max_documents of the batching, since one "
            f"segment fills the batch up to {tokens} tokens; got {max_segments}"
        )
    return replace(batching, max_documents=batching.max_documents or max_segments - 1)


@dataclass(frozen=True)
class FilledInOrder(Batching):
    """A batching for evaluation: each micro-batch has as many successive rows of the dataset as fit into its limits.

    Ranks take micro-batches in turn. If micro-batches are too few, copies of the first row with masked labels are
    added.

    Args:
        max_tokens: the most tokens that a micro-batch may have.
        max_documents: the most documents that a micro-batch may have.

    Raises:
        PackingError: a row alone is above a limit.

    Example:
        >>> from hf_packing.sampling.row_sizes import sizes_of_documents
        >>> plan = FilledInOrder(8, 2).plan(sizes_of_documents(np.array([5, 3, 2, 2, 2])), Epoch(0, world_size=2))
        >>> [plan.micro_batch(number, rank) for number in range(2) for rank in range(2)]
        [[(0, False), (1, False)], [(2, False), (3, False)], [(4, False)], [(0, True)]]
    """

    needs_row_per_rank: ClassVar[bool] = False  # the other ranks get copies of the first row

    max_tokens: int
    max_documents: int

    def fit(self, sizes: RowSizes) -> FittedRows:
        for name, unit, of_row, most in (
            ("tokens", "tokens", sizes.tokens, self.max_tokens),
            ("max_segments", "documents", sizes.segments, self.max_documents),
        ):
            if (of_row > most).any():
                row = int((of_row > most).argmax())
                raise PackingError(
                    f"{name}: expected at most {most} {unit} in each row, but row {row} has {of_row[row]}"
                )
        return keep_rows(sizes, sizes.tokens > 0)

    def num_micro_batches(self, rows: FittedRows, epoch: Epoch) -> int:
        return -(-len(self._begins(rows)) // epoch.world_size)

    def plan_fitted(self, rows: FittedRows, epoch: Epoch) -> EpochPlan:
        return plan_in_order(rows, self._begins(rows), epoch.world_size)

    def _begins(self, rows: FittedRows) -> IntArray:
        """Return the index of the first row of each micro-batch among the kept rows, int64 [micro-batches]."""
        begins, tokens, documents = [], self.max_tokens, self.max_documents
        of_rows = zip(rows.sizes.tokens[rows.kept].tolist(), rows.sizes.segments[rows.kept].tolist(), strict=True)
        for row, (more_tokens, more_documents) in enumerate(of_rows):
            tokens, documents = tokens + more_tokens, documents + more_documents
            if tokens > self.max_tokens or documents > self.max_documents:
                begins.append(row)
                tokens, documents = more_tokens, more_documents
        return np.array(begins, dtype=np.int64)
