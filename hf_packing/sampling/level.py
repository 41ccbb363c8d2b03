"""Which micro-batches run at the same time, and on which rank, so that no rank waits for another.

Ranks that work at the same time wait for the slowest. Micro-batches full of tokens still differ several times in what
attention costs, so they are sorted by cost and dealt as many at a time as there are ranks. What is left of the
difference is evened out over the micro-batches of one optimiser step. The steps themselves come in random order.
"""

import numpy as np
import numpy.typing as npt

from hf_packing.planning.lengths import IntArray
from hf_packing.planning.shuffle import random_order

TIE_BREAK = 1e-12
"""Which rank comes first among equals is left to chance, so that no rank has the costliest micro-batch every time."""


def level(cost: npt.NDArray[np.float64], world_size: int, accumulation: int, seed: int) -> IntArray:
    """The order in which micro-batches run.

    Args:
        cost: float64 [micro-batches], a multiple of world_size of them.
        world_size: ranks.
        accumulation: steps between two updates of the optimiser.
        seed: of the order of steps.

    Returns:
        int64 [steps, world_size]: the micro-batch of every rank at every step.
    """
    ascending = np.argsort(cost, kind="stable").reshape(-1, world_size)
    together = ascending[random_order(len(ascending), seed, "order of steps")]
    updates = -(-len(together) // accumulation)
    worked = random_order(updates * world_size, seed, "order of ranks").reshape(updates, world_size) * TIE_BREAK
    dealt = np.empty_like(together)
    for turn in range(accumulation):
        steps = together[turn::accumulation, ::-1]
        update = np.arange(len(steps))[:, None]
        least_worked = np.argsort(worked[: len(steps)], axis=1, kind="stable")
        dealt[turn::accumulation][update, least_worked] = steps
        worked[update, least_worked] += cost[steps]
    return dealt
