"""The decisions that `attach` makes once for a trainer."""

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel

from hf_packing.attention import ProveInTraining
from hf_packing.sampling.bucket_batches import BucketBatches
from hf_packing.sampling.epoch_plan import Batching
from hf_packing.sampling.token_budget import TokenBudget
from hf_packing.sampling.within_limits import Shapes
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
    def max_tokens(self) -> int:
        """The largest number of tokens that a micro-batch may have, including padding."""
        if self.shapes[0] is not None:
            return self.shapes[0]
        assert isinstance(self.batching, (TokenBudget, BucketBatches))
        return self.batching.max_tokens if isinstance(self.batching, TokenBudget) else self.batching.tokens_per_batch
