"""Rows on several ranks: every rank of a block collates the whole row, and runs its own part of it.

The labels of a part are those of the tokens that its own tokens predict, so no label is lost at its edges. They have
their weights in the loss of the step, which need the whole document, and the counts of the part come with them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import functional as F

from hf_packing.batch.collate import PackingCollator, Row
from hf_packing.batch.segments import OF_SEGMENTS, BatchSegments, columns_of, part_in, with_fillers
from hf_packing.checks import expect
from hf_packing.columns import IGNORED_LABEL, LABELS, MAX_LENGTHS
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray, indices_in_groups, offsets_of, total_of
from hf_packing.planning.rank_layout import LayoutCounts, RankLayout, RowPart, lay_out
from hf_packing.sampling.batching import Batching, EpochPlan
from hf_packing.sampling.sizes import RowSizes
from hf_packing.sampling.token_budget import TokenBudget
from hf_packing.training.kinds.packed import NextTokens, PackedLabels
from hf_packing.training.losses import COUNTS, TARGETS, WEIGHTS, Batch, Loss
from hf_packing.training.ranks import data_rank


class PartLabels(PackedLabels):
    """The labels of a part of a row: those of the tokens that follow its own tokens in their documents."""

    replaces_loss = True

    @classmethod
    def takes(cls, batch: Batch) -> bool:
        """Return whether a batch is of this kind.

        Raises:
            PackingError: the batch has lost which part of a row it is.
        """
        is_part = part_in(batch) is not None
        if not is_part and COUNTS in batch:
            name = MAX_LENGTHS[0]
            raise PackingError(
                f"{name}: expected the int of the loader, which knows which part of a row on several ranks the batch "
                f"is, got {type(batch.get(name)).__name__}. Convert only the tensors of a batch, and keep everything "
                "else"
            )
        return is_part

    @property
    def ranks(self) -> int:
        part = part_in(self.batch)
        assert part is not None
        return part.layout.num_ranks

    def total_of(self, weights: Tensor) -> Tensor:
        return weights.abs().sum()  # of a document on several ranks, less than 1

    def _sizes(self) -> tuple[Any, Any, Any]:
        segments: BatchSegments = self.batch[MAX_LENGTHS[0]].segments
        assert segments.part is not None
        pieces, is_real = segments.part.pieces, np.array(segments.numbers) >= 0  # copies have lower numbers
        cost = (pieces.start + pieces.length) ** 2 - pieces.start**2
        # a document is one of the rank with its first token
        return pieces.length[is_real].sum(), (is_real & (pieces.start == 0)).sum(), cost[is_real].sum()

    def next_tokens(self, predicts_next: bool = True) -> NextTokens:  # noqa: ARG002
        return super().next_tokens(predicts_next=False)


def ranks_of(batching: Batching | None) -> int:
    """Return the number of consecutive ranks that run a row together."""
    return batching.max_ranks_per_document if isinstance(batching, TokenBudget) else 1


@dataclass(frozen=True)
class RowsOnRanks:
    """Rows that are each on a block of several ranks.

    Args:
        ranks: the number of ranks of a block.
        rank: this rank, from 0 in its block.
        budget: decides how rows are laid out; None for as many tokens on each rank, so that documents are cut.
    """

    ranks: int
    rank: int
    budget: TokenBudget | None

    @classmethod
    def of(cls, ranks: int, accelerator: Accelerator, budget: TokenBudget | None) -> "RowsOnRanks":
        """Return how this rank has rows.

        Raises:
            PackingError: the ranks of the run cannot be divided into blocks.
        """
        rank, world_size = data_rank(accelerator)
        if world_size < accelerator.num_processes:
            expect(1, "with tensor parallelism", max_ranks_per_document=ranks)
        if world_size % ranks:
            raise PackingError(
                f"max_ranks_per_document: expected a number that divides the {world_size} ranks of this run, got "
                f"{ranks}"
            )
        return cls(ranks, rank % ranks, budget)

    def lay_out(self, lengths: IntArray) -> RankLayout:
        """Return which tokens of a micro-batch with segments of these lengths each rank of its block holds."""
        if self.budget is not None:
            return self.budget.lay_out(lengths)
        return lay_out(lengths, self.ranks, -(-total_of(lengths) // self.ranks), linear_cost=0)

    def parts(self, plan: EpochPlan, sizes: RowSizes) -> tuple[EpochPlan, RowSizes, LayoutCounts]:
        """Return the plan of the parts that ranks have of the rows of blocks, the sizes of the parts, and their counts.

        Args:
            plan: the plan of an epoch for blocks in the place of ranks.
            sizes: the sizes of rows.
        """
        assert self.budget is not None
        lengths, segments = sizes.tokens[plan.rows], sizes.segments[plan.rows]
        if sizes.seq_lengths is not None:
            lengths = sizes.seq_lengths[indices_in_groups(offsets_of(sizes.segments), plan.rows)[0]]
        layouts = [self.lay_out(row) for row in np.split(lengths, offsets_of(segments)[plan.offsets[1:-1]])]
        tokens, attention = (
            np.concatenate([getattr(layout, name) for layout in layouts]) for name in ("tokens", "attention_cost")
        )
        numbers, is_copy = np.arange(len(tokens)), np.repeat(plan.is_copy[plan.offsets[:-1]], self.ranks)
        parts = EpochPlan(
            plan.world_size * self.ranks, numbers, is_copy, np.append(numbers, len(tokens)), plan.left_out
        )
        counts = LayoutCounts(
            ranks=self.ranks,
            split=sum(layout.num_split for layout in layouts),
            utilization=parts.utilization(self.budget.cost(tokens, attention)),
        )
        return parts, RowSizes(tokens, np.ones_like(tokens), attention), counts


@dataclass(frozen=True)
class PartCollator:
    """A collator for one rank of a block, which makes its part of a row.

    Args:
        collate: makes the whole row.
        rows: lays them out on the ranks.
        loss: what the loss is a mean over.
    """

    collate: PackingCollator
    rows: RowsOnRanks
    loss: Loss

    def __call__(self, rows: Sequence[Row]) -> Batch:
        batch = self.collate(rows)
        layout = self._layout_of(batch)
        if layout.tokens.min() == 0:  # every rank has to run something, and with as many segments as ranks, it does
            batch = with_fillers(batch, [1] * (layout.num_ranks - len(layout.lengths)))
            layout = self._layout_of(batch)
        part = RowPart(layout, self.rows.rank)
        weights, labels = PackedLabels(batch).weights(self.loss), batch[LABELS]
        if not self.collate.keep_first_labels:  # a token predicts the label of the next one
            labels, weights = F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL), F.pad(weights[:, 1:], (0, 1))
        own = part_of({**batch, TARGETS: labels, WEIGHTS: weights}, part)
        del own[LABELS]
        return {**own, COUNTS: PartLabels(own).counts(self.loss)}

    def _layout_of(self, batch: Batch) -> RankLayout:
        return self.rows.lay_out(np.array(batch[MAX_LENGTHS[0]].segments.lengths))


def part_of(batch: Batch, part: RowPart) -> dict[str, Any]:
    """Return the part of a batch that one rank of a block runs, whose segments are the rank's pieces of documents.

    Args:
        batch: a batch with one row, as PackingCollator makes it, on the CPU.
        part: the layout of the row, and the rank.

    Example:
        >>> import hf_packing as hfp
        >>> from hf_packing.planning.rank_layout import lay_out
        >>> batch = hfp.PackingCollator()([{"input_ids": [5, 6, 7, 8, 9]}, {"input_ids": [1, 2]}])
        >>> own = part_of(batch, RowPart(lay_out([5, 2], ranks=2, max_tokens=4), rank=0))
        >>> own["input_ids"].tolist(), own["position_ids"].tolist(), own["cu_seq_lens_q"].tolist()
        ([[5, 6, 9, 2]], [[0, 1, 4, 1]], [0, 2, 3, 4])
    """
    places, lengths = torch.from_numpy(part.layout.places(part.rank)), part.pieces.length.tolist()
    own = {name: values[:, places] for name, values in batch.items() if name not in OF_SEGMENTS}
    whole: BatchSegments = batch[MAX_LENGTHS[0]].segments
    numbers = [whole.numbers[document] for document in part.pieces.document.tolist()]
    return {**columns_of(whole._replace(lengths=lengths, numbers=numbers, part=part)), **own}
