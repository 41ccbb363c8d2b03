"""Rows on several ranks: every rank of a block collates the whole row, and runs its own part of it.

The labels of a part are those of the tokens that its own tokens predict, so no label is lost at its edges. They have
their weights in the loss of the step, which need the whole document, and the counts of the part come with them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from hf_packing.batch.collate import PackingCollator, Row
from hf_packing.batch.segments import part_of, with_fillers
from hf_packing.columns import CU_SEQ_LENS, IGNORED_LABEL, LABELS, MAX_LENGTHS, SEQ_IDX
from hf_packing.planning.rank_layout import RankLayout, RowPart
from hf_packing.training.losses import COUNTS, TARGETS, WEIGHTS, Batch, Loss, documents_in, items_in, weights_of


@dataclass(frozen=True)
class PartCollator:
    """A collator for one rank of a block, which makes its part of a row.

    Args:
        collate: makes the whole row.
        lay_out: returns the layout of a row, given the lengths of its documents.
        rank: the rank, from 0 in its block.
        loss: what the loss is a mean over.
    """

    collate: PackingCollator
    lay_out: Callable[[Any], RankLayout]
    rank: int
    loss: Loss

    def __call__(self, rows: Sequence[Row]) -> Batch:
        batch = self.collate(rows)
        layout = self.lay_out(np.array(batch[MAX_LENGTHS[0]].segments.lengths))
        if layout.tokens.min() == 0:  # every rank has to run something, and with as many segments as ranks, it does
            batch = with_fillers(batch, [1] * (layout.num_ranks - len(layout.lengths)))
            layout = self.lay_out(np.array(batch[MAX_LENGTHS[0]].segments.lengths))
        part = RowPart(layout, self.rank)
        weights, labels = weights_of(batch, self.loss), batch[LABELS]
        if not self.collate.keep_first_labels:  # a token predicts the label of the next one
            labels, weights = F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL), F.pad(weights[:, 1:], (0, 1))
        own = part_of({**batch, TARGETS: labels, WEIGHTS: weights}, part)
        del own[LABELS]
        return {**own, COUNTS: torch.tensor(_counts(batch, part, self.loss))}


def _counts(batch: Batch, part: RowPart, loss: Loss) -> list[int]:
    """Return the counts of a part as `micro_batch_counts` has them. Documents and items of the loss are those of the
    whole row on the first rank, and none on the others."""
    pieces, is_real = part.pieces, (batch[SEQ_IDX][0] >= 0).numpy()  # copies have lower numbers
    real = is_real[batch[CU_SEQ_LENS[0]].numpy()[pieces.document]]
    cost = (real * ((pieces.start + pieces.length) ** 2 - pieces.start**2)).sum()
    documents, items = (0, 0) if part.rank else (documents_in(batch), items_in(batch, loss))
    return [int(each) for each in (is_real[part.layout.places(part.rank)].sum(), documents, cost, items)]
