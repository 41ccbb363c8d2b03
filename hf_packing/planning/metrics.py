"""What a plan gains and what it costs, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hf_packing.planning.bounds import pack_lower_bound

if TYPE_CHECKING:
    from hf_packing.planning.plan import PackingPlan


@dataclass(frozen=True)
class PackingMetrics:
    """A plan in numbers. All ratios but concatenation_ratio lie in [0, 1]; a plan without packs has zeros."""

    num_documents: int
    num_segments: int
    num_packs: int
    num_tokens: int
    """Tokens of all documents."""
    num_cut_documents: int
    """Documents of which some token is packed, but not all in one segment."""
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
    """Packs that any plan for the same segments needs, proven."""
    attention_cost: float
    """Sum of squared segment lengths / sum of squared capacities: attention's work against full rows."""


def measure(plan: PackingPlan) -> PackingMetrics:
    """The metrics of a plan; see `PackingMetrics` for what each one is."""
    documents, packs, segments = plan.num_documents, plan.num_packs, plan.num_segments
    packed_tokens = int(plan.segment_length.sum(dtype=np.int64))
    tokens = int(plan.document_length.sum(dtype=np.int64))
    segments_of = np.bincount(plan.segment_document, minlength=documents)
    single = segments_of[plan.segment_document] == 1
    shortened = single & (plan.segment_length < plan.document_length[plan.segment_document])
    empty = int((plan.document_length == 0).sum())
    bound = 0
    if packs:
        bound = pack_lower_bound(np.bincount(plan.segment_length), int(plan.pack_capacity.max()))
    return make_metrics(
        documents=documents,
        segments=segments,
        packs=packs,
        tokens=tokens,
        packed_tokens=packed_tokens,
        cut=int((segments_of > 1).sum() + shortened.sum()),
        dropped=int((segments_of == 0).sum()) - empty,
        empty=empty,
        slots=int(plan.pack_capacity.sum(dtype=np.int64)),
        squared_segments=float((plan.segment_length.astype(np.float64) ** 2).sum()),
        squared_capacities=float((plan.pack_capacity.astype(np.float64) ** 2).sum()),
        lower_bound=max(bound, plan.proven_lower_bound),
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
    """All metrics from what was counted."""
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
        padding_ratio=ratio(padding, slots),
        truncation_ratio=ratio(cut, documents),
        concatenation_ratio=ratio(documents, packs),
        dropped_token_ratio=ratio(tokens - packed_tokens, tokens),
        packing_efficiency=1 - ratio(padding, slots) if packs else 0.0,
        packing_factor=ratio(segments, packs),
        lower_bound=lower_bound,
        attention_cost=ratio(squared_segments, squared_capacities),
    )


def ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
