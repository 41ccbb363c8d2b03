"""The labels of a packed batch; the labels of the other kinds of batches differ from them."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_packing.columns import (
    CU_SEQ_LENS,
    IGNORED_LABEL,
    INPUT_IDS,
    LABELS,
    LOSS_WEIGHTS,
    PADDING_SEGMENT,
    SEGMENT_COLUMNS,
    SEQ_IDX,
    TREE_COLUMNS,
)
from hf_packing.errors import PackingError
from hf_packing.training.losses import ITEMS, TARGETS, WEIGHTS, Batch, Loss, exact_type

Document = dict[str, Tensor]
"""The columns of a document, each [1, tokens]."""

_NOT_OF_TOKENS = {*SEGMENT_COLUMNS, *TREE_COLUMNS, LOSS_WEIGHTS}
"""Columns that say where documents are, or how much they weigh."""


class NextTokens(NamedTuple):
    """The labels of a batch, each with the token that predicts it."""

    predictors: Tensor
    """The token that predicts each label, int64 [labels]; in a tree, the same one may predict several labels."""
    tokens: Tensor
    """The token that each label belongs to, int64 [labels], ascending."""
    labels: Tensor
    """int64 [labels]. A batch without labels has a single one of -100, so that its loss of 0 has a gradient."""


class PackedLabels:
    """The labels of a packed batch."""

    own_key = LABELS
    """The key of the labels in a batch of a `PackingCollator`."""
    borders: Sequence[str] = CU_SEQ_LENS[:1]
    """The keys that say where documents are."""
    of_loss: Sequence[str] = (LABELS, LOSS_WEIGHTS)
    """The keys that say what to train on, which a model does not need."""
    replaces_loss = False
    """True if a weighted sum always takes the place of the model's or the trainer's own loss."""
    shares_tokens = False
    """True if documents share tokens, so that none can be cut, and the model has to predict the next token."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    @classmethod
    def takes(cls, batch: Batch) -> bool:  # noqa: ARG003
        """Return whether a batch is of this kind."""
        return True

    @property
    def ranks(self) -> int:
        """The number of ranks that run the row together."""
        return 1

    @property
    def key(self) -> str:
        """The key of the labels."""
        return TARGETS if TARGETS in self.batch else self.own_key

    @property
    def labels(self) -> Tensor:
        """int64 [1, tokens]."""
        labels: Tensor = self.batch[self.key]
        return labels

    def is_weighted(self, loss: Loss) -> bool:
        """Return whether a weighted sum takes the place of the cross-entropy."""
        return self.replaces_loss or loss == "sequence" or not {WEIGHTS, LOSS_WEIGHTS}.isdisjoint(self.batch)

    def num_documents(self) -> Tensor:
        """Return the number of documents, an int64 scalar: the segments, without those that only fill the batch."""
        last: Tensor = self.batch[SEQ_IDX].max().long()
        return (last + 1).clamp(min=0)  # copies have lower numbers

    def weights(self, loss: Loss) -> Tensor:
        """Return each token's weight in the summed loss of the batch, not yet divided by the number of items.

        Returns:
            float64 [1, tokens], or float32 on an MPS device. The weight is 0 for a label of -100. Otherwise, the weight
            is 1 for loss="token", and 1 / (number of trainable tokens in the token's document) for loss="sequence". If
            several documents train on a token, it is the sum of these weights. Weights of the data multiply it.

        Raises:
            PackingError: loss="sequence", and labels of a document have different weights.
        """
        if WEIGHTS in self.batch:
            return self.batch[WEIGHTS]  # type: ignore[no-any-return]
        weights = self._own_weights(loss)
        if LOSS_WEIGHTS in self.batch:
            if loss == "sequence":
                self._check_of_documents(self.batch[LOSS_WEIGHTS][0])
            weights = weights * self.batch[LOSS_WEIGHTS].to(weights)
        return weights

    def _check_of_documents(self, given: Tensor) -> None:
        following = self.next_tokens(predicts_next=False)
        documents, places = self.of_documents(following)
        weights = given[following.tokens[places]]
        differs = (documents.diff() == 0) & (weights.diff() != 0)
        if differs.any():
            first = int(differs.int().argmax())
            raise PackingError(
                f"column {LOSS_WEIGHTS!r}: expected one weight for all labels of a document with loss='sequence', got "
                f"{weights[first]:g} and {weights[first + 1]:g} in document {documents[first]} of a micro-batch; use "
                "loss='token'"
            )

    def _own_weights(self, loss: Loss) -> Tensor:
        labeled = (self.labels != IGNORED_LABEL).to(exact_type(self.labels.device))
        if loss == "token":
            return labeled
        lengths = self.batch[CU_SEQ_LENS[0]].long().diff()
        return labeled / self._count_per_segment(labeled[0]).clamp(min=1).repeat_interleave(lengths)[None]

    def _count_per_segment(self, chosen: Tensor) -> Tensor:
        """Count the chosen tokens, bool or 0 and 1 [tokens], of each segment, int64 [segments]."""
        counted: Tensor = F.pad(chosen.long().cumsum(0), (1, 0))[self.batch[CU_SEQ_LENS[0]].long()]
        return counted.diff()

    def total_of(self, weights: Tensor) -> Tensor:
        """Return the number of items of some weights, a scalar; of weights of the data, the sum of their sizes."""
        return weights.abs().sum() if LOSS_WEIGHTS in self.batch else weights.sum().round().long()

    def items(self, loss: Loss) -> Tensor:
        """Return the number of trainable tokens or, if loss="sequence", of documents with trainable tokens, a scalar:
        what the loss of the batch is a mean of. A token counts once for each document that trains on it, and as much as
        it weighs."""
        return self.total_of(self.weights(loss))

    def next_tokens(self, predicts_next: bool = True) -> NextTokens:
        """Return the labels with the tokens that predict them.

        Args:
            predicts_next: False if the logits of a token predict its own label.

        Example:
            >>> from hf_packing import PackingCollator
            >>> labels = PackedLabels(PackingCollator()([{"input_ids": [4, 5]}, {"input_ids": [6, 7]}]))
            >>> labels.next_tokens().predictors.tolist()
            [0, 2]
        """
        before = self._predictors(predicts_next)
        tokens = ((self.labels[0] != IGNORED_LABEL) & (before >= 0)).nonzero()[:, 0]
        if not len(tokens):
            return NextTokens(tokens.new_zeros(1), tokens.new_zeros(1), self.labels.new_full((1,), IGNORED_LABEL))
        return NextTokens(before[tokens], tokens, self.labels[0, tokens])

    def _predictors(self, predicts_next: bool) -> Tensor:
        """Return the token that predicts each token, int64 [tokens]; negative for none."""
        return torch.arange(self.labels.shape[1], device=self.labels.device) - int(predicts_next)

    def of_documents(self, following: NextTokens) -> tuple[Tensor, Tensor]:
        """Return every document of every label, and the label's place in `following`, int64 [labels of documents]."""
        documents: Tensor = self.batch[SEQ_IDX][0, following.tokens].long()
        return documents, torch.arange(len(documents), device=documents.device)

    def counts(self, loss: Loss) -> Tensor:
        """Count the tokens, documents, attention cost and items of the loss, without padding and copies, float64 [4].

        Attention cost is the sum of squared segment lengths or, for trees, `TreeSegments.attention_cost`.
        """
        device = self.batch[INPUT_IDS].device
        counted = *self._sizes(), self.items(loss)
        return torch.stack([torch.as_tensor(each, dtype=exact_type(device), device=device) for each in counted])

    def _sizes(self) -> tuple[Any, Any, Any]:
        lengths = self._count_per_segment(self.batch[SEQ_IDX][0] >= 0)  # 0 for segments that only fill the batch
        return lengths.sum(), (lengths > 0).sum(), lengths.square().sum()

    def with_share(self, loss: Loss, items: Tensor, keep_labels: bool) -> Batch:
        """Return a copy of the batch for `compute_loss`, with the number of items of its optimizer step, a scalar.

        Unless `keep_labels`, the labels become targets, so that the model does not compute a loss itself. This is
        always so if they have weights.
        """
        shared = {**self.batch, ITEMS: items}
        if self.is_weighted(loss):
            shared[WEIGHTS] = self.weights(loss)
        if WEIGHTS in shared or not keep_labels:
            shared[TARGETS] = shared.pop(self.key)
        return shared

    def documents(self) -> list[Document]:
        """Return the documents of the batch, without filled tokens."""
        borders, is_own = self.batch[CU_SEQ_LENS[0]].tolist(), self.batch[SEQ_IDX][0] != PADDING_SEGMENT
        places = [begin + is_own[begin:end].nonzero()[:, 0] for begin, end in pairwise(borders)]
        columns = {**self._columns(), LABELS: self.labels}
        return [{name: each[:, own] for name, each in columns.items()} for own in places if len(own)]

    def _columns(self) -> Document:
        """Return the columns with one value for each token."""
        shape = self.batch[INPUT_IDS].shape
        return {name: each for name, each in self.batch.items() if name not in _NOT_OF_TOKENS and is_of(each, shape)}

    @staticmethod
    def rows_of(documents: list[Any]) -> list[Any]:
        """Return the rows of a batch of some documents."""
        return documents


def is_of(value: Any, shape: torch.Size | None) -> bool:
    """Return whether a value is a tensor of a shape."""
    return isinstance(value, Tensor) and value.shape == shape
