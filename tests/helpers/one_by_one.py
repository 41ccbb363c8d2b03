"""Best fit and first fit, one document after the other: the packs, as lists of lengths."""

from collections.abc import Callable, Iterable

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
