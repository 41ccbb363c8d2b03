"""Count and weigh the labels of a global batch, so that its split into micro-batches does not matter.

A global batch is all micro-batches of one optimizer step, on all ranks. The loss "token" is the mean over all trainable
tokens, which have a label other than -100. The loss "sequence" averages first within each document, then over
documents, so that long and short documents have the same weight (per-sequence loss of arXiv 2107.02027; loss weighting
of arXiv 2401.18058). If a document was split, each piece counts as a document. With both losses, the weight of a token
depends on the whole global batch. The loss of a batch without trainable tokens is zero.

There is one rule for all losses, of any model and trainer: a micro-batch is run as if it were the whole global batch,
and its loss is weighted by its share of the items, which are trainable tokens or documents with such tokens. So the
weighted sum over micro-batches is exact for a loss that is a mean over items, however it is computed. What is added to
it, such as the loss of routers or a regularizer, becomes the mean over micro-batches with these weights.

In a row of trees, the next token of a document may be anywhere in the row, and one token may predict several next
tokens, one for each branch.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import functional as F

from hf_packing.batch.collate import is_tree_batch
from hf_packing.batch.segments import part_in
from hf_packing.columns import (
    CU_SEQ_LENS,
    ENDS,
    IGNORED_LABEL,
    LABELS,
    MAX_LENGTHS,
    PARENTS,
    SEGMENT_LENGTHS,
    TRAINED,
    TREE_LABELS,
)
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import indices_in_ranges
from hf_packing.planning.rank_layout import RowPart
from hf_packing.trees.segments import Places, TreeSegments

Loss = Literal["token", "sequence"]

Batch = Mapping[str, Any]
"""A packed batch or a batch of trees, with the keys of a `PackingCollator`."""

ITEMS = "num_items_in_batch"
"""The keyword argument of transformers models that gives the divisor of the summed loss."""

TARGETS, WEIGHTS = "targets", "target_weights"
"""Keys of the entries that replace the labels of a batch, so that the model does not compute the loss itself; weights
as `weights_of` returns them."""

COUNTS = "counts"
"""Key of an entry that is added to batches of whole rows, int64 [4]: their counts of rows that are no copies, which are
the documents; and to parts of rows on several ranks: the counts of the part."""

TREE_KEYS_OF_THE_LOSS = (ENDS, TRAINED, TREE_LABELS)
"""The keys of a batch of trees that say what to train on, which a model does not need."""


def labels_key(batch: Batch) -> str:
    """Return the key of the labels of a batch of a `PackingCollator`, or as `with_share` returns it."""
    if TARGETS in batch:
        return TARGETS
    return TREE_LABELS if is_tree_batch(batch) else LABELS


def check_keys(batch: Any) -> None:
    """Raise PackingError unless a batch has labels, and the borders of its documents."""
    found = batch if isinstance(batch, Mapping) else {}
    borders = (SEGMENT_LENGTHS, PARENTS, ENDS, TRAINED) if is_tree_batch(found) else CU_SEQ_LENS[:1]
    for name in (labels_key(found), *borders):
        if name not in found:
            raise PackingError(
                f"batch: expected a batch from prepare_dataloader or PackingCollator, got {type(batch).__name__} "
                f"without {name!r}, with the keys: {', '.join(found) or 'none'}"
            )


def part_of_row(batch: Batch) -> RowPart | None:
    """Return which part of a row a batch is, if several ranks run the row together; else None.

    Raises:
        PackingError: the batch has lost which part of a row it is.
    """
    part = part_in(batch)
    if part is None and COUNTS in batch:
        name = MAX_LENGTHS[0]
        raise PackingError(
            f"{name}: expected the int of the loader, which knows which part of a row on several ranks the batch is, "
            f"got {type(batch.get(name)).__name__}. Convert only the tensors of a batch, and keep everything else"
        )
    return part


def trees_of(batch: Batch) -> TreeSegments:
    """Return the segments of a batch of trees. Waits for the device of the batch."""
    return TreeSegments.from_arrays(batch[SEGMENT_LENGTHS].cpu().numpy(), batch[PARENTS].cpu().numpy())


def count_per_segment(batch: Batch, chosen: Tensor) -> Tensor:
    """Count the chosen tokens, bool or 0 and 1 [tokens], of each segment of a packed batch, int64 [segments]."""
    counted: Tensor = F.pad(chosen.long().cumsum(0), (1, 0))[batch["cu_seq_lens_q"].long()]
    return counted.diff()


def documents_in(batch: Batch) -> Tensor:
    """Return the number of documents in a batch, an int64 scalar.

    In a packed batch, documents are the segments, without those that only fill fixed shapes.
    """
    if is_tree_batch(batch):
        return torch.tensor(len(batch[ENDS]), device=batch[ENDS].device)
    last: Tensor = batch["seq_idx"].max().long()
    return (last + 1).clamp(min=0)  # copies have lower numbers


def items_in(batch: Batch, loss: Loss) -> Tensor:
    """Count the trainable tokens of a batch or, if loss="sequence", the documents with trainable tokens.

    In a batch of trees, a token counts once for each document that trains on it.

    Returns:
        An int64 scalar: the number of items over which the loss of the batch is averaged.
    """
    return weights_of(batch, loss).sum().round().long()


def documents_and_tokens(batch: Batch) -> tuple[Places, Places]:
    """Return the document and the token of everything that documents of a batch of trees train on.

    Returns:
        The documents and the indices of the tokens in the batch, both int64 [trained tokens of all documents].
    """
    trained = batch[TRAINED].cpu().numpy()
    ranges = trees_of(batch).find_runs(batch[ENDS].cpu().numpy(), trained)
    return np.repeat(trained[ranges.part, 0], ranges.length), indices_in_ranges(ranges.begin, ranges.length)


class NextTokens(NamedTuple):
    """The labels of a batch, each with the token that predicts it."""

    predictors: Tensor
    """The token that predicts each label, int64 [labels]; in a tree, the same one may predict several labels."""
    tokens: Tensor
    """The token that each label belongs to, int64 [labels], ascending."""
    labels: Tensor
    """int64 [labels]. A batch without labels has a single one of -100, so that its loss of 0 has a gradient."""

    @classmethod
    def of_batch(cls, batch: Batch, labels: Tensor, predicts_next: bool = True) -> "NextTokens":
        """Return the labels of a packed batch or a batch of trees.

        Args:
            batch: the batch.
            labels: its labels, int64 [1, tokens].
            predicts_next: False if the logits of a token predict its own label.

        Example:
            >>> import torch
            >>> trees = {"segment_lengths": torch.tensor([2, 1, 1]), "parents": torch.tensor([-1, 0, 0])}
            >>> NextTokens.of_batch(trees, torch.tensor([[-100, 5, 6, 7]])).predictors.tolist()
            [0, 1, 1]
        """
        if is_tree_batch(batch):
            before = torch.from_numpy(trees_of(batch).predecessors).to(labels.device)
        else:
            before = torch.arange(labels.shape[1], device=labels.device) - int(predicts_next)
        tokens = ((labels[0] != IGNORED_LABEL) & (before >= 0)).nonzero()[:, 0]
        if not len(tokens):
            return cls(tokens.new_zeros(1), tokens.new_zeros(1), labels.new_full((1,), IGNORED_LABEL))
        return cls(before[tokens], tokens, labels[0, tokens])


def exact_type(device: torch.device) -> torch.dtype:
    """Return the most precise floating-point dtype that a device supports: float32 on MPS, else float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def weights_of(batch: Batch, loss: Loss) -> Tensor:
    """Return each token's weight in the summed loss of a batch, not yet divided by the number of items.

    Returns:
        float64 [1, tokens], or float32 on an MPS device. The weight is 0 for a label of -100. Otherwise, the weight is
        1 for loss="token", and 1 / (number of trainable tokens in the token's document) for loss="sequence". In a batch
        of trees, it is the sum of these weights over all documents that train on the token.
    """
    if is_tree_batch(batch):
        device, (documents, tokens) = batch[ENDS].device, documents_and_tokens(batch)
        shares = 1 / np.bincount(documents)[documents] if loss == "sequence" else None
        weights = torch.from_numpy(np.bincount(tokens, shares, minlength=int(batch[SEGMENT_LENGTHS].sum())))
        return weights[None].to(exact_type(device)).to(device)
    labeled: Tensor = (batch["labels"] != IGNORED_LABEL).to(exact_type(batch["labels"].device))
    if loss == "token":
        return labeled
    lengths = batch["cu_seq_lens_q"].long().diff()
    return labeled / count_per_segment(batch, labeled[0]).clamp(min=1).repeat_interleave(lengths)[None]


