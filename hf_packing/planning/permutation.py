"""Seeded random permutations that can be evaluated one element at a time, and the shuffling of packs.

Plans need random orders of packs, of documents of equal length, and of the documents in each pack. A permutation is a
function of (index, size, key), so all documents of all lengths are permuted with a few operations on arrays.

The function is a balanced Feistel network on a grid of about sqrt(size) x sqrt(size) cells. The grid may have a few
more than `size` cells. A result that is not below `size` is permuted again until the result is below `size` (cycle
walking; Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002).
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from hf_packing.planning.lengths import IntArray, indices_in_groups, indices_in_ranges, offsets_of

_Keys = npt.NDArray[np.uint64]

_ROUNDS = 4
# odd 64-bit multipliers of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)
_GAMMA, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
_HALF = np.uint64(32)
_ROUND_KEYS = np.arange(_ROUNDS + 1, dtype=np.uint64) * _GAMMA
_AT_ONCE, _PACKS_AT_ONCE = 1 << 16, 1 << 13


def derive_key(seed: int, purpose: str) -> np.uint64:
    """Return a 64-bit key that depends on the seed and on the name of a purpose, such as "packs".

    One seed gives statistically independent keys for different purposes.
    """
    words = np.random.SeedSequence([seed, *purpose.encode()]).generate_state(1, np.uint64)
    return np.uint64(words[0])


def derive_seed(seed: int, purpose: str) -> int:
    """Return a seed that depends on another seed and on the name of a purpose, from 0 to 2**63 - 1."""
    return int(derive_key(seed, purpose) >> np.uint64(1))


def keys_for(numbers: npt.NDArray[Any], key: np.uint64) -> _Keys:
    """Return one key for each number in an array. Each new key is a hash of the number and of `key`."""
    mixed = (numbers.astype(np.uint64) + key) * _GAMMA
    mixed ^= mixed >> _HALF
    return mixed * _MIX


def permute(index: npt.NDArray[Any], size: npt.NDArray[Any], keys: _Keys) -> npt.NDArray[np.int64]:
    """Return the elements of a random permutation of range(size) at the given indices.

    Args:
        index: integers [n], from 0 to size - 1.
        size: integers [n] or [1]: number of elements of the permutation, at least 1 and below 2**62.
        keys: uint64 [n] or [1]: random keys. Each pair of a size and a key selects one permutation.

    Returns:
        int64 [n], from 0 to size - 1. With the same size and key, different indices have different results.

    Example:
        >>> import numpy as np
        >>> size, keys = np.array([10]), np.array([7], dtype=np.uint64)
        >>> sorted(permute(np.arange(10), size, keys).tolist())
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    # a nearly square grid with at least `size` cells; the cell in row r and column c has the number r * columns + c
    rows = np.ceil(np.sqrt(size)).astype(np.uint64)
    size = size.astype(np.uint64)
    columns = (size + rows - np.uint64(1)) // rows
    # a rotation at the end, since otherwise, for sizes such as 3 and 5, some results would be a few percent more likely
    rotation = _hash_below(keys, size, _ROUND_KEYS[-1:])
    cell = _permute_cells(index.astype(np.uint64), rows, columns, keys)
    outside = np.flatnonzero(cell >= size)
    while outside.size:
        grid = (np.broadcast_to(each, cell.shape)[outside] for each in (rows, columns, keys))
        cell[outside] = _permute_cells(cell[outside], *grid)
        outside = outside[cell[outside] >= np.broadcast_to(size, cell.shape)[outside]]
    return _turn(cell, rotation, size).astype(np.int64)


def random_order(size: int, seed: int | None, purpose: str) -> IntArray:
    """Return a random permutation of range(size), int64 [size]; without a seed, range(size).

    The permutation depends on the seed and on the string `purpose`, so one seed can be used for several purposes.
    """
    order = np.arange(size)
    if seed is not None:
        sizes, key = np.array([size]), np.array([derive_key(seed, purpose)])
        for begin in range(0, size, _AT_ONCE):
            order[begin : begin + _AT_ONCE] = permute(order[begin : begin + _AT_ONCE], sizes, key)
    return order


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
    sizes = np.diff(pack_offsets)[packs]
    key = derive_key(seed, "order in packs")
    segments = [np.zeros(0, dtype=np.int64)]
    for begin in range(0, len(packs), _PACKS_AT_ONCE):
        size = sizes[begin : begin + _PACKS_AT_ONCE]
        pack, place = np.repeat(packs[begin : begin + _PACKS_AT_ONCE], size), indices_in_ranges(0, size)
        segments.append(pack_offsets[pack] + permute(place, np.repeat(size, size), keys_for(pack, key)))
    return np.concatenate(segments), offsets_of(sizes), packs


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


def _permute_cells(cell: _Keys, rows: _Keys, columns: _Keys, keys: _Keys) -> _Keys:
    """Return where each cell of a grid goes."""
    row = cell // columns
    column = cell - row * columns
    for number in range(_ROUNDS):
        key = keys + _ROUND_KEYS[number]
        if number % 2 == 0:
            row = _turn(row, _hash_below(column, rows, key), rows)
        else:
            column = _turn(column, _hash_below(row, columns, key), columns)
    return row * columns + column


def _hash_below(value: _Keys, bound: _Keys, key: _Keys) -> _Keys:
    mixed = (value ^ key) * _GAMMA
    mixed ^= mixed >> _HALF
    mixed *= _MIX
    mixed >>= _HALF
    mixed *= bound
    mixed >>= _HALF
    return mixed


def _turn(value: _Keys, by: _Keys, bound: _Keys) -> _Keys:
    """Add `by` to a value modulo `bound`. If the sum is below `bound`, subtracting `bound` wraps around."""
    turned = value + by
    np.minimum(turned, turned - bound, out=turned)
    return turned
