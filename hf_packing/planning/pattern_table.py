"""PatternTable: a plan from counts alone; which document goes where is decided later."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hf_packing.errors import PackingError
from hf_packing.planning.assign import Assignment, DealtShard
from hf_packing.planning.lengths import IntArray, check_lengths, check_whole_numbers, sort_by_length
from hf_packing.planning.metrics import PackingMetrics, make_metrics, pack_lower_bound
from hf_packing.planning.patterns import Cuts, DocumentsByLength, Patterns
from hf_packing.planning.plan import PackingPlan


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PatternTable:
    """Which packs to make from documents of which lengths.

    Its size depends on the number of distinct lengths; with Bucket, also on the number of cut documents.

    `plan_counts` makes it. Each worker needs only the table, its own documents and, for each length, how many documents
    earlier shards have. Together, the workers make the same packs as a plan over all documents.

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
    """The documents, by length and by the pieces they are cut into."""
    seed: int | None
    """Seed of all random orders; None keeps documents of equal length in order and does not shuffle packs."""
    proven_lower_bound: int = 0
    """Lower bound on the number of packs that the strategy has proven under its limits; 0 if it has proven none."""
    note: str = ""
    """How planning went, if the strategy reports it."""

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
    def _assignment(self) -> Assignment:
        return Assignment(self.patterns, self.cuts, self.seed)

    def plan(self, lengths: IntArray) -> PackingPlan:
        """Return the plan over all documents.

        Args:
            lengths: integers [documents], tokens: the checked lengths that the table was made for.
        """
        return self._assignment.plan(lengths, self.proven_lower_bound, self.note)

    def deal(self, shard_lengths: Any, already_dealt: Any = None) -> DealtShard:
        """Return where the documents of one shard go. Memory depends on the shard and the table, not on other shards.

        Args:
            shard_lengths: 1-d integers [documents], tokens, of this shard.
            already_dealt: 1-d integers: already_dealt[n] is the number of documents of n tokens in the shards before
                this one, the sum of their `np.bincount`; None for the first shard. Lengths beyond its end count as 0.

        Returns:
            DealtShard. Together, all shards hold every segment of the plan once and fill every place of every pack.

        Raises:
            PackingError: a length that was not counted, more documents of a length than were counted, bad integers.
        """
        lengths, by_length = check_lengths(shard_lengths), self.cuts.by_length()
        order = sort_by_length(lengths)
        dealt = _check_already_dealt(by_length, already_dealt)
        kind, number = _number_documents(by_length, lengths[order], dealt)
        return self._assignment.shard(order, kind, number)

    def metrics(self) -> PackingMetrics:
        """Return the metrics of the plan, the same as those of a plan over the documents."""
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
        """Leave out cached properties, so that a copy for another worker is small."""
        return _rebuild_table, (self.patterns, self.cuts, self.seed, self.proven_lower_bound, self.note)

    def __repr__(self) -> str:
        metrics = self.metrics()
        return (
            f"PatternTable({metrics.num_documents} documents, {metrics.num_segments} segments, "
            f"{metrics.num_packs} packs, efficiency {metrics.packing_efficiency:.4f})"
        )


def _rebuild_table(
    patterns: Patterns, cuts: Cuts, seed: int | None, proven_lower_bound: int, note: str
) -> PatternTable:
    return PatternTable(patterns=patterns, cuts=cuts, seed=seed, proven_lower_bound=proven_lower_bound, note=note)


def _number_documents(
    by_length: DocumentsByLength, lengths: IntArray, already_dealt: IntArray
) -> tuple[IntArray, IntArray]:
    """Return the arguments `kind` and `number` of `Assignment.shard`, for a shard's documents sorted by length.

    Returns:
        int64 [documents]: the length of each, as an index into `by_length`; int64 [documents]: how many documents of
        the same length come before it in all shards.
    """
    kind = np.searchsorted(by_length.length, lengths)
    unknown = kind == len(by_length.length)
    unknown[~unknown] = by_length.length[kind[~unknown]] != lengths[~unknown]
    if unknown.any():
        raise PackingError(f"lengths: expected only lengths that were counted, got {lengths[unknown][0]}")
    in_shard = np.bincount(kind, minlength=len(by_length.length))
    nth = np.arange(len(kind)) - (np.cumsum(in_shard) - in_shard)[kind]
    number: IntArray = already_dealt[kind] + nth
    if (beyond := number >= by_length.documents[kind]).any():
        first = kind[beyond][0]
        raise PackingError(
            f"lengths: expected at most {by_length.documents[first]} documents of length {by_length.length[first]} in "
            f"all shards, as counted; {already_dealt[first]} were already dealt and this shard has {in_shard[first]}"
        )
    return kind, number


def _check_already_dealt(by_length: DocumentsByLength, already_dealt: Any) -> IntArray:
    """Return how many documents of each counted length earlier shards have, from a histogram that may be shorter."""
    length, documents = by_length.length, by_length.documents
    if already_dealt is None:
        return np.zeros(len(length), dtype=np.int64)
    dealt = check_whole_numbers("already_dealt", already_dealt)
    if dealt.size and dealt.dtype.kind == "i" and dealt.min() < 0:
        first = int(np.argmax(dealt < 0))
        raise PackingError(f"already_dealt: expected no negative count, got {dealt[first]} documents of length {first}")
    inside = length < len(dealt)
    uncounted = dealt.copy()
    uncounted[length[inside]] = 0
    if uncounted.any():
        first = int(np.argmax(uncounted != 0))
        raise PackingError(f"already_dealt: expected no documents of length {first}, as counted, got {dealt[first]}")
    beyond = dealt[length[inside]] > documents[inside]
    if beyond.any():
        first = int(length[inside][beyond][0])
        raise PackingError(
            f"already_dealt: expected at most {documents[inside][beyond][0]} documents of length {first}, as counted, "
            f"got {dealt[first]}"
        )
    result = np.zeros(len(length), dtype=np.int64)
    result[inside] = dealt[length[inside]]
    return result
