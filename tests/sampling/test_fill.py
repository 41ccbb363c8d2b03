"""Filling micro-batches and sharing them among ranks, beside slow literal versions."""

import numpy as np
import pytest
from any_strategy import many_examples
from hypothesis import example, given
from hypothesis import strategies as st

from hf_packing.planning.permutation import random_order
from hf_packing.sampling.fill import (
    assign_ranks,
    best_fit,
    fewest_micro_batches,
    fill,
    group_by_cost,
    redistribute_rows,
)

PACKS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 4)), min_size=1, max_size=60).map(np.array)
MOST_DOCUMENTS = st.one_of(st.none(), st.integers(4, 12))


NO_LIMIT = 10**9


def limits_of(tokens, max_tokens, documents=None, max_documents=None):
    documents = np.ones_like(tokens) if documents is None else documents
    return [(tokens, max_tokens)] if max_documents is None else [(tokens, max_tokens), (documents, max_documents)]


def total(rows, tokens):
    return sum(tokens[row] for row in rows)


def longest_first(rows, tokens, documents):
    """Among rows of equal length, those with more documents come first."""
    return sorted(rows, key=lambda row: (-tokens[row], -documents[row]))


def roughly_longest_first(tokens, jitter, seed, documents):
    """As if row number n of a random order were shorter by n / rows of the jitter."""
    rows = random_order(len(tokens), seed, "rows that meet").tolist()
    seen_as = {row: -tokens[row] * (1 - jitter * (place / len(rows))) for place, row in enumerate(rows)}
    return sorted(rows, key=lambda row: (seen_as[row], -documents[row]))


def tightest_room_first(rows, tokens, max_tokens, documents, most):
    """Among micro-batches with equally little room, the one that has had it for the shortest time."""
    groups, touched = [], []
    for turn, row in enumerate(rows):
        room = [max_tokens - total(group, tokens) for group in groups]
        fitting = [number for number in range(len(groups)) if room[number] >= tokens[row]]
        fitting = [number for number in fitting if total([*groups[number], row], documents) <= most]
        if fitting:
            number = min(fitting, key=lambda number: (room[number], -touched[number]))
            groups[number].append(row)
            touched[number] = turn
        else:
            groups.append([row])
            touched.append(turn)
    return groups


def fewest_tokens_first(rows, tokens, number, documents, most):
    groups = [[] for _ in range(number)]
    for row in rows:
        fitting = [group for group in groups if total([*group, row], documents) <= most]
        if not fitting:
            return None
        min(fitting, key=lambda group: total(group, tokens)).append(row)
    return groups


def fit(groups, tokens, max_tokens):
    return groups is not None and max(total(group, tokens) for group in groups) <= max_tokens


