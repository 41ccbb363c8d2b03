"""Give all ranks about equal work: which micro-batches form an optimizer step, and which run at the same time.

In a round, every rank runs one micro-batch, and all ranks wait for the slowest rank. Micro-batches with equal numbers
of tokens can differ severalfold in attention cost. So micro-batches are sorted by cost, and neighbors in that order
form an optimizer step (`group_by_cost`). If a step is still uneven, the rows of its micro-batches are redistributed
among these micro-batches (`redistribute_rows`). Up to here, only the number of micro-batches in a step counts, not the
number of ranks. Then the neighbors in a step form rounds (`rounds_of_steps`), and remaining differences are
evened out over the rounds of the step (`assign_ranks`). The steps run in random order.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from hf_packing.planning.lengths import IntArray
from hf_packing.planning.permutation import random_order

_TIE_BREAK = 1e-12
"""Scale of random numbers that break ties between ranks, so that no rank gets the costliest micro-batch every time."""

_COST_JITTER = 0.01
"""Attention cost is randomly reduced by up to this share, so that steps are composed differently in every epoch."""


def jitter_attention(squared_lengths: npt.NDArray[Any], seed: int) -> npt.NDArray[np.float64]:
    """Return the attention cost of each micro-batch, reduced at random by up to 1 %, float64 [micro-batches].

    Args:
        squared_lengths: numbers [micro-batches]: the sum of squared segment lengths, which is the attention cost.
        seed: seed of the random reduction.
    """
    chance = random_order(len(squared_lengths), seed, "nearly") / len(squared_lengths)
    reduced: npt.NDArray[np.float64] = squared_lengths * (1 - _COST_JITTER * chance)
    return reduced


def group_by_cost(cost: npt.NDArray[np.float64], group: int, seed: int) -> IntArray:
    """Return the indices of the micro-batches in each group, int64 [groups, group].

    The micro-batches of a group have similar cost. The order of groups is random. If the number of micro-batches is not
    a multiple of `group`, the last group has fewer micro-batches, of random cost, and then indices from len(cost) on.

    Args:
        cost: float64 [micro-batches]: the cost of each micro-batch.
        group: number of micro-batches in a group: those of an optimizer step, or those that run at the same time.
        seed: seed that decides the order of groups, and which micro-batches of equal cost form a group.
    """
    chance = random_order(len(cost), seed, "equal costs")
    ascending = chance[np.argsort(cost[chance], kind="stable")]
    full, in_last = divmod(len(cost), group)
    begin = int(random_order(full + 1, seed, "last step")[0]) * group
    full_groups = np.delete(ascending, slice(begin, begin + in_last)).reshape(full, group)
    shuffled: IntArray = full_groups[random_order(full, seed, "order of steps")]
    if not in_last:
        return shuffled
    last = np.arange(len(cost) - in_last, len(cost) - in_last + group)
    last[:in_last] = ascending[begin : begin + in_last]
    return np.concatenate([shuffled, last[None]])


def rounds_of_steps(steps: IntArray, cost: npt.NDArray[np.float64], filled: int, world_size: int) -> IntArray:
    """Divide optimizer steps into rounds of micro-batches with similar cost, int64 [rounds, world_size].

    In a round, every rank runs one micro-batch. The costliest round of a step comes first. Copies run in the last
    round; rounds that only have copies are left out.

    Args:
        steps: int64 [steps, slots]: indices of the micro-batches in each step, from `group_by_cost`.
        cost: float64 [micro-batches]: the cost of each micro-batch.
        filled: number of micro-batches that are no copies; micro-batches with higher indices are copies.
        world_size: number of ranks, which divides the number of slots.
    """
    copies_first = np.take_along_axis(steps, np.lexsort((cost[steps], steps < filled)), axis=1)
    rounds = copies_first.reshape(len(steps), -1, world_size)[:, ::-1].reshape(-1, world_size)
    return rounds[: -(-filled // world_size)]


def assign_ranks(cost: npt.NDArray[np.float64], rounds: IntArray, accumulation: int, seed: int) -> IntArray:
    """Assign the micro-batches of each round to ranks. Return indices of micro-batches, int64 [rounds, world_size].

    Column r of the result belongs to rank r. The costliest micro-batch of a round goes to the rank with the least work
    so far in the optimizer step.

    Args:
        cost: float64 [micro-batches]: the cost of each micro-batch.
        rounds: int64 [rounds, world_size]: indices of the micro-batches that run at the same time, in any order.
        accumulation: number of rounds in one optimizer step.
        seed: seed that decides between ranks with equal work.
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


def balance(cost: npt.NDArray[np.float64], world_size: int, accumulation: int, seed: int) -> IntArray:
    """Return the index of the micro-batch that each rank runs in each round, int64 [rounds, world_size].

    In a round, every rank runs one micro-batch. The micro-batches of a round have about equal cost.

    Args:
        cost: float64 [micro-batches]: the cost of each micro-batch; the number of micro-batches is a multiple of
            world_size.
        world_size: number of ranks.
        accumulation: number of rounds in one optimizer step.
        seed: seed that decides the order of rounds, and which micro-batches of equal cost run together.
    """
    return assign_ranks(cost, group_by_cost(cost, world_size, seed), accumulation, seed)
