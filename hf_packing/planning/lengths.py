"""Check document lengths, count documents by length, and cut documents that are longer than a pack."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hf_packing.checks import INT32_MAX, check_whole_numbers
from hf_packing.errors import PackingError

Array = npt.NDArray[Any]
"""An array of any numbers."""
IntArray = npt.NDArray[Any]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

_MAX_TOKENS = 2**63
_DENSE_LENGTHS = 1 << 22
"""If all lengths are below this value, counting lengths in an array is cheaper than sorting them."""

Overflow = Literal["split", "truncate", "drop", "error"]


def check_lengths(lengths: Any) -> IntArray:
    """Check document lengths, and return the lengths as an integer array.

    Args:
        lengths: 1-d integers [documents]: document lengths in tokens, as a list, an array or any other input of
            `numpy.asarray`. A length may be 0.

    Returns:
        int32 [documents], or int64 [documents] if a document has 2**31 tokens or more.

    Raises:
        PackingError: `lengths` is not one-dimensional, is a masked array, has a value that is negative or not an
            integer, or has a total of 2**63 tokens or more.
    """
    array = check_whole_numbers("lengths", lengths)
    _refuse_negative("lengths", array)
    longest, total = int(array.max(initial=0)), float(array.sum(dtype=np.float64))
    if total >= _MAX_TOKENS:
        raise PackingError(
            f"lengths: expected fewer than 2**63 tokens in all documents together, got {total:.3g} tokens; the longest "
            f"document has {longest} tokens"
        )
    return array.astype(np.int32 if longest <= INT32_MAX else np.int64)


def _refuse_negative(name: str, array: IntArray) -> None:
    if array.min(initial=0) < 0:
        first = int(np.argmax(array < 0))
        raise PackingError(f"{name}: expected no negative number, got {array[first]} at index {first}")


def smallest_index_type(count: int) -> type[np.signedinteger[Any]]:
    """Return np.int32 if int32 can index an array of `count` items, and np.int64 otherwise."""
    return np.int32 if count <= INT32_MAX else np.int64


def sort_by_length(lengths: IntArray) -> IntArray:
    """Return the int64 indices that sort non-negative lengths in ascending order. The sort is stable.

    NumPy sorts 16-bit integers by radix sort, which is ten times as fast as sorting wider integers. So lengths
    of more than 16 bits are sorted in several passes, and each pass sorts by 16 of the bits.
    """
    if not len(lengths):
        return np.zeros(0, dtype=np.int64)
    order = np.argsort(lengths.astype(np.uint16), kind="stable")
    for shift in range(16, int(lengths.max()).bit_length(), 16):
        order = order[np.argsort((lengths >> shift).astype(np.uint16)[order], kind="stable")]
    return order


def offsets_of(lengths: Any) -> IntArray:
    """Return where things of these lengths begin and end, laid end to end, int64 [things + 1].

    Args:
        lengths: integers [things]: the length of each.

    Example:
        >>> offsets_of([2, 3]).tolist()
        [0, 2, 5]
    """
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, dtype=np.int64, out=offsets[1:])
    return offsets


def join_rows(arrays: Sequence[IntArray]) -> tuple[Int64Array, Int64Array]:
    """Return the values of arrays of integers, one after the other, and the number of values in each array."""
    values = np.concatenate([np.zeros(0, np.int64), *arrays], dtype=np.int64, casting="unsafe")
    return values, np.array([*map(len, arrays)], np.int64)


def sums_by(group: IntArray, values: IntArray, groups: int) -> Int64Array:
    """Return the sum of the values of each group, int64 [groups]. The sums are exact, other than those of np.bincount.

    Args:
        group: integers [values]: the group of each value.
        values: integers [values].
        groups: number of groups.
    """
    total = np.zeros(groups, dtype=np.int64)
    np.add.at(total, group, values)
    return total


def total_of(values: IntArray) -> int:
    """Return the sum of integers or booleans, in 64 bits also where NumPy would sum 32-bit integers in 32 bits."""
    return int(values.sum(dtype=np.int64))


def sums_of(values: IntArray, offsets: IntArray) -> IntArray:
    """Return the sum of the values offsets[i]:offsets[i + 1] for each i, int64 [len(offsets) - 1]."""
    return np.diff(offsets_of(values)[offsets])


def indices_in_ranges(begin: IntArray | int, length: IntArray) -> IntArray:
    """Return the indices in several ranges, one range after the other, int64 [sum of the lengths].

    Args:
        begin: integers [ranges]: the first index of each range; or the first index of all ranges.
        length: integers [ranges]: the number of indices in each range.

    Example:
        >>> indices_in_ranges(np.array([5, 0]), np.array([2, 3])).tolist()
        [5, 6, 0, 1, 2]
    """
    offsets = offsets_of(length)
    indices: IntArray = np.arange(offsets[-1]) + np.repeat(begin - offsets[:-1], length)
    return indices


def indices_in_groups(offsets: IntArray, groups: IntArray) -> tuple[IntArray, IntArray]:
    """Return the indices offsets[g]:offsets[g + 1] of each group g, group after group, and the number of each group.

    Example:
        >>> indices, sizes = indices_in_groups(np.array([0, 2, 5]), np.array([1, 0]))
        >>> indices.tolist(), sizes.tolist()
        ([2, 3, 4, 0, 1], [3, 2])
    """
    sizes = offsets[groups + 1] - offsets[groups]
    return indices_in_ranges(offsets[groups], sizes), sizes


def count_ranges(begin: IntArray, length: IntArray, size: int) -> IntArray:
    """Return how many ranges each index below `size` is in, int64 [size].

    Args:
        begin: integers [ranges]: the first index of each range.
        length: integers [ranges]: the number of indices in each range.
        size: the largest index of a range, plus 1, or more.

    Example:
        >>> count_ranges(np.array([0, 1]), np.array([3, 1]), 4).tolist()
        [1, 2, 1, 0]
    """
    changes = np.bincount(begin, minlength=size + 1) - np.bincount(begin + length, minlength=size + 1)
    return np.cumsum(changes[:-1])


@dataclass(frozen=True)
class LengthCounts:
    """The number of documents of each length. Lengths that do not occur are left out."""

    length: IntArray
    """int64 [lengths]: the distinct document lengths in tokens, ascending."""
    documents: IntArray
    """int64 [lengths]: number of documents of each length, at least 1."""


def count_lengths(lengths: IntArray) -> LengthCounts:
    """Count the documents of each length. `lengths` must be an array that `check_lengths` has returned."""
    if lengths.max(initial=0) >= _DENSE_LENGTHS:
        length, documents = np.unique(lengths, return_counts=True)
        return LengthCounts(length.astype(np.int64), documents.astype(np.int64))
    return counts_of_histogram(np.bincount(lengths))


def counts_of_histogram(counts: IntArray) -> LengthCounts:
    """Convert a histogram of document lengths to LengthCounts. The histogram must be valid (see `check_counts`).

    `counts[n]` is the number of documents of n tokens.
    """
    length = np.flatnonzero(counts)
    return LengthCounts(length, counts[length])


def check_counts(counts: Any) -> IntArray:
    """Check a histogram of document lengths, and return the histogram as an int64 array.

    Args:
        counts: 1-d integers [longest + 1]: counts[n] is the number of documents of n tokens.

    Returns:
        int64 [longest + 1].

    Raises:
        PackingError: `counts` is not one-dimensional, is a masked array, has a value that is negative or not an
            integer, or has a total of 2**63 or more documents or tokens.
    """
    array = check_whole_numbers("counts", counts)
    _refuse_negative("counts", array)
    documents, tokens = float(array.sum(dtype=np.float64)), float(array @ np.arange(len(array), dtype=np.float64))
    if max(documents, tokens) >= _MAX_TOKENS:
        raise PackingError(
            f"counts: expected fewer than 2**63 documents and fewer than 2**63 tokens, got {documents:.3g} documents "
            f"and {tokens:.3g} tokens"
        )
    return array.astype(np.int64)


@dataclass(frozen=True)
class Pieces:
    """The pieces that documents are cut into. A piece is a contiguous slice of one document, and fits in a pack."""

    document: IntArray
    """integers [pieces]: index of the document that the piece is cut from."""
    start: IntArray
    """integers [pieces]: index of the piece's first token in the document."""
    length: IntArray
    """integers [pieces]: length of the piece in tokens, at least 1."""

    @classmethod
    def whole(cls, lengths: IntArray) -> "Pieces":
        """Return documents as pieces that are not cut, given the lengths of the documents in tokens."""
        return cls(np.arange(len(lengths)), np.zeros(len(lengths), dtype=np.int64), lengths)

    def take(self, order: IntArray) -> "Pieces":
        """Return the pieces at the indices in `order`, in that order."""
        return Pieces(self.document[order], self.start[order], self.length[order])


