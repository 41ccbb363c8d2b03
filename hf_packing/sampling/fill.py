"""Put rows into a given number of micro-batches of at most max_tokens tokens, with equal work on all ranks.

Rows are placed by best fit, in an order that is roughly longest first. The order is only rough, so that rows
are grouped differently from epoch to epoch. The shortest rows still come last and fill the gaps, so the rough order
packs almost as well as the exact order.

In a round, every rank runs one micro-batch, and all ranks wait for the slowest rank. Micro-batches with equal numbers
of tokens can differ severalfold in attention cost. So micro-batches are sorted by cost, and neighbors in that order
form a round (`group_by_cost`). If a round is still uneven, the rows of its micro-batches are redistributed among these
micro-batches (`redistribute_rows`). Remaining differences are evened out over the rounds of one optimizer step
(`assign_ranks`). The rounds run in random order.
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

LINEAR_COST = 6 * 2048
"""The default time of linear layers for one token, in units of the time of attention for one pair of tokens.

The value holds for a model of width 2048.
"""

_LENGTH_JITTERS = (0.2, 0.03, 0.0)
"""Before rows are sorted by length, lengths are reduced at random by up to the first of these shares.

If the rows then do not fit, the next share is tried.
"""

_LOOSE = 0.95
"""If rows fill less than this share of the space in all micro-batches, rows are spread evenly instead of packed."""

_GRAINS = 2**16
"""Budgets above this number of tokens count free space in coarser units, so that few distinct values are searched."""

_REFILLED_PER_ADDED = 8
"""The number of micro-batches to refill for each additional micro-batch, so that no micro-batch loses many rows."""

_REFILLED_ROUNDS = 4
"""The smallest number of micro-batches per rank to refill."""

_TIE_BREAK = 1e-12
"""Scale of random numbers that break ties between ranks, so that no rank gets the costliest micro-batch every time."""

_COST_JITTER = 0.01
"""Attention cost is randomly reduced by up to this share, so that rounds are composed differently in every epoch."""

_EVEN = 0.99
"""A round is even, and stays unchanged, if its mean cost is at least this share of its largest cost."""


def fewest_micro_batches(tokens: IntArray, max_tokens: int) -> int:
    """Return the number of micro-batches that best-fit decreasing needs for all rows.

    This number of micro-batches is enough for `fill` in every epoch. If max_tokens is at most _GRAINS, the number is
    computed from the histogram of lengths, which is faster and gives the same result.

    Args:
        tokens: integers [rows], from 1 to max_tokens: the length of each row.
        max_tokens: the most tokens that a micro-batch may have.
    """
    if max_tokens <= _GRAINS:
        packs = OpenPacks(max_tokens, max_documents=None)
        fill_best_fit(packs, np.bincount(tokens))
        return packs.num_packs
    return len(_best_fit(_longest_first(np.arange(len(tokens)), tokens), tokens, max_tokens))


def fill(tokens: IntArray, max_tokens: int, num_micro_batches: int, world_size: int, seed: int) -> MicroBatches:
    """Put rows into micro-batches of at most max_tokens tokens, and return the rows of each micro-batch.

    Args:
        tokens: integers [rows], from 1 to max_tokens: the length of each row. There must be at least as many rows as
            micro-batches.
        max_tokens: the most tokens that a micro-batch may have.
        num_micro_batches: number of micro-batches to make, over all ranks; at least the number that
            `fewest_micro_batches` returns.
        world_size: number of ranks, which run one micro-batch each at the same time.
        seed: seed that decides which rows share a micro-batch.
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
    """Return the rows of all micro-batches as one array, with offsets.

    Returns:
        rows, int64 [rows], and offsets, int64 [micro-batches + 1]. Micro-batch i is rows[offsets[i]:offsets[i + 1]].
    """
    rows = np.array(list(chain.from_iterable(micro_batches)), dtype=np.int64)
    return rows, np.cumsum([0, *map(len, micro_batches)])


