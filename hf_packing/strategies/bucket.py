"""Strategies with packs of several capacities: Bucket, and the baseline BucketByLength."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hf_packing.errors import PackingError
from hf_packing.planning.lengths import (
    INT32_MAX,
    IntArray,
    LengthCounts,
    check_num_pieces,
    check_whole_number,
    is_real,
)
from hf_packing.planning.open_packs import Remaining
from hf_packing.planning.pattern_table import PatternTable
from hf_packing.planning.patterns import Cuts, Pattern, Patterns, cuts_from_list, patterns_from_list
from hf_packing.planning.plan import PackingPlan
from hf_packing.strategies.base import CountingStrategy, Strategy, check_optional_seed, register_strategy
from hf_packing.strategies.sequential import concatenate_and_cut

_BUCKET_LENGTHS = (2048, 4096, 8192, 16384)
"""Default capacities, from arXiv 2407.07495."""


@register_strategy
@dataclass(frozen=True)
class Bucket(CountingStrategy):
    """Fill packs of several capacities (buckets) with the longest documents first.

    Each pack has the smallest capacity that holds the longest remaining document, and takes the longest documents that
    fit. If more than `padding_threshold` of a pack stays free, the shortest remaining document is cut to fill the pack;
    among documents of equal length, the remainder of a cut document is cut before a whole document (Algorithm 1 of
    "Bucket pre-training is all you need", arXiv 2407.07495). A document longer than the largest bucket is cut into full
    packs and a remainder. No token is dropped.

    Args:
        bucket_lengths: capacities in tokens, ascending, each at least 1.
        padding_threshold: share of a pack that may stay free, from 0 to 1. With 1, only documents longer than the
            largest bucket are cut.
        seed: seed for shuffling the packs, the segments in each pack, and documents of equal length; None for no
            shuffling. Shuffling documents of equal length also chooses which of these documents are cut.

    Raises:
        PackingError: `bucket_lengths` is empty, unsorted or has repeats, or an argument does not match its description
            above.

    Example:
        >>> import hf_packing as hfp
        >>> batch = {"input_ids": [[1, 2, 3], [4, 5], [6]]}
        >>> packed = hfp.Bucket((2, 4), seed=None)(batch)
        >>> packed["input_ids"], packed["bucket"]
        ([[1, 2, 3, 6], [4, 5]], [4, 2])
    """

    has_buckets: ClassVar[bool] = True

    bucket_lengths: Sequence[int] = _BUCKET_LENGTHS
    padding_threshold: float = field(default=0.01, kw_only=True)
    seed: int | None = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        self.set_fields(
            bucket_lengths=_check_bucket_lengths(self.bucket_lengths),
            padding_threshold=_check_share("padding_threshold", self.padding_threshold),
            seed=check_optional_seed(self.seed),
        )

    def plan_counts(self, counts: LengthCounts) -> PatternTable:
        patterns, cuts = _bucket_packs(counts, self.bucket_lengths, self.padding_threshold)
        return PatternTable(patterns=patterns, cuts=cuts, seed=self.seed)


@register_strategy
@dataclass(frozen=True)
class BucketByLength(Strategy):
    """Put each document in the smallest bucket that holds the document, then concatenate and cut each bucket.

    This strategy is the multi-bucket baseline of arXiv 2407.07495. Documents longer than the largest bucket go to the
    largest bucket.

    Args:
        bucket_lengths: capacities in tokens, ascending, each at least 1.
        seed: seed for shuffling the packs and the segments in each pack; None for no shuffling. Without shuffling,
            packs are sorted by capacity, and documents keep their order.

    Raises:
        PackingError: `bucket_lengths` is empty, unsorted or has repeats, or an argument does not match its description
            above.

    Example:
        >>> import hf_packing as hfp
        >>> packed = hfp.BucketByLength((2, 4), seed=None)({"input_ids": [[1, 2, 3], [4, 5], [6], [7, 8, 9]]})
        >>> packed["input_ids"], packed["bucket"]
        ([[4, 5], [6], [1, 2, 3, 7], [8, 9]], [2, 2, 4, 4])
    """

    has_buckets: ClassVar[bool] = True

    bucket_lengths: Sequence[int] = _BUCKET_LENGTHS
    seed: int | None = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        self.set_fields(
            bucket_lengths=_check_bucket_lengths(self.bucket_lengths),
            seed=check_optional_seed(self.seed),
        )

    def plan_lengths(self, lengths: IntArray) -> PackingPlan:
        return concatenate_and_cut(lengths, tuple(self.bucket_lengths), self.seed)


def _check_bucket_lengths(bucket_lengths: Any) -> tuple[int, ...]:
    """Return the bucket lengths as a tuple of ints, or raise PackingError if the bucket lengths are invalid."""
    if isinstance(bucket_lengths, (str, bytes)) or not isinstance(bucket_lengths, (Sequence, np.ndarray)):
        raise PackingError(f"bucket_lengths: expected a sequence of integers, got {bucket_lengths!r}")
    if not len(bucket_lengths):
        raise PackingError("bucket_lengths: expected at least one length, got none")
    lengths = tuple(check_whole_number("bucket_lengths", length, maximum=INT32_MAX) for length in bucket_lengths)
    for shorter, longer in pairwise(lengths):
        if shorter >= longer:
            raise PackingError(
                f"bucket_lengths: expected ascending lengths without repeats, got {longer} after {shorter}"
            )
    return lengths


def _check_share(name: str, value: Any) -> float:
    """Return `value` as a float, or raise PackingError if `value` is not a number from 0 to 1."""
    if not is_real(value) or not 0 <= value <= 1:
        raise PackingError(f"{name}: expected a number from 0 to 1, got {value!r}")
    return float(value)


_PieceLengths = tuple[int, ...]


class _Given(NamedTuple):
    """The pieces that were cut off a document so far: the pieces in `before`, then `copies` pieces of length `piece`.

    A linked list, so that adding a piece is cheap.
    """

    before: "_Given | None"
    piece: int
    copies: int


def _pieces_of(given: _Given | None) -> _PieceLengths:
    """Return the lengths of the pieces in document order."""
    pieces: list[int] = []
    while given is not None:
        pieces += [given.piece] * given.copies
        given = given.before
    return tuple(reversed(pieces))


class _Fragments:
    """The remainders of cut documents, called fragments, grouped by length.

    Each entry is (number of fragments, document length, pieces that were already cut off).
    """

    def __init__(self) -> None:
        self.of_length: dict[int, list[tuple[int, int, _Given | None]]] = {}

    def add(self, length: int, number: int, document_length: int, given: _Given | None) -> None:
        """Add `number` fragments of this length, left over from documents after the pieces `given` were cut off."""
        self.of_length.setdefault(length, []).append((number, document_length, given))

    def number(self, length: int) -> int:
        """Return the number of fragments of this length."""
        return sum(number for number, _, _ in self.of_length.get(length, ()))

    def cut(self, length: int, room: int, whole: dict[int, int]) -> None:
        """Cut `room` tokens off a fragment of this length, or off a whole document if there is no such fragment."""
        if length in self.of_length:
            number, document_length, given = self.of_length[length].pop()
            if number > 1:
                self.add(length, number - 1, document_length, given)
            elif not self.of_length[length]:
                del self.of_length[length]
        else:
            document_length, given = length, None
            whole[length] -= 1
        self.add(length - room, 1, document_length, _Given(given, room, 1))

    def groups(self) -> list[tuple[int, int, _PieceLengths]]:
        """Return (document length, number of documents, pieces) for every way in which documents were cut."""
        number: dict[tuple[int, _PieceLengths], int] = {}
        for length, fragments in self.of_length.items():
            for documents, document_length, given in fragments:
                way = document_length, (*_pieces_of(given), length)
                number[way] = number.get(way, 0) + documents
        return [(length, documents, pieces) for (length, pieces), documents in number.items()]


def _bucket_packs(counts: LengthCounts, capacities: Sequence[int], padding_threshold: float) -> tuple[Patterns, Cuts]:
    """Pack counted documents by Algorithm 1 of arXiv 2407.07495.

    Packs are made one after the other. Each pack has the smallest capacity that holds the longest remaining document,
    and takes the longest documents that fit. If more than `padding_threshold` of the pack stays free, the shortest
    remaining document is cut to fill the pack, and the rest of that document is packed later. If no document is cut,
    the same pack is made again until one of the pack's lengths runs out, so identical packs are made in bulk.

    Args:
        counts: number of documents of each length.
        capacities: capacity of each bucket in tokens, ascending.
        padding_threshold: share of a pack that may stay free before a document is cut to fill the pack.

    Returns:
        Patterns of the packs, and Cuts of the documents.
    """
    largest = capacities[-1]
    patterns, groups, whole, fragments = _cut_at_largest(counts, largest)
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
            copies = _with_one_more(copies, room)
        patterns.append(Pattern(packs, capacity, copies))
    groups += [(length, documents, (length,)) for length, documents in whole.items() if documents]
    groups += fragments.groups()
    groups.sort(key=lambda group: (group[0], len(group[2]), group[2]))
    return patterns_from_list(patterns), cuts_from_list(groups)


def _cut_at_largest(
    counts: LengthCounts, largest: int
) -> tuple[list[Pattern], list[tuple[int, int, _PieceLengths]], dict[int, int], _Fragments]:
    """Cut documents longer than the largest bucket into full packs and a remainder.

    Returns:
        Patterns of the full packs; groups of documents that need no further packing, including empty documents; number
        of remaining whole documents by length; and the remainders.
    """
    long = counts.length > largest
    check_num_pieces(float(counts.documents[long].astype(float) @ (counts.length[long] // largest)), largest)
    patterns: list[Pattern] = []
    groups: list[tuple[int, int, _PieceLengths]] = []
    whole: dict[int, int] = {}
    fragments = _Fragments()
    for length, documents in zip(counts.length.tolist(), counts.documents.tolist(), strict=True):
        if length == 0:
            groups.append((0, documents, ()))
            continue
        if length <= largest:
            whole[length] = documents
            continue
        full, rest = divmod(length, largest)
        patterns.append(Pattern(documents * full, largest, [(largest, 1)]))
        if rest:
            fragments.add(rest, documents, length, _Given(None, largest, full))
        else:
            groups.append((length, documents, (largest,) * full))
    return patterns, groups, whole, fragments


def _with_one_more(copies: list[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """Return `copies` with one more segment of this length."""
    number = dict(copies)
    number[length] = number.get(length, 0) + 1
    return list(number.items())
