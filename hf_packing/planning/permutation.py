"""Seeded random permutations that can be evaluated one element at a time, and the shuffling of packs.

Plans need random orders of packs, of documents of equal length, and of the documents in each pack. A permutation is a
function of (index, size, key), so one call evaluates many small permutations, in blocks that fit in the CPU cache.

The function is a balanced Feistel network on a grid of about sqrt(size) x sqrt(size) cells. The grid may have a few
more than `size` cells. A result that is not below `size` is permuted again until the result is below `size` (cycle
walking; Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002).
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from hf_packing.planning.lengths import IntArray, indices_in_ranges, offsets_of

_Keys = npt.NDArray[np.uint64]

_ROUNDS = 4
# odd 64-bit multipliers of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)
_GAMMA, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
_HALF = np.uint64(32)
_ROUND_KEYS = np.arange(_ROUNDS + 1, dtype=np.uint64) * _GAMMA
_PLACES_AT_ONCE, _PACKS_AT_ONCE = 1 << 16, 1 << 13


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
        >>> places = permute(np.arange(10), np.array([10]), np.array([7], dtype=np.uint64))
        >>> sorted(places.tolist()) == list(range(10))
        True
    """
    rows, columns = _grid_sides(size)
    size = size.astype(np.uint64)
    result = _walk_inside(index.astype(np.uint64), size, rows, columns, keys)
    # a final rotation, since otherwise, for sizes such as 3 and 5, some results would be a few percent more likely
    rotation = _hash_below(keys, size, _ROUND_KEYS[-1:])
    return _add_modulo(result, rotation, size).astype(np.int64)


def random_order(size: int, seed: int, purpose: str) -> IntArray:
    """Return a random permutation of range(size), int64 [size].

    The permutation depends on the seed and on the string `purpose`, so one seed can be used for several purposes.
    """
    order = np.arange(size)
    for begin in range(0, size, _PLACES_AT_ONCE):
        block = slice(begin, begin + _PLACES_AT_ONCE)
        order[block] = permute(order[block], np.array([size]), np.array([derive_key(seed, purpose)]))
    return order


def shuffle_packs(pack_offsets: IntArray, seed: int) -> tuple[IntArray, IntArray, IntArray]:
    """Return a random order of packs, and a random order of the segments in each pack.

    Args:
        pack_offsets: int64 [packs + 1]: the segments of pack p are pack_offsets[p]:pack_offsets[p + 1].
        seed: seed of the random orders.

    Returns:
        int64 [segments]: old indices of the segments, in the new order; int64 [packs + 1]: the new pack_offsets; int64
        [packs]: old indices of the packs, in the new order.
    """
    packs = random_order(len(pack_offsets) - 1, seed, "order of packs")
    sizes = np.diff(pack_offsets)[packs]
    offsets = offsets_of(sizes)
    segments = np.empty(int(offsets[-1]), dtype=np.int64)
    key = derive_key(seed, "order in packs")
    for begin in range(0, len(packs), _PACKS_AT_ONCE):
        pack, size = packs[begin : begin + _PACKS_AT_ONCE], sizes[begin : begin + _PACKS_AT_ONCE]
        first = offsets[begin]
        place = permute(indices_in_ranges(0, size), np.repeat(size, size), keys_for(np.repeat(pack, size), key))
        segments[first : first + len(place)] = np.repeat(pack_offsets[pack], size) + place
    return segments, offsets, packs


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
    segments = np.diff(tree_offsets)[trees]
    return indices_in_ranges(tree_offsets[trees], segments), offsets_of(segments)[offsets], packs


def _grid_sides(size: npt.NDArray[Any]) -> tuple[_Keys, _Keys]:
    """Return (rows, columns) of a nearly square grid with at least `size` cells."""
    rows = np.ceil(np.sqrt(size)).astype(np.uint64)
    columns = (size.astype(np.uint64) + rows - np.uint64(1)) // rows
    return rows, columns


def _walk_inside(cell: _Keys, size: _Keys, rows: _Keys, columns: _Keys, keys: _Keys) -> _Keys:
    """Apply `_walk` to each cell number repeatedly until the result is below `size`, and return the results.

    `_walk` permutes the cells of a grid. The cell in row r and column c has the number r * columns + c.
    """
    cell = _walk(cell, rows, columns, keys)
    outside = np.flatnonzero(cell >= size)
    while outside.size:
        pick = [value if len(value) == 1 else value[outside] for value in (rows, columns, keys)]
        cell[outside] = _walk(cell[outside], *pick)
        limit = size if len(size) == 1 else size[outside]
        outside = outside[cell[outside] >= limit]
    return cell


def _walk(cell: _Keys, rows: _Keys, columns: _Keys, keys: _Keys) -> _Keys:
    """Return where each cell of a grid goes."""
    row = cell // columns
    column = cell - row * columns
    for number in range(_ROUNDS):
        key = keys + _ROUND_KEYS[number]
        if number % 2 == 0:
            row = _add_modulo(row, _hash_below(column, rows, key), rows)
        else:
            column = _add_modulo(column, _hash_below(row, columns, key), columns)
    return row * columns + column


def _hash_below(value: _Keys, bound: _Keys, key: _Keys) -> _Keys:
    mixed = (value ^ key) * _GAMMA
    mixed ^= mixed >> _HALF
    mixed *= _MIX
    mixed >>= _HALF
    mixed *= bound
    mixed >>= _HALF
    return mixed


def _add_modulo(left: _Keys, right: _Keys, bound: _Keys) -> _Keys:
    total = left + right
    total -= bound * (total >= bound)
    return total
