"""Strategies with packs of several capacities: Bucket, and its baseline BucketByLength."""

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
"""The buckets of arXiv 2407.07495."""


@register_strategy
@dataclass(frozen=True)
class Bucket(CountingStrategy):
    """Packs of several capacities: pick the smallest that holds the longest document left, then fill it longest first.

    If more than `padding_threshold` of a pack stays free, the shortest document left is cut to fill it; among equally
    short ones, a remainder is cut before a whole document (Algorithm 1 of "Bucket pre-training is all you need", arXiv
    2407.07495). A document longer than the largest bucket is cut into full packs and a remainder. Nothing is dropped.

    Args:
        bucket_lengths: ascending capacities, tokens, each at least 1.
        padding_threshold: share of a pack that may stay free, 0 to 1; with 1 no document that fits is cut.
        seed: of the random order of packs, of the documents in them, of documents of equal length, and of which of
            these are cut; None leaves them sorted.

    Raises:
        PackingError: bucket lengths empty, unsorted or repeated; an argument that is not as above.

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
    """Put each document in the smallest bucket that holds it; concatenate and cut each bucket.

    The multi-bucket baseline of arXiv 2407.07495. Documents longer than the largest bucket go to the largest.

    Args:
        bucket_lengths: ascending capacities, tokens, each at least 1.
        seed: of the random order of packs and of the segments in them; None keeps buckets together, documents in order.

    Raises:
        PackingError: bucket lengths empty, unsorted or repeated; a seed that is not as above.

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
    """Return ascending capacities, or raise a PackingError that names the first one out of order."""
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
    """Return `value` as a float within [0, 1], or raise PackingError."""
    if not is_real(value) or not 0 <= value <= 1:
        raise PackingError(f"{name}: expected a number from 0 to 1, got {value!r}")
    return float(value)


_PieceLengths = tuple[int, ...]


class _Given(NamedTuple):
    """The pieces cut off a document so far: `copies` of one length, and those cut off before them.

    A linked list, so that one more piece is cheap to add.
    """

    before: "_Given | None"
    piece: int
    copies: int


def _pieces_of(given: _Given | None) -> _PieceLengths:
    """List the pieces in document order."""
    pieces: list[int] = []
    while given is not None:
        pieces += [given.piece] * given.copies
        given = given.before
    return tuple(reversed(pieces))


class _Fragments:
    """Remainders of cut documents: for each length, which documents they are from and the pieces already cut off."""

    def __init__(self) -> None:
        self.of_length: dict[int, list[tuple[int, int, _Given | None]]] = {}

    def add(self, length: int, number: int, document_length: int, given: _Given | None) -> None:
        """Add `number` fragments of this length, each the rest of a document after the pieces `given` were cut off."""
        self.of_length.setdefault(length, []).append((number, document_length, given))

    def number(self, length: int) -> int:
        """Return how many fragments have this length."""
        return sum(number for number, _, _ in self.of_length.get(length, ()))

    def cut(self, length: int, room: int, whole: dict[int, int]) -> None:
        """Cut `room` tokens off a fragment of this length if there is one, or else off a whole document."""
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
        """Return (document length, documents, pieces) of all documents that were cut, each way of cutting once."""
        number: dict[tuple[int, _PieceLengths], int] = {}
        for length, fragments in self.of_length.items():
            for documents, document_length, given in fragments:
                way = document_length, (*_pieces_of(given), length)
                number[way] = number.get(way, 0) + documents
        return [(length, documents, pieces) for (length, pieces), documents in number.items()]


def _bucket_packs(counts: LengthCounts, capacities: Sequence[int], padding_threshold: float) -> tuple[Patterns, Cuts]:
    """Pack counted documents by Algorithm 1 of arXiv 2407.07495.

    Pack by pack: the smallest bucket that holds the longest document left takes the longest documents that fit, one
    after the other. If more than a share of the pack stays free, the shortest document left is cut to fill it, and what
    remains of it goes back. As long as nothing is cut, the same pack is made again until one of its lengths runs short,
    so identical packs are made in bulk.

    Args:
        counts: documents by length.
        capacities: tokens of the packs of each bucket, ascending.
        padding_threshold: share of a pack that may stay free before a document is cut to fill it.

    Returns:
        Patterns, and what the documents are cut into.
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
        The full packs; groups of documents that are done, including the empty ones; the documents left by length; and
        the remainders.
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
    """Add one more segment of a length."""
    number = dict(copies)
    number[length] = number.get(length, 0) + 1
    return list(number.items())
