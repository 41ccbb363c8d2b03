"""Find the most valuable packs for column generation by solving an unbounded knapsack problem.

A slot is a place for one document in a pack. Each slot length has a value and may be used repeatedly. The value of a
pack is the total value of its slots.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hf_packing.planning.lengths import IntArray

FloatArray = npt.NDArray[np.float64]

LEAST_GAIN = 1e-12
"""Differences in value up to this number are treated as rounding errors."""


class _Layer(NamedTuple):
    """The most valuable combination of slots for each amount of free room in a pack, from 0 to the capacity.

    If the number of slots in a pack is limited, there is one layer for each limit from 0 to the maximum.
    """

    value: FloatArray
    """float64 [capacity + 1]: value[r] is the total value of the best combination for a room of r."""
    slot: IntArray
    """int64 [capacity + 1]: slot[r] is the last slot of the best combination for a room of r.

    -1 if a combination for less room has the same value or, with a limit on slots, if fewer slots have the same value.
    """


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
        layer = fill_rooms(value, slots, capacity)
        return float(layer.value[capacity]), _packs_of_layer(layer, slots, capacity)
    layers = _fill_rooms_with_limit(value, slots, capacity, max_documents)
    return float(layers[-1].value[capacity]), _packs_of_layers(layers[:-1], slots, capacity)


def fill_rooms(value: FloatArray, slots: IntArray, capacity: int) -> _Layer:
    """Return the most valuable combination of slots for each amount of free room from 0 to the capacity.

    The number of slots is not limited. The best combination for a room is one slot, plus the best combination for the
    remaining room; all slots that fit are tried.

    Args:
        value: float64 [slots]: value of each slot, at least 0.
        slots: int64 [slots]: slot lengths, ascending, at least 1.
        capacity: capacity of a pack, in the same unit as the slot lengths.
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
            best[room] = best[room - 1]
    return _Layer(best, slot)


def _fill_rooms_with_limit(value: FloatArray, slots: IntArray, capacity: int, max_documents: int) -> list[_Layer]:
    """Return the most valuable combination of slots for each amount of free room and each limit on the number of slots.

    Element n of the returned list has the best combinations of at most n slots, for n from 0 to max_documents. `value`,
    `slots` and `capacity` have the same meaning as in `fill_rooms`.
    """
    layers = [_Layer(np.zeros(capacity + 1), np.full(capacity + 1, -1))]
    for _ in range(max_documents):
        fewer = layers[-1].value
        best, slot = fewer.copy(), np.full(capacity + 1, -1)
        for number, (length, worth) in enumerate(zip(slots.tolist(), value.tolist(), strict=True)):
            totals = fewer[: capacity + 1 - length] + worth
            better = totals > best[length:] + LEAST_GAIN
            best[length:][better] = totals[better]
            slot[length:][better] = number
        layers.append(_Layer(best, slot))
    return layers


def _packs_of_layer(layer: _Layer, slots: IntArray, capacity: int) -> IntArray:
    """Return, for each slot, the most valuable pack that contains this slot, as `most_valuable_packs` does.

    The pack for a slot consists of this slot and of the best combination of slots for the remaining room. For every
    amount of room, `layer` has the next slot of the best combination. Each iteration of the loop adds one slot to all
    packs that are not yet complete.
    """
    columns = np.eye(len(slots), dtype=np.int32)
    pack = np.arange(len(slots))
    reached_at = np.maximum.accumulate(np.where(layer.slot >= 0, np.arange(capacity + 1), 0))
    room = reached_at[capacity - slots]
    while (filled := room > 0).any():
        pack, room = pack[filled], room[filled]
        slot = layer.slot[room]
        columns[slot, pack] += 1
        room = reached_at[room - slots[slot]]
    return columns


def _packs_of_layers(layers: list[_Layer], slots: IntArray, capacity: int) -> IntArray:
    """Return, for each slot, the most valuable pack that contains this slot, as `most_valuable_packs` does.

    The number of slots in a pack is limited. The pack for a slot starts with this slot. Each layer, from the last to
    the first, adds at most one slot to each pack.

    Args:
        layers: list of layers from `_fill_rooms_with_limit`, with limits from 0 to the maximum number of slots minus 1.
        slots: int64 [slots]: slot lengths, ascending, at least 1.
        capacity: capacity of a pack, in the same unit as the slot lengths.
    """
    columns = np.eye(len(slots), dtype=np.int32)
    pack, room = np.arange(len(slots)), capacity - slots
    for layer in reversed(layers):
        slot = layer.slot[room]
        taken = slot >= 0
        columns[slot[taken], pack[taken]] += 1
        room = np.where(taken, room - slots[slot], room)
    return columns