def check_fitting(lengths: IntArray, capacity: int, overflow: Overflow) -> None:
    """Raise PackingError if `overflow` is "error" and a document is longer than the capacity.

    The error names the first document that is too long.
    """
    if overflow == "error" and lengths.max(initial=0) > capacity:
        first = int(np.argmax(lengths > capacity))
        raise PackingError(
            f"lengths: document {first} has {lengths[first]} tokens, more than max_length={capacity}; with "
            "overflow='error', no document may be longer. Use overflow='split', 'truncate' or 'drop' for long documents"
        )


def cut_to_pieces(lengths: IntArray, capacity: int, overflow: Overflow) -> Pieces:
    """Cut documents into pieces that fit in a pack, and return the pieces.

    A document of at most `capacity` tokens becomes one piece; an empty document becomes no piece. `overflow` selects
    the treatment of a longer document: "split" cuts the document into pieces of exactly `capacity` tokens and a
    remainder (cutting no more than necessary, as in arXiv 2404.10830), "truncate" keeps the first `capacity` tokens,
    "drop" leaves the document out, and "error" raises PackingError.

    Args:
        lengths: integers [documents]: document lengths in tokens, already checked.
        capacity: capacity of each pack, in tokens.
        overflow: treatment of documents longer than `capacity`, as described above.

    Returns:
        Pieces, in the order of the documents.

    Raises:
        PackingError: `overflow` is "error" and a document is too long.
    """
    check_fitting(lengths, capacity, overflow)
    numbers = np.arange(len(lengths), dtype=smallest_index_type(len(lengths)))
    if overflow == "split" and lengths.max(initial=0) > capacity:
        chunks = -(-lengths.astype(np.int64) // capacity)
        document = np.repeat(numbers, chunks)
        start = indices_in_ranges(0, chunks) * capacity
        length = np.minimum(lengths[document] - start, capacity)
        return Pieces(document, start.astype(lengths.dtype, copy=False), length.astype(np.int32))
    if overflow == "truncate":
        lengths = np.minimum(lengths, capacity)
    kept = np.flatnonzero((lengths > 0) & (lengths <= capacity))
    return Pieces(numbers[kept], np.zeros(len(kept), dtype=np.int32), lengths[kept].astype(np.int32))
