"""Batchings for fixed shapes: their limits, and evaluation batches that are filled in the order of the dataset."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hf_packing as hfp
from hf_packing.errors import PackingError
from hf_packing.sampling.batching import Epoch
from hf_packing.sampling.evaluation import InOrder
from hf_packing.sampling.sizes import sizes_of_documents, sizes_of_packs

PACKS = st.lists(st.lists(st.integers(1, 9), max_size=4), min_size=1, max_size=60).filter(lambda packs: any(packs))


def sizes_of_lists(packs, bucket=None):
    lengths = np.concatenate([np.zeros(0, dtype=np.int64), *map(np.array, packs)]).astype(np.int64)
    return sizes_of_packs(lengths, np.cumsum([0, *map(len, packs)]), bucket)


class TestWithin:
    def test_one_segment_is_left_for_the_padding(self):
        assert hfp.TokenBudget(100).within((128, 8)) == hfp.TokenBudget(100, max_documents=7)
        assert hfp.TokenBudget(100, max_documents=3).within((128, 8)).max_documents == 3
        assert hfp.BucketBatches(100).within((100, 8)) == hfp.BucketBatches(100, max_documents=7)

    @pytest.mark.parametrize(
        ("batching", "shapes", "argument"),
        [
            (hfp.TokenBudget(100), (99, 8), "tokens"),
            (hfp.BucketBatches(100), (9, 8), "tokens"),
            (hfp.TokenBudget(9, max_documents=8), (9, 8), "max_segments"),
            (hfp.TokenBudget(100), (None, 8), "tokens"),
            (hfp.TokenBudget(100), (100, None), "max_segments"),
            (hfp.TokenBudget(1), (1, 1), "max_segments"),
            (hfp.TokenBudget(9, length_schedule=hfp.LengthSchedule(2, 5)), (9, 8), "length_schedule"),
            (InOrder(1), (9, 8), "tokens"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, batching, shapes, argument):
        with pytest.raises(PackingError, match=f"^{argument}: expected"):
            batching.within(shapes)


class TestInOrder:
    @settings(max_examples=200)
    @given(PACKS, st.integers(36, 60), st.integers(4, 9), st.integers(1, 5))
    def test_as_many_successive_rows_as_fit(self, packs, max_tokens, max_documents, world_size):
        sizes = sizes_of_lists(packs)
        plan = InOrder(max_tokens=max_tokens, max_documents=max_documents).plan(sizes, Epoch(0, world_size))
        micro_batches = [
            plan.micro_batch(number, rank) for number in range(plan.num_micro_batches) for rank in range(world_size)
        ]
        expected, rows, tokens, documents = [], [], 0, 0
        for row, pack in enumerate(packs):
            if rows and pack and (tokens + sum(pack) > max_tokens or documents + len(pack) > max_documents):
                expected.append(rows)
                rows, tokens, documents = [], 0, 0
            rows, tokens, documents = rows + ([(row, False)] if pack else []), tokens + sum(pack), documents + len(pack)
        expected.append(rows)
        copies = len(micro_batches) - len(expected)
        assert micro_batches[: len(expected)] == expected
        assert 0 <= copies < world_size
        first = next(row for row, pack in enumerate(packs) if pack)
        assert micro_batches[len(expected) :] == [[(first, True)]] * copies

    def test_a_row_that_is_too_large_alone(self):
        with pytest.raises(PackingError, match="tokens: expected at most 4 tokens in each row, but row 1 has 5"):
            InOrder(max_tokens=4, max_documents=3).plan(sizes_of_documents(np.array([3, 5])))
        with pytest.raises(
            PackingError, match="max_segments: expected at most 1 documents in each row, but row 0 has 2"
        ):
            InOrder(max_tokens=4, max_documents=1).plan(sizes_of_lists([[1, 2]]))


@settings(max_examples=200)
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


def test_the_limit_of_bucket_batches_is_reached():
    sizes = sizes_of_lists([[1] * 4] * 4, np.full(4, 4))
    assert hfp.BucketBatches(16, max_documents=16).plan(sizes).per_micro_batch(sizes.segments).max() == 16
