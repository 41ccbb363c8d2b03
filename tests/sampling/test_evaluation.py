"""Batchings for fixed shapes: their limits, and evaluation batches that are filled in the order of the dataset."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hf_packing as hfp
from hf_packing.errors import PackingError
from hf_packing.sampling.batching import Epoch
from hf_packing.sampling.evaluation import InOrder
from hf_packing.sampling.sizes import sizes_of_packs

PACKS = st.lists(st.lists(st.integers(1, 9), max_size=4), min_size=1, max_size=60).filter(lambda packs: any(packs))


def sizes_of_lists(packs, bucket=None):
    lengths = np.concatenate([np.zeros(0, dtype=np.int64), *map(np.array, packs)]).astype(np.int64)
    return sizes_of_packs(lengths, np.cumsum([0, *map(len, packs)]), bucket)


def test_limits_of_fixed_shapes_are_kept_and_reached():
    assert hfp.TokenBudget(100).within((128, 8)) == hfp.TokenBudget(100, max_documents=7)
    assert hfp.TokenBudget(100, max_documents=3).within((128, 8)).max_documents == 3
    assert hfp.BucketBatches(100).within((100, 8)) == hfp.BucketBatches(100, max_documents=7)
    sizes = sizes_of_lists([[1] * 4] * 4, np.full(4, 4))
    assert hfp.BucketBatches(16, max_documents=16).plan(sizes).per_micro_batch(sizes.segments).max() == 16


@given(
    packs=PACKS,
    limits=st.one_of(
        st.tuples(st.integers(1, 9), st.just(999), st.just(999)),
        st.tuples(st.just(999), st.integers(36, 60), st.integers(4, 9)),
    ),
    world_size=st.integers(1, 8),
)
def test_in_order_as_many_successive_rows_as_fit(packs, limits, world_size):
    rows_per_batch, max_tokens, max_documents = limits
    sizes = sizes_of_lists(packs)
    batching = InOrder(max_tokens=max_tokens, max_documents=max_documents)
    plan = (batching if rows_per_batch == 999 else InOrder(rows_per_batch)).plan(sizes, Epoch(0, world_size))
    micro_batches = [
        plan.micro_batch(number, rank) for number in range(plan.num_micro_batches) for rank in range(world_size)
    ]
    expected, rows = [], []
    for row in np.flatnonzero(sizes.tokens).tolist():
        together = [row, *(each for each, _ in rows)]
        fits = sizes.tokens[together].sum() <= max_tokens and sizes.segments[together].sum() <= max_documents
        if rows and not (fits and len(together) <= rows_per_batch):
            expected.append(rows)
            rows = []
        rows = [*rows, (row, False)]
    expected.append(rows)
    copies = len(micro_batches) - len(expected)
    assert micro_batches[: len(expected)] == expected
    assert 0 <= copies < world_size
    assert micro_batches[len(expected) :] == [[(expected[0][0][0], True)]] * copies
    assert plan.left_out.tolist() == [row for row, pack in enumerate(packs) if not pack]


@given(
    st.lists(st.tuples(st.sampled_from([8, 16, 32]), st.integers(1, 6)), min_size=1, max_size=80),
    st.integers(1, 4),
    st.sampled_from([32, 64]),
)
def test_bucket_batches_never_exceed_the_limit_that_they_accept(rows, world_size, tokens):
    """A row of a bucket has up to six documents of one token. Leftover rows of small buckets are joined."""
    packs = [[1] * min(documents, capacity) for capacity, documents in rows]
    sizes = sizes_of_lists(packs, np.array([capacity for capacity, _ in rows]))
    batching = hfp.BucketBatches(tokens)
    most = batching._most_documents(batching.fit(sizes))
    limited = replace(batching, max_documents=most)
    if len(rows) < world_size:
        return
    for epoch in range(3):
        plan = limited.plan(sizes, Epoch(epoch, world_size))
        assert plan.per_micro_batch(sizes.segments).max() <= most
    with pytest.raises(PackingError, match=f"max_documents: expected (at least {most}|an integer from 1)"):
        replace(batching, max_documents=most - 1).plan(sizes, Epoch(0, world_size))
