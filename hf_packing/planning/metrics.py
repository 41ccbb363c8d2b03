"""Metrics of a plan, such as padding and truncation; and a lower bound on the packs of any plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hf_packing.planning.lengths import IntArray


@dataclass(frozen=True)
class PackingMetrics:
    """A plan in numbers. All ratios but concatenation_ratio lie in [0, 1]; a plan without packs has zeros."""

    num_documents: int
    num_segments: int
    num_packs: int
    num_tokens: int
    """Tokens of all documents."""
    num_cut_documents: int
    """Documents of which some tokens are packed, but not all in one segment."""
    num_dropped_documents: int
    """Documents that have tokens, none of which is packed."""
    num_empty_documents: int
    num_dropped_tokens: int
    num_padding_slots: int
    """Slots of packs that hold no token."""
    padding_ratio: float
    """Padding slots / slots."""
    truncation_ratio: float
    """Documents cut / documents."""
    concatenation_ratio: float
    """Documents / packs."""
    dropped_token_ratio: float
    """Tokens dropped / tokens."""
    packing_efficiency: float
    """1 - padding_ratio."""
    packing_factor: float
    """Segments / packs."""
    lower_bound: int
    """Proven lower bound on the packs of any plan for the same segments."""
    attention_cost: float
    """Sum of squared segment lengths / sum of squared capacities: the work of attention relative to full rows."""


def measure_plan(
    document_length: IntArray,
    segment_document: IntArray,
    segment_length: IntArray,
    pack_capacity: IntArray,
    proven_lower_bound: int,
) -> PackingMetrics:
    """Compute the metrics of a plan from its arrays.

    Args:
        document_length: integers [documents], tokens.
        segment_document: integers [segments].
        segment_length: integers [segments], tokens.
        pack_capacity: integers [packs], tokens.
        proven_lower_bound: lower bound on packs that the strategy has proven; 0 for none.
    """
    packs, capacity = len(pack_capacity), int(pack_capacity.max(initial=0))
    segments_of = np.bincount(segment_document, minlength=len(document_length))
    single = segments_of[segment_document] == 1
    shortened = single & (segment_length < document_length[segment_document])
    empty = int((document_length == 0).sum())
    bound = pack_lower_bound(np.bincount(segment_length), capacity) if packs else 0
    return make_metrics(
        documents=len(document_length),
        segments=len(segment_document),
        packs=packs,
        tokens=int(document_length.sum(dtype=np.int64)),
        packed_tokens=int(segment_length.sum(dtype=np.int64)),
        cut=int((segments_of > 1).sum() + shortened.sum()),
        dropped=int((segments_of == 0).sum()) - empty,
        empty=empty,
        slots=int(pack_capacity.sum(dtype=np.int64)),
        squared_segments=float((segment_length.astype(np.float64) ** 2).sum()),
        squared_capacities=float((pack_capacity.astype(np.float64) ** 2).sum()),
        lower_bound=max(bound, proven_lower_bound),
    )


def make_metrics(
    *,
    documents: int,
    segments: int,
    packs: int,
    tokens: int,
    packed_tokens: int,
    cut: int,
    dropped: int,
    empty: int,
    slots: int,
    squared_segments: float,
    squared_capacities: float,
    lower_bound: int,
) -> PackingMetrics:
    """Compute all metrics from what was counted."""
    padding = slots - packed_tokens
    return PackingMetrics(
        num_documents=documents,
        num_segments=segments,
        num_packs=packs,
        num_tokens=tokens,
        num_cut_documents=cut,
        num_dropped_documents=dropped,
        num_empty_documents=empty,
        num_dropped_tokens=tokens - packed_tokens,
        num_padding_slots=padding,
        padding_ratio=_ratio(padding, slots),
        truncation_ratio=_ratio(cut, documents),
        concatenation_ratio=_ratio(documents, packs),
        dropped_token_ratio=_ratio(tokens - packed_tokens, tokens),
        packing_efficiency=1 - _ratio(padding, slots) if packs else 0.0,
        packing_factor=_ratio(segments, packs),
        lower_bound=lower_bound,
        attention_cost=_ratio(squared_segments, squared_capacities),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def pack_lower_bound(counts: IntArray, capacity: int) -> int:
    """Return a lower bound on the packs of any plan for these segments.

    The larger of L1, tokens divided by capacity, and L2 (Martello and Toth, "Lower bounds and reduction procedures for
    the bin packing problem", 1990): for any threshold a up to half the capacity, segments above capacity - a need a
    pack of their own, those above half the capacity cannot share one, and the rest fills the room left, by volume.

    Args:
        counts: int64 [longest + 1]: how many segments there are of each length, none above capacity.
        capacity: tokens that a pack holds.

    Returns:
        packs.

    Example:
        >>> import numpy as np
        >>> pack_lower_bound(np.bincount([6, 6, 6, 2]), 10)  # no two segments of 6 tokens fit in a pack
        3
    """
    lengths = np.flatnonzero(counts)
    number = np.concatenate([[0], np.cumsum(counts[lengths], dtype=np.int64)])
    volume = np.concatenate([[0], np.cumsum(counts[lengths] * lengths, dtype=np.int64)])
    half = int(np.searchsorted(lengths, capacity // 2, side="right"))
    threshold = np.arange(half)  # the bound can only rise where a segment has the length of the threshold
    complement = np.searchsorted(lengths, capacity - lengths[:half], side="right")
    above_half = number[-1] - number[half]
    room = (number[complement] - number[half]) * capacity - (volume[complement] - volume[half])
    small = volume[half] - volume[threshold]
    extra = np.maximum(0, -((room - small) // capacity))
    by_volume = -(-int(volume[-1]) // capacity)
    return max(by_volume, int(above_half + extra.max(initial=0)))
