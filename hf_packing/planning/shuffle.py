"""Seeded random order of finished packs and of the segments inside each."""

from typing import Any

import numpy as np

from hf_packing.planning.lengths import IntArray, check_whole_number
from hf_packing.planning.scramble import derive_key, keys_for, scramble

SEED_MAX = 2**63 - 1
PLACES_AT_ONCE, PACKS_AT_ONCE = 1 << 16, 1 << 13


def check_seed(seed: Any) -> int:
    return check_whole_number("seed", seed, minimum=0, maximum=SEED_MAX)


def random_order(size: int, seed: int, purpose: str) -> IntArray:
    """int64 [size]: a permutation of range(size), another for each purpose."""
    order = np.arange(size)
    for begin in range(0, size, PLACES_AT_ONCE):
        block = slice(begin, begin + PLACES_AT_ONCE)
        order[block] = scramble(order[block], np.array([size]), np.array([derive_key(seed, purpose)]))
    return order


def shuffle_packs(pack_offsets: IntArray, seed: int) -> tuple[IntArray, IntArray, IntArray]:
    """A random order of packs and of the segments in them.

    Args:
        pack_offsets: int64 [packs + 1].
        seed: of the order.

    Returns:
        int64 [segments], the segments in their new order; int64 [packs + 1], the new offsets; int64 [packs], the packs
        in their new order.
    """
    packs = random_order(len(pack_offsets) - 1, seed, "order of packs")
    sizes = np.diff(pack_offsets)[packs]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    segments = np.empty(int(offsets[-1]), dtype=np.int64)
    key = derive_key(seed, "order in packs")
    for begin in range(0, len(packs), PACKS_AT_ONCE):
        pack, size = packs[begin : begin + PACKS_AT_ONCE], sizes[begin : begin + PACKS_AT_ONCE]
        first = offsets[begin]
        place = np.arange(first, first + size.sum()) - np.repeat(offsets[begin : begin + len(pack)], size)
        place = scramble(place, np.repeat(size, size), keys_for(np.repeat(pack, size), key))
        segments[first : first + len(place)] = np.repeat(pack_offsets[pack], size) + place
    return segments, offsets, packs
