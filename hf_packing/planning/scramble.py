"""Seeded permutations that can be evaluated one element at a time.

Dealing needs three random orders: of the packs, of documents of equal length, and of the documents inside a pack. A
permutation held as an array would need all documents in one place. Here each is a function of (index, size, key), so
that any slice of it can be had at once, on any machine, with the same result.

The function is a balanced Feistel network over a grid of about sqrt(size) x sqrt(size) cells, with cycle walking over
the few cells beyond `size` (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Walk = Callable[[Keys, Keys, Keys, Keys], Keys]

ROUNDS = 4
# odd 64-bit multipliers of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)
STEP, MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
HALF = np.uint64(32)
TURNS = np.arange(ROUNDS + 1, dtype=np.uint64) * STEP


def derive_key(seed: int, purpose: str) -> np.uint64:
    """An independent 64-bit key for each purpose of one seed."""
    words = np.random.SeedSequence([seed, *purpose.encode()]).generate_state(1, np.uint64)
    return np.uint64(words[0])


def keys_for(numbers: npt.NDArray[Any], key: np.uint64) -> Keys:
    """One key per number: `key` mixed with it."""
    mixed = (numbers.astype(np.uint64) + key) * STEP
    mixed ^= mixed >> HALF
    return mixed * MIX


def grid_sides(size: npt.NDArray[Any]) -> tuple[Keys, Keys]:
    """The smallest near-square grid, (rows, columns), with at least `size` cells."""
    rows = np.ceil(np.sqrt(size)).astype(np.uint64)
    columns = (size.astype(np.uint64) + rows - np.uint64(1)) // rows
    return rows, columns


def scramble(index: npt.NDArray[Any], size: npt.NDArray[Any], keys: Keys) -> npt.NDArray[np.int64]:
    """Where a random permutation of range(size) sends each index.

    Args:
        index: integers [n], each in [0, size).
        size: integers [n] or [1], at least 1: the size of the permuted range, below 2**62.
        keys: uint64 [n] or [1]: which permutation.

    Returns:
        int64 [n]. For one (size, key) the map from index to result is a bijection of range(size).

    Example:
        >>> import numpy as np
        >>> places = scramble(np.arange(10), np.array([10]), np.array([7], dtype=np.uint64))
        >>> sorted(places.tolist()) == list(range(10))
        True
    """
    rows, columns = grid_sides(size)
    size = size.astype(np.uint64)
    result = walk_inside(walk_once, index.astype(np.uint64), size, rows, columns, keys)
    # the last turn is a rotation, without which sizes of 3 or 5 would favour some places by a few percent
    rotation = hash_below(keys, size, TURNS[-1:])
    return add_modulo(result, rotation, size).astype(np.int64)


def unscramble(place: npt.NDArray[Any], size: npt.NDArray[Any], keys: Keys) -> npt.NDArray[np.int64]:
    """The inverse of `scramble`: which index it sends to each place. Arguments and result as there.

    Example:
        >>> import numpy as np
        >>> size, keys = np.array([10]), np.array([7], dtype=np.uint64)
        >>> unscramble(scramble(np.arange(10), size, keys), size, keys).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    rows, columns = grid_sides(size)
    size = size.astype(np.uint64)
    rotation = hash_below(keys, size, TURNS[-1:])
    start = subtract_modulo(place.astype(np.uint64), rotation, size)
    return walk_inside(walk_back, start, size, rows, columns, keys).astype(np.int64)


def walk_inside(walk: Walk, cell: Keys, size: Keys, rows: Keys, columns: Keys, keys: Keys) -> Keys:
    """Walk until the cell is one of the first `size`."""
    cell = walk(cell, rows, columns, keys)
    outside = np.flatnonzero(cell >= size)
    while outside.size:
        pick = [value if len(value) == 1 else value[outside] for value in (rows, columns, keys)]
        cell[outside] = walk(cell[outside], *pick)
        limit = size if len(size) == 1 else size[outside]
        outside = outside[cell[outside] >= limit]
    return cell


def walk_once(cell: Keys, rows: Keys, columns: Keys, keys: Keys) -> Keys:
    row = cell // columns
    column = cell - row * columns
    for turn in range(ROUNDS):
        key = keys + TURNS[turn]
        if turn % 2 == 0:
            row = add_modulo(row, hash_below(column, rows, key), rows)
        else:
            column = add_modulo(column, hash_below(row, columns, key), columns)
    return row * columns + column


def walk_back(cell: Keys, rows: Keys, columns: Keys, keys: Keys) -> Keys:
    row = cell // columns
    column = cell - row * columns
    for turn in reversed(range(ROUNDS)):
        key = keys + TURNS[turn]
        if turn % 2 == 0:
            row = subtract_modulo(row, hash_below(column, rows, key), rows)
        else:
            column = subtract_modulo(column, hash_below(row, columns, key), columns)
    return row * columns + column


def hash_below(value: Keys, bound: Keys, key: Keys) -> Keys:
    mixed = (value ^ key) * STEP
    mixed ^= mixed >> HALF
    mixed *= MIX
    mixed >>= HALF
    mixed *= bound
    mixed >>= HALF
    return mixed


def add_modulo(left: Keys, right: Keys, bound: Keys) -> Keys:
    total = left + right
    total -= bound * (total >= bound)
    return total


def subtract_modulo(left: Keys, right: Keys, bound: Keys) -> Keys:
    total = left + (bound - right)
    total -= bound * (total >= bound)
    return total
