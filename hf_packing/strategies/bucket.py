"""Strategies with packs of several capacities: Bucket, and the baseline BucketByLength."""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import chain
from typing import ClassVar

import numpy as np

from hf_packing.checks import check_real, expect, set_fields
from hf_packing.planning.best_fit import Remaining
from hf_packing.planning.lengths import IntArray, LengthCounts, offsets_of
from hf_packing.planning.patterns import Cuts, Patterns, Run, patterns_from_runs
from hf_packing.planning.plan import PackingPlan
from hf_packing.planning.table import PatternTable
from hf_packing.strategies.base import CountingStrategy, Strategy, register_strategy
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
    keeps_fitting_documents_whole: ClassVar[bool] = True  # with padding_threshold=1

    bucket_lengths: Sequence[int] = _BUCKET_LENGTHS
    _: KW_ONLY
    padding_threshold: float = 0.01
    seed: int | None = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        threshold = check_real("padding_threshold", self.padding_threshold, 0, 1, "a number from 0 to 1")
        set_fields(self, padding_threshold=threshold)

    def plan_counts(self, counts: LengthCounts) -> PatternTable:
        patterns, cuts = _bucket_packs(counts, self.bucket_lengths, self.padding_threshold)
        return PatternTable(patterns=patterns, cuts=cuts, seed=self.seed)

    def check_packs_trees(self) -> None:
        whole = "with share_prefixes, since a smaller value cuts documents that fit in a pack"
        expect(1, whole, padding_threshold=self.padding_threshold)
        super().check_packs_trees()


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
    fills_one_pack_at_a_time: ClassVar[bool] = True

    bucket_lengths: Sequence[int] = _BUCKET_LENGTHS
    _: KW_ONLY
    seed: int | None = 0

    def plan_lengths(self, lengths: IntArray) -> PackingPlan:
        return concatenate_and_cut(lengths, self.bucket_lengths, self.seed)


def _bucket_packs(counts: LengthCounts, capacities: Sequence[int], padding_threshold: float) -> tuple[Patterns, Cuts]:
    """Pack counted documents by Algorithm 1 of arXiv 2407.07495, as described in `Bucket`.

    A pack that needs no cut is repeated, in one step, as often as the remaining documents allow.

    Args:
        counts: number of documents of each length.
        capacities: capacity of each bucket in tokens, ascending.
        padding_threshold: largest share of a pack that may stay free. If more stays free, a document is cut to fill the
            pack.

    Returns:
        Patterns, which describe the packs; and Cuts, which describe the pieces of the documents.
    """
    largest = capacities[-1]
    runs: list[Run] = []
    num_packs = 0
    capacity_of_pattern: list[int] = []

    def make_packs(packs: int, capacity: int, copies: dict[int, int]) -> None:
        """Make packs of a capacity, given the number of segments in a pack by their length."""
        nonlocal num_packs
        runs.extend((length, num_packs, packs, number) for length, number in copies.items())
        capacity_of_pattern.append(capacity)
        num_packs += packs

    ways: Counter[tuple[int, tuple[int, ...]]] = Counter()  # documents by length and pieces
    # by length, what is left of documents: number, length of the whole document, pieces that were cut off before
    left: defaultdict[int, list[tuple[int, int, tuple[int, ...]]]] = defaultdict(list)
    for length, documents in zip(counts.length.tolist(), counts.documents.tolist(), strict=True):
        full, rest = divmod(length, largest) if length > largest else (0, length)
        if full:
            make_packs(documents * full, largest, {largest: 1})
        if rest:
            left[rest].append((documents, length, (largest,) * full))
        else:
            ways[length, (largest,) * full] += documents
    remaining = Remaining({length: sum(number for number, _, _ in some) for length, some in left.items()})
    while remaining.lengths:
        capacity = capacities[bisect_left(capacities, remaining.longest(largest))]
        copies, room = remaining.fill(capacity)
        too_empty = room / capacity > padding_threshold
        packs = 1 if too_empty else remaining.packs_alike(copies)
        for length, number in copies.items():
            remaining.take(length, packs * number)
        if too_empty and remaining.lengths:
            length = remaining.shortest()
            remaining.take(length, 1)
            remaining.add(length - room)
            number, document_length, before = left[length].pop()  # remainders come after whole documents
            if number > 1:
                left[length].append((number - 1, document_length, before))
            left[length - room].append((1, document_length, (*before, room)))
            copies[room] = copies.get(room, 0) + 1
        make_packs(packs, capacity, copies)
    for length, some in left.items():
        for documents, document_length, before in some:
            ways[document_length, (*before, length)] += documents
    groups = sorted(ways, key=lambda way: (way[0], len(way[1]), way[1]))
    cuts = Cuts(
        document_length=np.array([length for length, _ in groups], dtype=np.int64),
        documents=np.array([ways[group] for group in groups], dtype=np.int64),
        piece_offsets=offsets_of([len(pieces) for _, pieces in groups]),
        piece_length=np.fromiter(chain.from_iterable(pieces for _, pieces in groups), dtype=np.int32),
    )
    return patterns_from_runs(runs, num_packs, capacity_of_pattern), cuts
