"""The documents of an optimizer step depend on the product of ranks and accumulation, and not on these two numbers."""

from collections import Counter

import numpy as np
import pytest
from any_strategy import few_examples
from hypothesis import given
from hypothesis import strategies as st
from tiers import fast_only

import hf_packing as hfp
from hf_packing.sampling.batching import Epoch
from hf_packing.sampling.sizes import sizes_of_documents, sizes_of_packs

BUCKETS = np.array([8, 16, 32])
BATCHINGS = st.one_of(
    st.builds(
        hfp.TokenBudget,
        st.sampled_from([40, 41, 80, 200]),
        balance=st.sampled_from(["attention", "tokens"]),
        max_documents=st.one_of(st.none(), st.integers(1, 6)),
        seed=st.integers(0, 9),
    ),
    st.builds(hfp.BucketBatches, st.sampled_from([32, 64, 128]), seed=st.integers(0, 9)),
    st.builds(hfp.BucketBatches, st.sampled_from([32, 64]), order=st.just("short_to_long"), cycles=st.integers(1, 3)),
)


def sizes_for(batching, lengths):
    """The sizes of documents, or of packs that have one document and a bucket each."""
    if isinstance(batching, hfp.TokenBudget):
        return sizes_of_documents(np.array(lengths))
    lengths = np.minimum(lengths, 32)
    return sizes_of_packs(lengths, np.arange(len(lengths) + 1), BUCKETS[np.searchsorted(BUCKETS, lengths)])


def steps_of(plan, accumulation):
    """The rows of each optimizer step, a Counter without copies; counted micro-batch by micro-batch."""
    steps = []
    for first in range(0, plan.num_micro_batches, accumulation):
        numbers = range(first, min(first + accumulation, plan.num_micro_batches))
        rows = [row for number in numbers for rank in range(plan.world_size) for row in plan.micro_batch(number, rank)]
        steps.append(Counter(row for row, is_copy in rows if not is_copy))
    return steps


def micro_batches_of(plan, accumulation, step):
    numbers = range(step * accumulation, (step + 1) * accumulation)
    return Counter(
        frozenset(row for row, _ in plan.micro_batch(number, rank))
        for number in numbers
        for rank in range(plan.world_size)
    )


@given(BATCHINGS, st.lists(st.integers(1, 40), min_size=1, max_size=150), st.sampled_from([1, 2, 4, 6, 8, 12, 64]))
def test_steps_are_those_of_any_split_into_ranks_and_accumulation(batching, lengths, slots):
    check_steps(batching, sizes_for(batching, lengths), slots)


@few_examples
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=24, max_size=90),
    st.sampled_from([2, 4, 6, 12]),
    st.integers(0, 9),
)
def test_steps_of_packed_rows_and_of_a_number_of_documents(packs, slots, seed):
    sizes = sizes_of_packs(np.concatenate(packs), np.cumsum([0, *map(len, packs)]))
    check_steps(hfp.TokenBudget(60, max_documents=8, seed=seed), sizes, slots)
    documents = sum(map(len, packs))
    matched = hfp.TokenBudget(2000, match_documents_per_step=-(-documents // 2), seed=seed)
    assert len(check_steps(matched, sizes, slots)) == 2


def check_steps(batching, sizes, slots):
    """Compare the steps of all splits into ranks and accumulation, and return them."""
    wanted = batching.plan(sizes, Epoch(1, 1, slots))
    steps = steps_of(wanted, slots)
    assert sum(steps, Counter()) == Counter(range(len(sizes)))
    assert all(steps)
    for ranks in (ranks for ranks in range(2, slots + 1) if slots % ranks == 0 and ranks <= len(sizes)):
        accumulation = slots // ranks
        plan = batching.plan(sizes, Epoch(1, ranks, accumulation))
        assert steps_of(plan, accumulation) == steps
        for step in range(len(steps) - 1):
            assert micro_batches_of(plan, accumulation, step) == micro_batches_of(wanted, slots, step)
    return steps


def test_steps_have_all_micro_batches_and_large_ones_stay_level(rng, monkeypatch):
    sizes = sizes_of_documents(np.clip(rng.lognormal(3, 1, 3000), 1, 500).astype(int))
    for slots in (1, 8, 64):
        plan = hfp.TokenBudget(500).plan(sizes, Epoch(0, 1, slots))
        assert plan.num_micro_batches % slots == 0
        assert plan.num_micro_batches < hfp.TokenBudget(500).plan(sizes).num_micro_batches + slots
    monkeypatch.setattr("hf_packing.sampling.fill._MOST_REDISTRIBUTED", 4)
    sizes = sizes_of_documents(np.clip(rng.lognormal(6, 1.2, 4000), 1, 4096).astype(int))
    budget = hfp.TokenBudget(4096, linear_cost=0)
    steps = steps_of(budget.plan(sizes, Epoch(0, 1, 10)), 10)
    assert sum(steps, Counter()) == Counter(range(4000))
    assert steps_of(budget.plan(sizes, Epoch(0, 5, 2)), 2) == steps
    assert budget.plan(sizes, Epoch(0, 2, 5)).utilization(sizes.squared_lengths) > 0.95


@pytest.mark.parametrize(("ranks", "accumulation"), fast_only([(8, 1), (4, 2), (8, 4), (2, 16)], (8, 1), (8, 4)))
@pytest.mark.parametrize("balance", ["attention", "tokens"])
def test_ranks_have_equal_work_with_accumulation(rng, ranks, accumulation, balance):
    sizes = sizes_of_documents(np.clip(rng.lognormal(6, 1.2, 40_000), 1, 16384).astype(int))
    plan = hfp.TokenBudget(16384, balance=balance, linear_cost=0).plan(sizes, Epoch(0, ranks, accumulation))
    of_row = sizes.squared_lengths if balance == "attention" else sizes.tokens
    assert plan.utilization(of_row) > 0.98
    in_step = plan.per_micro_batch(of_row).reshape(-1, accumulation, ranks).sum(axis=1)
    assert (in_step.mean(axis=1) / in_step.max(axis=1)).mean() > 0.99


def test_ranks_have_equal_work_with_accumulation_in_buckets(rng):
    plan = hfp.plan_packing(np.clip(rng.lognormal(6, 1.2, 30_000), 1, 16384).astype(int), hfp.Bucket())
    sizes = sizes_of_packs(plan.segment_length, plan.pack_offsets, plan.pack_capacity)
    for accumulation in (1, 8, 32):
        epoch = hfp.BucketBatches(16384).plan(sizes, Epoch(0, 8, accumulation))
        assert epoch.utilization(sizes.tokens) > 0.99
        assert epoch.utilization(sizes.squared_lengths) > 0.98
