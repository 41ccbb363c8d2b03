"""Filling and levelling micro-batches, beside slow literal versions of the same."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_packing.sampling.fill import (
    best_fit,
    deal_evenly,
    divide_fullest,
    fewest_micro_batches,
    fill,
    longest_first,
    nearly_longest_first,
)
from hf_packing.sampling.level import level
from hf_packing.sampling.redeal import deal_by_cost, redeal

TOKENS = st.lists(st.integers(1, 30), min_size=1, max_size=80).map(np.array)


def tightest_room_first(rows, tokens, max_tokens):
    """Among micro-batches with as little room, the one that has had it for the shortest time."""
    groups, touched = [], []
    for turn, row in enumerate(rows):
        room = [max_tokens - sum(tokens[r] for r in group) for group in groups]
        fitting = [number for number in range(len(groups)) if room[number] >= tokens[row]]
        if fitting:
            number = min(fitting, key=lambda number: (room[number], -touched[number]))
            groups[number].append(row)
            touched[number] = turn
        else:
            groups.append([row])
            touched.append(turn)
    return groups


@settings(max_examples=300)
@given(TOKENS, st.integers(30, 90), st.randoms())
def test_best_fit(tokens, max_tokens, random):
    rows = list(range(len(tokens)))
    random.shuffle(rows)
    expected = tightest_room_first(rows, tokens.tolist(), max_tokens)
    assert best_fit(np.array(rows), tokens, max_tokens) == expected


@settings(max_examples=300)
@given(TOKENS, st.integers(30, 90))
def test_the_fewest_are_those_of_best_fit_decreasing(tokens, max_tokens):
    rows = longest_first(np.arange(len(tokens)), tokens)
    assert fewest_micro_batches(tokens, max_tokens) == len(tightest_room_first(rows, tokens.tolist(), max_tokens))


@pytest.mark.parametrize("budget", [2**16, 2**16 + 1, 2**20])
def test_rows_fit_into_the_fewest_whatever_the_budget(budget, rng):
    tokens = np.where(rng.random(3000) < 0.5, rng.uniform(0.3, 0.42, 3000), rng.uniform(0.01, 0.51, 3000)) * budget
    tokens = tokens.astype(int)
    fewest = fewest_micro_batches(tokens, budget)
    groups = fill(tokens, budget, fewest, 1, seed=0)
    assert len(groups) == fewest
    assert max(int(tokens[group].sum()) for group in groups) <= budget


@settings(max_examples=300)
@given(TOKENS, st.integers(1, 12))
def test_deal_evenly(tokens, micro_batches):
    expected = [[] for _ in range(micro_batches)]
    for row in range(len(tokens)):
        sums = [sum(tokens[r] for r in group) for group in expected]
        expected[sums.index(min(sums))].append(row)
    assert deal_evenly(np.arange(len(tokens)), tokens, micro_batches) == expected


@given(TOKENS, st.integers(0, 99))
def test_nearly_longest_first(tokens, seed):
    exact, nearly = (nearly_longest_first(tokens, each, seed) for each in (0.0, 0.25))
    assert sorted(exact) == sorted(nearly) == list(range(len(tokens)))
    assert (np.diff(tokens[exact]) <= 0).all()
    latest_shorter = np.maximum.accumulate(tokens[nearly][::-1])[::-1]
    assert (tokens[nearly] >= 0.75 * latest_shorter).all()


def test_equal_lengths_come_in_another_order_for_another_seed():
    tokens = np.full(50, 7)
    assert not np.array_equal(nearly_longest_first(tokens, 0.0, 1), nearly_longest_first(tokens, 0.0, 2))


@settings(max_examples=300)
@given(TOKENS, st.integers(30, 90), st.integers(1, 8), st.integers(0, 20), st.integers(0, 9))
def test_exactly_as_many_as_wanted(tokens, max_tokens, together, more, seed):
    wanted = min(fewest_micro_batches(tokens, max_tokens) + more, len(tokens))
    groups = fill(tokens, max_tokens, wanted, together, seed)
    assert len(groups) == wanted
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(tokens)))
    assert max(int(tokens[group].sum()) for group in groups) <= max_tokens
    assert all(len(group) for group in groups)


@given(TOKENS, st.integers(30, 90), st.data())
def test_divide_fullest(tokens, max_tokens, data):
    groups = best_fit(longest_first(np.arange(len(tokens)), tokens), tokens, max_tokens)
    more = data.draw(st.integers(0, len(tokens) - len(groups)))
    divided = divide_fullest(groups, tokens, more)
    assert len(divided) == len(groups) + more
    assert sorted(np.concatenate(divided).tolist()) == list(range(len(tokens)))
    assert all(len(group) for group in divided)
    kept = {tuple(sorted(group)) for group in groups} & {tuple(sorted(group)) for group in divided}
    if more == 1:
        assert len(kept) == len(groups) - 1


@settings(max_examples=200)
@given(
    st.lists(st.integers(1, 99), min_size=1, max_size=20),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(0, 9),
)
def test_level(costs, world_size, accumulation, seed):
    cost = np.resize(np.array(costs, dtype=np.float64), len(costs) * world_size)
    steps = level(cost, world_size, accumulation, seed)
    assert sorted(steps.ravel().tolist()) == list(range(len(cost)))
    together = np.sort(cost).reshape(-1, world_size)
    assert sorted(map(tuple, np.sort(cost[steps], axis=1))) == sorted(map(tuple, together))
    for first in range(0, len(steps), accumulation):
        worked = np.zeros(world_size)
        for step in cost[steps[first : first + accumulation]]:
            order = np.argsort(worked, kind="stable")
            ties = len(set(worked.tolist())) < world_size
            assert ties or (np.diff(step[order]) <= 0).all()
            worked += step


def test_steps_come_in_random_order():
    cost = np.arange(400, dtype=np.float64)
    mean = cost[level(cost, 4, 1, seed=0)].mean(axis=1)
    assert abs(np.corrcoef(np.arange(100), mean)[0, 1]) < 0.3


COSTS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 500)), min_size=1, max_size=60)


def cheapest_with_room_first(rows, cost, tokens, max_tokens, micro_batches):
    dealt = [[] for _ in range(micro_batches)]
    for row in sorted(rows, key=lambda row: -cost[row]):
        fitting = [n for n in range(micro_batches) if sum(tokens[r] for r in dealt[n]) + tokens[row] <= max_tokens]
        if not fitting:
            return None
        dealt[min(fitting, key=lambda n: (sum(cost[r] for r in dealt[n]), n))].append(row)
    return dealt


@settings(max_examples=300)
@given(COSTS, st.integers(30, 90), st.integers(1, 6))
def test_deal_by_cost(rows, max_tokens, micro_batches):
    tokens, cost = np.array(rows).T
    expected = cheapest_with_room_first(range(len(rows)), cost.tolist(), tokens.tolist(), max_tokens, micro_batches)
    assert deal_by_cost(np.arange(len(rows)), cost.astype(float), tokens, max_tokens, micro_batches) == expected


@settings(max_examples=300)
@given(COSTS, st.integers(30, 90), st.integers(1, 4), st.integers(0, 9))
def test_dealt_again_every_step_keeps_its_rows_and_its_largest_cost_never_grows(rows, max_tokens, together, seed):
    tokens, cost = np.array(rows).T
    wanted = -(-fewest_micro_batches(tokens, max_tokens) // together) * together
    if wanted > len(rows):
        return
    groups = fill(tokens, max_tokens, wanted, together, seed)
    steps = np.random.default_rng(seed).permutation(wanted).reshape(-1, together)
    level = redeal(groups, steps, cost.astype(float), tokens, max_tokens)
    for step in steps.tolist():
        before, after = ([each[number] for number in step] for each in (groups, level))
        assert sorted(np.concatenate(before)) == sorted(np.concatenate(after))
        assert all(after)
        assert max(tokens[group].sum() for group in after) <= max_tokens
        assert max(cost[group].sum() for group in after) <= max(cost[group].sum() for group in before)


def test_one_costly_micro_batch_is_shared_out():
    tokens, cost = np.full(8, 4), np.array([9.0, 9, 9, 9, 1, 1, 1, 1])
    level = redeal([[0, 1, 2, 3], [4, 5, 6, 7]], np.array([[0, 1]]), cost, tokens, 16)
    assert [cost[group].sum() for group in level] == [20, 20]
