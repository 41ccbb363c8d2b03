"""Ranges of indices: list their indices, and count the ranges that an index is in."""

import numpy as np

from hf_packing.planning.lengths import IntArray


def indices_in_ranges(begin: IntArray, length: IntArray) -> IntArray:
    """Return the indices in several ranges, one range after the other, int64 [sum of the lengths].

    Args:
        begin: integers [ranges]: the first index of each range.
        length: integers [ranges]: the number of indices in each range.

    Example:
        >>> indices_in_ranges(np.array([5, 0]), np.array([2, 3])).tolist()
        [5, 6, 0, 1, 2]
    """
    end = np.cumsum(length, dtype=np.int64)
    total = int(end[-1]) if len(end) else 0
    return np.arange(total) + np.repeat(begin - (end - length), length)


def count_ranges(begin: IntArray, length: IntArray, size: int) -> IntArray:
    """Return how many ranges each index below `size` is in, int64 [size].

    Args:
        begin: integers [ranges]: the first index of each range.
        length: integers [ranges]: the number of indices in each range.
        size: the largest index of a range, plus 1, or more.

    Example:
        >>> count_ranges(np.array([0, 1]), np.array([3, 1]), 4).tolist()
        [1, 2, 1, 0]
    """
    changes = np.bincount(begin, minlength=size + 1) - np.bincount(begin + length, minlength=size + 1)
    return np.cumsum(changes[:-1])
