"""Rows on several ranks: every rank of a block collates the whole row, and runs its own part of it.

The labels of a part are those of the tokens that its own tokens predict, so no label is lost at its edges. They have
their weights in the loss of the step, which need the whole document, and the counts of the part come with them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_packing.batch.collate import PackingCollator, Row
from hf_packing.batch.segments import part_in, part_of, with_fillers
from hf_packing.columns import CU_SEQ_LENS, IGNORED_LABEL, LABELS, MAX_LENGTHS, SEQ_IDX
from hf_packing.errors import PackingError
from hf_packing.planning.rank_layout import RankLayout, RowPart
from hf_packing.sampling.batching import Batching
from hf_packing.training.kinds.packed import NextTokens, PackedLabels
from hf_packing.training.losses import COUNTS, TARGETS, WEIGHTS, Batch, Loss


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
        return weights.sum()  # of a document on several ranks, less than 1

    def next_tokens(self, predicts_next: bool = True) -> NextTokens:  # noqa: ARG002
        return super().next_tokens(predicts_next=False)


@dataclass(frozen=True)
class PartCollator:
    """A collator for one rank of a block, which makes its part of a row.

    Args:
        collate: makes the whole row.
        batching: lays the documents of a row out on the ranks.
        rank: the data rank.
        loss: what the loss is a mean over.
    """

    collate: PackingCollator
    batching: Batching
    rank: int
    loss: Loss

    def __call__(self, rows: Sequence[Row]) -> Batch:
        batch = self.collate(rows)
        layout = self._layout_of(batch)
        if layout.tokens.min() == 0:  # every rank has to run something, and with as many segments as ranks, it does
            batch = with_fillers(batch, [1] * (layout.num_ranks - len(layout.lengths)))
            layout = self._layout_of(batch)
        part = RowPart(layout, self.rank % layout.num_ranks)
        weights, labels = PackedLabels(batch).weights(self.loss), batch[LABELS]
        if not self.collate.keep_first_labels:  # a token predicts the label of the next one
            labels, weights = F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL), F.pad(weights[:, 1:], (0, 1))
        own = part_of({**batch, TARGETS: labels, WEIGHTS: weights}, part)
        del own[LABELS]
        return {**own, COUNTS: torch.tensor(_counts(batch, part, self.loss))}

    def _layout_of(self, batch: Batch) -> RankLayout:
        return self.batching.lay_out(np.array(batch[MAX_LENGTHS[0]].segments.lengths))


def _counts(batch: Batch, part: RowPart, loss: Loss) -> list[int]:
    """Return the counts of a part as `micro_batch_counts` has them. Documents and items of the loss are those of the
    whole row on the first rank, and none on the others."""
    pieces, is_real = part.pieces, (batch[SEQ_IDX][0] >= 0).numpy()  # copies have lower numbers
    real = is_real[batch[CU_SEQ_LENS[0]].numpy()[pieces.document]]
    cost = (real * ((pieces.start + pieces.length) ** 2 - pieces.start**2)).sum()
    whole = PackedLabels(batch)
    documents, items = (0, 0) if part.rank else (whole.num_documents(), whole.items(loss))
    return [int(each) for each in (is_real[part.layout.places(part.rank)].sum(), documents, cost, items)]
