"""Put rows into a given number of micro-batches, with at most max_tokens tokens each, and equal work on all ranks.

Rows are placed by best fit, in an order that is roughly longest first. The order is only rough, so that rows
are grouped differently from epoch to epoch. The shortest rows still come last and fill the gaps, so the rough order
packs almost as well as the exact order. If documents or patches are limited, too, best fit would leave the shortest
rows for micro-batches of their own, which they cannot fill. So rows are spread instead: each is placed in the
micro-batch with the fewest tokens.

All ranks wait for the slowest one. Micro-batches with equal numbers of tokens can differ severalfold in attention cost.
So they are sorted by cost, and neighbors in that order form an optimizer step (`group_by_cost`). If a step is still
uneven, its rows are redistributed (`redistribute_rows`). Up to here, only the number of micro-batches in a step counts,
not the number of ranks. Then neighbors in a step form rounds, in which every rank runs one micro-batch
(`order_in_steps`), and remaining differences are evened out over the rounds of the step (`assign_ranks`).
"""

import heapq
from bisect import bisect_left, insort
from itertools import chain, islice
from operator import ge, sub

import numpy as np

from hf_packing.planning.best_fit import OpenPacks, fill_best_fit
from hf_packing.planning.lengths import Array, FloatArray, IntArray, offsets_of, total_of
from hf_packing.planning.permutation import random_order

MicroBatches = list[list[int]]
"""The rows of each micro-batch."""

Limits = list[tuple[IntArray, int]]
"""What is limited: tokens first, then others, such as documents or patches of pictures. Each is a pair of what each row
has of it, integers [rows], and the most that a micro-batch may have. No row has more, and no row is without tokens."""

_LENGTH_JITTERS = (0.2, 0.03, 0.0)
"""Before rows are sorted by length, lengths are reduced at random by up to the first of these shares. If the rows then
do not fit, the next share is tried."""

_LOOSE = 0.95
"""If rows fill less than this share of the space in all micro-batches, rows are spread evenly instead of packed."""

_FIRST_TRIED = 1000
"""If rows do not fit into the smallest possible number of micro-batches, the first larger number that is tried is
larger by this part."""

_REFILLED_PER_ADDED = 8
"""The number of micro-batches to refill for each additional micro-batch, so that no micro-batch loses many rows."""

_REFILLED_STEPS = 4
"""The smallest number of optimizer steps whose micro-batches are refilled."""

_MOST_REDISTRIBUTED = 512
"""The largest number of micro-batches among which rows are redistributed, since the time grows with its square. Of a
larger optimizer step, neighbors in the order of cost are taken together."""

_TIE_BREAK = 1e-12
"""Scale of random numbers that break ties between ranks, so that no rank gets the costliest micro-batch every time."""

_COST_JITTER = 0.01
"""Attention cost is randomly reduced by up to this share, so that steps are composed differently in every epoch."""

_EVEN = 0.99
"""A step is even, and stays unchanged, if its mean cost is at least this share of its largest cost."""

GRAINS = 2**16
"""Budgets above this number of tokens count free space in coarser units, so that few distinct values are searched."""

_TRIES = 64
"""If more than tokens is limited, the number of micro-batches to look at before a new one is opened."""


def fewest_micro_batches(limits: Limits) -> int:
    """Return a number of micro-batches that is enough for `fill` in every epoch, and almost the smallest.

    If only tokens are limited, the number is that of best-fit decreasing. For at most GRAINS tokens, it is computed
    from the histogram of lengths, which is faster and gives the same result.
    """
    tokens, max_tokens = limits[0]
    if not len(tokens):
        return 0
    if len(limits) > 1:
        return len(_in_few_micro_batches(limits))
    if max_tokens > GRAINS:
        return len(best_fit(_longest_first(np.arange(len(tokens)), limits), limits))
    packs = OpenPacks(max_tokens, max_documents=None)
    fill_best_fit(packs, np.bincount(tokens))
    return packs.num_packs


