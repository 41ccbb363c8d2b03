"""Strategies with packs of several capacities. Their rows carry the capacity in a column `bucket`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from hf_packing.planning.bucket import bucket_packs
from hf_packing.planning.counts import LengthCounts
from hf_packing.planning.fixed_length import bucket_by_length_plan
from hf_packing.planning.lengths import IntArray, check_share
from hf_packing.planning.plan import PackingPlan
from hf_packing.planning.table import PatternTable
from hf_packing.strategies.base import CountingStrategy, Strategy, check_bucket_lengths, check_optional_seed

BUCKET_LENGTHS = (2048, 4096, 8192, 16384)
"""Those of arXiv 2407.07495."""


@dataclass(frozen=True)
class Bucket(CountingStrategy):
    """Packs of several capacities: each takes the longest documents that fit, in the smallest bucket that holds them.

    Where more than `padding_threshold` of a pack stays free, the shortest document left is cut to fill it, one that is
    already cut before a whole one (Algorithm 1 of "Bucket pre-training is all you need", arXiv 2407.07495). A document
    longer than the largest bucket is cut into full packs and a remainder. Nothing is dropped.

    Args:
        bucket_lengths: ascending capacities, tokens, each at least 1.
        padding_threshold: share of a pack that may stay free, 0 to 1; with 1 no document that fits is cut.
        seed: of the random order of packs, of the documents in them, of documents of equal length, and of which of
            those are cut; None leaves them sorted.

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

    bucket_lengths: Sequence[int] = BUCKET_LENGTHS
    padding_threshold: float = field(default=0.01, kw_only=True)
    seed: int | None = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        self.settle(
            bucket_lengths=check_bucket_lengths(self.bucket_lengths),
            padding_threshold=check_share("padding_threshold", self.padding_threshold),
            seed=check_optional_seed(self.seed),
        )

    def plan_counts(self, counts: LengthCounts) -> PatternTable:
        patterns, cuts = bucket_packs(counts, self.bucket_lengths, self.padding_threshold)
        return PatternTable(patterns=patterns, cuts=cuts, seed=self.seed)


@dataclass(frozen=True)
class BucketByLength(Strategy):
    """Each document goes to the smallest bucket that holds it; each bucket is concatenated and cut: the baseline.

    The multi-bucket baseline of arXiv 2407.07495. Documents longer than the largest bucket go there.

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

    bucket_lengths: Sequence[int] = BUCKET_LENGTHS
    seed: int | None = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        self.settle(
            bucket_lengths=check_bucket_lengths(self.bucket_lengths),
            seed=check_optional_seed(self.seed),
        )

    def plan_lengths(self, lengths: IntArray) -> PackingPlan:
        return bucket_by_length_plan(lengths, tuple(self.bucket_lengths), self.seed)
