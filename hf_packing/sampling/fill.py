"""Rows -> exactly as many micro-batches as wanted, none over the token budget, mixed anew for every seed.

Rows are placed best-fit, roughly longest first. Roughly, because rows that share a micro-batch should be different in
every epoch. The shortest rows still come last and fill the gaps, so this costs next to nothing against the exact order.
A round is one micro-batch on every rank, at the same time.
"""

import heapq
from bisect import bisect_left, insort
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_packing.planning.lengths import IntArray
from hf_packing.planning.open_packs import OpenPacks, fill_best_fit
from hf_packing.planning.permutation import random_order

MicroBatches = list[list[int]]
"""The rows of each micro-batch."""

_LENGTH_JITTERS = (0.2, 0.03, 0.0)
"""By what share of its length a row may be sorted as if it were shorter; the first jitter with which all rows fit."""
_LOOSE = 0.95
"""Micro-batches that are at most this full need no packing: rows are spread over them evenly."""
_GRAINS = 2**16
"""Free room is rounded to 1 / 65536 of large budgets, which bounds the number of distinct values to search."""
_REFILLED_PER_ADDED = 8
"""How many micro-batches are dealt anew for each additional one, so that each of them gives up little."""
_REFILLED_ROUNDS = 4
"""At least the micro-batches of so many rounds are dealt anew."""


def fewest_micro_batches(tokens: IntArray, max_tokens: int) -> int:
    """Return how many micro-batches hold all rows in every epoch: those of best-fit decreasing.

    Small budgets are counted from the histogram of lengths, which is faster and gives the same number.

    Args:
        tokens: integers [rows], from 1 to max_tokens.
        max_tokens: the budget.
    """
    if max_tokens <= _GRAINS:
        packs = OpenPacks(max_tokens, max_documents=None)
        fill_best_fit(packs, np.bincount(tokens))
        return packs.num_packs
    return len(_best_fit(_longest_first(np.arange(len(tokens)), tokens), tokens, max_tokens))


def fill(tokens: IntArray, max_tokens: int, num_micro_batches: int, world_size: int, seed: int) -> MicroBatches:
    """Return the rows in micro-batches of at most max_tokens tokens.

    Args:
        tokens: integers [rows], from 1 to max_tokens; at least as many rows as micro-batches.
        max_tokens: the budget.
        num_micro_batches: how many to make, over all ranks; at least `fewest_micro_batches`.
        world_size: how many run at the same time.
        seed: decides which rows meet.
    """
    if tokens.sum() < _LOOSE * max_tokens * num_micro_batches:
        spread = _deal_evenly(_roughly_longest_first(tokens, _LENGTH_JITTERS[0], seed), tokens, num_micro_batches)
        if sum_rows(spread, tokens).max() <= max_tokens:
            return spread
    for jitter in _LENGTH_JITTERS:
        packed = _best_fit(_roughly_longest_first(tokens, jitter, seed), tokens, max_tokens)
        if len(packed) <= num_micro_batches:
            break
    return _split_more(packed, tokens, max_tokens, num_micro_batches - len(packed), world_size)


def flatten(micro_batches: MicroBatches) -> tuple[IntArray, IntArray]:
    """Return all rows, int64 [rows], and where each micro-batch begins among them, int64 [micro-batches + 1]."""
    rows = np.array(list(chain.from_iterable(micro_batches)), dtype=np.int64)
    return rows, np.cumsum([0, *map(len, micro_batches)])


