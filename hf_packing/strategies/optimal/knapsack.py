"""The most valuable packs, for column generation: a knapsack in which a length may be used any number of times."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hf_packing.planning.lengths import IntArray

FloatArray = npt.NDArray[np.float64]

LEAST_GAIN = 1e-12
"""Differences below this are rounding errors."""


class _ValuablePacks(NamedTuple):
    """The best pack among all, and the best among those that contain each slot."""

    most: float
    """The value of the best pack."""
    columns: IntArray
    """int32 [slots, slots]: column i is the most valuable pack with slot i in it."""


class _Layer(NamedTuple):
    """The best value for each room with at most some number of slots, and the slot that reached it."""

    value: FloatArray
    """float64 [capacity + 1]."""
    slot: IntArray
    """int64 [capacity + 1]: -1 if the value is that of less room, or of fewer slots."""


def most_valuable_packs(value: FloatArray, slots: IntArray, capacity: int, max_documents: int | None) -> _ValuablePacks:
    """Return the most valuable packs.

    Args:
        value: float64 [slots], not negative: what each slot is worth.
        slots: int64 [slots], ascending, at least 1.
        capacity: room of a pack, in the unit of the slots.
        max_documents: most slots in a pack; None for no limit.
    """
    if max_documents is None:
        layer = fill_rooms(value, slots, capacity)
        return _ValuablePacks(float(layer.value[capacity]), _packs_of_layer(layer, slots, capacity))
    layers = _fill_rooms_with_limit(value, slots, capacity, max_documents)
    return _ValuablePacks(float(layers[-1].value[capacity]), _packs_of_layers(layers[:-1], slots, capacity))


def fill_rooms(value: FloatArray, slots: IntArray, capacity: int) -> _Layer:
    """Find the best filling of every room: the best slot, and the best filling of the room that it leaves."""
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
    """Find the best filling of every room with 0, 1, ... up to max_documents slots."""
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
    """Return for every slot the best filling of the room that it leaves, read back for all of them at once."""
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
    """Return the same as `_packs_of_layer`, under a limit on slots."""
    columns = np.eye(len(slots), dtype=np.int32)
    pack, room = np.arange(len(slots)), capacity - slots
    for layer in reversed(layers):
        slot = layer.slot[room]
        taken = slot >= 0
        columns[slot[taken], pack[taken]] += 1
        room = np.where(taken, room - slots[slot], room)
    return columns
