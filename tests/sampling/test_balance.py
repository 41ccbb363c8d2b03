"""Which micro-batches run together and on which rank, against slow literal versions of the same."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hf_packing.sampling.fill import assign_ranks, fewest_micro_batches, fill, group_by_cost, redistribute_rows


@given(
    st.lists(st.integers(1, 99), min_size=1, max_size=20),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(0, 9),
)
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


def total(rows, of_row):
    return sum(of_row[row] for row in rows)


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
