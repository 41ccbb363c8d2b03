"""The checks that every PackingPlan must pass, and the dtypes in which its arrays are stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hf_packing.errors import PackingError
from hf_packing.planning.lengths import INT32_MAX, IntArray, smallest_index_type

SEGMENT_SHARED = "segment_shared"
"""The array that only plans of documents with shared prefixes have."""


def check_laws(arrays: Mapping[str, IntArray]) -> None:
    """Raise PackingError if the arrays of a plan are invalid.

    In a valid plan, no token is in two segments, and no pack has more tokens than its capacity. A token may be in no
    segment; the metrics count such tokens as dropped.
    """
    _check_shapes(arrays)
    offsets, capacity, documents = arrays["pack_offsets"], arrays["pack_capacity"], arrays["document_length"]
    document, start, length = (arrays[f"segment_{name}"] for name in ("document", "start", "length"))
    segments = len(document)
    if offsets[0] != 0 or offsets[-1] != segments or (np.diff(offsets) < 1).any():
        raise PackingError(
            f"pack_offsets: expected offsets that rise from 0 to {segments}, the number of segments, with at least one "
            f"segment in each pack, got {offsets}"
        )
    if not segments:
        return
    if length.min() < 1:
        raise PackingError(
            f"segment_length: expected no empty segment, got length {length.min()} at index {int(length.argmin())}"
        )
    if document.min() < 0 or document.max() >= len(documents):
        raise PackingError(
            f"segment_document: expected document indices of at least 0 and below {len(documents)}, the number of "
            f"documents, got indices from {document.min()} to {document.max()}"
        )
    own = length
    if SEGMENT_SHARED in arrays:
        _check_shared(arrays[SEGMENT_SHARED], length, offsets)
        own = length - arrays[SEGMENT_SHARED]
    fill = np.add.reduceat(own, offsets[:-1], dtype=np.int64)
    if (overfull := fill > capacity).any():
        pack = int(overfull.argmax())
        raise PackingError(
            f"segment_length: expected at most {capacity[pack]} tokens in pack {pack}, the capacity of the "
            f"pack, got {fill[pack]} tokens"
        )
    outside = start > documents[document] - length
    if start.any():
        outside |= start < 0
    if outside.any():
        segment = int(outside.argmax())
        raise PackingError(
            f"segment_start: expected segments within their documents, but segment {segment} covers tokens "
            f"{start[segment]}:{int(start[segment]) + int(length[segment])} of document {document[segment]}, which has "
            f"{documents[document[segment]]} tokens"
        )
    _check_disjoint(document, start, length, len(documents))


def stored_types(arrays: Mapping[str, IntArray]) -> dict[str, Any]:
    """Return the dtype in which each array of a valid plan is stored."""
    longest = int(arrays["document_length"].max(initial=0))
    tokens = np.int32 if longest <= INT32_MAX else np.int64
    return {
        "document_length": tokens,
        "segment_document": smallest_index_type(len(arrays["document_length"])),
        "segment_start": tokens,
        "segment_length": np.int32,
        "pack_offsets": np.int64,
        "pack_capacity": np.int32,
        SEGMENT_SHARED: np.int32,
    }


def _check_shapes(arrays: Mapping[str, IntArray]) -> None:
    documents, segments = arrays["document_length"], len(arrays["segment_document"])
    offsets, capacities = arrays["pack_offsets"], arrays["pack_capacity"]
    for name, array in arrays.items():
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise PackingError(f"{name}: expected 1-d integers, got an array of {array.dtype} with shape {array.shape}")
    if len(documents) and documents.min() < 0:
        raise PackingError(f"document_length: expected no negative length, got {documents.min()}")
    for name in ("segment_length", "pack_capacity"):
        if (largest := arrays[name].max(initial=0)) > INT32_MAX:
            raise PackingError(f"{name}: expected at most {INT32_MAX} tokens, got {largest}")
    for name in ("segment_start", "segment_length", SEGMENT_SHARED):
        if name in arrays and len(arrays[name]) != segments:
            raise PackingError(
                f"{name}: expected one value for each of the {segments} segments in segment_document, got "
                f"{len(arrays[name])} values"
            )
    if len(offsets) != len(capacities) + 1:
        raise PackingError(
            f"pack_offsets: expected one offset more than packs, got {len(offsets)} offsets for the "
            f"{len(capacities)} packs in pack_capacity"
        )


def _check_shared(shared: IntArray, length: IntArray, offsets: IntArray) -> None:
    """Raise PackingError if a segment shares more tokens with the segment before it than both have.

    The first segment of a pack shares nothing.
    """
    most = np.minimum(length, np.concatenate([[0], length[:-1]]))
    most[offsets[:-1]] = 0
    if (wrong := (shared < 0) | (shared > most)).any():
        segment = int(wrong.argmax())
        if shared[segment] < 0:
            reason = "no negative number"
        elif not most[segment]:
            reason = "0 at the first segment of a pack"
        else:
            reason = (
                f"at most {most[segment]}, since segment {segment} has {length[segment]} tokens and the segment before "
                f"it has {length[segment - 1]}"
            )
        raise PackingError(f"segment_shared: expected {reason}, got {shared[segment]} at index {segment}")


def _check_disjoint(document: IntArray, start: IntArray, length: IntArray, documents: int) -> None:
    """Raise PackingError if two segments share a token.

    Documents with a single segment are skipped. The segments of all other documents are sorted and compared.
    """
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
            f"segment_start: expected segments that share no token, but segments {left[first]} and {right[first]} of "
            f"document {document[left[first]]} overlap: segment {left[first]} ends before token {end[first]}, and "
            f"segment {right[first]} starts at token {start[right[first]]}"
        )
