"""Run a language model without a backward pass, and return the log-probability of each label and hidden states.

The output layer runs on one chunk of tokens at a time, as in training, wherever a test has shown that it can.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_packing.attention import inner_model
from hf_packing.columns import INPUT_IDS, LABELS
from hf_packing.errors import PackingError
from hf_packing.training.chunked_head import UnsupportedHeadError
from hf_packing.training.next_tokens import NextTokenHead, NextTokens
from hf_packing.training.run_with_loss import CHUNK_LOGITS, can_chunk

Found = tuple[Tensor, Tensor, Tensor | None]


def log_probs_and_hidden(
    model: nn.Module, inputs: Mapping[str, Any], following: NextTokens | None, hidden: bool
) -> Found:
    """Run a patched model on a packed row or a row of trees.

    Args:
        model: a patched model, with or without wrappers.
        inputs: a packed batch or a batch of trees; labels are not passed on to the model.
        following: the tokens to score, and the tokens of the row that predict them; None for a model without
            likelihoods.
        hidden: whether to return the last hidden states.

    Returns:
        The log-probability of each token to score, float64 [labels]; whether it is the most probable token, bool
        [labels]; and the last hidden states, [tokens, width], or None.
    """
    inner = inner_model(model)
    given = {name: value for name, value in inputs.items() if name != LABELS}
    outputs: list[Any] = []
    handle = inner.base_model.register_forward_hook(lambda _, __, output: outputs.append(output))
    try:
        if following is not None:
            log_probs, is_greedy = _log_probs(model, inner, given, following)
        else:
            model(**given)
            log_probs, is_greedy = torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.bool)
    finally:
        handle.remove()
    return log_probs, is_greedy, _last_hidden_state(outputs[-1])[0] if hidden else None


def _last_hidden_state(output: Any) -> Tensor:
    state = getattr(output, "last_hidden_state", output[0] if isinstance(output, tuple) else None)
    if not isinstance(state, Tensor):
        raise PackingError(f"hidden: expected a backbone that returns hidden states, got {type(output).__name__}")
    return state


def _log_probs(
    model: nn.Module, inner: PreTrainedModel, given: dict[str, Any], following: NextTokens
) -> tuple[Tensor, Tensor]:
    vocabulary = getattr(inner.config.get_text_config(), "vocab_size", 1)
    if can_chunk(model, inner):
        weights = torch.ones_like(given[INPUT_IDS], dtype=torch.float32)
        head = _ScoringHead(inner, following, weights, _chunk(vocabulary))
        try:
            with head.installed():
                model(**given)
            if head.hidden is not None:
                return head.log_probs, head.is_greedy
        except UnsupportedHeadError:
            pass
    logits = model(**given).logits[0]
    found = [
        _scores_of(logits[following.predictors[part]], torch.arange(len(part)), following.labels[part])
        for part in torch.split(torch.arange(len(following.labels)), _chunk(vocabulary))
    ]
    return torch.cat([each for each, _ in found]), torch.cat([each for _, each in found])


def _chunk(vocabulary: int) -> int:
    return max(1, min(_CHUNK_TOKENS, CHUNK_LOGITS // vocabulary))


_CHUNK_TOKENS = 1024
"""Largest number of tokens in a chunk. More of them gain nothing, and their logits leave the processor's caches."""


def _scores_of(logits: Tensor, predictors: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each label, float64 [labels], and whether the label is the most probable one.

    Args:
        logits: float [tokens, vocabulary].
        predictors: the token whose logits predict each label, int64 [labels].
        labels: int64 [labels].
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    predictors, labels = predictors.to(logits.device), labels.to(logits.device)
    of_label = logits[predictors, labels]
    return (of_label - logits.logsumexp(-1)[predictors]).double(), of_label >= logits.amax(-1)[predictors]


class _ScoringHead(NextTokenHead):
    """Hooks for one forward, which keep the log-probability of each label instead of the loss."""

    log_probs: Tensor
    is_greedy: Tensor

    def _result(self, hidden: Tensor) -> Tensor:
        chunks = [slice(begin, begin + self.size) for begin in range(0, hidden.shape[1], self.size)]
        found = [self._scores_of_chunk(hidden[:, chunk], chunk) for chunk in chunks]
        self.log_probs, self.is_greedy = (torch.cat(each) for each in zip(*found, strict=True))
        return self.log_probs.sum()

    def _scores_of_chunk(self, hidden: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
        labels = self._labels_of(chunk)
        logits = self.of_logits(self.layer.forward(hidden))
        return _scores_of(logits[0], self.among_chosen[labels] - chunk.start, self.following.labels[labels])
