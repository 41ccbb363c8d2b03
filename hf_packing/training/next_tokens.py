"""The labels of a batch, each with the token that predicts it.

In a row of trees, the next token of a document may be anywhere in the row, and one token may predict several next
tokens, one for each branch. Its logits are computed and normalized once.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_packing.attention import inner_model, sees_labels
from hf_packing.collate import is_tree_batch
from hf_packing.columns import IGNORED_LABEL
from hf_packing.errors import PackingError
from hf_packing.training.chunked_head import ChunkedHead
from hf_packing.training.losses import predicts_next
from hf_packing.training.token_losses import TokenLosses
from hf_packing.training.tree_batch import trees_of


class NextTokens(NamedTuple):
    """The labels of a batch, sorted by the tokens that predict them.

    Example:
        >>> import torch
        >>> from hf_packing.tree_segments import TreeSegments
        >>> before = torch.from_numpy(TreeSegments((2, 1, 1), (-1, 0, 0)).predecessors)
        >>> NextTokens.of(before, torch.tensor([[-100, 5, 6, 7]])).predictors.tolist()
        [0, 1, 1]
    """

    predictors: Tensor
    """The token that predicts each label, int64 [labels], ascending; the same one for several labels in a tree."""
    tokens: Tensor
    """The token that each label belongs to, int64 [labels]."""
    labels: Tensor
    """int64 [labels]."""

    @classmethod
    def of(cls, before: Tensor, labels: Tensor) -> "NextTokens":
        """Return the next tokens of a row.

        Args:
            before: the token before each token in its documents, int64 [tokens]; -1 for none.
            labels: int64 [1, tokens]; -100 for none.
        """
        tokens = ((labels[0] != IGNORED_LABEL) & (before >= 0)).nonzero()[:, 0]
        predictors, order = before[tokens].sort(stable=True)
        return cls(predictors, tokens[order], labels[0, tokens[order]])

    @classmethod
    def of_batch(cls, batch: Mapping[str, Any], labels: Tensor) -> "NextTokens":
        """Return the next tokens of a packed batch or a batch of trees, with its labels, int64 [1, tokens]."""
        if is_tree_batch(batch):
            return cls.of(torch.from_numpy(trees_of(batch).predecessors).to(labels.device), labels)
        return cls.of(torch.arange(-1, labels.shape[1] - 1, device=labels.device), labels)

    def log_probs(self, logits: Tensor) -> Tensor:
        """Return the log-probability of each label, float [labels].

        Args:
            logits: float [1, tokens, vocabulary]; 16-bit logits are converted to float32.
        """
        return log_probs_of(logits, self.predictors, self.labels)

    def weighted_loss(self, logits: Tensor, weights: Tensor, token_losses: TokenLosses | None = None) -> Tensor:
        """Return the weighted sum of cross-entropies, a float scalar.

        Args:
            logits: as for `log_probs`.
            weights: float [1, tokens], the weight of each token's label.
            token_losses: where the losses of all labels are kept; None to keep none.
        """
        losses = -self.log_probs(logits)
        if token_losses is not None:
            token_losses.put(losses, self.tokens)
        return losses @ weights[0, self.tokens].to(losses)


def log_probs_of(logits: Tensor, predictors: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of each label, float [labels]. Each token's logits are normalized once.

    Args:
        logits: float [1, tokens, vocabulary]; 16-bit logits are converted to float32.
        predictors: the token whose logits predict each label, int64 [labels].
        labels: int64 [labels].
    """
    exact = logits[0] if logits.dtype == torch.float64 else logits[0].float()
    return exact.log_softmax(-1)[predictors.to(exact.device), labels.to(exact.device)]


def check_predicts_next(model: nn.Module) -> None:
    """Raise PackingError unless a model's logits at a token predict the next token, from this token and earlier ones.

    Args:
        model: a patched model, with or without wrappers.
    """
    inner = inner_model(model)
    if not predicts_next(model) or sees_labels(inner):
        raise PackingError(
            f"model: expected a causal language model for documents that share prefixes and for log-probabilities of "
            f"documents, but {type(inner).__name__} sees the tokens that it predicts"
        )


class NextTokenHead(ChunkedHead):
    """Hooks for one forward of a model, which replace the logits by the loss, chunk by chunk of tokens that predict.

    Args:
        inner: the model.
        following: the labels of the batch.
        weights: float [1, tokens], the weight of each token's label.
        size: number of predicting tokens in a chunk.
        token_losses: where the losses of all labels are kept; None to keep none.
    """

    def __init__(
        self,
        inner: PreTrainedModel,
        following: NextTokens,
        weights: Tensor,
        size: int,
        token_losses: TokenLosses | None = None,
    ) -> None:
        predicts = torch.full(weights.shape, IGNORED_LABEL, device=weights.device)
        predicts[0, following.predictors] = 0
        super().__init__(inner, predicts, weights, False, size, token_losses)
        self.following, self.label_weights = following, weights[0, following.tokens]
        self.among_chosen = torch.searchsorted(self.chosen, following.predictors)
        """The index of each label's predictor in `chosen`, int64 [labels]."""
        counts = torch.bincount(self.among_chosen, minlength=len(self.chosen))
        self.borders: list[int] = F.pad(counts.cumsum(0), (1, 0)).tolist()
        """The labels of chosen token i are borders[i]:borders[i + 1]."""

    def log_probs_of_chunk(self, hidden: Tensor, chunk: slice) -> Tensor:
        """Return the log-probabilities of the labels that a chunk of the chosen tokens predicts, float [labels]."""
        labels = self._labels_of(chunk)
        logits = self.of_logits(self.layer.forward(hidden))  # without hooks, which FSDP expects to be called once
        return log_probs_of(logits, self.among_chosen[labels] - chunk.start, self.following.labels[labels])

    def _labels_of(self, chunk: slice) -> slice:
        return slice(self.borders[chunk.start], self.borders[min(chunk.stop, len(self.chosen))])

    def _loss_of_chunk(self, hidden: Tensor, chunk: slice) -> Tensor:
        labels = self._labels_of(chunk)
        losses = -self.log_probs_of_chunk(hidden, chunk)
        if self.token_losses is not None:
            self.token_losses.put(losses, self.following.tokens[labels])
        return losses @ self.label_weights[labels].to(losses)
