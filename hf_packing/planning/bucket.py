"""Bucket packing (arXiv 2407.07495, Algorithm 1) on length counts.

Pack by pack: the smallest bucket that holds the longest document left takes the longest documents that fit, one after
the other. Where more than a share of the pack stays free, the shortest document left is cut to fill it, and what
remains of it goes back. As long as nothing is cut, the same pack can be made again until one of its lengths runs short,
so identical packs are made in bulk.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from hf_packing.planning.counts import LengthCounts
from hf_packing.planning.cuts import Cuts, make_cuts
from hf_packing.planning.overflow import check_pieces
from hf_packing.planning.patterns import Pattern, Patterns, patterns_from_list
from hf_packing.planning.remaining import Remaining

Pieces = tuple[int, ...]


class Given(NamedTuple):
    """The pieces that a document has given so far: some, and before them others. One more is cheap to add."""

    before: "Given | None"
    piece: int
    copies: int


def pieces_of(given: Given | None) -> Pieces:
    """In document order."""
    pieces: list[int] = []
    while given is not None:
        pieces += [given.piece] * given.copies
        given = given.before
    return tuple(reversed(pieces))


class Fragments:
    """What remains of documents that were cut: for each length, from which documents, and what they already gave."""

    def __init__(self) -> None:
        self.of_length: dict[int, list[tuple[int, int, Given | None]]] = {}

    def add(self, length: int, number: int, document_length: int, given: Given | None) -> None:
        """`number` fragments of this length, each from a document of document_length that gave these pieces."""
        self.of_length.setdefault(length, []).append((number, document_length, given))

    def number(self, length: int) -> int:
        return sum(number for number, _, _ in self.of_length.get(length, ()))

    def cut(self, length: int, room: int, whole: dict[int, int]) -> None:
        """Cut `room` tokens off something of this length: off a fragment if there is one, or else a whole document."""
        if length in self.of_length:
            number, document_length, given = self.of_length[length].pop()
            if number > 1:
                self.add(length, number - 1, document_length, given)
            elif not self.of_length[length]:
                del self.of_length[length]
        else:
            document_length, given = length, None
            whole[length] -= 1
        self.add(length - room, 1, document_length, Given(given, room, 1))

    def groups(self) -> list[tuple[int, int, Pieces]]:
        """(document length, documents, pieces) of all documents that were cut, each way of cutting once."""
        number: dict[tuple[int, Pieces], int] = {}
        for length, fragments in self.of_length.items():
            for documents, document_length, given in fragments:
                way = document_length, (*pieces_of(given), length)
                number[way] = number.get(way, 0) + documents
        return [(length, documents, pieces) for (length, pieces), documents in number.items()]


def bucket_packs(counts: LengthCounts, capacities: Sequence[int], padding_threshold: float) -> tuple[Patterns, Cuts]:
    """The packs of bucket packing.

    Args:
        counts: documents by length.
        capacities: tokens of the packs of each bucket, ascending.
        padding_threshold: share of a pack that may stay free before a document is cut to fill it.

    Returns:
        Patterns, and what the documents are cut into.
    """
    largest = capacities[-1]
    long = counts.length > largest
    check_pieces(float(counts.documents[long].astype(float) @ (counts.length[long] // largest)), largest)
    patterns: list[Pattern] = []
    fragments = Fragments()
    whole: dict[int, int] = {}
    groups: list[tuple[int, int, Pieces]] = []
    for length, documents in zip(counts.length.tolist(), counts.documents.tolist(), strict=True):
        if length <= largest:
            whole[length] = documents
            continue
        full, rest = divmod(length, largest)
        patterns.append(Pattern(documents * full, largest, [(largest, 1)]))
        if rest:
            fragments.add(rest, documents, length, Given(None, largest, full))
        else:
            groups.append((length, documents, (largest,) * full))
    empty = whole.pop(0, 0)
    if empty:
        groups.append((0, empty, ()))
    left = dict(whole)
    for length in fragments.of_length:
        left[length] = left.get(length, 0) + fragments.number(length)
    remaining = Remaining(left)
    while remaining.lengths:
        capacity = capacities[bisect_left(capacities, remaining.longest(largest))]
        copies, room = remaining.fill(capacity)
        too_empty = room / capacity > padding_threshold
        packs = 1 if too_empty else remaining.packs_alike(copies)
        for length, number in copies:
            remaining.take(length, packs * number)
        if too_empty and remaining.lengths:
            length = remaining.shortest()
            remaining.take(length, 1)
            remaining.add(length - room)
            fragments.cut(length, room, whole)
            copies = merged(copies, room)
        patterns.append(Pattern(packs, capacity, copies))
    groups += [(length, documents, (length,)) for length, documents in whole.items() if documents]
    groups += fragments.groups()
    groups.sort(key=lambda group: (group[0], len(group[2]), group[2]))
    return patterns_from_list(patterns), make_cuts(groups)


def merged(copies: list[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """With one more segment of a length."""
    number = dict(copies)
    number[length] = number.get(length, 0) + 1
    return list(number.items())