def fill(limits: Limits, num_micro_batches: int, slots: int, seed: int) -> MicroBatches:
    """Put rows into micro-batches that keep to the limits, and return the rows of each micro-batch.

    Args:
        limits: the most that a micro-batch may have, and what each row has. There must be at least as many rows as
            micro-batches.
        num_micro_batches: number of micro-batches to make, over all ranks; at least the number that
            `fewest_micro_batches` returns.
        slots: number of micro-batches in an optimizer step.
        seed: seed that decides which rows share a micro-batch.
    """
    tokens, max_tokens = limits[0]
    is_loose = tokens.sum() < _LOOSE * max_tokens * num_micro_batches
    for jitter in _LENGTH_JITTERS if len(limits) > 1 else _LENGTH_JITTERS[: int(is_loose)]:
        if spread := _spread(_roughly_longest_first(limits, jitter, seed), limits, num_micro_batches):
            return spread
    for jitter in _LENGTH_JITTERS:
        packed = best_fit(_roughly_longest_first(limits, jitter, seed), limits)
        if len(packed) <= num_micro_batches:
            break
    else:
        packed = _in_few_micro_batches(limits)
    return _split_more(packed, limits, num_micro_batches - len(packed), slots)


def jitter_attention(squared_lengths: IntArray, seed: int) -> FloatArray:
    """Return the attention cost of each micro-batch, reduced at random by up to 1 %, float64 [micro-batches].

    Args:
        squared_lengths: numbers [micro-batches]: the sum of squared segment lengths, which is the attention cost.
        seed: seed of the random reduction.
    """
    chance = random_order(len(squared_lengths), seed, "nearly") / len(squared_lengths)
    reduced: FloatArray = squared_lengths * (1 - _COST_JITTER * chance)
    return reduced


def group_by_cost(cost: FloatArray, group: int, seed: int) -> IntArray:
    """Return the indices of the micro-batches in each group, int64 [groups, group].

    The micro-batches of a group have similar cost. The order of groups is random. If the number of micro-batches is not
    a multiple of `group`, the last group has fewer micro-batches, of random cost, and then indices from len(cost) on.

    Args:
        cost: float64 [micro-batches]: the cost of each micro-batch.
        group: number of micro-batches in a group: those of an optimizer step, or those that run at the same time.
        seed: seed that decides the order of groups, and which micro-batches of equal cost form a group.
    """
    chance = random_order(len(cost), seed, "equal costs")
    ascending = chance[np.argsort(cost[chance], kind="stable")]
    full, in_last = divmod(len(cost), group)
    begin = int(random_order(full + 1, seed, "last step")[0]) * group
    last = slice(begin, begin + in_last)
    missing = np.arange(len(cost), len(cost) + -len(cost) % group)
    groups = np.concatenate([np.delete(ascending, last), ascending[last], missing]).reshape(-1, group)
    groups[:full] = groups[random_order(full, seed, "order of steps")]
    return groups


