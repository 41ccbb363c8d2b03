"""Concatenate all documents and cut every `capacity` tokens: the baseline. Nothing is padded, anything is cut."""

import numpy as np

from hf_packing.planning.lengths import IntArray, smallest_index_type
from hf_packing.planning.plan import PackingPlan


def fixed_length_plan(lengths: IntArray, capacity: int) -> PackingPlan:
    """The plan of plain concatenation, documents and packs in the order given (TRL calls it "wrapped").

    Args:
        lengths: integers [documents], tokens, checked.
        capacity: tokens of every pack; only the last may hold fewer.
    """
    end = np.cumsum(lengths, dtype=np.int64)
    start = end - lengths
    first_pack = start // capacity
    packs_touched = np.where(lengths > 0, (end - 1) // capacity - first_pack + 1, 0)
    numbers = np.arange(len(lengths), dtype=smallest_index_type(len(lengths)))
    document = np.repeat(numbers, packs_touched)
    nth_segment = np.arange(len(document)) - np.repeat(np.cumsum(packs_touched) - packs_touched, packs_touched)
    pack = first_pack[document] + nth_segment
    segment_begin = np.maximum(start[document], pack * capacity)
    segment_end = np.minimum(end[document], (pack + 1) * capacity)
    num_packs = int(pack[-1]) + 1 if len(pack) else 0
    return PackingPlan(
        document_length=lengths,
        segment_document=document,
        segment_start=(segment_begin - start[document]).astype(lengths.dtype),
        segment_length=(segment_end - segment_begin).astype(np.int32),
        pack_offsets=np.searchsorted(pack, np.arange(num_packs + 1)),
        pack_capacity=np.full(num_packs, capacity, dtype=np.int32),
    )
