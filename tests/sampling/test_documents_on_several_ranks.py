"""TokenBudget(max_ranks_per_document=k): law 7 for blocks of k ranks, and what a summary says of their documents."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import hf_packing as hfp
from hf_packing.errors import PackingError
from hf_packing.sampling.batching import Epoch
from hf_packing.sampling.sampler import RankBatchSampler
from hf_packing.sampling.sizes import sizes_of_documents, sizes_of_packs
from hf_packing.training.kinds.split import RowsOnRanks

LENGTHS = st.lists(st.integers(0, 120), min_size=1, max_size=80)


@given(
    lengths=LENGTHS,
    ranks=st.integers(2, 5),
    blocks=st.integers(1, 5),
    accumulation=st.integers(1, 3),
    balance=st.sampled_from(["attention", "tokens"]),
    overflow=st.sampled_from(["split", "truncate", "drop"]),
)
def test_blocks_share_every_epoch_exactly(lengths, ranks, blocks, accumulation, balance, overflow):
    sizes = sizes_of_documents(np.array(lengths))
    budget = hfp.TokenBudget(40, max_ranks_per_document=ranks, balance=balance, overflow=overflow, linear_cost=9)
    fitted = budget.fit(sizes)
    assume(len(fitted.kept) >= blocks)
    plans = [budget.plan(sizes, Epoch(number, blocks, accumulation)) for number in range(2)]
    assert len({plan.num_micro_batches for plan in plans}) == 1
    for plan in plans:
        micro_batches = [each for block in range(blocks) for each in plan.micro_batches(block)]
        assert len(micro_batches) == blocks * plan.num_micro_batches
        rows = [row for micro_batch in micro_batches for row in micro_batch]
        assert Counter(row for row, is_copy in rows if not is_copy) == dict.fromkeys(fitted.kept.tolist(), 1)
        for micro_batch in micro_batches:
            layout = budget.lay_out(fitted.sizes.tokens[[row for row, _ in micro_batch]])
            assert layout.num_ranks == ranks
            assert layout.tokens.max() <= 40
            assert sum(len(layout.places(rank)) for rank in range(ranks)) == layout.lengths.sum()
        assert sum(is_copy for _, is_copy in rows) == plan.num_copies < blocks


@given(
    lengths=LENGTHS,
    max_tokens=st.integers(120, 200),
    ranks=st.integers(1, 3),
    world_size=st.integers(1, 4),
    accumulation=st.integers(1, 3),
)
def test_blocks_are_planned_like_ranks_with_more_tokens(lengths, max_tokens, ranks, world_size, accumulation):
    """So a block of one rank is planned like a rank."""
    sizes = sizes_of_documents(np.array(lengths))
    assume(np.count_nonzero(lengths) >= world_size)
    alone = hfp.TokenBudget(ranks * max_tokens).plan(sizes, Epoch(1, world_size, accumulation))
    budget = hfp.TokenBudget(max_tokens, max_ranks_per_document=ranks)
    blocks = budget.plan(sizes, Epoch(1, world_size, accumulation))
    assert blocks.num_micro_batches == alone.num_micro_batches
    for rank in range(world_size):
        assert list(blocks.micro_batches(rank)) == list(alone.micro_batches(rank))


@given(lengths=LENGTHS, ranks=st.integers(2, 5))
def test_rows_of_any_size_are_laid_out_evenly(lengths, ranks):
    row = np.array([length for length in lengths if length])
    assume(len(row))
    for rows in (RowsOnRanks(ranks, 0, None), RowsOnRanks(ranks, 0, hfp.TokenBudget(1, max_ranks_per_document=ranks))):
        assert rows.lay_out(row).tokens.max() <= -(-row.sum() // ranks)


@pytest.mark.parametrize(("overflow", "kept", "lost"), [("drop", [9, 5], 21), ("truncate", [9, 20, 5], 1)])
def test_overflow_begins_where_all_ranks_are_full(overflow, kept, lost):
    budget = hfp.TokenBudget(5, max_ranks_per_document=4, overflow=overflow)
    rows = budget.fit(sizes_of_documents(np.array([9, 21, 5])))
    assert (rows.sizes.tokens[rows.kept].tolist(), rows.lost_tokens) == (kept, lost)


def test_steps_do_not_depend_on_how_many_ranks_run_them():
    sizes = sizes_of_documents(np.arange(1, 400))
    budget = hfp.TokenBudget(200, max_ranks_per_document=2)

    def steps(world_size, accumulation):
        plan = budget.plan(sizes, Epoch(0, world_size // 2, accumulation))
        per_step = plan.world_size * accumulation
        return [set(rows.tolist()) for rows in np.split(plan.rows, plan.offsets[per_step:-1:per_step])]

    assert steps(8, 1) == steps(4, 2) == steps(2, 4)
    assert len(steps(8, 1)) > 5
    sampler = RankBatchSampler(budget, sizes, 4)
    RankBatchSampler(budget, sizes, 2, accumulation=2).check_can_resume(sampler.plan_inputs())
    other = RankBatchSampler(hfp.TokenBudget(200, max_ranks_per_document=4), sizes, 4)
    with pytest.raises(PackingError, match="max_ranks_per_document: expected 2, .* got 4"):
        other.check_can_resume(sampler.plan_inputs())


def sampler_of(budget, sizes, ranks):
    """The sampler of a run on so many ranks."""
    sampler = RankBatchSampler(budget, sizes, ranks // budget.max_ranks_per_document)
    sampler.on_ranks = RowsOnRanks(budget.max_ranks_per_document, 0, budget)
    return sampler


def long_and_short(rng):
    return np.concatenate([rng.integers(1000, 8001, 12), rng.lognormal(5, 1, 600).astype(int).clip(1, 1000)])


def test_documents_on_several_ranks_are_counted(rng):
    """In the summary, as added up over micro-batches and ranks one by one."""
    lengths = long_and_short(rng)
    budget = hfp.TokenBudget(1000, max_ranks_per_document=8, linear_cost=300)
    sampler = sampler_of(budget, sizes_of_documents(lengths), 16)
    split, busy, tokens = 0, [], []
    for number in range(len(sampler)):
        work, held = [], []
        for block in range(2):
            layout = budget.lay_out(lengths[[row for row, _ in sampler.plan.micro_batch(number, block)]])
            split += layout.num_split
            held += layout.tokens.tolist()
            work += (300 * layout.tokens + layout.attention_cost).tolist()
        busy.append(np.mean(work) / max(work))
        tokens.append(np.mean(held) / max(held))
    summary = sampler.summary()
    assert (summary.copies, summary.split, summary.documents) == (0, 0, len(lengths))
    assert summary.layout.split == split >= 12
    assert summary.layout.utilization == pytest.approx(np.mean(busy))
    assert np.mean(busy) > 0.93
    assert summary.token_utilization == pytest.approx(np.mean(tokens))
    assert summary.largest_micro_batch <= 1000
    said = f"blocks of 8 ranks: {split} documents are on several of them; utilization of the ranks {np.mean(busy):.1%}"
    assert said in str(summary)


def test_packed_rows_are_laid_out_by_their_documents(rng):
    lengths = long_and_short(rng)
    packs = hfp.plan_packing(lengths, hfp.BestFit(8000))
    budget = hfp.TokenBudget(1000, max_ranks_per_document=8, linear_cost=300)
    sampler = sampler_of(budget, sizes_of_packs(packs.segment_length, packs.pack_offsets), 8)
    summary = sampler.summary()
    assert summary.largest_micro_batch == 1000
    rows = np.split(packs.segment_length, packs.pack_offsets[1:-1])
    assert summary.layout.split == sum(budget.lay_out(row).num_split for row in rows)
    assert summary.layout.utilization > 0.93


def test_copies_are_no_work():
    budget = hfp.TokenBudget(100, max_ranks_per_document=2)
    summary = sampler_of(budget, sizes_of_documents(np.full(3, 200)), 4).summary()
    assert summary.copies == 1
    assert summary.layout.utilization == 0.75


def test_without_documents_on_several_ranks_nothing_is_said(rng):
    summary = RankBatchSampler(hfp.TokenBudget(8000), sizes_of_documents(long_and_short(rng)), 2).summary()
    assert summary.layout is None
    assert "blocks of" not in str(summary)
