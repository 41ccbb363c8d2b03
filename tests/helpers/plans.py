"""What a plan holds, as lists."""

from itertools import pairwise


def segments_of(plan):
    """The segments of all packs in order: (document, start, length)."""
    columns = plan.segment_document, plan.segment_start, plan.segment_length
    return list(zip(*(column.tolist() for column in columns), strict=True))


def packs_of(plan):
    """The segments of each pack."""
    segments = segments_of(plan)
    return [segments[first:end] for first, end in pairwise(plan.pack_offsets.tolist())]