def sum_rows(micro_batches: MicroBatches, of_row: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the sum of numbers [rows] over the rows of each micro-batch, numbers [micro-batches]."""
    rows, offsets = flatten(micro_batches)
    total: npt.NDArray[Any] = np.add.reduceat(of_row[rows], offsets[:-1])
    return total


def _longest_first(rows: IntArray, tokens: IntArray) -> IntArray:
    return rows[np.argsort(-tokens[rows], kind="stable")]


def _roughly_longest_first(tokens: IntArray, jitter: float, seed: int) -> IntArray:
    """Return the rows sorted by lengths that are reduced by up to `jitter`; equal lengths come in random order."""
    rows = random_order(len(tokens), seed, "rows that meet")  # the purpose is part of every plan's random numbers
    chance = np.arange(len(tokens)) / len(tokens)
    return rows[np.argsort(-tokens[rows] * (1 - jitter * chance), kind="stable")]


def _best_fit(rows: IntArray, tokens: IntArray, max_tokens: int) -> MicroBatches:
    """Place row after row in the micro-batch with the least room that holds it."""
    grain = -(-max_tokens // _GRAINS)
    lengths = tokens[rows]
    micro_batches: MicroBatches = []
    room_in: list[int] = []
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    for row, length, least in zip(rows.tolist(), lengths.tolist(), (-(-lengths // grain)).tolist(), strict=True):
        place = bisect_left(rooms, least)
        if place == len(rooms):
            number = len(micro_batches)
            micro_batches.append([])
            room_in.append(max_tokens)
        else:
            number = with_room[rooms[place]].pop()
            if not with_room[rooms[place]]:
                del with_room[rooms[place]], rooms[place]
        micro_batches[number].append(row)
        room_in[number] -= length
        room = room_in[number] // grain
        if room in with_room:
            with_room[room].append(number)
        elif room:
            with_room[room] = [number]
            insort(rooms, room)
    return micro_batches


def _split_more(
    micro_batches: MicroBatches, tokens: IntArray, max_tokens: int, more: int, world_size: int
) -> MicroBatches:
    """Return the same rows in `more` additional micro-batches, or in as many, the last of which are then evened out.

    The micro-batches with the shortest rows are emptied, and their rows dealt anew over those and the additional ones,
    the longest first. Enough of them take part that each gives up little, that they make whole rounds, and that the
    shortest rows do not always meet each other.
    """
    by_squares = np.argsort(sum_rows(micro_batches, tokens.astype(np.int64) ** 2), kind="stable")
    refilled = -(-max(_REFILLED_PER_ADDED * max(more, 1), _REFILLED_ROUNDS * world_size) // world_size) * world_size
    emptied = min(refilled - more, len(micro_batches))
    rows, _ = flatten([micro_batches[number] for number in by_squares[:emptied].tolist()])
    if len(rows) >= emptied + more:
        dealt = _deal_evenly(_longest_first(rows, tokens), tokens, emptied + more)
        if sum_rows(dealt, tokens).max() <= max_tokens:
            return [micro_batches[number] for number in by_squares[emptied:].tolist()] + dealt
    return _split_fullest(micro_batches, tokens, more)


def _deal_evenly(rows: IntArray, tokens: IntArray, num_micro_batches: int) -> MicroBatches:
    """Give row after row to the micro-batch with the fewest tokens; at least as many rows as micro-batches."""
    dealt: MicroBatches = [[] for _ in range(num_micro_batches)]
    heap = [(0, number) for number in range(num_micro_batches)]
    for row, length in zip(rows.tolist(), tokens[rows].tolist(), strict=True):
        least, number = heap[0]
        dealt[number].append(row)
        heapq.heapreplace(heap, (least + length, number))
    return dealt


def _split_fullest(micro_batches: MicroBatches, tokens: IntArray, more: int) -> MicroBatches:
    """Split the micro-batch with the most tokens, among those with two rows or more, `more` times."""
    split = list(micro_batches)
    total = sum_rows(micro_batches, tokens).tolist()
    fullest = [(-total[number], number) for number, rows in enumerate(micro_batches) if len(rows) > 1]
    heapq.heapify(fullest)
    for _ in range(more):
        _, number = heapq.heappop(fullest)
        split[number], other = _deal_evenly(_longest_first(np.array(split[number]), tokens), tokens, 2)
        split.append(other)
        for place, half in ((number, split[number]), (len(split) - 1, other)):
            if len(half) > 1:
                heapq.heappush(fullest, (-int(tokens[half].sum()), place))
    return split
