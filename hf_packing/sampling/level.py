"""Which micro-batches run at the same time, and on which rank, so that no rank waits for another.

Ranks that work at the same time wait for the slowest. Micro-batches full of tokens still differ several times in what
attention costs, so they are sorted by cost and dealt as many at a time as there are ranks. What is left of the
difference is evened out over the micro-batches of one optimiser step. The steps themselves come in random order.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from hf_packing.planning.lengths import IntArray
from hf_packing.planning.permutation import random_order

LINEAR_COST = 6 * 2048
"""Of a model 2048 wide: its linear layers work on a token as long as attention does on 6 * 2048 pairs of tokens."""
TIE_BREAK = 1e-12
"""Which rank comes first among equals is left to chance, so that no rank has the costliest micro-batch every time."""
NEARLY = 0.01
"""What attention costs is taken for up to this share less, so that other micro-batches run together in every epoch."""


def nearly(squares: npt.NDArray[Any], seed: int) -> npt.NDArray[np.float64]:
    """float64 [micro-batches]: what attention costs, slightly wrong."""
    chance = random_order(len(squares), seed, "nearly") / len(squares)
    lowered: npt.NDArray[np.float64] = squares * (1 - NEARLY * chance)
    return lowered


def level(cost: npt.NDArray[np.float64], world_size: int, accumulation: int, seed: int) -> IntArray:
    """The order in which micro-batches run.

    Args:
        cost: float64 [micro-batches], a multiple of world_size of them.
        world_size: ranks.
        accumulation: steps between two updates of the optimiser.
        seed: of the order of steps, and of what runs together among equals.

    Returns:
        int64 [steps, world_size]: the micro-batch of every rank at every step.
    """
    return on_ranks(cost, run_together(cost, world_size, seed), accumulation, seed)


def run_together(cost: npt.NDArray[np.float64], world_size: int, seed: int) -> IntArray:
    """int64 [steps, world_size]: micro-batches of similar cost; arguments as in `level`."""
    chance = random_order(len(cost), seed, "equal costs")
    ascending = chance[np.argsort(cost[chance], kind="stable")].reshape(-1, world_size)
    return ascending[random_order(len(ascending), seed, "order of steps")]


def on_ranks(cost: npt.NDArray[np.float64], together: IntArray, accumulation: int, seed: int) -> IntArray:
    """int64 [steps, world_size]: the same steps, the costliest on the rank that has worked least since the last update.

    Args:
        cost: float64 [micro-batches].
        together: int64 [steps, world_size]: which micro-batches run at the same time.
        accumulation: steps between two updates of the optimiser.
        seed: of the rank that comes first where all have worked alike.
    """
    world_size = together.shape[1]
    ascending = np.take_along_axis(together, np.argsort(cost[together], axis=1, kind="stable"), axis=1)
    updates = -(-len(together) // accumulation)
    worked = random_order(updates * world_size, seed, "order of ranks").reshape(updates, world_size) * TIE_BREAK
    dealt = np.empty_like(together)
    for turn in range(min(accumulation, len(together))):
        steps = ascending[turn::accumulation, ::-1]
        update = np.arange(len(steps))[:, None]
        least_worked = np.argsort(worked[: len(steps)], axis=1, kind="stable")
        dealt[turn::accumulation][update, least_worked] = steps
        worked[update, least_worked] += cost[steps]
    return dealt
