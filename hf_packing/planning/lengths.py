"""Document lengths: check them, count them, and cut the documents that are longer than a pack."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from hf_packing.errors import PackingError

IntArray = npt.NDArray[Any]

INT32_MAX = 2**31 - 1
_MAX_TOKENS = 2**63
_MAX_PIECES = 2**40
_COUNTED_AT_ONCE = 1 << 22
_DENSE_LENGTHS = 1 << 22
"""Up to this length a table of counts is cheaper than sorting."""

Overflow = Literal["split", "truncate", "drop", "error"]


def check_lengths(lengths: Any) -> IntArray:
    """Return the lengths as an integer array, or raise an error that points at the first bad one.

    Args:
        lengths: 1-d integers [documents], tokens; a list, an array, or anything `numpy.asarray` takes. Zero is allowed.

    Returns:
        int32 [documents], or int64 where a document has 2**31 tokens or more.

    Raises:
        PackingError: not one-dimensional, not integers, masked, negative, or more than 2**63 - 1 tokens in all.
    """
    array = check_whole_numbers("lengths", lengths)
    if not array.size:
        return np.zeros(0, dtype=np.int32)
    if array.dtype.kind == "i" and array.min() < 0:
        first = int(np.argmax(array < 0))
        raise PackingError(f"lengths: expected no negative length, got {array[first]} at index {first}")
    longest, total = int(array.max()), float(array.sum(dtype=np.float64))
    if total >= _MAX_TOKENS:
        raise PackingError(f"lengths: expected fewer than 2**63 tokens in all, got {total:.3g}, the longest {longest}")
    return array.astype(np.int32 if longest <= INT32_MAX else np.int64)


def check_whole_numbers(name: str, values: Any) -> IntArray:
    """Return `values` as a 1-d integer array, or raise a PackingError that names the argument.

    An empty array may have any type.
    """
    if isinstance(values, np.ma.MaskedArray):
        raise PackingError(f"{name}: expected an array without a mask, got a masked array")
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise PackingError(f"{name}: expected 1-d integers, got {type(values).__name__}: {error}") from error
    if array.ndim != 1:
        raise PackingError(f"{name}: expected one dimension, got shape {array.shape}")
    if array.size and array.dtype.kind not in "iu":
        raise PackingError(f"{name}: expected integers, got {array.dtype} such as {array[0]!r}")
    return array


def check_whole_number(name: str, value: Any, *, minimum: int = 1, maximum: int = INT32_MAX) -> int:
    """Return `value` as an int within [minimum, maximum], or raise a PackingError that names the argument."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not minimum <= value <= maximum:
        raise PackingError(f"{name}: expected an integer from {minimum} to {maximum}, got {value!r}")
    return int(value)


def is_real(value: Any) -> bool:
    """Return whether `value` is a number, and not a bool."""
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def smallest_index_type(count: int) -> type[np.signedinteger[Any]]:
    """Return the integer type to index `count` items with."""
    return np.int32 if count <= INT32_MAX else np.int64


def sort_by_length(lengths: IntArray) -> IntArray:
    """Return the indices that sort non-negative lengths, shortest first; equal lengths keep their order.

    NumPy sorts 16-bit keys by radix, ten times as fast as wider ones, so wider lengths are sorted 16 bits at a time.
    """
    if not len(lengths):
        return np.zeros(0, dtype=np.int64)
    order = np.argsort(lengths.astype(np.uint16), kind="stable")
    for shift in range(16, int(lengths.max()).bit_length(), 16):
        order = order[np.argsort((lengths >> shift).astype(np.uint16)[order], kind="stable")]
    return order


@dataclass(frozen=True)
class LengthCounts:
    """How many documents there are of each length. Only lengths that occur are listed."""

    length: IntArray
    """int64 [lengths], tokens, ascending, without repeats."""
    documents: IntArray
    """int64 [lengths], at least 1."""

    @property
    def num_documents(self) -> int:
        return int(self.documents.sum())


def count_lengths(lengths: IntArray) -> LengthCounts:
    """Count checked lengths."""
    if lengths.max(initial=0) >= _DENSE_LENGTHS:
        length, documents = np.unique(lengths, return_counts=True)
        return LengthCounts(length.astype(np.int64), documents.astype(np.int64))
    counts = np.zeros(int(lengths.max(initial=0)) + 1, dtype=np.int64)
    for begin in range(0, len(lengths), _COUNTED_AT_ONCE):
        counts += np.bincount(lengths[begin : begin + _COUNTED_AT_ONCE], minlength=len(counts))
    return counts_of_histogram(counts)