def slow_fewest(tokens, max_tokens, documents, most):
    """Few micro-batches; within two limits spread, if that needs fewer than best fit."""
    rows = longest_first(range(len(tokens)), tokens, documents)
    packed = tightest_room_first(rows, tokens, max_tokens, documents, most)
    number, step = max(-(-sum(tokens) // max_tokens), -(-sum(documents) // most)), 0
    least, first = number, max(number // 1000, 1)
    while most != NO_LIMIT and (number < len(packed) or number <= least + first):
        groups = fewest_tokens_first(rows, tokens, min(number, len(rows)), documents, most)
        if fit(groups, tokens, max_tokens):
            return groups
        step = max(2 * step, least // 1000, 1)
        number = least + step
    return packed


def slow_fill(tokens, max_tokens, wanted, world_size, seed, documents, most):
    """The micro-batches, and the ways by which they were found."""
    loose = [0.2] if sum(tokens) < 0.95 * max_tokens * wanted else []
    for jitter in loose if most == NO_LIMIT else (0.2, 0.03, 0.0):
        rows = roughly_longest_first(tokens, jitter, seed, documents)
        groups = fewest_tokens_first(rows, tokens, wanted, documents, most)
        if fit(groups, tokens, max_tokens):
            return groups, {f"spread {jitter}"}
    for jitter in (0.2, 0.03, 0.0):
        rows = roughly_longest_first(tokens, jitter, seed, documents)
        groups = tightest_room_first(rows, tokens, max_tokens, documents, most)
        if len(groups) <= wanted:
            break
    else:
        groups = slow_fewest(tokens, max_tokens, documents, most)
        jitter = "none"
    more = wanted - len(groups)
    by_squares = sorted(groups, key=lambda group: sum(tokens[row] ** 2 for row in group))
    refilled = -(-max(8 * max(more, 1), 4 * world_size) // world_size) * world_size
    emptied = min(refilled - more, len(groups))
    rows = longest_first([row for group in by_squares[:emptied] for row in group], tokens, documents)
    if len(rows) >= emptied + more:
        dealt = fewest_tokens_first(rows, tokens, emptied + more, documents, most)
        if fit(dealt, tokens, max_tokens):
            return by_squares[emptied:] + dealt, {f"jitter {jitter}", "refilled"}
    for _ in range(more):
        fullest = max((group for group in groups if len(group) > 1), key=lambda group: total(group, tokens))
        rows = longest_first(fullest, tokens, documents)
        groups[groups.index(fullest)], other = fewest_tokens_first(rows, tokens, 2, documents, most)
        groups.append(other)
    return groups, {f"jitter {jitter}", "split" if more else "as packed"}


def check_fill(tokens, max_tokens, more, world_size, seed, documents=None, most=None):
    """Compare with the slow version and check what fill promises; return the ways that the slow version went."""
    limits = limits_of(tokens, max_tokens, documents, most)
    wanted = min(fewest_micro_batches(limits) + more, len(tokens))
    groups = fill(limits, wanted, world_size, seed)
    of_rows = (np.ones_like(tokens) if most is None else documents).tolist(), most or NO_LIMIT
    expected, ways = slow_fill(tokens.tolist(), max_tokens, wanted, world_size, seed, *of_rows)
    assert groups == expected
    assert len(groups) == wanted
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(tokens)))
    assert all(max(int(has[group].sum()) for group in groups) <= limit for has, limit in limits)
    assert all(groups)
    return ways


@many_examples
@given(PACKS, st.integers(30, 90), st.integers(0, 20), st.integers(1, 8), st.integers(0, 9), MOST_DOCUMENTS)
def test_exactly_as_many_as_wanted_and_equal_to_the_slow_version(packs, max_tokens, more, world_size, seed, most):
    tokens, documents = packs.T
    check_fill(tokens, max_tokens, more, world_size, seed, documents, most)


@given(PACKS, st.integers(30, 90), MOST_DOCUMENTS)
@example(np.array([[30, 1]] * 3 + [[1, 1]] * 70), 31, None)
def test_the_fewest_are_those_of_the_slow_version(packs, max_tokens, most):
    tokens, documents = packs.T
    of_rows = (documents if most else np.ones_like(tokens)).tolist(), most or NO_LIMIT
    expected = len(slow_fewest(tokens.tolist(), max_tokens, *of_rows))
    assert fewest_micro_batches(limits_of(tokens, max_tokens, documents, most)) == expected


def test_no_micro_batch_is_empty_if_almost_every_row_has_one():
    limits = limits_of(np.array([10] * 3999 + [5, 5, 1]), 10, None, 63)
    groups = fill(limits, fewest_micro_batches(limits), 1, seed=0)
    assert all(groups)
    assert fewest_micro_batches(limits) == 4001


def test_a_limit_of_documents_adds_hardly_any_padding(rng):
    """Best fit would leave the shortest documents for micro-batches that they cannot fill."""
    tokens = np.clip(rng.lognormal(6, 1.2, 5000).astype(int), 1, 16384)
    limits = limits_of(tokens, 16384, None, 63)
    fewest = fewest_micro_batches(limits)
    assert tokens.sum() > 0.99 * 16384 * fewest
    assert tokens.sum() < 0.97 * 16384 * len(best_fit(np.argsort(-tokens), limits))
    for seed in range(2):
        groups = fill(limits, fewest, 4, seed)
        assert max(map(len, groups)) <= 63
        assert max(int(tokens[group].sum()) for group in groups) <= 16384


@pytest.mark.parametrize(("micro_batches", "found"), [(63, True), (64, False)])
def test_the_search_for_space_gives_up_after_64_micro_batches(micro_batches, found):
    """They have space for the tokens of the last row, but not for its documents. The next one has space for both."""
    tokens = np.array([12] * micro_batches + [11, 8])
    documents = np.array([3] * micro_batches + [1, 3])
    assert len(best_fit(np.arange(len(tokens)), limits_of(tokens, 20, documents, 4))) == micro_batches + 2 - found


@pytest.mark.parametrize("limited", [False, True])
def test_equal_to_the_slow_version_by_every_way(limited, rng):
    """Of lengths that hardly fit, and of few different lengths, with and without a limit of documents."""
    ways = set()
    for seed in range(14 if limited else 24):
        hard = rng.integers(10, 510, 200)
        documents, most = (rng.integers(1, 4, 200), int(rng.choice([6, 8]))) if limited else (None, None)
        if not limited:
            hard = np.where(rng.random(200) < 0.5, rng.integers(300, 420, 200), hard)
        more = int(rng.choice([0, 150])) if limited else 0
        ways |= check_fill(hard, 1000, more, int(rng.integers(1, 3)), seed, documents, most)
        few_lengths, ones = rng.choice([7, 10, 15, 30], 70), np.ones(70, int)
        more, ranks = int(rng.integers(0, 3)), int(rng.integers(1, 3))
        ways |= check_fill(few_lengths, 30, more, ranks, seed, ones, 2 if limited else None)
    if limited:
        assert {"spread 0.2", "spread 0.03", "spread 0.0", "refilled"} <= ways
    else:
        assert ways == {"spread 0.2", "jitter 0.2", "jitter 0.03", "jitter 0.0", "refilled", "split", "as packed"}


@pytest.mark.parametrize("budget", [2**16, 2**16 + 1, 2**20])
def test_rows_fit_into_the_fewest_whatever_the_budget(budget, rng):
    tokens = np.where(rng.random(3000) < 0.5, rng.uniform(0.3, 0.42, 3000), rng.uniform(0.01, 0.51, 3000)) * budget
    tokens = tokens.astype(int)
    fewest = fewest_micro_batches(limits_of(tokens, budget))
    groups = fill(limits_of(tokens, budget), fewest, 1, seed=0)
    assert len(groups) == fewest
    assert max(int(tokens[group].sum()) for group in groups) <= budget


def test_equal_lengths_meet_others_for_another_seed():
    one, other = (fill(limits_of(np.full(50, 7), 14), 25, 1, seed) for seed in (1, 2))
    assert len({frozenset(rows) for rows in one} & {frozenset(rows) for rows in other}) < 10


@given(st.lists(st.integers(1, 99), min_size=1, max_size=20), st.integers(1, 6), st.integers(1, 4), st.integers(0, 9))
def test_neighbors_by_cost_run_together_the_costliest_where_least_was_done(costs, world_size, accumulation, seed):
    cost = np.resize(np.array(costs, dtype=np.float64), len(costs) * world_size)
    rounds = assign_ranks(cost, group_by_cost(cost, world_size, seed), accumulation, seed)
    assert sorted(rounds.ravel().tolist()) == list(range(len(cost)))
    neighbors = np.sort(cost).reshape(-1, world_size)
    assert sorted(map(tuple, np.sort(cost[rounds], axis=1))) == sorted(map(tuple, neighbors))
    for first in range(0, len(rounds), accumulation):
        worked = np.zeros(world_size)
        for of_round in cost[rounds[first : first + accumulation]]:
            order = np.argsort(worked, kind="stable")
            ties = len(set(worked.tolist())) < world_size
            assert ties or (np.diff(of_round[order]) <= 0).all()
            worked += of_round


ROWS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 500)), min_size=1, max_size=60)
"""Tokens and cost."""


