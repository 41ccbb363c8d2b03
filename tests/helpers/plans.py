"""What a plan holds, as lists, and packs that are made one document after the other, or by trying everything."""

from collections.abc import Callable, Iterable
from itertools import pairwise


def segments_of(plan):
    """The segments of all packs in order: (document, start, length)."""
    columns = plan.segment_document, plan.segment_start, plan.segment_length
    return list(zip(*(column.tolist() for column in columns), strict=True))


def packs_of(plan):
    segments = segments_of(plan)
    return [segments[first:end] for first, end in pairwise(plan.pack_offsets.tolist())]


Packs = list[list[int]]


def best_fit(lengths: list[int], capacity: int) -> Packs:
    """Each document, the longest first, goes into the fullest pack that holds it."""
    return _place(lengths, capacity, lambda fitting: max(fitting, key=sum, default=None))


def first_fit(lengths: list[int], capacity: int) -> Packs:
    """Each document, the longest first, goes into the first pack that holds it."""
    return _place(lengths, capacity, lambda fitting: next(iter(fitting), None))


def _place(lengths: list[int], capacity: int, choose: Callable[[Iterable[list[int]]], list[int] | None]) -> Packs:
    packs: Packs = []
    for length in sorted(lengths, reverse=True):
        pack = choose(pack for pack in packs if sum(pack) + length <= capacity)
        if pack is None:
            packs.append(pack := [])
        pack.append(length)
    return packs


def fewest_packs(lengths: list[int], capacity: int, limit: int | None = None) -> int:
    best = len(lengths)
    most = limit or len(lengths)

    def place(remaining: list[int], packs: list[tuple[int, int]]) -> None:
        nonlocal best
        if len(packs) >= best and remaining:
            return
        if not remaining:
            best = min(best, len(packs))
            return
        length, *rest = remaining
        for i, (room, documents) in enumerate(packs):
            if room >= length and documents < most and packs[i] not in packs[:i]:
                place(rest, [*packs[:i], (room - length, documents + 1), *packs[i + 1 :]])
        place(rest, [*packs, (capacity - length, 1)])

    place(sorted(lengths, reverse=True), [])
    return best
