"""What epochs and optimizer steps are made of: a summary of the first epoch, and figures for the trainer's logs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_packing.errors import PackingError
from hf_packing.sampling.sampler import RankBatchSampler
from hf_packing.sampling.token_budget import TokenBudget
from hf_packing.training.losses import Loss, items_in

_TOKENS, _DOCUMENTS, _SQUARES, _ITEMS = range(4)
"""What is counted in a micro-batch, in this order."""


@dataclass(frozen=True)
class EpochSummary:
    """What the first epoch is made of, over all ranks; print it."""

    optimizer_steps: int
    num_micro_batches: int
    """Of each rank."""
    world_size: int
    documents: int
    """A packed row counts as its segments; pieces of a document that was split count one by one."""
    tokens: int
    documents_per_step: float
    """Mean over the optimizer steps."""
    tokens_per_step: float
    """Mean over the optimizer steps."""
    largest_micro_batch: int
    """Tokens."""
    token_utilization: float
    """Mean over largest number of tokens among the ranks that work at the same time, averaged: 1 if none waits."""
    attention_utilization: float
    """The same for the sum of squared segment lengths."""
    copies: int
    """Rows that are repeated with masked labels, where rows do not divide evenly."""
    left_out: int
    """Rows that are empty, or too long and dropped."""
    lost_tokens: int
    """Tokens of dropped and truncated documents."""
    unpacked_documents_per_step: int | None = None
    """Documents in a step without packing, under the same arguments, if match_documents_per_step can keep that."""

    def __str__(self) -> str:
        text = (
            f"{self.optimizer_steps:,} optimizer steps per epoch of {self.documents_per_step:,.1f} documents, "
            f"{self.tokens_per_step:,.0f} tokens\n"
            f"{self.world_size} x {self.num_micro_batches:,} micro-batches (ranks x micro-batches of a rank), the "
            f"largest with {self.largest_micro_batch:,} tokens\n"
            f"utilization of the ranks: {self.token_utilization:.1%} by tokens, {self.attention_utilization:.1%} by "
            "attention\n"
            f"{self.copies:,} masked copies, {self.left_out:,} rows left out, {self.lost_tokens:,} tokens lost"
        )
        if self.unpacked_documents_per_step is None:
            return text
        return (
            f"{text}\nwithout packing: {self.unpacked_documents_per_step:,} documents per optimizer step "
            f"({-(-self.documents // self.unpacked_documents_per_step):,} steps); "
            f"match_documents_per_step={self.unpacked_documents_per_step} keeps that schedule"
        )


def summary_of(sampler: RankBatchSampler, unpacked: int) -> EpochSummary:
    """Return the summary of the sampler's current epoch.

    Args:
        sampler: of any rank.
        unpacked: documents in an optimizer step without packing.
    """
    plan, fitted = sampler.plan, sampler.rows
    steps = -(-plan.num_micro_batches // sampler.accumulation)
    tokens = int(fitted.sizes.tokens[fitted.kept].sum())
    documents = int(fitted.sizes.segments[fitted.kept].sum())
    return EpochSummary(
        optimizer_steps=steps,
        num_micro_batches=plan.num_micro_batches,
        world_size=sampler.world_size,
        documents=documents,
        tokens=tokens,
        documents_per_step=documents / steps,
        tokens_per_step=tokens / steps,
        largest_micro_batch=plan.largest_micro_batch(fitted.sizes),
        token_utilization=plan.utilization(fitted.sizes.tokens),
        attention_utilization=plan.utilization(fitted.sizes.squared_lengths),
        copies=plan.num_copies,
        left_out=len(plan.left_out),
        lost_tokens=fitted.lost_tokens,
        unpacked_documents_per_step=unpacked if _can_match(sampler, unpacked) else None,
    )


def micro_batch_counts(batches: Sequence[Mapping[str, Any]], loss: Loss) -> Tensor:
    """Count tokens, documents, squared segment lengths and items of the loss: int64 [batches, 4] on their device."""
    rows = []
    for batch in batches:
        borders = batch["cu_seq_lens_q"]
        counted = torch.tensor([batch["input_ids"].shape[1], len(borders) - 1], device=borders.device)
        squares = borders.long().diff().square().sum()
        rows.append(torch.cat([counted, squares[None], items_in(batch, loss)[None].to(borders.device)]))
    return torch.stack(rows)


def items_counted(counts: Tensor) -> Tensor:
    """Return how many items the loss of an optimizer step is a mean over: int64 scalar, at least 1.

    Args:
        counts: int64 [ranks, batches, 4].
    """
    return counts[..., _ITEMS].sum().clamp(min=1)


class StepCounts:
    """Counts of the optimizer steps since the last log. They stay on the device until they are logged."""

    def __init__(self) -> None:
        self._steps: list[Tensor] = []

    def add(self, counts: Tensor) -> None:
        """Add an optimizer step: int64 [ranks, batches, 4]."""
        self._steps.append(counts.detach())

    def take(self, max_tokens: int) -> dict[str, float]:
        """Return the means over the steps, by the names that they have in logs, and begin anew.

        Args:
            max_tokens: how many tokens a micro-batch may have.
        """
        if not self._steps:
            return {}
        steps = len(self._steps)
        together = torch.cat(self._steps, dim=1).double().cpu()
        self._steps.clear()
        tokens, squares = together[..., _TOKENS], together[..., _SQUARES]
        return {
            "packing_efficiency": float(tokens.mean()) / max_tokens,
            "documents_per_step": float(together[..., _DOCUMENTS].sum()) / steps,
            "tokens_per_step": float(tokens.sum()) / steps,
            "token_utilization": _utilization(tokens),
            "attention_utilization": _utilization(squares),
        }


def _can_match(sampler: RankBatchSampler, documents: int) -> bool:
    """Return whether optimizer steps could have so many documents on average."""
    batching = sampler.batching
    if not isinstance(batching, TokenBudget) or batching.match_documents_per_step is not None:
        return False
    try:
        matched = replace(batching, match_documents_per_step=documents)
        matched.num_micro_batches(sampler.rows, sampler.epoch)
    except PackingError:
        return False
    return True


def _utilization(work: Tensor) -> float:
    """Return mean over largest across ranks [ranks, micro-batches], averaged over micro-batches."""
    return float((work.mean(dim=0) / work.amax(dim=0)).mean())