def cheapest_with_room_first(rows, cost, tokens, max_tokens, number):
    dealt = [[] for _ in range(number)]
    for row in sorted(rows, key=lambda row: -cost[row]):
        fitting = [n for n in range(number) if total(dealt[n], tokens) + tokens[row] <= max_tokens]
        if not fitting:
            return None
        dealt[min(fitting, key=lambda n: (total(dealt[n], cost), n))].append(row)
    return dealt


def slow_redistribute(groups, rounds, cost, tokens, max_tokens):
    """The micro-batches, and what was done to the rounds."""
    groups, done = list(groups), set()
    for of_round in rounds.tolist():
        rows = [row for number in of_round for row in groups[number]]
        costs = [total(groups[number], cost) for number in of_round]
        if np.mean(costs) >= 0.99 * max(costs):
            done.add("even")
            continue
        dealt = None
        if len(rows) > len(of_round) and max(cost[row] for row in rows) < max(costs):
            dealt = cheapest_with_room_first(rows, cost, tokens, max_tokens, len(of_round))
            done.add("no room" if dealt is None else "dealt anew")
        if dealt is not None and max(total(group, cost) for group in dealt) < max(costs):
            done.add("cheaper")
            for number, group in zip(of_round, dealt, strict=True):
                groups[number] = group
    return groups, done


