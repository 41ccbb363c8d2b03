"""Permutations as functions of the place: bijections, even, and different for each key; and shuffled packs."""

import numpy as np
import pytest
from any_strategy import made_for, strategy_classes
from hypothesis import given
from hypothesis import strategies as st
from plans import packs_of

import hf_packing as hfp
from hf_packing.planning.permutation import derive_key, keys_for, permute


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_bijection(size, key):
    places = permute(np.arange(size), np.array([size]), np.array([key], dtype=np.uint64))
    assert sorted(places.tolist()) == list(range(size))


@given(
    st.integers(1, 2**40),
    st.integers(0, 2**64 - 1),
    st.lists(st.integers(0, 2**40), min_size=2, max_size=20, unique=True),
)
def test_large_ranges_stay_in_range_and_apart(size, key, indices):
    indices = sorted({index % size for index in indices})
    places = permute(np.array(indices), np.array([size]), np.array([key], dtype=np.uint64))
    assert len(set(places.tolist())) == len(indices)
    assert places.min() >= 0
    assert places.max() < size


def test_every_place_is_equally_likely_and_purposes_have_keys_of_their_own():
    trials = 20_000
    keys = keys_for(np.arange(trials), derive_key(0, "test"))
    for size in (2, 3, 5, 7, 16):
        for index in range(size):
            seen = np.bincount(permute(np.full(trials, index), np.array([size]), keys), minlength=size)
            expected = trials / size
            assert ((seen - expected) ** 2 / expected).sum() < 60, (size, index)
    assert len({int(derive_key(seed, purpose)) for seed in range(3) for purpose in ("packs", "documents")}) == 6


def capacities_and_packs(plan):
    return sorted(zip(plan.pack_capacity.tolist(), map(sorted, packs_of(plan)), strict=True))


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(0, 2**63 - 1))
def test_the_same_packs_in_another_order(lengths, seed):
    plan = hfp.plan_packing(lengths, hfp.Bucket((5, 16)))
    other = plan.shuffle(seed)
    assert capacities_and_packs(other) == capacities_and_packs(plan)
    assert other == plan.shuffle(seed)
    assert other.metrics() == plan.metrics()


def test_epochs_differ_in_packs_and_within_them(rng):
    plan = hfp.plan_packing(rng.integers(1, 60, 3000), hfp.BestFit(200))
    epochs = [plan.shuffle(epoch) for epoch in range(3)]
    assert len({epoch.fingerprint for epoch in [plan, *epochs]}) == 4
    for left, right in ((plan, epochs[0]), (epochs[0], epochs[1]), (epochs[1], epochs[2])):
        assert (first_segments(left) == first_segments(right)).mean() < 0.02
        assert share_of_pairs_turned(left, right) == pytest.approx(0.5, abs=0.1)


def first_segments(plan):
    return plan.segment_document[plan.pack_offsets[:-1]]


def share_of_pairs_turned(left, right):
    """Of pairs of neighbours in a pack of one plan, how many stand in the other order in the other plan."""
    place = np.empty(right.num_segments, dtype=int)
    place[right.segment_document] = np.arange(right.num_segments)
    steps = np.diff(place[left.segment_document])
    inside = np.diff(left.pack_of_segment()) == 0
    return (steps[inside] < 0).mean()


@pytest.mark.parametrize("seed", [-1, 2.0, None, True])
def test_bad_seed(seed):
    with pytest.raises(hfp.PackingError, match=f"seed: expected an integer from 0 to {2**63 - 1}, got {seed!r}"):
        hfp.plan_packing([1], hfp.BestFit(8)).shuffle(seed)


STRATEGIES = [
    *(made_for(500, each) for each in strategy_classes() if each not in (hfp.NonNegativeLeastSquares, hfp.Multipack)),
    hfp.NonNegativeLeastSquares(500, max_documents=2),  # with 3 it takes seconds
    hfp.Multipack(500, window=300),
    hfp.FirstCome(500, order="longest_first"),
    hfp.FirstCome(500, order="dataset"),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_rows_and_their_documents_come_in_random_order(strategy):
    """Documents grow through the dataset, so any order by place or by length would show."""
    lengths = np.arange(4000) // 20 + 1
    plan = hfp.plan_packing(lengths, strategy)
    first = plan.segment_document[plan.pack_offsets[:-1]].astype(int)
    assert abs(np.corrcoef(first, np.arange(len(first)))[0, 1]) < 0.15
    inside = np.diff(plan.pack_of_segment()) == 0
    for steps in (np.diff(plan.segment_document.astype(int)), np.diff(plan.segment_length)):
        steps = steps[inside & (steps != 0)]
        assert (steps > 0).mean() == pytest.approx(0.5, abs=0.07)
