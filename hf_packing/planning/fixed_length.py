"""Concatenate and cut, the baselines: nothing is padded but the last pack, documents are cut wherever a pack ends."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hf_packing.planning.lengths import IntArray, smallest_index_type
from hf_packing.planning.overflow import check_pieces
from hf_packing.planning.plan import PackingPlan
from hf_packing.planning.shuffle import shuffle_packs


class Concatenated(NamedTuple):
    """Segments of documents that were concatenated and cut, and how many of them each pack has."""

    document: IntArray
    start: IntArray
    length: IntArray
    pack_sizes: IntArray


def fixed_length_plan(lengths: IntArray, capacity: int, seed: int | None) -> PackingPlan:
    """The plan of plain concatenation (TRL calls it "wrapped").

    Args:
        lengths: integers [documents], tokens, checked.
        capacity: tokens of every pack; only the last may hold fewer.
        seed: of the order of packs and of the segments in them; None keeps that of the documents.
    """
    return bucket_by_length_plan(lengths, (capacity,), seed)


def bucket_by_length_plan(lengths: IntArray, capacities: Sequence[int], seed: int | None) -> PackingPlan:
    """Each document goes to the smallest bucket that holds it, or to the largest; each bucket is concatenated and cut.

    It is the multi-bucket baseline of arXiv 2407.07495.

    Args:
        lengths: integers [documents], tokens, checked.
        capacities: tokens of the packs of each bucket, ascending.
        seed: of the order of packs and of the segments in them; None keeps the buckets apart, the smallest first.
    """
    bucket = np.minimum(np.searchsorted(capacities, lengths), len(capacities) - 1)
    buckets = []
    for number, capacity in enumerate(capacities):
        document = np.flatnonzero(bucket == number)
        segments = concatenate_and_cut(lengths[document], capacity)
        buckets.append(segments._replace(document=document[segments.document]))
    document, start, length, pack_sizes = map(np.concatenate, zip(*buckets, strict=True))
    pack_capacity = np.repeat(np.array(capacities, dtype=np.int32), [len(segments.pack_sizes) for segments in buckets])
    pack_offsets = np.concatenate([[0], np.cumsum(pack_sizes)])
    if seed is not None:
        order, pack_offsets, packs = shuffle_packs(pack_offsets, seed)
        document, start, length, pack_capacity = document[order], start[order], length[order], pack_capacity[packs]
    return PackingPlan(
        document_length=lengths,
        segment_document=document.astype(smallest_index_type(len(lengths)), copy=False),
        segment_start=start.astype(lengths.dtype, copy=False),
        segment_length=length.astype(np.int32),
        pack_offsets=pack_offsets,
        pack_capacity=pack_capacity,
    )


def concatenate_and_cut(lengths: IntArray, capacity: int) -> Concatenated:
    end = np.cumsum(lengths, dtype=np.int64)
    start = end - lengths
    first_pack = start // capacity
    packs_touched = np.where(lengths > 0, (end - 1) // capacity - first_pack + 1, 0)
    check_pieces(float(packs_touched.sum()), capacity)
    document = np.repeat(np.arange(len(lengths)), packs_touched)
    nth_segment = np.arange(len(document)) - np.repeat(np.cumsum(packs_touched) - packs_touched, packs_touched)
    pack = first_pack[document] + nth_segment
    segment_begin = np.maximum(start[document], pack * capacity)
    segment_end = np.minimum(end[document], (pack + 1) * capacity)
    return Concatenated(document, segment_begin - start[document], segment_end - segment_begin, np.bincount(pack))
