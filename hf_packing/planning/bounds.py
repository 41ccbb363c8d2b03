"""How few packs any plan could need: the bounds L1 and L2 of bin packing."""

import numpy as np

from hf_packing.planning.lengths import IntArray


def pack_lower_bound(counts: IntArray, capacity: int) -> int:
    """A number of packs below which no plan for these segments can go.

    The larger of L1, tokens divided by capacity, and L2 (Martello and Toth, "Lower bounds and reduction procedures for
    the bin packing problem", 1990): for any threshold a up to half the capacity, segments above capacity - a need a
    pack of their own, those above half cannot share one, and the rest fills what room is left by volume.

    Args:
        counts: int64 [longest + 1]: how many segments there are of each length, none above capacity.
        capacity: tokens a pack holds.

    Returns:
        packs.

    Example:
        >>> import numpy as np
        >>> pack_lower_bound(np.bincount([6, 6, 6, 2]), 10)  # no two sixes share a pack
        3
    """
    lengths = np.flatnonzero(counts)
    number = np.concatenate([[0], np.cumsum(counts[lengths], dtype=np.int64)])
    volume = np.concatenate([[0], np.cumsum(counts[lengths] * lengths, dtype=np.int64)])
    half = int(np.searchsorted(lengths, capacity // 2, side="right"))
    threshold = np.arange(half)  # the bound can only rise where a segment has the length of the threshold
    complement = np.searchsorted(lengths, capacity - lengths[:half], side="right")
    above_half = number[-1] - number[half]
    room = (number[complement] - number[half]) * capacity - (volume[complement] - volume[half])
    small = volume[half] - volume[threshold]
    extra = np.maximum(0, -((room - small) // capacity))
    by_volume = -(-int(volume[-1]) // capacity)
    return max(by_volume, int(above_half + extra.max(initial=0)))
