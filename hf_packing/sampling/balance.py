"""Which micro-batches run at the same time, and on which rank, so that no rank waits for another.

A round is one micro-batch on every rank, at the same time; ranks wait for the slowest. Micro-batches with equal tokens
can differ severalfold in attention cost. So they are sorted by cost, and each round takes neighbors (`group_by_cost`).
Where a round is still uneven, its rows are dealt anew (`redistribute_rows`). The differences that remain are evened out
over the rounds of one optimizer step (`assign_ranks`). The rounds themselves run in random order.
"""

import heapq
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_packing.planning.lengths import IntArray
from hf_packing.planning.permutation import random_order
from hf_packing.sampling.fill import MicroBatches, flatten, sum_rows

LINEAR_COST = 6 * 2048
"""Of a model of width 2048: its linear layers take as long for one token as attention does for 6 * 2048 pairs."""

_TIE_BREAK = 1e-12
"""A random rank comes first among equals, so that no rank has the costliest micro-batch every time."""
_COST_JITTER = 0.01
"""By what share attention cost may be reduced, so that other micro-batches run together in every epoch."""
_EVEN = 0.99
"""Rounds whose mean cost is at least this share of their largest stay as they are."""


def balance(cost: npt.NDArray[np.float64], world_size: int, accumulation: int, seed: int) -> IntArray:
    """Return which micro-batch each rank runs in each round, int64 [rounds, world_size].

    Args:
        cost: float64 [micro-batches], a multiple of world_size of them.
        world_size: ranks.
        accumulation: rounds of one optimizer step.
        seed: decides the order of rounds, and what runs together among equal costs.
    """
    return assign_ranks(cost, group_by_cost(cost, world_size, seed), accumulation, seed)


def jitter_attention(squared_lengths: npt.NDArray[Any], seed: int) -> npt.NDArray[np.float64]:
    """Return the attention cost, float64 [micro-batches], reduced by up to 1 % at random."""
    chance = random_order(len(squared_lengths), seed, "nearly") / len(squared_lengths)
    reduced: npt.NDArray[np.float64] = squared_lengths * (1 - _COST_JITTER * chance)
    return reduced


def group_by_cost(cost: npt.NDArray[np.float64], world_size: int, seed: int) -> IntArray:
    """Return rounds of micro-batches with similar cost, int64 [rounds, world_size]; arguments as in `balance`."""
    chance = random_order(len(cost), seed, "equal costs")
    ascending = chance[np.argsort(cost[chance], kind="stable")].reshape(-1, world_size)
    return ascending[random_order(len(ascending), seed, "order of steps")]


def assign_ranks(cost: npt.NDArray[np.float64], rounds: IntArray, accumulation: int, seed: int) -> IntArray:
    """Return the same rounds with each micro-batch at the place of its rank, int64 [rounds, world_size].

    The costliest micro-batch of a round goes to the rank that has worked least since the last optimizer step.

    Args:
        cost: float64 [micro-batches].
        rounds: int64 [rounds, world_size]: which micro-batches run at the same time.
        accumulation: rounds of one optimizer step.
        seed: decides which rank comes first among those that have worked equally.
    """
    world_size = rounds.shape[1]
    ascending = np.take_along_axis(rounds, np.argsort(cost[rounds], axis=1, kind="stable"), axis=1)
    optimizer_steps = -(-len(rounds) // accumulation)
    worked = random_order(optimizer_steps * world_size, seed, "order of ranks").reshape(-1, world_size) * _TIE_BREAK
    assigned = np.empty_like(rounds)
    for turn in range(min(accumulation, len(rounds))):
        costliest_first = ascending[turn::accumulation, ::-1]
        step = np.arange(len(costliest_first))[:, None]
        least_worked = np.argsort(worked[: len(costliest_first)], axis=1, kind="stable")
        assigned[turn::accumulation][step, least_worked] = costliest_first
        worked[step, least_worked] += cost[costliest_first]
    return assigned


def redistribute_rows(
    micro_batches: MicroBatches,
    rounds: IntArray,
    cost: npt.NDArray[np.float64],
    tokens: IntArray,
    max_tokens: int,
) -> MicroBatches:
    """Return micro-batches with the same rows in every round, whose largest cost is no larger than before.

    Args:
        micro_batches: rows of each.
        rounds: int64 [rounds, world_size]: which micro-batches run at the same time.
        cost: float64 [rows].
        tokens: integers [rows].
        max_tokens: the budget.
    """
    evened = list(micro_batches)
    costs = sum_rows(micro_batches, cost)[rounds]
    for number in np.flatnonzero(costs.mean(axis=1) < _EVEN * costs.max(axis=1)).tolist():
        places, largest = rounds[number].tolist(), costs[number].max()
        rows, _ = flatten([micro_batches[place] for place in places])
        if len(rows) == len(places) or cost[rows].max() >= largest:
            continue
        dealt = _deal_by_cost(rows, cost, tokens, max_tokens, len(places))
        if dealt is not None and max(cost[of_rank].sum() for of_rank in dealt) < largest:
            for place, of_rank in zip(places, dealt, strict=True):
                evened[place] = of_rank
    return evened


def _deal_by_cost(
    rows: IntArray, cost: npt.NDArray[np.float64], tokens: IntArray, max_tokens: int, num_micro_batches: int
) -> MicroBatches | None:
    """Give row after row, the costliest first, to the cheapest micro-batch that has room; None if a row fits nowhere.

    There are at least as many rows as micro-batches, so none stays empty.
    """
    dealt: MicroBatches = [[] for _ in range(num_micro_batches)]
    room = [max_tokens] * num_micro_batches
    cheapest = [(0.0, number) for number in range(num_micro_batches)]
    order = rows[np.argsort(-cost[rows], kind="stable")]
    for row, more, length in zip(order.tolist(), cost[order].tolist(), tokens[order].tolist(), strict=True):
        too_full = []
        while cheapest and room[cheapest[0][1]] < length:
            too_full.append(heapq.heappop(cheapest))
        if not cheapest:
            return None
        total, number = cheapest[0]
        dealt[number].append(row)
        room[number] -= length
        heapq.heapreplace(cheapest, (total + more, number))
        for micro_batch in too_full:
            heapq.heappush(cheapest, micro_batch)
    return dealt
