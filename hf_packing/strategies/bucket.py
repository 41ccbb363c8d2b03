"""Strategies with packs of several capacities: Bucket, and the baseline BucketByLength."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hf_packing.checks import INT32_MAX, check_optional_seed, check_real, check_whole_number, set_fields
from hf_packing.errors import PackingError
from hf_packing.planning.best_fit import Remaining
from hf_packing.planning.lengths import IntArray, LengthCounts, check_num_pieces
from hf_packing.planning.patterns import Cuts, Pattern, Patterns, cuts_from_list, patterns_from_list
from hf_packing.planning.plan import PackingPlan
from hf_packing.planning.table import PatternTable
from hf_packing.planning.windows import WindowPlan, packs_with_room
from hf_packing.strategies.base import CountingStrategy, Strategy, TreeLimits, register_strategy
from hf_packing.strategies.sequential import concatenate_and_cut

_BUCKET_LENGTHS = (2048, 4096, 8192, 16384)
"""Default bucket lengths (capacities of packs in tokens), from arXiv 2407.07495."""


@register_strategy
@dataclass(frozen=True)
class Bucket(CountingStrategy):
    """A strategy that fills packs of several capacities (buckets), longest documents first.

    Packs are made one after the other. Each pack gets the smallest capacity that holds the longest remaining document,
    and takes the longest documents that fit. If the free share of the pack is then above `padding_threshold`, the
    shortest remaining document is cut: the first part fills the pack, and the second part is packed later. If a whole
    document and a remainder of an earlier cut have the same length, the remainder is cut first. This is Algorithm 1 of
    "Bucket pre-training is all you need" (arXiv 2407.07495). A document longer than the largest bucket is cut into full
    packs of the largest bucket and a remainder. No token is dropped.

    Args:
        bucket_lengths: capacities of packs in tokens, ascending without repeats, each at least 1.
        padding_threshold: share of a pack that may stay free, from 0 to 1. With 1, only documents longer than the
            largest bucket are cut.
        seed: seed for shuffling the packs, the segments in each pack, and documents of equal length; None for no
            shuffling. The seed also decides which of several documents of equal length are cut.

    Raises:
        PackingError: an argument does not match its description above.

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
        set_fields(
            self,
            bucket_lengths=_check_bucket_lengths(self.bucket_lengths),
            padding_threshold=check_real("padding_threshold", self.padding_threshold, 0, 1, "a number from 0 to 1"),
            seed=check_optional_seed(self.seed),
        )

    def plan_counts(self, counts: LengthCounts) -> PatternTable:
        patterns, cuts = _bucket_packs(counts, self.bucket_lengths, self.padding_threshold)
        return PatternTable(patterns=patterns, cuts=cuts, seed=self.seed)

    def tree_limits(self) -> TreeLimits:
        if self.padding_threshold < 1:
            raise PackingError(
                "padding_threshold: expected 1 with share_prefixes, since a smaller value cuts documents that fit in a "
                f"pack, and a tree of documents can be cut only between documents, got {self.padding_threshold}"
            )
        return TreeLimits(self.largest_capacity, "split")


