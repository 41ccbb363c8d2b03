"""Which pieces documents become, length by length: the half of a counted plan that is about documents.

Documents of equal length that are cut alike form a group. Pieces are numbered through all groups, and ranked among the
pieces of equal length by group, then document, then place in the document. So the rank of any piece follows from the
rank of its document among those of equal length: no worker has to see the documents of another.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from hf_packing.errors import PackingError
from hf_packing.planning.counts import LengthCounts
from hf_packing.planning.lengths import IntArray
from hf_packing.planning.overflow import Overflow, check_pieces


@dataclass(frozen=True)
class Cuts:
    """Groups of documents that are cut alike, by document length; of one length, those left whole come first."""

    document_length: IntArray
    """int64 [groups], tokens, ascending."""
    documents: IntArray
    """int64 [groups]: how many documents are in the group."""
    piece_offsets: IntArray
    """int64 [groups + 1]: pieces of group i are piece_offsets[i]:piece_offsets[i + 1], in document order."""
    piece_length: IntArray
    """int32 [pieces], tokens. They follow each other from the document's first token; what remains is dropped."""

    @property
    def num_documents(self) -> int:
        return int(self.documents.sum())

    @cached_property
    def pieces_each(self) -> IntArray:
        """int64 [groups]: pieces that each document becomes."""
        return np.diff(self.piece_offsets)

    @cached_property
    def tokens_kept(self) -> IntArray:
        """int64 [groups]: tokens of each document that are in its pieces."""
        total = np.concatenate([[0], np.cumsum(self.piece_length, dtype=np.int64)])
        return np.diff(total[self.piece_offsets])

    @cached_property
    def piece_start(self) -> IntArray:
        """int64 [pieces], tokens: where in its document a piece begins."""
        begin = np.cumsum(self.piece_length, dtype=np.int64) - self.piece_length
        first = np.append(begin, 0)[self.piece_offsets[:-1]]
        start: IntArray = begin - np.repeat(first, self.pieces_each)
        return start

    @cached_property
    def whole(self) -> IntArray:
        """bool [groups]: documents that are one piece with all of their tokens."""
        whole: IntArray = (self.pieces_each == 1) & (self.tokens_kept == self.document_length)
        return whole

    @cached_property
    def cut(self) -> IntArray:
        """bool [groups]: documents of which some token is kept, but not all in one piece."""
        cut: IntArray = (self.pieces_each > 0) & ~self.whole
        return cut

    def counts(self) -> IntArray:
        """int64 [longest + 1]: pieces of each length."""
        counts = np.zeros(int(self.piece_length.max(initial=0)) + 1, dtype=np.int64)
        np.add.at(counts, self.piece_length, np.repeat(self.documents, self.pieces_each))
        return counts

    def ranks(self) -> tuple[IntArray, IntArray]:
        """For each piece: its rank among all, shortest first, in the group's first document, and the step to the next.

        Returns:
            int64 [pieces] twice.
        """
        by_length = np.argsort(self.piece_length, kind="stable")
        group = np.repeat(np.arange(len(self.documents)), self.pieces_each)[by_length]
        length = self.piece_length[by_length]
        opens = np.append(True, (np.diff(group) != 0) | (np.diff(length) != 0))[: len(group)]
        run = np.cumsum(opens) - 1
        first_of_run = np.flatnonzero(opens)
        before = np.cumsum(self.documents[group]) - self.documents[group]
        first_rank, step = np.empty_like(before), np.empty_like(before)
        first_rank[by_length] = before[first_of_run][run] + np.arange(len(group)) - first_of_run[run]
        step[by_length] = np.bincount(run)[run]
        return first_rank, step


def make_cuts(groups: list[tuple[int, int, tuple[int, ...]]]) -> Cuts:
    """Cuts from (document length, documents, lengths of the pieces), in the order that `Cuts` asks for."""
    sizes = [len(pieces) for _, _, pieces in groups]
    return Cuts(
        document_length=np.array([length for length, _, _ in groups], dtype=np.int64),
        documents=np.array([documents for _, documents, _ in groups], dtype=np.int64),
        piece_offsets=np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]),
        piece_length=np.fromiter(chain.from_iterable(pieces for _, _, pieces in groups), dtype=np.int32),
    )


def cut_by_overflow(counts: LengthCounts, capacity: int, overflow: Overflow) -> Cuts:
    """The pieces of documents under a capacity; what each overflow means stands with `cut_to_pieces`.

    Args:
        counts: documents by length.
        capacity: tokens a pack holds.
        overflow: "split", "truncate", "drop" or "error".

    Raises:
        PackingError: a document is too long and overflow is "error", or there would be too many pieces.
    """
    length = counts.length
    long = length > capacity
    if overflow == "error" and long.any():
        raise PackingError(
            f"counts: {counts.documents[long].sum()} documents have more tokens than max_length={capacity}, the "
            f"longest {length[-1]}; with overflow='error' none may (accepted: split, truncate, drop)"
        )
    pieces_each = (length > 0).astype(np.int64)
    if overflow == "drop":
        pieces_each[long] = 0
    elif overflow == "split":
        pieces_each = -(-length // capacity)
        check_pieces(float(pieces_each[long] @ counts.documents[long].astype(np.float64)), capacity)
    offsets = np.concatenate([[0], np.cumsum(pieces_each)])
    piece_length = np.repeat(np.minimum(length, capacity), pieces_each).astype(np.int32)
    if overflow == "split" and long.any():
        piece_length[offsets[1:][long] - 1] = length[long] - (pieces_each[long] - 1) * capacity
    return Cuts(length, counts.documents, offsets, piece_length)
