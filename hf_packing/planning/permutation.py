"""Seeded random orders: of documents of equal length, of packs, and of the documents in each pack.

NumPy's generator shuffles whole arrays, or all groups of equal size at once. A new version of NumPy may shuffle
otherwise: ranks compare the `shuffles_of_numpy`, and states that would go on with other orders are refused.
"""

import hashlib
from functools import cache

import numpy as np

from hf_packing.planning.lengths import IntArray, indices_in_groups, offsets_of

_AT_ONCE = 1 << 16
"""Numbers of small groups that are shuffled at a time, so that arrays fit in the CPU cache."""


def generator_for(seed: int, purpose: str) -> np.random.Generator:
    """Return a generator that depends on the seed and on the name of a purpose, such as "packs".

    One seed gives statistically independent generators for different purposes.
    """
    return np.random.default_rng([seed, *purpose.encode()])


def derive_seed(seed: int, purpose: str) -> int:
    """Return a seed that depends on another seed and on the name of a purpose, from 0 to 2**63 - 1."""
    return int(generator_for(seed, purpose).integers(1 << 63))


def random_order(size: int, seed: int | None, purpose: str) -> IntArray:
    """Return a random permutation of range(size), int64 [size]; without a seed, range(size).

    The permutation depends on the seed and on the string `purpose`, so one seed can be used for several purposes.
    """
    order = np.arange(size)
    if seed is not None:
        generator_for(seed, purpose).shuffle(order)
    return order


def shuffle_in_groups(values: IntArray, sizes: IntArray, generator: np.random.Generator) -> None:
    """Shuffle the values of each group, in place.

    Args:
        values: [values]: those of the first group, then those of the second one, and so on.
        sizes: integers [groups]: the number of values in each group; together, as many as there are values.
        generator: draws the random numbers.

    Example:
        >>> values = np.array([1, 2, 3, 40, 50, 60])
        >>> shuffle_in_groups(values, np.array([3, 3]), np.random.default_rng(0))
        >>> sorted(values[:3].tolist()), sorted(values[3:].tolist())
        ([1, 2, 3], [40, 50, 60])
    """
    begins, by_size = offsets_of(sizes), np.argsort(sizes, kind="stable")
    distinct, first = np.unique(sizes[by_size], return_index=True)
    for size, groups in zip(distinct.tolist(), np.split(by_size, first[1:]), strict=False):  # none for no groups
        if size > 1 and len(groups) == 1:
            generator.shuffle(values[begins[groups[0]] :][:size])
        elif size > 1:
            for some in np.array_split(groups, -(-len(groups) * size // _AT_ONCE)):
                places = begins[some, None] + np.arange(size)
                values[places] = generator.permuted(values[places], axis=1)


@cache
def shuffles_of_numpy() -> str:
    """Return a digest of a few random orders. Plans are the same with two versions of NumPy only if it is the same."""
    values = np.append(np.arange(99), derive_seed(0, "shuffles"))
    shuffle_in_groups(values, np.array([64, 6, 6, 6, 6, 6, 6]), generator_for(0, "shuffles"))
    return hashlib.blake2b(values.tobytes(), digest_size=8).hexdigest()


def order_of_packs(packs: int, seed: int | None) -> IntArray:
    """Return the old indices of packs in their new order, int64 [packs], as `shuffle_packs` does; None for the old."""
    return random_order(packs, seed, "order of packs")


def shuffle_packs(pack_offsets: IntArray, seed: int) -> tuple[IntArray, IntArray, IntArray]:
    """Return a random order of packs, and a random order of the segments in each pack.

    Args:
        pack_offsets: int64 [packs + 1]: the segments of pack p are pack_offsets[p]:pack_offsets[p + 1].
        seed: seed of the random orders.

    Returns:
        int64 [segments]: old indices of the segments, in the new order; int64 [packs + 1]: the new pack_offsets; int64
        [packs]: old indices of the packs, in the new order.
    """
    packs = order_of_packs(len(pack_offsets) - 1, seed)
    segments, sizes = indices_in_groups(pack_offsets, packs)
    shuffle_in_groups(segments, sizes, generator_for(seed, "order in packs"))
    return segments, offsets_of(sizes), packs


def shuffle_trees(tree_offsets: IntArray, pack_offsets: IntArray, seed: int) -> tuple[IntArray, IntArray, IntArray]:
    """Return a random order of packs, and a random order of the trees in each pack. Trees stay whole.

    Args:
        tree_offsets: int64 [trees + 1]: the segments of tree t are tree_offsets[t]:tree_offsets[t + 1].
        pack_offsets: int64 [packs + 1]: the segments of pack p are pack_offsets[p]:pack_offsets[p + 1].
        seed: seed of the random orders.

    Returns:
        The same three arrays as `shuffle_packs`: the segments in the new order, the new pack_offsets, and the packs in
        the new order.
    """
    trees, offsets, packs = shuffle_packs(np.searchsorted(tree_offsets, pack_offsets), seed)
    segments, sizes = indices_in_groups(tree_offsets, trees)
    return segments, offsets_of(sizes)[offsets], packs
