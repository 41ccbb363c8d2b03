"""How many documents there are of each length: all that a counting strategy looks at."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_packing.errors import PackingError
from hf_packing.planning.lengths import MAX_TOKENS, IntArray, check_whole_numbers

COUNTED_AT_ONCE = 1 << 22
DENSE_LENGTHS = 1 << 22
"""Up to this length a table of counts is cheaper than sorting."""


@dataclass(frozen=True)
class LengthCounts:
    """Documents by length; only lengths that occur are listed."""

    length: IntArray
    """int64 [lengths], tokens, ascending, without repeats."""
    documents: IntArray
    """int64 [lengths], at least 1."""

    @property
    def num_documents(self) -> int:
        return int(self.documents.sum())


def count_lengths(lengths: IntArray) -> LengthCounts:
    """The counts of checked lengths."""
    if lengths.max(initial=0) >= DENSE_LENGTHS:
        length, documents = np.unique(lengths, return_counts=True)
        return LengthCounts(length.astype(np.int64), documents.astype(np.int64))
    counts = np.zeros(int(lengths.max(initial=0)) + 1, dtype=np.int64)
    for begin in range(0, len(lengths), COUNTED_AT_ONCE):
        counts += np.bincount(lengths[begin : begin + COUNTED_AT_ONCE], minlength=len(counts))
    return of_histogram(counts)


def of_histogram(counts: IntArray) -> LengthCounts:
    """The counts of a checked histogram: counts[n] documents of n tokens."""
    length = np.flatnonzero(counts)
    return LengthCounts(length, counts[length])


def check_counts(counts: Any) -> IntArray:
    """A histogram as int64, or an error that points at the first bad count.

    Args:
        counts: 1-d integers [longest + 1]: counts[n] is the number of documents of n tokens.

    Raises:
        PackingError: not one-dimensional, not integers, masked, negative, or 2**63 tokens or more in all.
    """
    array = check_whole_numbers("counts", counts)
    if not array.size:
        return np.zeros(0, dtype=np.int64)
    if array.dtype.kind == "i" and array.min() < 0:
        first = int(np.argmax(array < 0))
        raise PackingError(f"counts: expected no negative count, got {array[first]} documents of length {first}")
    documents, tokens = float(array.sum(dtype=np.float64)), float(array @ np.arange(len(array), dtype=np.float64))
    if max(documents, tokens) >= MAX_TOKENS:
        raise PackingError(
            f"counts: expected fewer than 2**63 documents and tokens, got {documents:.3g} and {tokens:.3g}"
        )
    return array.astype(np.int64)