def sum_rows(micro_batches: MicroBatches, of_row: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the sum of a value over the rows of each micro-batch, as an array [micro-batches].

    Args:
        micro_batches: the rows of each micro-batch.
        of_row: numbers [rows]: the value of each row, such as its number of tokens.
    """
    rows, offsets = flatten(micro_batches)
    total: npt.NDArray[Any] = np.add.reduceat(of_row[rows], offsets[:-1])
    return total


def balance(cost: npt.NDArray[np.float64], world_size: int, accumulation: int, seed: int) -> IntArray:
    """Return the index of the micro-batch that each rank runs in each round, int64 [rounds, world_size].

    In a round, every rank runs one micro-batch. The micro-batches of a round have about equal cost.

    Args:
        cost: float64 [micro-batches]: the cost of each micro-batch; the number of micro-batches is a multiple of
            world_size.
        world_size: number of ranks.
        accumulation: number of rounds in one optimizer step.
        seed: seed that decides the order of rounds, and which micro-batches of equal cost run together.
    """
    return assign_ranks(cost, group_by_cost(cost, world_size, seed), accumulation, seed)


def jitter_attention(squared_lengths: npt.NDArray[Any], seed: int) -> npt.NDArray[np.float64]:
    """Return the attention cost of each micro-batch, reduced at random by up to 1 %, float64 [micro-batches].

    Args:
        squared_lengths: numbers [micro-batches]: the sum of squared segment lengths, which is the attention cost.
        seed: seed of the random reduction.
    """
    chance = random_order(len(squared_lengths), seed, "nearly") / len(squared_lengths)
    reduced: npt.NDArray[np.float64] = squared_lengths * (1 - _COST_JITTER * chance)
    return reduced


def group_by_cost(cost: npt.NDArray[np.float64], world_size: int, seed: int) -> IntArray:
    """Return the indices of the micro-batches in each round, int64 [rounds, world_size].

    The micro-batches of a round have similar cost. The order of rounds is random. The arguments are those of `balance`.
    """
    chance = random_order(len(cost), seed, "equal costs")
    ascending = chance[np.argsort(cost[chance], kind="stable")].reshape(-1, world_size)
    return ascending[random_order(len(ascending), seed, "order of steps")]


def assign_ranks(cost: npt.NDArray[np.float64], rounds: IntArray, accumulation: int, seed: int) -> IntArray:
    """Assign the micro-batches of each round to ranks. Return indices of micro-batches, int64 [rounds, world_size].

    Column r of the result belongs to rank r. The costliest micro-batch of a round goes to the rank with the least work
    so far in the optimizer step.

    Args:
        cost: float64 [micro-batches]: the cost of each micro-batch.
        rounds: int64 [rounds, world_size]: indices of the micro-batches that run at the same time, in any order.
        accumulation: number of rounds in one optimizer step.
        seed: seed that decides between ranks with equal work.
    """
    world_size = rounds.shape[1]
    ascending = np.take_along_axis(rounds, np.argsort(cost[rounds], axis=1, kind="stable"), axis=1)
    optimizer_steps = -(-len(rounds) // accumulation)
    worked = random_order(optimizer_steps * world_size, seed, "order of ranks").reshape(-1, world_size) * _TIE_BREAK
    assigned = np.empty_like(rounds)
    for turn in range(min(accumulation, len(rounds))):
        costliest_first = ascending[turn::accumulation, ::-1]
        step = np.arange(len(costliest_first))[:, None]
        least_worked = np.argsort(worked[: len(costliest_first)], axis=1, kind="stable")
        assigned[turn::accumulation][step, least_worked] = costliest_first
        worked[step, least_worked] += cost[costliest_first]
    return assigned


def redistribute_rows(
    micro_batches: MicroBatches,
    rounds: IntArray,
    cost: npt.NDArray[np.float64],
    tokens: IntArray,
    max_tokens: int,
) -> MicroBatches:
    """Redistribute the rows of every uneven round among the round's micro-batches, and return all micro-batches.

    A round stays unchanged if redistribution would not reduce the largest cost of its micro-batches.

    Args:
        micro_batches: the rows of each micro-batch.
        rounds: int64 [rounds, world_size]: indices of the micro-batches that run at the same time.
        cost: float64 [rows]: the cost of each row.
        tokens: integers [rows]: the length of each row.
        max_tokens: the most tokens that a micro-batch may have.
    """
    evened = list(micro_batches)
    costs = sum_rows(micro_batches, cost)[rounds]
    for number in np.flatnonzero(costs.mean(axis=1) < _EVEN * costs.max(axis=1)).tolist():
        places, largest = rounds[number].tolist(), costs[number].max()
        rows, _ = flatten([micro_batches[place] for place in places])
        if len(rows) == len(places) or cost[rows].max() >= largest:
            continue
        dealt = _deal_by_cost(rows, cost, tokens, max_tokens, len(places))
        if dealt is not None and max(cost[of_rank].sum() for of_rank in dealt) < largest:
            for place, of_rank in zip(places, dealt, strict=True):
                evened[place] = of_rank
    return evened


def _longest_first(rows: IntArray, tokens: IntArray) -> IntArray:
    return rows[np.argsort(-tokens[rows], kind="stable")]


def _roughly_longest_first(tokens: IntArray, jitter: float, seed: int) -> IntArray:
    """Return all row numbers, sorted by randomly reduced lengths, longest row first.

    Args:
        tokens: integers [rows]: the length of each row.
        jitter: the largest share by which a length is reduced, from 0 to 1.
        seed: seed of the random reduction.
    """
    rows = random_order(len(tokens), seed, "rows that meet")  # never change this string: it is part of the seed
    chance = np.arange(len(tokens)) / len(tokens)
    return rows[np.argsort(-tokens[rows] * (1 - jitter * chance), kind="stable")]


def _best_fit(rows: IntArray, tokens: IntArray, max_tokens: int) -> MicroBatches:
    """Place each row in turn in the fullest micro-batch with enough space, or else in a new micro-batch."""
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
    """Spread the rows over `more` additional micro-batches, and return all micro-batches.

    The micro-batches with the smallest sums of squared row lengths are emptied, and their rows are dealt out again,
    longest row first, to the emptied and the additional micro-batches. If these rows are too few or do not fit, the
    fullest micro-batches are split instead. If `more` is 0, dealing the rows again only makes micro-batches more even.

    Several micro-batches are emptied for each additional one, so that each has only a few rows fewer than before, and
    so that the shortest rows do not always share a micro-batch. The number of refilled micro-batches is a multiple of
    world_size, so that they can form whole rounds, in which every rank runs one micro-batch.
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
    """Place each row in turn in the micro-batch with the fewest tokens so far, and return all micro-batches.

    There must be at least as many rows as micro-batches. Otherwise some micro-batches would stay empty.
    """
    dealt: MicroBatches = [[] for _ in range(num_micro_batches)]
    heap = [(0, number) for number in range(num_micro_batches)]
    for row, length in zip(rows.tolist(), tokens[rows].tolist(), strict=True):
        least, number = heap[0]
        dealt[number].append(row)
        heapq.heapreplace(heap, (least + length, number))
    return dealt


def _split_fullest(micro_batches: MicroBatches, tokens: IntArray, more: int) -> MicroBatches:
    """Repeat `more` times: split one micro-batch in two. Return all micro-batches.

    The micro-batch to split is always the one with the most tokens among all micro-batches with two or more rows.
    """
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


def _deal_by_cost(
    rows: IntArray, cost: npt.NDArray[np.float64], tokens: IntArray, max_tokens: int, num_micro_batches: int
) -> MicroBatches | None:
    """Place rows, costliest first, each in the micro-batch that has the least cost so far among those with space.

    There must be at least as many rows as micro-batches. Otherwise some micro-batches would stay empty.

    Returns:
        The rows of each micro-batch, or None if a row fits in no micro-batch.
    """
    dealt: MicroBatches = [[] for _ in range(num_micro_batches)]
    room = [max_tokens] * num_micro_batches
    cheapest = [(0.0, number) for number in range(num_micro_batches)]
    order = rows[np.argsort(-cost[rows], kind="stable")]
    for row, more, length in zip(order.tolist(), cost[order].tolist(), tokens[order].tolist(), strict=True):
        too_full = []
        while cheapest and room[cheapest[0][1]] < length:
            too_full.append(heapq.heappop(cheapest))
        if not cheapest:
            return None
        total, number = cheapest[0]
        dealt[number].append(row)
        room[number] -= length
        heapq.heapreplace(cheapest, (total + more, number))
        for micro_batch in too_full:
            heapq.heappush(cheapest, micro_batch)
    return dealt
