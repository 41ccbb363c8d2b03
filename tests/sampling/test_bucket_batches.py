"""BucketBatches: one bucket a step, constant tokens, every row once; and evaluation batches in order."""

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

BUCKETS = np.array([8, 16, 32])


def full_rows(counts, missing=0):
    """Rows that fill their buckets, so many of each, but for some missing tokens."""
    bucket = np.repeat(BUCKETS, counts)
    return sizes_of_packs(bucket - missing, np.arange(len(bucket) + 1), bucket)


@given(
    counts=st.lists(st.integers(0, 40), min_size=3, max_size=3),
    world_size=st.integers(1, 64),
    tokens=st.sampled_from([32, 64, 128]),
    order=st.sampled_from(["random", "short_to_long"]),
    seed=st.integers(0, 9),
)
def test_every_row_once_and_constant_tokens(counts, world_size, tokens, order, seed):
    sizes = full_rows(counts)
    batches = hfp.BucketBatches(tokens, order=order, seed=seed)
    if len(sizes) < world_size:
        with pytest.raises(PackingError, match=f"at least one row for each of {world_size} ranks"):
            batches.plan(sizes, Epoch(0, world_size))
        return
    plans = [batches.plan(sizes, Epoch(epoch, world_size)) for epoch in range(3)]
    for plan in plans:
        assert sorted(plan.rows[~plan.is_copy].tolist()) == list(range(len(sizes)))
        assert plan.num_micro_batches == plans[0].num_micro_batches
        (of_step,) = set(plan.per_micro_batch(sizes.tokens).ravel().tolist())
        assert of_step == tokens or (plan.num_micro_batches == 1 and of_step < tokens)
    assert len(sizes) < 40 or not np.array_equal(plans[0].rows, plans[1].rows)


def largest_bucket(plan, sizes):
    """int [num_micro_batches, ranks]: the largest bucket of each micro-batch's rows."""
    return np.maximum.reduceat(sizes.bucket[plan.rows], plan.offsets[:-1]).reshape(-1, plan.world_size)


def test_buckets_of_steps_and_leftovers():
    """Where counts divide evenly, no row leaves its bucket."""
    sizes = full_rows([64, 32, 16])
    plan = hfp.BucketBatches(64).plan(sizes, Epoch(0, 4))
    smallest = np.minimum.reduceat(sizes.bucket[plan.rows], plan.offsets[:-1]).reshape(-1, 4)
    largest = largest_bucket(plan, sizes)
    assert np.array_equal(smallest, largest)
    assert (largest == largest[:, :1]).all()
    assert plan.num_copies == 0
    assert np.array_equal(plan.bucket, largest[:, 0])
    assert set(largest[:, 0].tolist()) == {8, 16, 32}
    sizes = full_rows([10, 3, 1])
    batches = hfp.BucketBatches(32)
    plan = batches.plan(sizes, Epoch(0, 2))
    assert sorted(plan.bucket.tolist()) == [8, 16, 32]
    of_bucket = {
        bucket: [plan.micro_batch(number, rank) for rank in range(2)]
        for number, bucket in enumerate(plan.bucket.tolist())
    }
    assert [len(rows) for rows in of_bucket[8]] == [4, 4]  # of 10 rows, 2 are left
    assert sorted(len(rows) for rows in of_bucket[16]) == [2, 3]  # 3 rows, and those 2 in the place of a fourth
    assert sorted(row for rows in of_bucket[32] for row in rows) == [(13, False), (13, True)]
    assert plan.num_micro_batches == 3
    assert plan.num_copies == 1
    sizes = full_rows([100, 0, 0])
    plan = hfp.BucketBatches(65536).plan(sizes, Epoch(0, 64))
    assert (plan.num_micro_batches, plan.num_copies) == (1, 28)
    assert plan.per_micro_batch(sizes.tokens).max() == 16


@pytest.mark.parametrize("cycles", [1, 2, 4])
def test_short_to_long_in_cycles(cycles):
    sizes = full_rows([64, 32, 16])
    plan = hfp.BucketBatches(32, order="short_to_long", cycles=cycles).plan(sizes, Epoch(0, 2))
    buckets = largest_bucket(plan, sizes)[:, 0]
    ways = np.split(buckets, np.flatnonzero(np.diff(buckets) < 0) + 1)
    assert len(ways) == cycles
    assert all(set(way.tolist()) == {8, 16, 32} for way in ways)


def test_random_order_mixes_buckets():
    sizes = full_rows([640, 320, 160])
    buckets = largest_bucket(hfp.BucketBatches(32).plan(sizes), sizes)[:, 0]
    changes = np.count_nonzero(np.diff(buckets))
    assert changes > len(buckets) / 2


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
        st.tuples(st.integers(1, 9), st.integers(1, 40), st.just(999)),
        st.tuples(st.just(999), st.integers(36, 60), st.integers(4, 9)),
    ),
    world_size=st.integers(1, 8),
    align_tokens=st.sampled_from([1, 2, 5]),
)
def test_in_order_as_many_successive_rows_as_fit(packs, limits, world_size, align_tokens):
    rows_per_batch, max_tokens, max_documents = limits
    sizes = sizes_of_lists(packs)
    max_tokens += align_tokens - 1
    batching = InOrder(max_tokens=max_tokens, max_documents=max_documents, align_tokens=align_tokens)
    if rows_per_batch != 999:  # then a row of more tokens is alone
        batching = InOrder(rows_per_batch, max_tokens=max_tokens, align_tokens=align_tokens)
    plan = batching.plan(sizes, Epoch(0, world_size))
    micro_batches = [
        plan.micro_batch(number, rank) for number in range(plan.num_micro_batches) for rank in range(world_size)
    ]
    expected, rows = [], []
    for row in np.flatnonzero(sizes.tokens).tolist():
        together = [row, *(each for each, _ in rows)]
        filled = -(-sizes.tokens[together].sum() // align_tokens) * align_tokens
        fits = filled <= max_tokens and sizes.segments[together].sum() <= max_documents
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
