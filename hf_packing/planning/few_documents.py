"""The fewest packs for a few documents, exactly: an integer programme over all ways to fill a pack."""

import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from hf_packing.planning.columns import fill_columns
from hf_packing.planning.lengths import IntArray
from hf_packing.planning.optional import load_scipy_optimize
from hf_packing.planning.patterns import Patterns

FEW_SEGMENTS = 64
MOST_WAYS = 1 << 14


def fewest_packs_of_few(counts: IntArray, capacity: int, max_documents: int | None, deadline: float) -> Patterns | None:
    """The fewest packs there can be; None where there are too many ways to fill a pack, or too little time.

    Args:
        counts: int64 [longest + 1]: how many segments there are of each length; none is empty.
        capacity: tokens a pack holds.
        max_documents: most segments in one pack; None for no limit.
        deadline: of `time.monotonic`.
    """
    lengths = np.flatnonzero(counts)
    demand = counts[lengths]
    ways = list(islice(ways_to_fill(lengths.tolist(), demand.tolist(), capacity, max_documents), MOST_WAYS + 1))
    seconds = deadline - time.monotonic()
    if len(ways) > MOST_WAYS or seconds <= 0:
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


def ways_to_fill(
    lengths: list[int], left: list[int], room: int, max_documents: int | None
) -> Iterator[tuple[int, ...]]:
    """Copies of each length, in every way that fits and not empty."""
    limit = sum(left) if max_documents is None else max_documents

    def extend(number: int, room: int, limit: int) -> Iterator[tuple[int, ...]]:
        if number == len(lengths):
            yield ()
            return
        for copies in range(min(left[number], room // lengths[number], limit) + 1):
            for rest in extend(number + 1, room - copies * lengths[number], limit - copies):
                yield (copies, *rest)

    return (way for way in extend(0, room, limit) if any(way))
