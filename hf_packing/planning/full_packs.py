"""All ways to fill a pack exactly, without a Python loop over them."""

import numpy as np

from hf_packing.planning.lengths import IntArray


def full_packs(capacity: int, max_documents: int) -> IntArray:
    """Every multiset of at most max_documents lengths whose sum is the capacity.

    Args:
        capacity: tokens, at least 1.
        max_documents: most lengths in a multiset, at least 1.

    Returns:
        int32 [multisets, max_documents or the capacity if that is less]: lengths, descending, filled up with zeros.

    Example:
        >>> full_packs(4, 3).tolist()
        [[2, 1, 1], [2, 2, 0], [3, 1, 0], [4, 0, 0]]
    """
    chosen = np.zeros((1, 0), dtype=np.int32)
    rest = np.array([capacity], dtype=np.int32)
    largest = rest
    for places in range(min(max_documents, capacity), 0, -1):
        least = -(-rest // places)
        choices = np.minimum(rest, largest) - least + 1
        if places == 1:
            choices = np.where(rest <= largest, 1, 0)
            least = rest
        of = np.repeat(np.arange(len(rest)), choices)
        length = (least[of] + np.arange(len(of)) - np.repeat(np.cumsum(choices) - choices, choices)).astype(np.int32)
        chosen = np.column_stack([chosen[of], length])
        rest, largest = rest[of] - length, length
    return chosen


def number_of_full_packs(capacity: int, max_documents: int, enough: int) -> int:
    """How many rows `full_packs` has: partitions of the capacity. Counting stops when there are more than enough."""
    ways = [1] + [0] * capacity
    for length in range(1, min(max_documents, capacity) + 1):  # as many with at most d parts as with parts of at most d
        for tokens in range(length, capacity + 1):
            ways[tokens] += ways[tokens - length]
        if ways[capacity] > enough:
            break
    return ways[capacity]