def with_share(batch: Batch, loss: Loss, items: Tensor, keep_labels: bool) -> Batch:
    """Return a copy of a batch for `compute_loss`, with the number of items of its optimizer step, a float scalar.

    Unless `keep_labels`, the labels become targets, so that the model does not compute a loss itself. This is always so
    in a batch with weights: of trees, or for loss="sequence".
    """
    shared = {**batch, ITEMS: items}
    if WEIGHTS in batch:  # a part of a row on several ranks
        return shared
    is_weighted = loss == "sequence" or is_tree_batch(batch)
    if is_weighted:
        shared[WEIGHTS] = weights_of(batch, loss)
    if is_weighted or not keep_labels:
        shared[TARGETS] = shared.pop(labels_key(batch))
    return shared


class TokenMean:
    """Running sums of losses and of tokens; their quotient is the mean loss. Each rank adds its own batches."""

    def __init__(self, device: torch.device) -> None:
        self._total = torch.zeros(2, dtype=exact_type(device), device=device)
        self.batches = 0

    def add(self, loss: Tensor, tokens: Tensor) -> None:
        """Add the mean loss of some tokens."""
        self._total += torch.stack([(loss.detach() * tokens).to(self._total), tokens.to(self._total)])
        self.batches += 1

    def over_ranks(self, accelerator: Accelerator) -> tuple[float, float]:
        """Return the summed loss and the number of tokens over all ranks; all ranks must call this method together."""
        summed_loss, tokens = accelerator.reduce(self._total, reduction="sum").tolist()
        return summed_loss, tokens
