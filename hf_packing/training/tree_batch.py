"""Read the labels of a batch: what predicts them and, in trees, which documents train on them, with what weight.

In a row of trees, the next token of a document may be anywhere in the row, and one token may predict several next
tokens, one for each branch.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hf_packing.batch.collate import is_tree_batch
from hf_packing.columns import ENDS, IGNORED_LABEL, LABELS, PARENTS, SEGMENT_LENGTHS, TRAINED, TREE_LABELS
from hf_packing.planning.lengths import indices_in_ranges
from hf_packing.trees.segments import Places, TreeSegments

TREE_KEYS = (SEGMENT_LENGTHS, PARENTS, ENDS, TRAINED, TREE_LABELS)
"""The keys that only a batch of trees has."""

TREE_KEYS_OF_THE_LOSS = (ENDS, TRAINED, TREE_LABELS)
"""The keys of these that say what to train on, which a model does not need."""


def labels_key(batch: Mapping[str, Any]) -> str:
    """Return the key of the labels of a batch of a `PackingCollator`."""
    return TREE_LABELS if is_tree_batch(batch) else LABELS


def trees_of(batch: Mapping[str, Any]) -> TreeSegments:
    """Return the segments of a batch of trees. Waits for the device of the batch."""
    return TreeSegments.from_arrays(_array(batch[SEGMENT_LENGTHS]), _array(batch[PARENTS]))


def trained_per_tree_document(batch: Mapping[str, Any]) -> Tensor:
    """Return the number of tokens that each document of a batch of trees trains on, int64 [documents]."""
    document, _, length = batch[TRAINED].T
    return torch.zeros_like(batch[ENDS]).index_add_(0, document, length)


def documents_and_tokens(batch: Mapping[str, Any]) -> tuple[Places, Places]:
    """Return the document and the token of everything that documents of a batch of trees train on.

    Returns:
        The documents and the indices of the tokens in the batch, both int64 [trained tokens of all documents].
    """
    trained = _array(batch[TRAINED])
    ranges = trees_of(batch).find_runs(_array(batch[ENDS]), trained)
    return np.repeat(trained[ranges.part, 0], ranges.length), indices_in_ranges(ranges.begin, ranges.length)


def tree_weights(batch: Mapping[str, Any], *, by_document: bool) -> npt.NDArray[np.float64]:
    """Return each token's weight in the summed loss of a batch of trees, float64 [tokens].

    Args:
        batch: a batch of trees.
        by_document: False if the weight is the number of documents that train on the token; True if it is the sum of
            1 / n over these documents, where n is the number of tokens that a document trains on.
    """
    documents, tokens = documents_and_tokens(batch)
    shares = 1 / np.bincount(documents)[documents] if by_document else None
    return np.bincount(tokens, shares, minlength=int(batch[SEGMENT_LENGTHS].sum())).astype(np.float64)


def _array(values: Tensor) -> npt.NDArray[np.int64]:
    array: npt.NDArray[np.int64] = values.cpu().numpy()
    return array


class NextTokens(NamedTuple):
    """The labels of a batch, each with the token that predicts it."""

    predictors: Tensor
    """The token that predicts each label, int64 [labels]; in a tree, the same one may predict several labels."""
    tokens: Tensor
    """The token that each label belongs to, int64 [labels], ascending."""
    labels: Tensor
    """int64 [labels]. A batch without labels has a single one of -100, so that its loss of 0 has a gradient."""

    @classmethod
    def of_batch(cls, batch: Mapping[str, Any], labels: Tensor, predicts_next: bool = True) -> "NextTokens":
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