def counts_of_histogram(counts: IntArray) -> LengthCounts:
    """Convert a checked histogram, in which counts[n] documents have n tokens."""
    length = np.flatnonzero(counts)
    return LengthCounts(length, counts[length])


def check_counts(counts: Any) -> IntArray:
    """Return a histogram as int64, or raise an error that points at the first bad count.

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
    if max(documents, tokens) >= _MAX_TOKENS:
        raise PackingError(
            f"counts: expected fewer than 2**63 documents and tokens, got {documents:.3g} and {tokens:.3g}"
        )
    return array.astype(np.int64)


@dataclass(frozen=True)
class Pieces:
    """Contiguous slices of documents, none longer than a pack, in document order."""

    document: IntArray
    """integers [pieces]: the document that a piece is cut from."""
    start: IntArray
    """integers [pieces], tokens: where in the document the piece begins."""
    length: IntArray
    """integers [pieces], tokens, at least 1."""

    def take(self, order: IntArray) -> "Pieces":
        """Select pieces by index."""
        return Pieces(self.document[order], self.start[order], self.length[order])


def check_overflow(overflow: str) -> None:
    """Raise PackingError unless `overflow` is one of the accepted values."""
    if overflow not in get_args(Overflow):
        raise PackingError(f"overflow: expected one of {', '.join(get_args(Overflow))}, got {overflow!r}")


def check_fitting(lengths: IntArray, capacity: int, overflow: Overflow) -> None:
    """With overflow="error", raise a PackingError that names the first document longer than the capacity."""
    if overflow == "error" and lengths.max(initial=0) > capacity:
        first = int(np.argmax(lengths > capacity))
        raise PackingError(
            f"lengths: document {first} has {lengths[first]} tokens, more than max_length={capacity}, and "
            "overflow='error' (accepted: split, truncate, drop)"
        )


def check_num_pieces(pieces: float, capacity: int) -> None:
    """Raise PackingError if long documents become more pieces than can be planned."""
    if pieces > _MAX_PIECES:
        raise PackingError(
            f"max_length: expected to cut documents into at most 2**40 pieces, got {capacity}, which makes {pieces:.4g}"
        )


def cut_to_pieces(lengths: IntArray, capacity: int, overflow: Overflow) -> Pieces:
    """Cut documents into pieces that fit in a pack.

    "split" cuts a long document into chunks of exactly `capacity` and a remainder (the minimally required truncation of
    arXiv 2404.10830); "truncate" keeps its first `capacity` tokens; "drop" leaves it out; "error" raises. Empty
    documents yield no piece.

    Args:
        lengths: integers [documents], tokens, checked.
        capacity: tokens that a pack holds.
        overflow: as above.

    Raises:
        PackingError: unknown overflow, or a document is too long and overflow is "error".
    """
    check_overflow(overflow)
    documents = len(lengths)
    numbers = np.arange(documents, dtype=smallest_index_type(documents))
    longest = int(lengths.max(initial=0))
    if longest > capacity:
        check_fitting(lengths, capacity, overflow)
        if overflow == "split":
            return _split(lengths, capacity, numbers)
        if overflow == "truncate":
            lengths = np.minimum(lengths, capacity)
    kept = np.flatnonzero((lengths > 0) & (lengths <= capacity))
    if len(kept) < documents:
        numbers, lengths = numbers[kept], lengths[kept]
    return Pieces(numbers, np.zeros(len(numbers), dtype=np.int32), lengths.astype(np.int32, copy=False))


def _split(lengths: IntArray, capacity: int, numbers: IntArray) -> Pieces:
    chunks = -(-lengths.astype(np.int64) // capacity)
    check_num_pieces(float(chunks.sum()), capacity)
    document = np.repeat(numbers, chunks)
    first_piece = np.cumsum(chunks) - chunks
    start = (np.arange(len(document)) - np.repeat(first_piece, chunks)) * capacity
    length = np.minimum(lengths[document] - start, capacity)
    return Pieces(document, start.astype(lengths.dtype, copy=False), length.astype(np.int32))
