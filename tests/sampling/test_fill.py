"""Filling micro-batches: exactly as many as wanted, none over the budget, and equal to a slow literal version."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hf_packing.planning.permutation import random_order
from hf_packing.sampling.fill import fewest_micro_batches, fill

TOKENS = st.lists(st.integers(1, 30), min_size=1, max_size=60).map(np.array)


def total(rows, tokens):
    return sum(tokens[row] for row in rows)


def longest_first(rows, tokens):
    return sorted(rows, key=lambda row: -tokens[row])


def roughly_longest_first(tokens, jitter, seed):
    """As if row number n of a random order were shorter by n / rows of the jitter."""
    rows = random_order(len(tokens), seed, "rows that meet").tolist()
    seen_as = {row: -tokens[row] * (1 - jitter * (place / len(rows))) for place, row in enumerate(rows)}
    return sorted(rows, key=seen_as.get)


def tightest_room_first(rows, tokens, max_tokens):
    """Among micro-batches with equally little room, the one that has had it for the shortest time."""
    groups, touched = [], []
    for turn, row in enumerate(rows):
        room = [max_tokens - total(group, tokens) for group in groups]
        fitting = [number for number in range(len(groups)) if room[number] >= tokens[row]]
        if fitting:
            number = min(fitting, key=lambda number: (room[number], -touched[number]))
            groups[number].append(row)
            touched[number] = turn
        else:
            groups.append([row])
            touched.append(turn)
    return groups


def fewest_tokens_first(rows, tokens, number):
    groups = [[] for _ in range(number)]
    for row in rows:
        sums = [total(group, tokens) for group in groups]
        groups[sums.index(min(sums))].append(row)
    return groups


def slow_fill(tokens, max_tokens, wanted, world_size, seed):
    """The micro-batches, and the ways by which they were found."""
    tokens = tokens.tolist()
    if sum(tokens) < 0.95 * max_tokens * wanted:
        groups = fewest_tokens_first(roughly_longest_first(tokens, 0.2, seed), tokens, wanted)
        if max(total(group, tokens) for group in groups) <= max_tokens:
            return groups, {"spread"}
    for jitter in (0.2, 0.03, 0.0):
        groups = tightest_room_first(roughly_longest_first(tokens, jitter, seed), tokens, max_tokens)
        if len(groups) <= wanted:
            break
    more = wanted - len(groups)
    by_squares = sorted(groups, key=lambda group: sum(tokens[row] ** 2 for row in group))
    refilled = -(-max(8 * max(more, 1), 4 * world_size) // world_size) * world_size
    emptied = min(refilled - more, len(groups))
    rows = longest_first([row for group in by_squares[:emptied] for row in group], tokens)
    if len(rows) >= emptied + more:
        dealt = fewest_tokens_first(rows, tokens, emptied + more)
        if max(total(group, tokens) for group in dealt) <= max_tokens:
            return by_squares[emptied:] + dealt, {f"jitter {jitter}", "refilled"}
    for _ in range(more):
        of_several = [number for number, group in enumerate(groups) if len(group) > 1]
        fullest = max(of_several, key=lambda number: (total(groups[number], tokens), -number))
        groups[fullest], other = fewest_tokens_first(longest_first(groups[fullest], tokens), tokens, 2)
        groups.append(other)
    return groups, {f"jitter {jitter}", "split" if more else "as packed"}


def check_fill(tokens, max_tokens, more, world_size, seed):
    """Compare with the slow version and check what fill promises; return the ways that the slow version went."""
    wanted = min(fewest_micro_batches(tokens, max_tokens) + more, len(tokens))
    groups = fill(tokens, max_tokens, wanted, world_size, seed)
    expected, ways = slow_fill(tokens, max_tokens, wanted, world_size, seed)
    assert groups == expected
    assert len(groups) == wanted
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(tokens)))
    assert max(int(tokens[group].sum()) for group in groups) <= max_tokens
    assert all(groups)
    return ways


@settings(max_examples=200)
@given(TOKENS, st.integers(30, 90), st.integers(0, 20), st.integers(1, 8), st.integers(0, 9))
def test_exactly_as_many_as_wanted_and_equal_to_the_slow_version(tokens, max_tokens, more, world_size, seed):
    check_fill(tokens, max_tokens, more, world_size, seed)


def test_equal_to_the_slow_version_by_every_way(rng):
    ways = set()
    for seed in range(60):
        hard = np.where(rng.random(200) < 0.5, rng.integers(300, 420, 200), rng.integers(10, 510, 200))
        ways |= check_fill(hard, 1000, 0, int(rng.integers(1, 3)), seed)
    for seed in range(100):
        few_lengths = rng.choice([7, 10, 15, 30], 70)
        ways |= check_fill(few_lengths, 30, int(rng.integers(0, 3)), int(rng.integers(1, 3)), seed)
    assert ways == {"spread", "jitter 0.2", "jitter 0.03", "jitter 0.0", "refilled", "split", "as packed"}


@settings(max_examples=200)
@given(TOKENS, st.integers(30, 90))
@example(np.array([30] * 3 + [1] * 70), 31)
def test_the_fewest_are_those_of_best_fit_decreasing(tokens, max_tokens):
    rows = longest_first(range(len(tokens)), tokens)
    assert fewest_micro_batches(tokens, max_tokens) == len(tightest_room_first(rows, tokens.tolist(), max_tokens))


@pytest.mark.parametrize("budget", [2**16, 2**16 + 1, 2**20])
def test_rows_fit_into_the_fewest_whatever_the_budget(budget, rng):
    tokens = np.where(rng.random(3000) < 0.5, rng.uniform(0.3, 0.42, 3000), rng.uniform(0.01, 0.51, 3000)) * budget
    tokens = tokens.astype(int)
    fewest = fewest_micro_batches(tokens, budget)
    groups = fill(tokens, budget, fewest, 1, seed=0)
    assert len(groups) == fewest
    assert max(int(tokens[group].sum()) for group in groups) <= budget


@given(TOKENS, st.integers(0, 99))
def test_a_row_is_taken_for_at_most_the_jitter_shorter(tokens, seed):
    exact, rough = (np.array(roughly_longest_first(tokens, jitter, seed)) for jitter in (0.0, 0.2))
    assert sorted(exact) == sorted(rough) == list(range(len(tokens)))
    assert (np.diff(tokens[exact]) <= 0).all()
    latest_shorter = np.maximum.accumulate(tokens[rough][::-1])[::-1]
    assert (tokens[rough] >= 0.8 * latest_shorter).all()


def test_equal_lengths_meet_others_for_another_seed():
    one, other = (fill(np.full(50, 7), 14, 25, 1, seed) for seed in (1, 2))
    assert len({frozenset(rows) for rows in one} & {frozenset(rows) for rows in other}) < 10
