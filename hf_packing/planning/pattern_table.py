"""PatternTable, a plan that is made from counts of document lengths, before any document is assigned to a pack."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hf_packing.checks import check_whole_numbers
from hf_packing.errors import PackingError
from hf_packing.planning.assign import Assignment, DealtShard
from hf_packing.planning.lengths import IntArray, LengthCounts, check_lengths, sort_by_length
from hf_packing.planning.metrics import PackingMetrics, make_metrics, pack_lower_bound
from hf_packing.planning.patterns import Cuts, DocumentsByLength, Patterns
from hf_packing.planning.plan import PackingPlan


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PatternTable:
    """A plan that is made from counts of document lengths alone.

    The table describes the packs, but does not yet assign documents to packs. `plan_counts` returns a PatternTable. The
    size of a table depends on the number of distinct lengths and, with `Bucket`, on the number of cut documents.

    To assign a shard of documents to packs, a worker needs only the table, the lengths of the shard's documents, and
    the number of documents of each length in earlier shards. Together, the workers make the same packs as a plan for
    all documents.

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
    """The packs, described by the lengths of their segments."""
    cuts: Cuts
    """The pieces that documents of each length are cut into."""
    seed: int | None
    """Seed for shuffling packs, the segments in each pack, and documents of equal length; None for no shuffling."""
    proven_lower_bound: int = 0
    """Lower bound on the number of packs, proven by the strategy; 0 if the strategy proves no bound.

    The bound holds for packs that respect the limits of the strategy, such as `max_documents`.
    """
    note: str = ""
    """Remark of the strategy, such as that the time limit was too short; empty if there is no remark."""

    def __post_init__(self) -> None:
        if not np.array_equal(np.trim_zeros(self.patterns.counts(), "b"), np.trim_zeros(self.cuts.counts(), "b")):
            raise AssertionError(
                "patterns and cuts: expected as many segments of each length in patterns as pieces of that length in "
                "cuts, but the numbers differ for at least one length"
            )

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
        """Return the plan that assigns all documents to packs.

        Args:
            lengths: integers [documents]: document lengths in tokens, already checked. The table must have been made
                from counts of these lengths.
        """
        return self._assignment.plan(lengths, self.proven_lower_bound, self.note)

    def deal(self, shard_lengths: Any, already_dealt: Any = None) -> DealtShard:
        """Assign the documents of one shard to packs. The documents of other shards are not needed.

        Args:
            shard_lengths: 1-d integers [documents]: lengths of the shard's documents, in tokens.
            already_dealt: 1-d integers: already_dealt[n] is the number of documents of n tokens in all earlier shards
                together, that is, the sum of `np.bincount(shard_lengths)` over the earlier shards. The array may end
                before the longest length; missing counts are 0. A LengthCounts gives the same numbers for some lengths
                only, which must include those of the shard. None for the first shard.

        Returns:
            DealtShard with all segments of the shard's documents. Together, the results for all shards contain every
            segment of every pack exactly once.

        Raises:
            PackingError: an argument is not a 1-d array of non-negative integers, or this shard and the earlier shards
                have more documents of some length than the table has.
        """
        lengths, by_length = check_lengths(shard_lengths, "shard_lengths"), self.cuts.by_length()
        order = sort_by_length(lengths)
        dealt = _check_already_dealt(by_length, already_dealt)
        kind, number = _number_documents(by_length, lengths[order], dealt)
        return self._assignment.shard(order, kind, number)

    def pack_capacity(self, first: int, end: int) -> IntArray:
        """Return the capacities of the packs first:end of the plan in tokens, int32 [end - first].

        Args:
            first: index of the first pack, from 0.
            end: index of the last pack, plus 1; at most `num_packs`.
        """
        return self._assignment.pack_capacity(first, end)

    def metrics(self) -> PackingMetrics:
        """Return the metrics of the plan. The PackingPlan that `plan` returns has the same metrics."""
        return make_metrics(**self.totals())

    def totals(self) -> dict[str, Any]:
        """Return the totals that the metrics are made of: the arguments of `make_metrics`."""
        cuts, patterns = self.cuts, self.patterns
        counts = cuts.counts()
        length = np.arange(len(counts), dtype=np.float64)
        capacity = patterns.capacity.astype(np.int64)
        largest = int(capacity.max(initial=0))
        dropped = (cuts.pieces_each == 0) & (cuts.document_length > 0)
        return {
            "documents": self.num_documents,
            "segments": int(counts.sum()),
            "packs": self.num_packs,
            "tokens": int(cuts.documents @ cuts.document_length),
            "packed_tokens": int(cuts.documents @ cuts.tokens_kept),
            "cut": int(cuts.documents[cuts.cut].sum()),
            "dropped": int(cuts.documents[dropped].sum()),
            "empty": int(cuts.documents[cuts.document_length == 0].sum()),
            "slots": int(patterns.packs.astype(object) @ capacity.astype(object)) if len(capacity) else 0,
            "squared_segments": float(counts @ length**2),
            "squared_capacities": float(patterns.packs @ capacity.astype(np.float64) ** 2),
            "lower_bound": max(pack_lower_bound(counts, largest) if largest else 0, self.proven_lower_bound),
        }

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the function and the arguments that rebuild the table when the table is copied or unpickled.

        Cached properties are left out, so a pickled table for another worker is small.
        """
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
    """Return the arguments `kind` and `number` of `Assignment.shard` for the documents of a shard.

    Args:
        by_length: number of documents of each length in the PatternTable.
        lengths: integers [documents]: lengths of the shard's documents, ascending.
        already_dealt: int64 [lengths]: for each length in `by_length`, the number of documents in earlier shards.

    Returns:
        int64 [documents]: index of the document's length in `by_length`; int64 [documents]: number of earlier documents
        of the same length, counted in this shard and in all shards before this shard.

    Raises:
        PackingError: this shard and the earlier shards have more documents of some length than the PatternTable has.
    """
    kind = np.searchsorted(by_length.length, lengths)
    unknown = kind == len(by_length.length)
    unknown[~unknown] = by_length.length[kind[~unknown]] != lengths[~unknown]
    if unknown.any():
        raise PackingError(
            "shard_lengths: expected only document lengths that occur in the counts of the PatternTable, got a length "
            f"of {lengths[unknown][0]}"
        )
    in_shard = np.bincount(kind, minlength=len(by_length.length))
    nth = np.arange(len(kind)) - (np.cumsum(in_shard) - in_shard)[kind]
    number: IntArray = already_dealt[kind] + nth
    if (beyond := number >= by_length.documents[kind]).any():
        first = kind[beyond][0]
        raise PackingError(
            f"shard_lengths: expected at most {by_length.documents[first]} documents of length "
            f"{by_length.length[first]} in all shards together, as in the counts of the PatternTable, but earlier "
            f"shards have {already_dealt[first]} such documents and this shard has {in_shard[first]}"
        )
    return kind, number


def _check_already_dealt(by_length: DocumentsByLength, already_dealt: Any) -> IntArray:
    """Check `already_dealt`, and return its counts for the lengths in `by_length`.

    Args:
        by_length: number of documents of each length in the PatternTable.
        already_dealt: 1-d integers: already_dealt[n] is the number of documents of n tokens in earlier shards. The
            array may end before the longest length; missing counts are 0. Or a LengthCounts. None if there are no
            earlier shards.

    Returns:
        int64 [lengths]: for each length in `by_length`, the number of documents in earlier shards.
    """
    length, documents = by_length.length, by_length.documents
    if already_dealt is None:
        return np.zeros(len(length), dtype=np.int64)
    if isinstance(already_dealt, LengthCounts):
        result = np.zeros(len(length), dtype=np.int64)
        known = np.isin(already_dealt.length, length)
        result[np.searchsorted(length, already_dealt.length[known])] = already_dealt.documents[known]
        return result
    dealt = check_whole_numbers("already_dealt", already_dealt)
    if dealt.size and dealt.dtype.kind == "i" and dealt.min() < 0:
        first = int(np.argmax(dealt < 0))
        raise PackingError(f"already_dealt: expected no negative count, got {dealt[first]} documents of length {first}")
    inside = length < len(dealt)
    uncounted = dealt.copy()
    uncounted[length[inside]] = 0
    if uncounted.any():
        first = int(np.argmax(uncounted != 0))
        raise PackingError(
            f"already_dealt: expected no documents of length {first}, since the counts of the PatternTable have none, "
            f"got {dealt[first]}"
        )
    beyond = dealt[length[inside]] > documents[inside]
    if beyond.any():
        first = int(length[inside][beyond][0])
        raise PackingError(
            f"already_dealt: expected at most {documents[inside][beyond][0]} documents of length {first}, as "
            f"in the counts of the PatternTable, got {dealt[first]}"
        )
    result = np.zeros(len(length), dtype=np.int64)
    result[inside] = dealt[length[inside]]
    return result