def check_redistribute(rows, max_tokens, world_size, seed):
    tokens, cost = np.array(rows).T
    limits = [(tokens, max_tokens)]
    wanted = -(-fewest_micro_batches(limits) // world_size) * world_size
    if wanted > len(rows):
        return set()
    groups = fill(limits, wanted, world_size, seed)
    rounds = np.random.default_rng(seed).permutation(wanted).reshape(-1, world_size)
    evened = redistribute_rows(groups, rounds, cost.astype(float), limits)
    expected, done = slow_redistribute(groups, rounds, cost.tolist(), tokens.tolist(), max_tokens)
    assert evened == expected
    for of_round in rounds.tolist():
        before, after = ([each[number] for number in of_round] for each in (groups, evened))
        assert sorted(np.concatenate(before)) == sorted(np.concatenate(after))
        assert all(after)
        assert max(tokens[group].sum() for group in after) <= max_tokens
        assert max(cost[group].sum() for group in after) <= max(cost[group].sum() for group in before)
    return done


@given(ROWS, st.integers(30, 90), st.integers(1, 4), st.integers(0, 9))
def test_rounds_keep_their_rows_and_their_largest_cost_never_grows(rows, max_tokens, world_size, seed):
    check_redistribute(rows, max_tokens, world_size, seed)


def test_equal_to_the_slow_version_whatever_is_done(rng):
    done = set()
    for seed in range(100):
        rows = np.stack([rng.integers(1, 31, 40), rng.choice([1, 100, 500], 40)], axis=1)
        done |= check_redistribute(rows, int(rng.integers(30, 60)), int(rng.integers(1, 5)), seed)
    assert done == {"even", "no room", "dealt anew", "cheaper"}
    cost = np.arange(400, dtype=np.float64)
    mean = cost[assign_ranks(cost, group_by_cost(cost, 4, seed=0), 1, seed=0)].mean(axis=1)
    assert abs(np.corrcoef(np.arange(100), mean)[0, 1]) < 0.3


def test_documents_stay_within_their_limit():
    """The costly rows have three documents each, of at most four in a micro-batch: dealing them is impossible."""
    tokens, cost = np.full(4, 4), np.array([9.0, 9, 1, 1])
    for documents, expected in (([1, 1, 1, 1], [10, 10]), ([2, 2, 3, 3], [18, 2])):
        limits = [(tokens, 16), (np.array(documents), 4)]
        micro_batches = [[0, 1], [2, 3]]
        evened = redistribute_rows(micro_batches, np.array([[0, 1]]), cost, limits)
        assert [cost[group].sum() for group in evened] == expected
