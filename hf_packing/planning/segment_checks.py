"""Checks of segments that only some plans need: segments that share a prefix, and several segments of one document."""

import numpy as np

from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray


def check_shared(shared: IntArray, length: IntArray, offsets: IntArray) -> None:
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


def check_disjoint(document: IntArray, start: IntArray, length: IntArray) -> None:
    """Raise PackingError if two segments have the same token of a document.

    Documents with a single segment are skipped. The segments of all other documents are sorted and compared.
    """
    segments_of = np.bincount(document)
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
