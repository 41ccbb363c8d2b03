"""PatternTable: a plan but for the documents' names, made from a histogram alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hf_packing.planning.bounds import pack_lower_bound
from hf_packing.planning.cuts import Cuts
from hf_packing.planning.deal import DealtShard, deal_shard
from hf_packing.planning.lengths import IntArray, check_lengths
from hf_packing.planning.metrics import PackingMetrics, make_metrics
from hf_packing.planning.patterns import Patterns
from hf_packing.planning.slots import Slots


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PatternTable:
    """Which packs to make from documents of which lengths.

    Its size depends on the distinct lengths; with Bucket also on how many documents it cuts.

    `plan_counts` makes it. Workers that share nothing but the table and, for each length, how many documents earlier
    shards had, deal the same packs as a plan over all documents at once.

    Example:
        >>> import numpy as np, hf_packing as hfp
        >>> lengths = np.array([5, 3, 6, 2])
        >>> table = hfp.plan_counts(np.bincount(lengths), hfp.BestFit(8))
        >>> table
        PatternTable(4 documents, 4 segments, 2 packs, efficiency 1.0000)
        >>> first = table.deal(lengths[:2])
        >>> second = table.deal(lengths[2:], already_dealt=np.bincount(lengths[:2]))
        >>> sorted(first.pack.tolist() + second.pack.tolist())
        [0, 0, 1, 1]
    """

    patterns: Patterns
    """The packs, by the lengths of their segments."""
    cuts: Cuts
    """The documents, by what they are cut into."""
    seed: int | None
    """Of all random orders; None deals documents of equal length in their order and leaves packs as they are."""
    proven_lower_bound: int = 0
    """Packs that any plan under the strategy's limits needs, where it has proven more than the lengths tell."""
    note: str = ""
    """What the strategy has to say about how it went."""

    def __post_init__(self) -> None:
        if not np.array_equal(np.trim_zeros(self.patterns.counts(), "b"), np.trim_zeros(self.cuts.counts(), "b")):
            raise AssertionError("the patterns and the documents' pieces have different lengths")

    @property
    def num_documents(self) -> int:
        return self.cuts.num_documents

    @property
    def num_packs(self) -> int:
        return self.patterns.num_packs

    @cached_property
    def slots(self) -> Slots:
        return Slots(self.patterns, self.seed)

    @cached_property
    def piece_ranks(self) -> tuple[IntArray, IntArray]:
        return self.cuts.ranks()

    def deal(self, shard_lengths: Any, already_dealt: Any = None) -> DealtShard:
        """Where the documents of one shard go. Memory depends on the shard and the table, not on the other shards.

        Args:
            shard_lengths: 1-d integers [documents], tokens, of this shard.
            already_dealt: 1-d integers: already_dealt[n] documents of n tokens are in the shards before this one, that
                is the sum of their `np.bincount`; None for the first shard. Lengths beyond its end were not dealt.

        Returns:
            DealtShard. All shards together hold every segment of the plan once, and every place of every pack.

        Raises:
            PackingError: a length that was not counted, more documents of a length than were counted, bad integers.
        """
        return deal_shard(self, check_lengths(shard_lengths), already_dealt)

    def metrics(self) -> PackingMetrics:
        """What the plan gains and what it costs; the same as those of a plan over the documents."""
        cuts, patterns = self.cuts, self.patterns
        counts = cuts.counts()
        length = np.arange(len(counts), dtype=np.float64)
        capacity = patterns.capacity.astype(np.int64)
        largest = int(capacity.max(initial=0))
        dropped = (cuts.pieces_each == 0) & (cuts.document_length > 0)
        return make_metrics(
            documents=self.num_documents,
            segments=int(counts.sum()),
            packs=self.num_packs,
            tokens=int(cuts.documents @ cuts.document_length),
            packed_tokens=int(cuts.documents @ cuts.tokens_kept),
            cut=int(cuts.documents[cuts.cut].sum()),
            dropped=int(cuts.documents[dropped].sum()),
            empty=int(cuts.documents[cuts.document_length == 0].sum()),
            slots=int(patterns.packs.astype(object) @ capacity.astype(object)) if len(capacity) else 0,
            squared_segments=float(counts @ length**2),
            squared_capacities=float(patterns.packs @ capacity.astype(np.float64) ** 2),
            lower_bound=max(pack_lower_bound(counts, largest) if largest else 0, self.proven_lower_bound),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Without what was computed on the way, so that a copy for another worker is small."""
        return rebuild, (self.patterns, self.cuts, self.seed, self.proven_lower_bound, self.note)

    def __repr__(self) -> str:
        metrics = self.metrics()
        return (
            f"PatternTable({metrics.num_documents} documents, {metrics.num_segments} segments, "
            f"{metrics.num_packs} packs, efficiency {metrics.packing_efficiency:.4f})"
        )


def rebuild(patterns: Patterns, cuts: Cuts, seed: int | None, proven_lower_bound: int, note: str) -> PatternTable:
    return PatternTable(patterns=patterns, cuts=cuts, seed=seed, proven_lower_bound=proven_lower_bound, note=note)
