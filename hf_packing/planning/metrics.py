"""Metrics of a plan, such as padding and truncation, and a lower bound on the number of packs of a plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hf_packing.planning.lengths import IntArray, offsets_of


@dataclass(frozen=True)
class PackingMetrics:
    """The metrics of a plan, such as the share of padding. A ratio is 0 if the denominator is 0.

    padding_ratio, truncation_ratio, dropped_token_ratio, packing_efficiency and attention_cost are between 0 and 1.
    """

    num_documents: int
    num_segments: int
    num_packs: int
    num_tokens: int
    """Number of tokens in all documents."""
    num_cut_documents: int
    """Number of documents that are packed in several segments or only in part."""
    num_dropped_documents: int
    """Number of documents that have tokens but are not packed at all."""
    num_empty_documents: int
    num_dropped_tokens: int
    num_padding_slots: int
    """Number of positions in packs that hold padding instead of a token."""
    padding_ratio: float
    """num_padding_slots / sum of the capacities of all packs."""
    truncation_ratio: float
    """num_cut_documents / num_documents."""
    concatenation_ratio: float
    """num_documents / num_packs."""
    dropped_token_ratio: float
    """num_dropped_tokens / num_tokens."""
    packing_efficiency: float
    """1 - padding_ratio, or 0 for a plan without packs."""
    packing_factor: float
    """num_segments / num_packs."""
    lower_bound: int
    """Proven lower bound on the number of packs that the segments of the plan need.

    The bound may depend on limits of the strategy, such as `max_documents`. If packs differ in capacity, the bound
    assumes that all packs have the largest capacity.
    """
    attention_cost: float
    """Sum of squared segment lengths / sum of squared capacities.

    This ratio is the cost of attention within segments, relative to attention over whole packs. With shared prefixes,
    the squared lengths are those of whole segments minus those of the tokens that the segments share.
    """
    shared_ratio: float = 1.0
    """Number of tokens in all segments / number of tokens in packs; 1 without shared prefixes, or without packs.

    With shared prefixes, a row has the tokens that segments share only once. All other metrics of padding count these
    tokens once, too.
    """


def sum_of_squares(lengths: IntArray) -> float:
    """Return the sum of squared lengths as a float, since it may exceed int64."""
    return float((lengths.astype(np.float64) ** 2).sum())


def make_metrics(
    *,
    documents: IntArray,
    document_length: IntArray,
    segments_each: IntArray,
    tokens_kept: IntArray,
    packs: int,
    slots: int,
    squared_segments: float,
    squared_capacities: float,
    lower_bound: int,
    shared_tokens: int = 0,
) -> PackingMetrics:
    """Return the metrics of a plan, given its documents in groups of equal documents, and totals over its packs.

    Args:
        documents: int64 [groups]: number of documents in each group.
        document_length: integers [groups]: length of each document of the group, in tokens.
        segments_each: int64 [groups]: number of segments of each document.
        tokens_kept: int64 [groups]: number of tokens in all segments of each document.
        packs: number of packs.
        slots: sum of the capacities of all packs.
        squared_segments: sum of squared segment lengths.
        squared_capacities: sum of squared capacities of all packs.
        lower_bound: proven lower bound on the number of packs.
        shared_tokens: number of tokens that segments take from other segments.
    """
    is_whole = (segments_each == 1) & (tokens_kept == document_length)
    is_left_out = (segments_each == 0) & (document_length > 0)
    num_documents, segments = int(documents.sum()), int(documents @ segments_each)
    tokens, packed_tokens = int(documents @ document_length), int(documents @ tokens_kept)
    cut = int(documents[(segments_each > 0) & ~is_whole].sum())
    unique = packed_tokens - shared_tokens
    padding = slots - unique
    return PackingMetrics(
        num_documents=num_documents,
        num_segments=segments,
        num_packs=packs,
        num_tokens=tokens,
        num_cut_documents=cut,
        num_dropped_documents=int(documents[is_left_out].sum()),
        num_empty_documents=int(documents[document_length == 0].sum()),
        num_dropped_tokens=tokens - packed_tokens,
        num_padding_slots=padding,
        padding_ratio=_ratio(padding, slots),
        truncation_ratio=_ratio(cut, num_documents),
        concatenation_ratio=_ratio(num_documents, packs),
        dropped_token_ratio=_ratio(tokens - packed_tokens, tokens),
        packing_efficiency=1 - _ratio(padding, slots) if packs else 0.0,
        packing_factor=_ratio(segments, packs),
        lower_bound=lower_bound,
        attention_cost=_ratio(squared_segments, squared_capacities),
        shared_ratio=packed_tokens / unique if unique else 1.0,
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def pack_lower_bound(counts: IntArray, capacity: int) -> int:
    """Return a lower bound on the number of packs that segments need, given the number of segments of each length.

    The bound is the larger of two bounds, L1 and L2. L1 is the total number of tokens divided by the capacity, rounded
    up. L2 (Martello and Toth, "Lower bounds and reduction procedures for the bin packing problem", 1990) counts one
    pack for each long segment, that is, each segment longer than half the capacity. Two long segments never fit in one
    pack. L2 then adds packs for shorter segments that do not fit beside the long segments. For a threshold t, a segment
    of at least t tokens fits only beside a long segment of at most capacity - t tokens. Each threshold t up to half the
    capacity gives a number of packs, and L2 is the largest of these numbers.

    Args:
        counts: int64 [longest + 1]: counts[n] is the number of segments of n tokens, for n up to the capacity.
        capacity: capacity of each pack, in tokens.

    Returns:
        Lower bound on the number of packs.

    Example:
        >>> import numpy as np
        >>> pack_lower_bound(np.bincount([6, 6, 6, 2]), 10)  # no two segments of 6 tokens fit in a pack
        3
    """
    lengths = np.flatnonzero(counts)
    number = offsets_of(counts[lengths])
    volume = offsets_of(counts[lengths] * lengths)
    half = int(np.searchsorted(lengths, capacity // 2, side="right"))
    # the thresholds are the lengths up to half; one between two lengths gives no higher bound
    complement = np.searchsorted(lengths, capacity - lengths[:half], side="right")
    above_half = number[-1] - number[half]
    room = (number[complement] - number[half]) * capacity - (volume[complement] - volume[half])
    small = volume[half] - volume[:half]
    extra = np.maximum(0, -((room - small) // capacity))
    by_volume = -(-int(volume[-1]) // capacity)
    return max(by_volume, int(above_half + extra.max(initial=0)))
