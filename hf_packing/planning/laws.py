"""The laws that make arrays a plan. They are checked whenever a plan is made or loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray

if TYPE_CHECKING:
    from hf_packing.planning.plan import PackingPlan


def check_laws(plan: PackingPlan) -> None:
    """Raise PackingError unless every token is in at most one segment and no pack is overfull.

    Tokens in no segment are allowed: they are the ones that the metrics count as dropped.
    """
    check_shapes(plan)
    segments = plan.num_segments
    offsets, length, start, document = plan.pack_offsets, plan.segment_length, plan.segment_start, plan.segment_document
    if offsets[0] != 0 or offsets[-1] != segments or (np.diff(offsets) < 1).any():
        raise PackingError(
            f"pack_offsets: expected to rise from 0 to the {segments} segments, at least one for each pack"
        )
    if not segments:
        return
    if length.min() < 1:
        raise PackingError(f"segment_length: expected no empty segment, got {length.min()} at {int(length.argmin())}")
    if document.min() < 0 or document.max() >= plan.num_documents:
        raise PackingError(
            f"segment_document: expected numbers below {plan.num_documents} documents, "
            f"got {document.min()}..{document.max()}"
        )
    fill = np.add.reduceat(length, offsets[:-1], dtype=np.int64)
    if (overfull := fill > plan.pack_capacity).any():
        pack = int(overfull.argmax())
        raise PackingError(f"pack {pack} holds {fill[pack]} tokens, its capacity is {plan.pack_capacity[pack]}")
    outside = start > plan.document_length[document] - length
    if start.any():
        outside |= start < 0
    if outside.any():
        segment = int(outside.argmax())
        raise PackingError(
            f"segment {segment} is tokens {start[segment]}:{int(start[segment]) + int(length[segment])} of document "
            f"{document[segment]}, which has {plan.document_length[document[segment]]}"
        )
    check_disjoint(document, start, length, plan.num_documents)


def check_shapes(plan: PackingPlan) -> None:
    arrays = plan.arrays()
    for name, array in arrays.items():
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise PackingError(f"{name}: expected 1-d integers, got {array.dtype} of shape {array.shape}")
    if len(plan.document_length) and plan.document_length.min() < 0:
        raise PackingError(f"document_length: expected no negative length, got {plan.document_length.min()}")
    for name in ("segment_start", "segment_length"):
        if len(arrays[name]) != plan.num_segments:
            raise PackingError(f"{name}: expected {plan.num_segments} segments, got {len(arrays[name])}")
    if len(plan.pack_offsets) != len(plan.pack_capacity) + 1:
        raise PackingError(
            f"pack_offsets: expected one more than the {len(plan.pack_capacity)} packs, got {len(plan.pack_offsets)}"
        )


def check_disjoint(document: IntArray, start: IntArray, length: IntArray, documents: int) -> None:
    """No token is in two segments. Only documents with several segments need a look at their order."""
    seen = np.zeros(documents, dtype=bool)
    seen[document] = True
    if np.count_nonzero(seen) == len(document):
        return
    segments_of = np.bincount(document, minlength=documents)
    several = np.flatnonzero(segments_of[document] > 1)
    several = several[np.lexsort((start[several], document[several]))]
    left, right = several[:-1], several[1:]
    end = start[left].astype(np.int64) + length[left]
    if (twice := (document[left] == document[right]) & (start[right] < end)).any():
        first = int(twice.argmax())
        raise PackingError(
            f"segments {left[first]} and {right[first]} share tokens of document {document[left[first]]}: "
            f"one ends at {end[first]}, the other starts at {start[right[first]]}"
        )
