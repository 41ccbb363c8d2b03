"""The labels of a batch, each with the token that predicts it.

In a row of trees, the next token of a document may be anywhere in the row, and one token may predict several next
tokens, one for each branch.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_packing.batch.collate import is_tree_batch
from hf_packing.columns import IGNORED_LABEL
from hf_packing.training.tree_batch import trees_of


class NextTokens(NamedTuple):
    """The labels of a batch, sorted by the tokens that predict them.

    Example:
        >>> import torch
        >>> from hf_packing.trees.segments import TreeSegments
        >>> before = torch.from_numpy(TreeSegments((2, 1, 1), (-1, 0, 0)).predecessors)
        >>> NextTokens.of(before, torch.tensor([[-100, 5, 6, 7]])).predictors.tolist()
        [0, 1, 1]
    """

    predictors: Tensor
    """The token that predicts each label, int64 [labels], ascending; the same one for several labels in a tree."""
    tokens: Tensor
    """The token that each label belongs to, int64 [labels]."""
    labels: Tensor
    """int64 [labels]. A batch without labels has a single one of -100, so that its loss of 0 has a gradient."""

    @classmethod
    def of(cls, before: Tensor, labels: Tensor) -> "NextTokens":
        """Return the next tokens of a row.

        Args:
            before: the token before each token in its documents, int64 [tokens]; -1 for none.
            labels: int64 [1, tokens]; -100 for none.
        """
        tokens = ((labels[0] != IGNORED_LABEL) & (before >= 0)).nonzero()[:, 0]
        if not len(tokens):
            none = tokens.new_zeros(1)
            return cls(none, none, labels.new_full((1,), IGNORED_LABEL))
        predictors, order = before[tokens].sort(stable=True)
        return cls(predictors, tokens[order], labels[0, tokens[order]])

    @classmethod
    def of_batch(cls, batch: Mapping[str, Any], labels: Tensor, predicts_next: bool = True) -> "NextTokens":
        """Return the labels of a packed batch or a batch of trees.

        Args:
            batch: the batch.
            labels: its labels, int64 [1, tokens].
            predicts_next: False if the logits of a token predict its own label.
        """
        if is_tree_batch(batch):
            return cls.of(torch.from_numpy(trees_of(batch).predecessors).to(labels.device), labels)
        return cls.of(torch.arange(labels.shape[1], device=labels.device) - int(predicts_next), labels)
