"""Rows dealt anew among the micro-batches of a step, where those were made alike in tokens but not in cost."""

import heapq

import numpy as np
import numpy.typing as npt

from hf_packing.planning.lengths import IntArray
from hf_packing.sampling.fill import Groups, flat, sums

LEVEL = 0.99
"""Steps whose mean cost is at least this share of the largest stay as they are."""


def redeal(
    groups: Groups, together: IntArray, cost: npt.NDArray[np.float64], tokens: IntArray, max_tokens: int
) -> Groups:
    """The same rows at every step, in micro-batches whose largest cost is no larger than before.

    Args:
        groups: rows of each micro-batch.
        together: int64 [steps, world_size]: which micro-batches run at the same time.
        cost: float64 [rows].
        tokens: integers [rows].
        max_tokens: the budget.
    """
    level = list(groups)
    costs = sums(groups, cost)[together]
    for step in np.flatnonzero(costs.mean(axis=1) < LEVEL * costs.max(axis=1)).tolist():
        numbers = together[step].tolist()
        of_step, _ = flat([groups[number] for number in numbers])
        if len(of_step) == len(numbers) or cost[of_step].max() >= costs[step].max():
            continue
        dealt = deal_by_cost(of_step, cost, tokens, max_tokens, len(numbers))
        if dealt is not None and max(cost[group].sum() for group in dealt) < costs[step].max():
            for number, group in zip(numbers, dealt, strict=True):
                level[number] = group
    return level


def deal_by_cost(
    rows: IntArray, cost: npt.NDArray[np.float64], tokens: IntArray, max_tokens: int, micro_batches: int
) -> Groups | None:
    """Row after row, the costliest first, each to the cheapest micro-batch that has room; None if one fits nowhere.

    At least as many rows as micro-batches, so that none stays empty.
    """
    dealt: Groups = [[] for _ in range(micro_batches)]
    room = [max_tokens] * micro_batches
    cheapest = [(0.0, number) for number in range(micro_batches)]
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
