"""Steps, documents and tokens of an epoch: what packing changes for whoever trains."""

from dataclasses import dataclass, replace

from hf_packing.errors import PackingError
from hf_packing.sampling.sampler import RankBatchSampler
from hf_packing.sampling.token_budget import TokenBudget


@dataclass(frozen=True)
class EpochSummary:
    """What the first epoch is made of, over all ranks; print it."""

    optimizer_steps: int
    num_micro_batches: int
    """Of each rank."""
    world_size: int
    documents: int
    """Packed ones count as their segments, and the pieces of one that was cut one by one."""
    tokens: int
    documents_per_step: float
    """Mean over the steps of the optimizer."""
    tokens_per_step: float
    largest_micro_batch: int
    """Tokens."""
    token_utilization: float
    """Mean over largest across the ranks that work at the same time, averaged: 1 where none waits for another."""
    attention_utilization: float
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
            f"{self.optimizer_steps:,} optimizer steps per epoch of {self.documents_per_step:,.1f} documents, "
            f"{self.tokens_per_step:,.0f} tokens\n"
            f"{self.world_size} x {self.num_micro_batches:,} micro-batches (ranks x steps), the largest of "
            f"{self.largest_micro_batch:,} tokens\n"
            f"ranks busy while the busiest works: {self.token_utilization:.1%} by tokens, "
            f"{self.attention_utilization:.1%} by attention\n"
            f"{self.copies:,} masked copies, {self.left_out:,} rows left out, {self.lost_tokens:,} tokens lost"
        )
        if self.unpacked_documents_per_step is None:
            return text
        return (
            f"{text}\nunpacked: {self.unpacked_documents_per_step:,} documents per optimizer step "
            f"({-(-self.documents // self.unpacked_documents_per_step):,} steps); "
            f"match_documents_per_step={self.unpacked_documents_per_step} keeps that schedule"
        )


def can_match(sampler: RankBatchSampler, documents: int) -> bool:
    """Whether steps of the optimizer could have so many documents on average."""
    batching = sampler.batching
    if not isinstance(batching, TokenBudget) or batching.match_documents_per_step is not None:
        return False
    try:
        matched = replace(batching, match_documents_per_step=documents)
        matched.num_micro_batches(sampler.rows, sampler.epoch)
    except PackingError:
        return False
    return True


def summary_of(sampler: RankBatchSampler, unpacked: int) -> EpochSummary:
    """The summary of the sampler's current epoch.

    Args:
        sampler: of any rank.
        unpacked: documents a step of the optimizer would have without packing.
    """
    plan, fitted = sampler.plan, sampler.rows
    optimizer_steps = -(-plan.num_micro_batches // sampler.accumulation)
    tokens = int(fitted.sizes.tokens[fitted.kept].sum())
    documents = int(fitted.sizes.segments[fitted.kept].sum())
    return EpochSummary(
        optimizer_steps=optimizer_steps,
        num_micro_batches=plan.num_micro_batches,
        world_size=sampler.world_size,
        documents=documents,
        tokens=tokens,
        documents_per_step=documents / optimizer_steps,
        tokens_per_step=tokens / optimizer_steps,
        largest_micro_batch=plan.largest_micro_batch(fitted.sizes),
        token_utilization=plan.utilization(fitted.sizes.tokens),
        attention_utilization=plan.utilization(fitted.sizes.squared_lengths),
        copies=plan.num_copies,
        left_out=len(plan.left_out),
        lost_tokens=fitted.lost_tokens,
        unpacked_documents_per_step=unpacked if can_match(sampler, unpacked) else None,
    )
