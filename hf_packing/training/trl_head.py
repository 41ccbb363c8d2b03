"""The log-probabilities that SFTTrainer's fused head returns, weighed or summed on their way to the loss.

SFTTrainer makes its loss from `log_probs` [1, tokens - 1] of the model's output, without logits: their sum, divided by
num_items_in_batch. This is the one place that knows.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hf_packing.errors import PackingError
from hf_packing.training.losses import exact_type, weights_of


@contextmanager
def seeing_outputs(model: nn.Module, see: Callable[[Any], None]) -> Iterator[None]:
    handle = model.register_forward_hook(lambda _, __, outputs: see(outputs))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def weighed(model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[None]:
    """Within it, log-probabilities are weighed so that all documents of the packed inputs weigh the same."""
    weights = weights_of(inputs, "sequence")[:, 1:]

    def weigh(outputs: Any) -> None:
        found = getattr(outputs, "log_probs", None)
        if found is None or found.shape != weights.shape:
            raise PackingError(
                f"loss: expected log_probs of shape {tuple(weights.shape)} from SFTTrainer's fused head for "
                f"loss='sequence', this version of TRL returns {type(outputs).__name__}; loss='token' needs none"
            )
        outputs.log_probs = found * weights.to(found)

    with seeing_outputs(model, weigh):
        yield


@contextmanager
def summed_log_probs(model: nn.Module) -> Iterator[list[Tensor]]:
    """Within it, the sums of log-probabilities are put into the list, one for each call with a fused head."""
    sums: list[Tensor] = []

    def add(outputs: Any) -> None:
        if isinstance(found := getattr(outputs, "log_probs", None), Tensor):
            sums.append(found.detach().to(exact_type(found.device)).sum())

    with seeing_outputs(model, add):
        yield sums
