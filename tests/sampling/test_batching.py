"""Epoch, and what is measured of an EpochPlan."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hf_packing as hfp
from hf_packing.sampling.batching import Epoch, EpochPlan
from hf_packing.sampling.sizes import sizes_of_documents


def test_micro_batches_by_number_and_rank():
    plan = EpochPlan(
        world_size=2,
        rows=np.array([4, 0, 1, 3, 0]),
        is_copy=np.array([False, False, False, False, True]),
        offsets=np.array([0, 1, 3, 4, 5]),
        left_out=np.array([2]),
    )
    assert plan.num_micro_batches == 2
    assert plan.num_copies == 1
    assert plan.micro_batch(0, rank=1) == [(0, False), (1, False)]
    assert list(plan.micro_batches(rank=1)) == [[(0, False), (1, False)], [(0, True)]]
    assert list(plan.micro_batches(rank=0, first=1)) == [[(3, False)]]
    tokens = np.array([5, 1, 0, 4, 8])
    assert plan.per_micro_batch(tokens).tolist() == [[8, 6], [4, 5]]
    assert plan.per_micro_batch(tokens, plan.is_copy).tolist() == [[0, 0], [0, 5]]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=8, max_size=60), world_size=st.integers(1, 8), seed=st.integers(0, 9)
)
def test_what_is_measured_of_a_plan(lengths, world_size, seed):
    sizes = sizes_of_documents(np.array(lengths))
    plan = hfp.TokenBudget(50, seed=seed).plan(sizes, Epoch(0, world_size))
    tokens = [
        [sum(lengths[row] for row, _ in plan.micro_batch(number, rank)) for rank in range(world_size)]
        for number in range(plan.num_micro_batches)
    ]
    assert plan.per_micro_batch(sizes.tokens).tolist() == tokens
    assert plan.per_micro_batch(sizes.tokens).max() == max(map(max, tokens))
    copied = plan.per_micro_batch(sizes.tokens, plan.is_copy).tolist()
    assert sum(map(sum, copied)) == sum(lengths[row] for row in plan.rows[plan.is_copy])
    busy = [(sum(step) - sum(copies)) / len(step) / max(step) for step, copies in zip(tokens, copied, strict=True)]
    assert plan.utilization(sizes.tokens) == pytest.approx(sum(busy) / len(busy))
