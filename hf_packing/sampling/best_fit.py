"""Place rows by best fit into as few micro-batches as possible, within limits of tokens and documents."""

from bisect import bisect_left, insort
from typing import NamedTuple

from hf_packing.planning.lengths import IntArray
from hf_packing.sampling.epoch_plan import MicroBatches


class Limits(NamedTuple):
    """The most tokens and documents that a micro-batch may have, and how many each row has."""

    tokens: IntArray
    """integers [rows], from 1 to max_tokens."""
    max_tokens: int
    documents: IntArray
    """integers [rows], from 1 to max_documents: the number of documents, or pieces of documents, in each row."""
    max_documents: int | None = None


GRAINS = 2**16
"""Budgets above this number of tokens count free space in coarser units, so that few distinct values are searched."""

_TRIES = 64
"""If the number of documents is limited, the number of micro-batches to look at before a new one is opened."""


def best_fit(rows: IntArray, limits: Limits) -> MicroBatches:
    """Place each row in turn in the fullest micro-batch with enough space, or else in a new micro-batch."""
    grain = -(-limits.max_tokens // GRAINS)
    lengths, documents = limits.tokens[rows], limits.documents[rows].tolist()
    most_documents = float("inf") if limits.max_documents is None else limits.max_documents
    documents_left: list[float] = []
    micro_batches: MicroBatches = []
    room_in: list[int] = []
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    for turn, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        place, index = bisect_left(rooms, -(-length // grain)), -1
        if limits.max_documents is not None:
            place, index = _with_documents(documents[turn], documents_left, rooms, with_room, place)
        if place == len(rooms):
            number = len(micro_batches)
            micro_batches.append([])
            room_in.append(limits.max_tokens)
            documents_left.append(most_documents)
        else:
            number = with_room[rooms[place]].pop(index)
            if not with_room[rooms[place]]:
                del with_room[rooms[place]], rooms[place]
        micro_batches[number].append(row)
        room_in[number] -= length
        documents_left[number] -= documents[turn]
        room = room_in[number] // grain if documents_left[number] else 0
        if room in with_room:
            with_room[room].append(number)
        elif room:
            with_room[room] = [number]
            insort(rooms, room)
    return micro_batches


def _with_documents(
    documents: int, documents_left: list[float], rooms: list[int], with_room: dict[int, list[int]], place: int
) -> tuple[int, int]:
    """Find the fullest micro-batch with enough space for a row, and give up after _TRIES micro-batches.

    Args:
        documents: number of documents in the row.
        documents_left: the number of documents that each micro-batch can still take.
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
            if documents_left[numbers[index]] >= documents:
                return room, index
        tries -= len(numbers)
        if tries <= 0:
            break
    return len(rooms), -1
