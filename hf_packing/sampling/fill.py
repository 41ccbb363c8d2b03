"""Rows -> exactly as many micro-batches as wanted, none over the budget, fresh for every seed.

Rows come nearly in the order of their lengths, the longest first, and each goes where it fits best. Nearly, so that
what shares a micro-batch is new in every epoch; the shortest still come last and fill the gaps, so that this costs next
to nothing against the exact order.
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

NEARLY = (0.2, 0.03, 0.0)
"""How far rows may be from the order of their lengths, as a share of their length: the first with which all fit."""
SHARED_BY, STEPS_TO_LEVEL = 8, 4
"""What is missing in one micro-batch is shared by so many, and by all of so many steps."""
LOOSE = 0.95
"""Micro-batches that are no fuller than this need no packing: rows are dealt to them evenly."""
GRAINS = 2**16
"""Rooms are told apart to this share of the budget, so that there are never too many of them to keep in order."""


Groups = list[list[int]]
"""The rows of each micro-batch."""


def fewest_micro_batches(tokens: IntArray, max_tokens: int) -> int:
    """Micro-batches that hold all rows in every epoch: those of best-fit decreasing.

    From the counts of lengths, which is quicker, wherever rooms are told apart exactly.

    Args:
        tokens: integers [rows], from 1 to max_tokens.
        max_tokens: the budget.
    """
    if max_tokens <= GRAINS:
        packs = OpenPacks(max_tokens, max_documents=None)
        fill_best_fit(packs, np.bincount(tokens))
        return packs.num_packs
    return len(best_fit(longest_first(np.arange(len(tokens)), tokens), tokens, max_tokens))


def fill(tokens: IntArray, max_tokens: int, micro_batches: int, together: int, seed: int) -> Groups:
    """Rows in micro-batches of at most max_tokens.

    Args:
        tokens: integers [rows], from 1 to max_tokens; at least as many rows as micro-batches.
        max_tokens: the budget.
        micro_batches: how many to make, at least `fewest_micro_batches`.
        together: how many run at the same time.
        seed: of the rows that meet.
    """
    if tokens.sum() < LOOSE * max_tokens * micro_batches:
        groups = deal_evenly(nearly_longest_first(tokens, NEARLY[0], seed), tokens, micro_batches)
        if sums(groups, tokens).max() <= max_tokens:
            return groups
    for nearly in NEARLY:
        groups = best_fit(nearly_longest_first(tokens, nearly, seed), tokens, max_tokens)
        if len(groups) <= micro_batches:
            break
    return divide(groups, tokens, max_tokens, micro_batches - len(groups), together)


def flat(groups: Groups) -> tuple[IntArray, IntArray]:
    """int64 [rows], group by group; int64 [groups + 1], where each begins."""
    return np.array(list(chain.from_iterable(groups)), dtype=np.int64), np.cumsum([0, *map(len, groups)])


def sums(groups: Groups, of_row: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Numbers [groups]: of numbers [rows]."""
    rows, offsets = flat(groups)
    total: npt.NDArray[Any] = np.add.reduceat(of_row[rows], offsets[:-1])
    return total


def longest_first(rows: IntArray, tokens: IntArray) -> IntArray:
    return rows[np.argsort(-tokens[rows], kind="stable")]


def nearly_longest_first(tokens: IntArray, nearly: float, seed: int) -> IntArray:
    """Rows by length, each taken for up to so much shorter; among equals the order is random."""
    rows = random_order(len(tokens), seed, "rows that meet")
    chance = np.arange(len(tokens)) / len(tokens)
    return rows[np.argsort(-tokens[rows] * (1 - nearly * chance), kind="stable")]


def best_fit(rows: IntArray, tokens: IntArray, max_tokens: int) -> Groups:
    """Row after row, each to the micro-batch with the least room that holds it."""
    grain = -(-max_tokens // GRAINS)
    lengths = tokens[rows]
    filled: Groups = []
    room_in: list[int] = []
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    for row, length, least in zip(rows.tolist(), lengths.tolist(), (-(-lengths // grain)).tolist(), strict=True):
        place = bisect_left(rooms, least)
        if place == len(rooms):
            number = len(filled)
            filled.append([])
            room_in.append(max_tokens)
        else:
            number = with_room[rooms[place]].pop()
            if not with_room[rooms[place]]:
                del with_room[rooms[place]], rooms[place]
        filled[number].append(row)
        room_in[number] -= length
        room = room_in[number] // grain
        if room in with_room:
            with_room[room].append(number)
        elif room:
            with_room[room] = [number]
            insort(rooms, room)
    return filled


def divide(groups: Groups, tokens: IntArray, max_tokens: int, more: int, together: int) -> Groups:
    """So many more micro-batches from the same rows, or as many.

    Those with the shortest rows give all their rows up, which are dealt again, the longest first, each to the
    micro-batch with the fewest tokens. So many take part that each loses little, that they fill whole steps, and that
    the shortest rows of all are not always among themselves.
    """
    shortest = np.argsort(sums(groups, tokens.astype(np.int64) ** 2), kind="stable")
    wanted = -(-max(SHARED_BY * max(more, 1), STEPS_TO_LEVEL * together) // together) * together
    given_up = min(wanted - more, len(groups))
    rows, _ = flat([groups[number] for number in shortest[:given_up].tolist()])
    if len(rows) >= given_up + more:
        dealt = deal_evenly(longest_first(rows, tokens), tokens, given_up + more)
        if sums(dealt, tokens).max() <= max_tokens:
            return [groups[number] for number in shortest[given_up:].tolist()] + dealt
    return divide_fullest(groups, tokens, more)


def deal_evenly(rows: IntArray, tokens: IntArray, micro_batches: int) -> Groups:
    """Row after row, each to the micro-batch with the fewest tokens; at least as many rows as micro-batches."""
    dealt: Groups = [[] for _ in range(micro_batches)]
    heap = [(0, number) for number in range(micro_batches)]
    for row, length in zip(rows.tolist(), tokens[rows].tolist(), strict=True):
        least, number = heap[0]
        dealt[number].append(row)
        heapq.heapreplace(heap, (least + length, number))
    return dealt


def divide_fullest(groups: Groups, tokens: IntArray, more: int) -> Groups:
    """Again and again, the micro-batch with the most tokens among those with two rows or more becomes two."""
    divided = list(groups)
    tokens_of = sums(groups, tokens).tolist()
    fullest = [(-tokens_of[number], number) for number, group in enumerate(groups) if len(group) > 1]
    heapq.heapify(fullest)
    for _ in range(more):
        _, number = heapq.heappop(fullest)
        halves = deal_evenly(longest_first(np.array(divided[number]), tokens), tokens, 2)
        divided[number], other = halves
        divided.append(other)
        for place, half in ((number, divided[number]), (len(divided) - 1, other)):
            if len(half) > 1:
                heapq.heappush(fullest, (-int(tokens[half].sum()), place))
    return divided
