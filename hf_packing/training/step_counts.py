"""Count what the ranks run: the tokens, documents and attention cost of optimizer steps for logs, and predictions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch import Tensor

from hf_packing.sampling.fill import mean_over_max
from hf_packing.training.kinds import labels_of, refuse_zero
from hf_packing.training.losses import COUNTS, Batch, Loss, exact_type, positive

_TOKENS, _DOCUMENTS, _SQUARES, _ITEMS = range(4)
"""Columns of counts. Items are the tokens or documents over which the loss is averaged."""


def micro_batch_counts(batches: Sequence[Batch], loss: Loss) -> Tensor:
    """Count the tokens, documents, attention cost and items of the loss of each batch, without padding and copies.

    Returns:
        float64 [batches, 4], on the batches' device. Items are the tokens, documents or other units over which the loss
        is averaged.
    """
    counts = [batch[COUNTS] if COUNTS in batch else labels_of(batch).counts(loss) for batch in batches]
    return torch.stack([each.to(exact_type(each.device)) for each in counts])


@dataclass
class StepCounts:
    """Counts of tokens, documents and attention cost in the optimizer steps since the trainer last logged.

    The counts stay on the device until they are logged.
    """

    steps: list[Tensor] = field(default_factory=list)
    documents: Tensor | int = 0
    """The number of documents in all steps."""

    def add(self, counts: Tensor, batches: Sequence[Batch] = ()) -> Tensor:
        """Add the counts of an optimizer step, and return the number of its items, a scalar that is not 0.

        Args:
            counts: float64 [ranks, batches, 4], the result of `micro_batch_counts` on each rank.
            batches: the micro-batches of this rank, whose weights must not be 0 with those of all ranks.
        """
        items = counts[..., _ITEMS].sum()
        refuse_zero(batches, items)
        self.steps.append(counts)
        self.documents = self.documents + counts[..., _DOCUMENTS].sum()
        return positive(items)

    def take(self, max_tokens: int | None) -> dict[str, float]:
        """Return packing metrics of the optimizer steps since the last call, by their names in the logs.

        Args:
            max_tokens: the largest number of tokens that a micro-batch may have; None if there is none.
        """
        if not self.steps:
            return {}
        steps = len(self.steps)
        together = torch.cat(self.steps, dim=1).double().cpu()
        self.steps.clear()
        tokens, squares = together[..., _TOKENS], together[..., _SQUARES]
        taken = {} if max_tokens is None else {"packing_efficiency": float(tokens.mean()) / max_tokens}
        taken["documents_per_step"] = float(together[..., _DOCUMENTS].sum()) / steps
        taken["tokens_per_step"] = float(tokens.sum()) / steps
        if len(together) > 1:  # one rank waits for no other
            for name, work in (("token_utilization", tokens), ("attention_utilization", squares)):
                of_batches = work.T[work.any(0)].numpy()
                taken[name] = mean_over_max(of_batches, of_batches)
        return taken


@dataclass
class Predictions:
    """The predictions of all ranks in an evaluation, without the copies of rows that some of them had to run."""

    accelerator: Accelerator
    documents: Tensor | int = 0
    """The number of documents, over all ranks."""
    counted: Sequence[bool] = ()
    """For each process: whether its current micro-batch has rows that are not copies."""

    def begin(self, batch: Batch) -> None:
        """Note the micro-batch that this rank is about to run; all ranks call this together."""
        documents = self.accelerator.gather(micro_batch_counts([batch], "token")[:, _DOCUMENTS])
        self.documents = self.documents + documents.sum()
        self.counted = [True] if len(documents) == 1 else (documents > 0).tolist()

    def gathered(self, gather: Callable[[Any], Any], data: Any) -> Any:
        """Return what `gather` returns for the results of a micro-batch, without those of ranks that ran a copy."""
        found = gather(data)
        if all(self.counted):
            return found

        def without_copies(of_ranks: Any) -> Any:
            size = len(of_ranks) // len(self.counted)
            kept = np.flatnonzero(np.repeat(self.counted, size))
            return of_ranks[kept] if isinstance(of_ranks, Tensor) else [of_ranks[number] for number in kept]

        if isinstance(found, list) and not isinstance(data, list):  # of eval_use_gather_object
            return without_copies(found)
        return recursively_apply(without_copies, found)
