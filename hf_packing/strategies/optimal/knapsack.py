"""Find the most valuable packs for column generation by solving an unbounded knapsack problem.

A slot is a place for one document in a pack. Each slot length has a value and may be used repeatedly. The value of a
pack is the total value of its slots.
"""

from collections.abc import Iterator
from itertools import repeat

import numpy as np
import numpy.typing as npt

from hf_packing.planning.lengths import IntArray

FloatArray = npt.NDArray[np.float64]

LEAST_GAIN = 1e-12
"""Differences in value up to this number are treated as rounding errors."""


def most_valuable_packs(
    value: FloatArray, slots: IntArray, capacity: int, max_documents: int | None
) -> tuple[float, IntArray]:
    """Return the value of the most valuable pack, and for each slot the most valuable pack that contains this slot.

    A slot is a place for one document in a pack. It has a fixed length, and may hold a shorter document.

    Args:
        value: float64 [slots]: value of each slot, at least 0.
        slots: int64 [slots]: slot lengths, ascending, at least 1.
        capacity: capacity of a pack, in the same unit as the slot lengths.
        max_documents: maximum number of slots in a pack; None for no limit.

    Returns:
        The value, and columns, int32 [slots, slots]: columns[j, i] is the number of slots j in the most valuable pack
        that contains slot i.
    """
    if max_documents is None:
        best, slot = _fill_rooms(value, slots, capacity)
        layers: Iterator[IntArray] = repeat(slot)
    else:
        best, slots_taken = _fill_rooms_with_limit(value, slots, capacity, max_documents)
        layers = reversed(slots_taken[:-1])
    # each pack begins with its own slot, and then takes one slot after the other of the best combination for its room
    columns = np.eye(len(slots), dtype=np.int32)
    pack, room = np.arange(len(slots)), capacity - slots
    for slot_of_room in layers:
        slot = slot_of_room[room]
        taken = slot >= 0
        if not taken.any():
            break
        pack, room, slot = pack[taken], room[taken], slot[taken]
        columns[slot, pack] += 1
        room = room - slots[slot]
    return float(best[capacity]), columns


def _fill_rooms(value: FloatArray, slots: IntArray, capacity: int) -> tuple[FloatArray, IntArray]:
    """Return the most valuable combination of slots for each amount of free room from 0 to the capacity.

    The number of slots is not limited. The best combination for a room is one slot, plus the best combination for the
    remaining room; all slots that fit are tried.

    Args:
        value: float64 [slots]: value of each slot, at least 0.
        slots: int64 [slots]: slot lengths, ascending, at least 1.
        capacity: capacity of a pack, in the same unit as the slot lengths.

    Returns:
        float64 [capacity + 1]: total value of the best combination; int64 [capacity + 1]: a slot of the best
        combination, or -1 if no slot adds value.
    """
    best, slot = np.zeros(capacity + 1), np.full(capacity + 1, -1)
    fitting = np.searchsorted(slots, np.arange(capacity + 1), side="right").tolist()
    for room in range(int(slots[0]), capacity + 1):
        count = fitting[room]
        totals = best[room - slots[:count]] + value[:count]
        top = totals.argmax()
        if totals[top] > best[room - 1] + LEAST_GAIN:
            best[room], slot[room] = totals[top], top
        else:
            best[room], slot[room] = best[room - 1], slot[room - 1]
    return best, slot


def _fill_rooms_with_limit(
    value: FloatArray, slots: IntArray, capacity: int, max_documents: int
) -> tuple[FloatArray, list[IntArray]]:
    """Return the most valuable combinations of at most `max_documents` slots, as `_fill_rooms` does.

    Element n of the returned list has a slot of the best combination of at most n slots, for n from 0 to max_documents.
    """
    best, slot = np.zeros(capacity + 1), np.full(capacity + 1, -1)
    layers = [slot]
    for _ in range(max_documents):
        fewer, best, slot = best, best.copy(), slot.copy()
        for number, (length, worth) in enumerate(zip(slots.tolist(), value.tolist(), strict=True)):
            totals = fewer[: capacity + 1 - length] + worth
            better = totals > best[length:] + LEAST_GAIN
            best[length:][better] = totals[better]
            slot[length:][better] = number
        layers.append(slot)
    return best, layers
