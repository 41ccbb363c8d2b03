"""Run a language model without a backward pass, and return the log-probability of each label and hidden states.

The output layer runs on one chunk of tokens at a time, as in training, wherever a test has shown that it can.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_packing.attention import inner_model
from hf_packing.columns import IGNORED_LABEL, LABELS
from hf_packing.errors import PackingError
from hf_packing.training.chunked_head import ChunkedHead, UnsupportedHeadError
from hf_packing.training.run_with_loss import CHUNK_LOGITS, can_chunk

Found = tuple[Tensor, Tensor, Tensor | None]


def log_probs_and_hidden(
    model: nn.Module, inputs: Mapping[str, Any], targets: Tensor, scores_tokens: bool, hidden: bool
) -> Found:
    """Run a patched model on a packed row.

    Args:
        model: a patched model, with or without wrappers.
        inputs: a batch of a PackingCollator.
        targets: the token to score after each token, int64 [1, tokens]; -100 for none.
        scores_tokens: whether to compute log-probabilities; if False, the first two results are empty.
        hidden: whether to return the last hidden states.

    Returns:
        The log-probability of each target given the tokens up to its place, float64 [tokens], 0 without a target;
        whether the target is the most probable token, bool [tokens], True without a target; and the last hidden
        states, [tokens, width], or None.
    """
    inner = inner_model(model)
    given = {name: value for name, value in inputs.items() if name != LABELS}
    states: list[Tensor] = []
    handle = inner.base_model.register_forward_hook(lambda _, __, output: states.append(_last_hidden_state(output)))
    try:
        if scores_tokens:
            log_probs, is_greedy = _log_probs(model, inner, given, targets)
        else:
            model(**given)
            log_probs, is_greedy = torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.bool)
    finally:
        handle.remove()
    return log_probs, is_greedy, states[-1][0] if hidden else None


def _last_hidden_state(output: Any) -> Tensor:
    state = getattr(output, "last_hidden_state", output[0] if isinstance(output, tuple) else None)
    if not isinstance(state, Tensor):
        raise PackingError(f"hidden: expected a backbone that returns hidden states, got {type(output).__name__}")
    return state


def _log_probs(
    model: nn.Module, inner: PreTrainedModel, given: dict[str, Any], targets: Tensor
) -> tuple[Tensor, Tensor]:
    vocabulary = getattr(inner.config.get_text_config(), "vocab_size", 1)
    if can_chunk(model, inner):
        head = _ScoringHead(inner, targets, torch.ones_like(targets, dtype=torch.float32), False, _chunk(vocabulary))
        try:
            with head.installed():
                model(**given)
            if head.hidden is not None:
                return head.scores()
        except UnsupportedHeadError:
            pass
    logits = model(**given).logits
    found = torch.zeros_like(targets, dtype=torch.float64), torch.ones_like(targets, dtype=torch.bool)
    chosen = (targets[0] != IGNORED_LABEL).nonzero()[:, 0]
    for part in torch.split(chosen, _chunk(vocabulary)):
        for whole, each in zip(found, _scores_of(logits[:, part], targets[:, part]), strict=True):
            whole[:, part] = each
    return found[0][0], found[1][0]


def _chunk(vocabulary: int) -> int:
    return max(1, min(_CHUNK_TOKENS, CHUNK_LOGITS // vocabulary))


_CHUNK_TOKENS = 1024
"""Largest number of tokens in a chunk. More of them gain nothing, and their logits leave the processor's caches."""


def _scores_of(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each label, float64, and whether the label is the most probable one."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    of_label = logits.gather(-1, labels[..., None])[..., 0]
    return (of_label - logits.logsumexp(-1)).double(), of_label >= logits.amax(-1)


class _ScoringHead(ChunkedHead):
    """Hooks for one forward, which keep the log-probability of each label instead of the loss."""

    def _loss_of_chunk(self, hidden: Tensor, chunk: slice) -> Tensor:
        self._found = getattr(self, "_found", [])
        labels = self.labels[:, chunk]
        is_label = labels != IGNORED_LABEL
        log_probs, is_greedy = _scores_of(self.of_logits(self.layer.forward(hidden)), labels.where(is_label, 0))
        self._found.append((log_probs.where(is_label, 0), is_greedy | ~is_label))
        return log_probs.sum()

    def scores(self) -> tuple[Tensor, Tensor]:
        """Return the results of all tokens."""
        log_probs = torch.zeros(self.shape[1], dtype=torch.float64, device=self.chosen.device)
        is_greedy = torch.ones(self.shape[1], dtype=torch.bool, device=self.chosen.device)
        log_probs[self.chosen] = torch.cat([each for each, _ in self._found], 1)[0].to(log_probs.device)
        is_greedy[self.chosen] = torch.cat([each for _, each in self._found], 1)[0].to(log_probs.device)
        return log_probs, is_greedy
