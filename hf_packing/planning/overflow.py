"""What happens to a document longer than a pack: it becomes pieces, and pieces are what gets packed."""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray, smallest_index_type

MAX_PIECES = 2**40

Overflow = Literal["split", "truncate", "drop", "error"]


@dataclass(frozen=True)
class Pieces:
    """Contiguous slices of documents, none longer than the capacity, in document order."""

    document: IntArray
    """integers [pieces]: the document a piece is cut from."""
    start: IntArray
    """integers [pieces], tokens: where in the document it begins."""
    length: IntArray
    """integers [pieces], tokens, at least 1."""

    def take(self, order: IntArray) -> "Pieces":
        return Pieces(self.document[order], self.start[order], self.length[order])


def check_overflow(overflow: str) -> None:
    if overflow not in get_args(Overflow):
        raise PackingError(f"overflow: expected one of {', '.join(get_args(Overflow))}, got {overflow!r}")


def check_fitting(lengths: IntArray, capacity: int, overflow: Overflow) -> None:
    """Raise PackingError, which names the first document that is too long, where overflow is "error"."""
    if overflow == "error" and lengths.max(initial=0) > capacity:
        first = int(np.argmax(lengths > capacity))
        raise PackingError(
            f"lengths: document {first} has {lengths[first]} tokens, more than max_length={capacity}; "
            "with overflow='error' none may (accepted: split, truncate, drop)"
        )


def check_pieces(pieces: float, capacity: int) -> None:
    """Raise PackingError where cutting long documents makes more pieces than can be planned."""
    if pieces > MAX_PIECES:
        raise PackingError(
            f"max_length: expected one that cuts documents into at most 2**40 pieces, {capacity} makes {pieces:.4g}"
        )


def cut_to_pieces(lengths: IntArray, capacity: int, overflow: Overflow) -> Pieces:
    """The pieces that documents become under a capacity.

    "split" cuts a long document into chunks of exactly `capacity` and a remainder (the minimally required truncation of
    arXiv 2404.10830); "truncate" keeps its first `capacity` tokens; "drop" leaves it out; "error" refuses it. Empty
    documents have no piece.

    Args:
        lengths: integers [documents], tokens, checked.
        capacity: tokens a pack holds.
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
            return split(lengths, capacity, numbers)
        if overflow == "truncate":
            lengths = np.minimum(lengths, capacity)
    kept = np.flatnonzero((lengths > 0) & (lengths <= capacity))
    if len(kept) < documents:
        numbers, lengths = numbers[kept], lengths[kept]
    return Pieces(numbers, np.zeros(len(numbers), dtype=np.int32), lengths.astype(np.int32, copy=False))


def split(lengths: IntArray, capacity: int, numbers: IntArray) -> Pieces:
    chunks = -(-lengths.astype(np.int64) // capacity)
    check_pieces(float(chunks.sum()), capacity)
    document = np.repeat(numbers, chunks)
    first_piece = np.cumsum(chunks) - chunks
    start = (np.arange(len(document)) - np.repeat(first_piece, chunks)) * capacity
    length = np.minimum(lengths[document] - start, capacity)
    return Pieces(document, start.astype(lengths.dtype, copy=False), length.astype(np.int32))