def order_in_steps(steps: IntArray, cost: FloatArray, filled: int, world_size: int, seed: int) -> IntArray:
    """Return indices of micro-batches in the order in which they run, by round and then by rank, int64 [n].

    In a round, every rank runs one micro-batch. The micro-batches of a round have similar cost, and the costliest round
    of a step comes first. Copies run in the last round; rounds that only have copies are left out.

    Args:
        steps: int64 [steps, slots]: indices of the micro-batches in each optimizer step, from `group_by_cost`.
        cost: float64 [micro-batches]: the cost of each micro-batch.
        filled: number of micro-batches that are not copies; micro-batches with higher indices are copies.
        world_size: number of ranks, which divides the number of slots.
        seed: seed that decides between ranks with equal work.
    """
    copies_first = np.take_along_axis(steps, np.lexsort((cost[steps], steps < filled)), axis=1)
    rounds = copies_first.reshape(len(steps), -1, world_size)[:, ::-1]
    with_rows = rounds.reshape(-1, world_size)[: -(-filled // world_size)]
    return assign_ranks(cost, with_rows, rounds.shape[1], seed).ravel()


def assign_ranks(cost: FloatArray, rounds: IntArray, accumulation: int, seed: int) -> IntArray:
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
    costliest_first = np.take_along_axis(rounds, np.argsort(cost[rounds], axis=1, kind="stable")[:, ::-1], axis=1)
    steps = -(-len(rounds) // accumulation)
    worked = random_order(steps * world_size, seed, "order of ranks").reshape(-1, world_size) * _TIE_BREAK
    assigned = np.empty_like(rounds)
    for turn in range(min(accumulation, len(rounds))):
        of_turn = assigned[turn::accumulation]
        worked = worked[: len(of_turn)]  # the last step may have fewer rounds
        least_worked = np.argsort(worked, axis=1, kind="stable")
        np.put_along_axis(of_turn, least_worked, costliest_first[turn::accumulation], axis=1)
        worked += cost[of_turn]
    return assigned


def redistribute_rows(micro_batches: MicroBatches, steps: IntArray, cost: FloatArray, limits: Limits) -> MicroBatches:
    """Redistribute the rows of every uneven step among the step's micro-batches, and return all micro-batches.

    A step stays unchanged if redistribution would not reduce the largest cost of its micro-batches.

    Args:
        micro_batches: the rows of each micro-batch.
        steps: int64 [steps, slots]: indices of the micro-batches in each optimizer step.
        cost: float64 [rows]: the cost of each row.
        limits: the most that a micro-batch may have, and what each row has.
    """
    evened = list(micro_batches)
    before = sum_rows(micro_batches, cost)
    for neighbors in np.array_split(steps, -(-steps.shape[1] // _MOST_REDISTRIBUTED), axis=1):
        is_uneven = before[neighbors].mean(axis=1) < _EVEN * before[neighbors].max(axis=1)
        for places in neighbors[is_uneven].tolist():
            rows, _ = flatten([micro_batches[place] for place in places])
            largest = before[places].max()
            if cost[rows].max() < largest:
                costliest_first = rows[np.argsort(-cost[rows], kind="stable")]
                dealt = _deal(costliest_first, cost, limits, len(places))
                if dealt and max(cost[of_slot].sum() for of_slot in dealt) < largest:
                    for place, of_slot in zip(places, dealt, strict=True):
                        evened[place] = of_slot
    return evened


def _in_few_micro_batches(limits: Limits) -> MicroBatches:
    """Put all rows into few micro-batches, if not only tokens are limited. Their number does not depend on the order.

    Rows are spread over as many micro-batches as their tokens and the rest need at least. If rows do not fit, more
    micro-batches are tried, and after the second try, at most the number that best fit needs.
    """
    rows = _longest_first(np.arange(len(limits[0][0])), limits)
    least, more = max(-(-total_of(needed) // most) for needed, most in limits), 0
    packed: MicroBatches = []
    while not packed or least + more < len(packed):
        if spread := _spread(rows, limits, min(least + more, len(rows))):
            return spread
        if more and not packed:
            packed = best_fit(rows, limits)
        more = max(2 * more, least // _FIRST_TRIED, 1)
    return packed


def _longest_first(rows: IntArray, limits: Limits, reduced: IntArray | float = 1.0) -> IntArray:
    """Return the rows, longest first; among rows of equal length, rows with more documents, or else patches, first.

    Args:
        rows: int64 [sorted rows].
        limits: what each row has.
        reduced: numbers [sorted rows], by which the lengths are multiplied before they are compared.
    """
    tokens, *others = (-needed[rows] for needed, _ in limits)
    return rows[np.lexsort((*reversed(others), tokens * reduced))]


def _roughly_longest_first(limits: Limits, jitter: float, seed: int) -> IntArray:
    """Return all row numbers, longest row first, if lengths are reduced at random by up to the share `jitter`."""
    number = len(limits[0][0])
    rows = random_order(number, seed, "rows that meet")  # never change this string: it is part of the seed
    return _longest_first(rows, limits, 1 - jitter * (np.arange(number) / number))


def _split_more(micro_batches: MicroBatches, limits: Limits, more: int, slots: int) -> MicroBatches:
    """Spread the rows over `more` additional micro-batches, and return all micro-batches.

    The micro-batches with the smallest sums of squared row lengths are emptied, and their rows are spread again,
    longest row first, over the emptied and the additional micro-batches. If these rows are too few or do not fit, the
    fullest micro-batches are split instead. If `more` is 0, spreading rows again only makes micro-batches more even.

    Several micro-batches are emptied for each additional one, so that each has only a few rows fewer than before, and
    so that the shortest rows do not always share a micro-batch. The number of refilled micro-batches is a multiple of
    slots, so that they can form whole optimizer steps.
    """
    by_squares = np.argsort(sum_rows(micro_batches, limits[0][0].astype(np.int64) ** 2), kind="stable").tolist()
    refilled = -(-max(_REFILLED_PER_ADDED * max(more, 1), _REFILLED_STEPS * slots) // slots) * slots
    emptied = min(refilled - more, len(micro_batches))
    rows, _ = flatten([micro_batches[number] for number in by_squares[:emptied]])
    if len(rows) >= emptied + more and (spread := _spread(_longest_first(rows, limits), limits, emptied + more)):
        return [micro_batches[number] for number in by_squares[emptied:]] + spread
    return _split_fullest(micro_batches, limits, more)


def _split_fullest(micro_batches: MicroBatches, limits: Limits, more: int) -> MicroBatches:
    """Split the micro-batch with the most tokens of those with several rows, `more` times. Return all micro-batches."""
    tokens, _ = limits[0]
    split = list(micro_batches)
    fullest = [(-total, number) for number, total in enumerate(sum_rows(split, tokens).tolist())]
    heapq.heapify(fullest)
    while len(split) < len(micro_batches) + more:
        _, number = heapq.heappop(fullest)
        if len(split[number]) > 1:
            split[number], half = _spread(_longest_first(np.array(split[number]), limits), limits, 2)
            split.append(half)
            for place in (number, len(split) - 1):
                heapq.heappush(fullest, (-int(tokens[split[place]].sum()), place))
    return split


def _spread(rows: IntArray, limits: Limits, num_micro_batches: int) -> MicroBatches:
    """Place each row in turn in the micro-batch with the fewest tokens. Return an empty list if rows do not fit."""
    (tokens, max_tokens), *others = limits
    spread = _deal(rows, tokens, others, num_micro_batches)
    return spread if spread and sum_rows(spread, tokens).max() <= max_tokens else []


def _deal(rows: IntArray, cost: IntArray, within: Limits, num_micro_batches: int) -> MicroBatches:
    """Place each row in turn in the micro-batch that has the least cost so far among those with space for the row.

    There must be at least as many rows as micro-batches. Otherwise some micro-batches would stay empty.

    Args:
        rows: the rows to place, int64 [placed rows].
        cost: numbers [rows]: the cost of each row.
        within: the limits to keep to.
        num_micro_batches: number of micro-batches to make.

    Returns:
        The rows of each micro-batch, or an empty list if a row fits in no micro-batch.
    """
    dealt: MicroBatches = [[] for _ in range(num_micro_batches)]
    limited = [(needed[rows].tolist(), [most] * num_micro_batches) for needed, most in within]
    cheapest = [(0, number) for number in range(num_micro_batches)]
    for turn, (row, more) in enumerate(zip(rows.tolist(), cost[rows].tolist(), strict=True)):
        too_full = []
        while limited and cheapest and any(left[cheapest[0][1]] < needed[turn] for needed, left in limited):
            too_full.append(heapq.heappop(cheapest))
        if not cheapest:
            return []
        total, number = cheapest[0]
        dealt[number].append(row)
        for needed, left in limited:
            left[number] -= needed[turn]
        heapq.heapreplace(cheapest, (total + more, number))
        for micro_batch in too_full:
            heapq.heappush(cheapest, micro_batch)
    return dealt


def best_fit(rows: IntArray, limits: Limits) -> MicroBatches:
    """Place each row in turn in the fullest micro-batch with enough space, or else in a new micro-batch."""
    grain = -(-limits[0][1] // GRAINS)
    least = [int(needed.min()) for needed, _ in limits]
    micro_batches: MicroBatches = []
    left: list[list[int]] = []  # of each micro-batch, what is left of everything that is limited
    with_room: dict[int, list[int]] = {}  # the micro-batches with each amount of free space
    rooms: list[int] = []  # these amounts, ascending
    needs_of_rows = zip(*(needed[rows].tolist() for needed, _ in limits), strict=True)
    for row, needs in zip(rows.tolist(), needs_of_rows, strict=True):
        place, index = bisect_left(rooms, -(-needs[0] // grain)), -1
        if len(limits) > 1:
            place, index = _within_all(needs, left, rooms, with_room, place)
        if place == len(rooms):
            number = len(micro_batches)
            micro_batches.append([])
            left.append([most for _, most in limits])
        else:
            numbers = with_room[rooms[place]]
            number = numbers.pop(index)
            if not numbers:
                del with_room[rooms[place]], rooms[place]
        micro_batches[number].append(row)
        left[number] = list(map(sub, left[number], needs))
        if all(map(ge, left[number], least)):  # else no row fits any more
            room = left[number][0] // grain
            if room not in with_room:
                with_room[room] = []
                insort(rooms, room)
            with_room[room].append(number)
    return micro_batches


def _within_all(
    needs: tuple[int, ...], left: list[list[int]], rooms: list[int], with_room: dict[int, list[int]], first: int
) -> tuple[int, int]:
    """Find the fullest micro-batch with enough space for a row, and give up after _TRIES micro-batches.

    Args:
        needs: what the row has of everything that is limited.
        left: what is left of it in each micro-batch.
        rooms: amounts of free space, ascending, for which there are micro-batches.
        with_room: the micro-batches with each amount of free space.
        first: index in `rooms` of the least free space that is enough for the row's tokens.

    Returns:
        The index in `rooms`, and the index among the micro-batches with this space; (len(rooms), -1) if none is found.
    """
    places = (
        (place, index) for place in range(first, len(rooms)) for index in reversed(range(len(with_room[rooms[place]])))
    )
    for place, index in islice(places, _TRIES):  # of equal space, the latest first
        if all(map(ge, left[with_room[rooms[place]][index]], needs)):
            return place, index
    return len(rooms), -1


def flatten(micro_batches: MicroBatches) -> tuple[IntArray, IntArray]:
    """Return the rows of all micro-batches as one array, with offsets.

    Returns:
        rows, int64 [rows], and offsets, int64 [micro-batches + 1]. Micro-batch i is rows[offsets[i]:offsets[i + 1]].
    """
    rows = np.array(list(chain.from_iterable(micro_batches)), dtype=np.int64)
    return rows, offsets_of([*map(len, micro_batches)])


def sum_rows(micro_batches: MicroBatches, of_row: IntArray) -> IntArray:
    """Return the sum of a value over the rows of each micro-batch, as an array [micro-batches].

    Args:
        micro_batches: the rows of each micro-batch.
        of_row: numbers [rows]: the value of each row, such as its number of tokens.
    """
    rows, offsets = flatten(micro_batches)
    total: IntArray = np.add.reduceat(of_row[rows], offsets[:-1])
    return total


def mean_over_max(own: Array, work: Array) -> float:
    """Return the mean of `own` over ranks / the maximum of `work` over ranks, averaged over micro-batches.

    Args:
        own: numbers [num_micro_batches, ranks]: the work without that for copies.
        work: numbers [num_micro_batches, ranks]: the work.
    """
    return float((own.mean(axis=1) / work.max(axis=1)).mean())
