"""Steps, documents and tokens of an epoch: what packing changes for whoever trains."""

from dataclasses import dataclass, replace

from hf_packing.errors import PackingError
from hf_packing.sampling.sampler import RankBatchSampler
from hf_packing.sampling.token_budget import TokenBudget


@dataclass(frozen=True)
class EpochSummary:
    """What the first epoch is made of, over all ranks; print it."""

    optimiser_steps: int
    micro_batches: int
    """Of each rank."""
    world_size: int
    documents: int
    """Packed ones count as their segments, and the pieces of one that was cut one by one."""
    tokens: int
    documents_per_step: float
    """Mean over the steps of the optimiser."""
    tokens_per_step: float
    largest_micro_batch: int
    """Tokens."""
    token_utilisation: float
    """Mean over largest across the ranks that work at the same time, averaged: 1 where none waits for another."""
    attention_utilisation: float
    """The same for the sum of squared segment lengths."""
    copies: int
    """Rows with masked labels, which make up for what does not divide evenly."""
    left_out: int
    """Rows that are empty, or too long and dropped."""
    lost_tokens: int
    """Of dropped and truncated documents."""
    unpacked_documents_per_step: int | None = None
    """What the same arguments would give without packing, where match_documents_per_step can keep it."""

    def __str__(self) -> str:
        text = (
            f"{self.optimiser_steps:,} optimiser steps per epoch of {self.documents_per_step:,.1f} documents, "
            f"{self.tokens_per_step:,.0f} tokens\n"
            f"{self.world_size} x {self.micro_batches:,} micro-batches (ranks x steps), the largest of "
            f"{self.largest_micro_batch:,} tokens\n"
            f"ranks busy while the busiest works: {self.token_utilisation:.1%} by tokens, "
            f"{self.attention_utilisation:.1%} by attention\n"
            f"{self.copies:,} masked copies, {self.left_out:,} rows left out, {self.lost_tokens:,} tokens lost"
        )
        if self.unpacked_documents_per_step is None:
            return text
        return (
            f"{text}\nunpacked: {self.unpacked_documents_per_step:,} documents per optimiser step "
            f"({-(-self.documents // self.unpacked_documents_per_step):,} steps); "
            f"match_documents_per_step={self.unpacked_documents_per_step} keeps that schedule"
        )


def can_match(sampler: RankBatchSampler, documents: int) -> bool:
    """Whether steps of the optimiser could have so many documents on average."""
    batching = sampler.batching
    if not isinstance(batching, TokenBudget) or batching.match_documents_per_step is not None:
        return False
    try:
        matched = replace(batching, match_documents_per_step=documents)
        matched.steps_per_epoch(sampler.cut, sampler.world_size, sampler.accumulation)
    except PackingError:
        return False
    return True


def summary_of(sampler: RankBatchSampler, unpacked: int) -> EpochSummary:
    """The summary of the sampler's current epoch.

    Args:
        sampler: of any rank.
        unpacked: documents a step of the optimiser would have without packing.
    """
    plan, cut = sampler.plan, sampler.cut
    updates = -(-plan.num_steps // sampler.accumulation)
    tokens, documents = int(cut.sizes.tokens[cut.kept].sum()), int(cut.sizes.segments[cut.kept].sum())
    return EpochSummary(
        optimiser_steps=updates,
        micro_batches=plan.num_steps,
        world_size=sampler.world_size,
        documents=documents,
        tokens=tokens,
        documents_per_step=documents / updates,
        tokens_per_step=tokens / updates,
        largest_micro_batch=plan.largest(cut.sizes),
        token_utilisation=plan.utilisation(cut.sizes.tokens),
        attention_utilisation=plan.utilisation(cut.sizes.squares),
        copies=plan.num_copies,
        left_out=len(plan.left_out),
        lost_tokens=cut.lost_tokens,
        unpacked_documents_per_step=unpacked if can_match(sampler, unpacked) else None,
    )
