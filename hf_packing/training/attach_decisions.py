"""The decisions that `attach` makes once for a trainer."""

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel

from hf_packing.attention import ProveInTraining
from hf_packing.sampling.batching import Batching, Shapes
from hf_packing.training.losses import Loss


@dataclass(frozen=True)
class AttachDecisions:
    """The decisions that attach makes once for a trainer."""

    batching: Batching
    """The batching that was passed to attach, with linear_cost and match_documents_per_step filled in."""
    loss: Loss
    prove: ProveInTraining
    shapes: Shapes
    model: Callable[[], PreTrainedModel | None]
    """A function that returns the trainer's model at the time of attach, or None if that model no longer exists."""

    @property
    def max_tokens(self) -> int | None:
        """The largest number of tokens that a micro-batch may have, including padding; None if there is none."""
        return self.batching.most_tokens if self.shapes[0] is None else self.shapes[0]