@register_strategy
@dataclass(frozen=True)
class BucketByLength(Strategy):
    """A strategy that sorts documents into buckets by length, then concatenates and cuts the documents of each bucket.

    Each document goes to the smallest bucket that holds the document. Documents longer than the largest bucket go to
    the largest bucket. The packs of a bucket have the bucket's capacity, and only the last pack of each bucket is
    padded. This strategy is the multi-bucket baseline of arXiv 2407.07495.

    Args:
        bucket_lengths: capacities of packs in tokens, ascending without repeats, each at least 1.
        seed: seed for shuffling the packs and the segments in each pack; None for no shuffling. Without shuffling,
            packs are sorted by capacity, and documents keep their order.

    Raises:
        PackingError: an argument does not match its description above.

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
        set_fields(
            self,
            bucket_lengths=_check_bucket_lengths(self.bucket_lengths),
            seed=check_optional_seed(self.seed),
        )

    def plan_lengths(self, lengths: IntArray) -> PackingPlan:
        return concatenate_and_cut(lengths, tuple(self.bucket_lengths), self.seed)

    def plan_window(self, lengths: IntArray, number: int) -> WindowPlan:
        plan = self.with_seed_for(f"window {number}").plan_lengths(lengths)
        return WindowPlan(plan, packs_with_room(plan, share=0.0), all_wait=True)


def _check_bucket_lengths(bucket_lengths: Any) -> tuple[int, ...]:
    """Return the bucket lengths as a tuple of ints.

    Raise PackingError if the bucket lengths are not a sequence of integers, or are empty or not strictly ascending.
    """
    if isinstance(bucket_lengths, (str, bytes)) or not isinstance(bucket_lengths, (Sequence, np.ndarray)):
        raise PackingError(f"bucket_lengths: expected a sequence of integers, got {bucket_lengths!r}")
    if not len(bucket_lengths):
        raise PackingError("bucket_lengths: expected at least one length, got an empty sequence")
    lengths = tuple(check_whole_number("bucket_lengths", length, maximum=INT32_MAX) for length in bucket_lengths)
    for shorter, longer in pairwise(lengths):
        if shorter >= longer:
            raise PackingError(
                f"bucket_lengths: expected ascending lengths without repeats, got {', '.join(map(str, lengths))}"
            )
    return lengths


_PieceLengths = tuple[int, ...]


class _Given(NamedTuple):
    """A linked list of the lengths of the pieces that have been cut off a document so far.

    The list consists of the pieces in `before`, followed by `copies` pieces of `piece` tokens each. Adding a piece to a
    linked list is cheap.
    """

    before: "_Given | None"
    piece: int
    copies: int


def _pieces_of(given: _Given | None) -> _PieceLengths:
    """Return a linked list of piece lengths as a tuple, in document order."""
    pieces: list[int] = []
    while given is not None:
        pieces += [given.piece] * given.copies
        given = given.before
    return tuple(reversed(pieces))


class _Fragments:
    """The remainders of cut documents, called fragments, grouped by length.

    `of_length[n]` is a list of (number of fragments, length of the whole document, pieces already cut off the document)
    for the fragments of n tokens.
    """

    def __init__(self) -> None:
        self.of_length: dict[int, list[tuple[int, int, _Given | None]]] = {}

    def add(self, length: int, number: int, document_length: int, given: _Given | None) -> None:
        """Add `number` equal fragments of `length` tokens.

        Each fragment is what is left of a document of `document_length` tokens after earlier pieces were cut off.
        `given` holds those pieces; None if there are none.
        """
        self.of_length.setdefault(length, []).append((number, document_length, given))

    def number(self, length: int) -> int:
        """Return the number of fragments of `length` tokens."""
        return sum(number for number, _, _ in self.of_length.get(length, ()))

    def cut(self, length: int, room: int, whole: dict[int, int]) -> None:
        """Cut `room` tokens off a fragment of `length` tokens, or off a whole document if there is no such fragment.

        `whole[n]` is the number of uncut documents of n tokens. If a whole document is cut, `whole` is updated.
        """
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
        """Return the cut documents in groups of documents that have the same length and were cut in the same way.

        Each group is (document length, number of documents, piece lengths).
        """
        number: dict[tuple[int, _PieceLengths], int] = {}
        for length, fragments in self.of_length.items():
            for documents, document_length, given in fragments:
                way = document_length, (*_pieces_of(given), length)
                number[way] = number.get(way, 0) + documents
        return [(length, documents, pieces) for (length, pieces), documents in number.items()]


def _bucket_packs(counts: LengthCounts, capacities: Sequence[int], padding_threshold: float) -> tuple[Patterns, Cuts]:
    """Pack counted documents by Algorithm 1 of arXiv 2407.07495.

    The docstring of `Bucket` describes the algorithm. A pack that needs no cut is repeated, in one step,
    as often as the remaining documents allow.

    Args:
        counts: number of documents of each length.
        capacities: capacity of each bucket in tokens, ascending.
        padding_threshold: largest share of a pack that may stay free. If more stays free, a document is cut to fill the
            pack.

    Returns:
        Patterns, which describe the packs; and Cuts, which describe the pieces of the documents.
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
        Patterns of the full packs; a list of (document length, number of documents, piece lengths) for documents that
        are empty or were cut into full packs only; a dict with the number of uncut documents of each length; and the
        remainders.
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
    """Return the content of a pack with one more segment of `length` tokens.

    `copies` and the result are lists of (segment length, number of segments).
    """
    number = dict(copies)
    number[length] = number.get(length, 0) + 1
    return list(number.items())
