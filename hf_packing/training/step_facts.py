"""What steps of the optimiser are made of, on all ranks, for a trainer's logs."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_packing.training.losses import Loss, items_in

TOKENS, DOCUMENTS, SQUARES, ITEMS_COUNTED = range(4)
"""What is counted of a micro-batch, in this order."""


def facts_of(batches: Sequence[Mapping[str, Any]], loss: Loss) -> Tensor:
    """int64 [batches, 4] on their device: tokens, documents, squared lengths summed, and items of the loss."""
    rows = []
    for batch in batches:
        borders = batch["cu_seq_lens_q"]
        counted = torch.tensor([batch["input_ids"].shape[1], len(borders) - 1], device=borders.device)
        squares = borders.long().diff().square().sum()
        rows.append(torch.cat([counted, squares[None], items_in(batch, loss)[None].to(borders.device)]))
    return torch.stack(rows)


class StepFacts:
    """Of the steps since the last log. Nothing is copied from the device before it is asked for."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []
        """int64 [ranks, batches, 4] for each step of the optimiser."""

    def add(self, everywhere: Tensor) -> None:
        """One step, int64 [ranks, batches, 4]."""
        self.steps.append(everywhere.detach())

    def take(self, budget: int) -> dict[str, float]:
        """The means since they were last taken, by the names that they have in logs.

        Args:
            budget: tokens that a micro-batch may have.
        """
        if not self.steps:
            return {}
        steps = len(self.steps)
        together = torch.cat(self.steps, dim=1).double().cpu()
        self.steps.clear()
        tokens, squares = together[..., TOKENS], together[..., SQUARES]
        return {
            "packing_efficiency": float(tokens.mean()) / budget,
            "documents_per_step": float(together[..., DOCUMENTS].sum()) / steps,
            "tokens_per_step": float(tokens.sum()) / steps,
            "token_utilization": utilization(tokens),
            "attention_utilization": utilization(squares),
        }


def utilization(work: Tensor) -> float:
    """Mean over largest across ranks [ranks, steps], averaged over steps."""
    return float((work.mean(dim=0) / work.amax(dim=0)).mean())
