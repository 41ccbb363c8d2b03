"""Random orders: of groups, each equally likely, and different for each seed and purpose; and shuffled packs."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from any_strategy import made_for, strategy_classes
from hypothesis import given
from hypothesis import strategies as st
from plans import packs_of

import hf_packing as hfp
from hf_packing.planning import permutation
from hf_packing.planning.permutation import derive_seed, generator_for, random_order, shuffle_in_groups

SIZES = st.lists(st.integers(0, 9) | st.just(40), max_size=30)


@given(SIZES, st.integers(0, 2**63 - 1))
def test_values_stay_in_their_groups(sizes, seed):
    values = np.arange(sum(sizes)) * 3
    shuffled = values.copy()
    shuffle_in_groups(shuffled, np.array(sizes, dtype=int), generator_for(seed, "test"))
    again = values.copy()
    shuffle_in_groups(again, np.array(sizes, dtype=int), generator_for(seed, "test"))
    assert (shuffled == again).all()
    for begin, end in pairwise([0, *np.cumsum(sizes).tolist()]):
        assert sorted(shuffled[begin:end].tolist()) == values[begin:end].tolist()


@pytest.mark.parametrize("groups", [1, 3, 20_000])
def test_every_order_of_a_group_is_equally_likely(groups, monkeypatch):
    monkeypatch.setattr(permutation, "_AT_ONCE", 1000)  # so that groups of equal size are shuffled in parts
    generator, seen = generator_for(0, "test"), Counter()
    for _ in range(20_000 // groups):
        values = np.tile(np.arange(3), groups)
        shuffle_in_groups(values, np.full(groups, 3), generator)
        seen.update(map(tuple, values.reshape(-1, 3).tolist()))
    assert len(seen) == 6
    expected = seen.total() / 6
    assert sum((each - expected) ** 2 / expected for each in seen.values()) < 30


def test_groups_of_equal_size_have_orders_of_their_own():
    values = np.tile(np.arange(50), 40)
    shuffle_in_groups(values, np.full(40, 50), generator_for(0, "test"))
    assert len({*map(tuple, values.reshape(40, 50).tolist())}) == 40


def test_purposes_and_seeds_have_orders_of_their_own():
    orders = [random_order(100, seed, purpose).tolist() for seed in range(3) for purpose in ("packs", "documents")]
    assert len({*map(tuple, orders)}) == 6
    assert all(sorted(each) == [*range(100)] for each in orders)
    assert random_order(5, None, "packs").tolist() == [*range(5)]
    assert len({derive_seed(seed, purpose) for seed in range(3) for purpose in ("a", "b")}) == 6


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
    *(made_for(500, each) for each in strategy_classes() if each is not hfp.Multipack),
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
