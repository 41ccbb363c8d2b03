"""The fewest packs for a few documents, exactly: an integer program over all ways to fill a pack."""

import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from hf_packing.planning.lengths import IntArray
from hf_packing.planning.patterns import Patterns
from hf_packing.strategies.base import load_scipy_optimize
from hf_packing.strategies.columns import fill_columns

_MOST_WAYS = 1 << 14


def fewest_packs_of_few(counts: IntArray, capacity: int, max_documents: int | None, deadline: float) -> Patterns | None:
    """Return the fewest packs possible; None if there are too many ways to fill a pack, or the time runs out.

    Args:
        counts: int64 [longest + 1]: how many segments there are of each length; none is empty.
        capacity: tokens that a pack holds.
        max_documents: most segments in one pack; None for no limit.
        deadline: of `time.monotonic`.
    """
    lengths = np.flatnonzero(counts)
    demand = counts[lengths]
    ways = list(islice(_ways_to_fill(lengths.tolist(), demand.tolist(), capacity, max_documents), _MOST_WAYS + 1))
    seconds = deadline - time.monotonic()
    if len(ways) > _MOST_WAYS or seconds <= 0:
        return None
    optimize: Any = load_scipy_optimize("Optimal")
    columns = np.array(ways, dtype=np.int64).T
    options = {"time_limit": seconds} if np.isfinite(seconds) else {}
    result = optimize.milp(
        np.ones(len(ways)),
        integrality=np.ones(len(ways)),
        constraints=optimize.LinearConstraint(columns, lb=demand),
        options=options,
    )
    if result.status != 0:
        return None
    packs = np.rint(result.x).astype(np.int64)
    return fill_columns(packs, columns, lengths, counts, capacity, max_documents)


def _ways_to_fill(
    lengths: list[int], left: list[int], room: int, max_documents: int | None
) -> Iterator[tuple[int, ...]]:
    """Yield the copies of each length, in every way that fits and is not empty."""
    limit = sum(left) if max_documents is None else max_documents

    def extend(number: int, room: int, limit: int) -> Iterator[tuple[int, ...]]:
        if number == len(lengths):
            yield ()
            return
        for copies in range(min(left[number], room // lengths[number], limit) + 1):
            for rest in extend(number + 1, room - copies * lengths[number], limit - copies):
                yield (copies, *rest)

    return (way for way in extend(0, room, limit) if any(way))
