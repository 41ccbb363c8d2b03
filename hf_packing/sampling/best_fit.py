"""Place rows by best fit into as few micro-batches as possible, within limits of tokens, documents and patches."""

from bisect import bisect_left, insort
from typing import NamedTuple

from hf_packing.planning.lengths import IntArray
from hf_packing.sampling.epoch_plan import MicroBatches


class Limits(NamedTuple):
    """The most that a micro-batch may have of everything that is limited, and what each row has of it."""

    tokens: IntArray
    """integers [rows], from 1 to max_tokens."""
    max_tokens: int
    others: tuple[tuple[IntArray, int], ...] = ()
    """Further limits, such as documents or patches of pictures: integers [rows], from 0 to the limit; and the limit."""


GRAINS = 2**16
"""Budgets above this number of tokens count free space in coarser units, so that few distinct values are searched."""

_TRIES = 64
"""If more than tokens is limited, the number of micro-batches to look at before a new one is opened."""


def best_fit(rows: IntArray, limits: Limits) -> MicroBatches:
    """Place each row in turn in the fullest micro-batch with enough space, or else in a new micro-batch."""
    grain = -(-limits.max_tokens // GRAINS)
    lengths = limits.tokens[rows]
    others = [_OtherLimit(needed[rows].tolist(), most, int(needed.min()), []) for needed, most in limits.others]
    micro_batches: MicroBatches = []
    room_in: list[int] = []
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    for turn, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        place, index = bisect_left(rooms, -(-length // grain)), -1
        if others:
            place, index = _within_others(turn, others, rooms, with_room, place)
        if place == len(rooms):
            number = len(micro_batches)
            micro_batches.append([])
            room_in.append(limits.max_tokens)
            for other in others:
                other.left.append(other.most)
        else:
            number = with_room[rooms[place]].pop(index)
            if not with_room[rooms[place]]:
                del with_room[rooms[place]], rooms[place]
        micro_batches[number].append(row)
        room_in[number] -= length
        for other in others:
            other.left[number] -= other.needed[turn]
        is_full = any(other.left[number] < other.least for other in others)
        room = 0 if is_full else room_in[number] // grain
        if room in with_room:
            with_room[room].append(number)
        elif room:
            with_room[room] = [number]
            insort(rooms, room)
    return micro_batches


class _OtherLimit(NamedTuple):
    """A limit beside that of tokens, while rows are placed."""

    needed: list[int]
    """What each row needs, in the order of placing."""
    most: int
    least: int
    """What the row with the least needs."""
    left: list[int]
    """What is left in each micro-batch."""


def _within_others(
    turn: int, others: list[_OtherLimit], rooms: list[int], with_room: dict[int, list[int]], place: int
) -> tuple[int, int]:
    """Find the fullest micro-batch with enough space for a row, and give up after _TRIES micro-batches.

    Args:
        turn: the row's number in the order of placing.
        others: the limits beside that of tokens.
        rooms: amounts of free space, ascending, for which there are micro-batches.
        with_room: the micro-batches with each amount of free space.
        place: index in `rooms` of the least free space that is enough for the row's tokens.

    Returns:
        The index in `rooms`, and the index among the micro-batches with this space; (len(rooms), -1) if none is found.
    """
    tries = _TRIES
    for room in range(place, len(rooms)):
        numbers = with_room[rooms[room]]
        for index in range(-1, -1 - min(tries, len(numbers)), -1):  # the latest first
            if all(other.left[numbers[index]] >= other.needed[turn] for other in others):
                return room, index
        tries -= len(numbers)
        if tries <= 0:
            break
    return len(rooms), -1
