"""Run a language model without a backward pass, and return the log-probability of each label and hidden states.

The output layer runs on one chunk of tokens at a time, as in training, wherever a test has shown that it can.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_packing.attention import inner_model
from hf_packing.columns import INPUT_IDS, LABELS
from hf_packing.errors import PackingError
from hf_packing.training.head import Logits, observed_logits, reduced_logits, tokens_of_chunk
from hf_packing.training.next_tokens import NextTokens

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
            log_probs, is_greedy = _log_probs(model, given, following)
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


def _log_probs(model: nn.Module, given: dict[str, Any], following: NextTokens) -> tuple[Tensor, Tensor]:
    def reduce(logits: Tensor) -> Tensor:
        if isinstance(logits, Logits):
            return logits.of_tokens(following.predictors).in_chunks(
                lambda rows, chunk: _scores_of(rows, following.labels[chunk])
            )
        chunks = zip(torch.split(following.predictors, size), torch.split(following.labels, size), strict=True)
        return torch.cat([_scores_of(logits[0, predictors], labels) for predictors, labels in chunks])

    size = min(_CHUNK_TOKENS, tokens_of_chunk(inner_model(model)))
    with observed_logits(model, given[INPUT_IDS].shape, size=size), reduced_logits(model, reduce):
        found = model(**given).logits
    return found[:, 0], found[:, 1] > 0


_CHUNK_TOKENS = 1024
"""Largest number of tokens in a chunk. More of them gain nothing, and their logits leave the processor's caches."""


def _scores_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of each label, and 1 if it is the most probable one or 0, float64 [labels, 2].

    Args:
        logits: float [labels, vocabulary].
        labels: int64 [labels].
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    of_label = logits.gather(1, labels[:, None].to(logits.device))[:, 0]
    return torch.stack([of_label - logits.logsumexp(-1), of_label >= logits.amax(-1)], 1).double()
