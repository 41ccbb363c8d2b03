"""Lay the documents of a row out on several ranks, and plan which tokens the ranks send each other.

A document that is longer than a rank may hold is split over ranks. k consecutive ranks form a block, which holds a row
of at most k * max_tokens tokens:

    lengths of the row's documents -> lay_out -> RankLayout -> plan_exchange -> Exchange

All ranks of a block compute the same layout, so each one knows without asking what the others hold, see and send. A
token of a causal model attends to all earlier tokens of its document, so the end of a document costs more than its
beginning. Each rank therefore gets two chunks of a split document, one from either end (zigzag): if k equal slices were
used instead, ranks would be idle for a third of the time. Tokens are sent as spans of documents, whose number does not
depend on the number of tokens. Laying out a row takes about half a millisecond, and its exchange a tenth of that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_packing.planning.lengths import IntArray, Pieces, indices_in_ranges, offsets_of, sums_by

LINEAR_COST = 6 * 2048
"""The default time of linear layers for one token, in units of the time of attention for one pair of tokens: that of a
model of width 2048."""

_SHARE = 1 / 3
"""Documents are split into parts that have at most this share of the mean work of a rank. Larger parts leave ranks less
evenly busy; smaller ones split more documents, so that more tokens are exchanged."""


@dataclass(frozen=True, eq=False)
class RankLayout:
    """Which rank of a block holds which tokens of a row. Every token is on exactly one rank."""

    lengths: IntArray
    """int64 [documents], tokens: the length of each document of the row."""
    pieces: Pieces
    """The pieces of documents, by rank; on each rank in the order of the row. A rank has up to two of each document."""
    rank: IntArray
    """int64 [pieces]: the rank that holds each piece, from 0 in the block."""
    num_ranks: int
    """Number of ranks in the block."""

    @property
    def tokens(self) -> IntArray:
        """int64 [ranks]: the number of tokens that each rank holds."""
        return self._sum_on_ranks(self.pieces.length)

    @property
    def attention_cost(self) -> IntArray:
        """int64 [ranks]: the attention cost of each rank. The sum over ranks is the sum of squared document lengths."""
        start = self.pieces.start
        return self._sum_on_ranks((start + self.pieces.length) ** 2 - start**2)

    @property
    def num_split(self) -> int:
        """Number of documents that are on several ranks."""
        document, length = self.pieces.document, self.pieces.length
        return len(np.unique(document[length < self.lengths[document]]))

    def places(self, rank: int) -> IntArray:
        """Return where in the row the tokens of a rank stand, in the order in which the rank holds them, int64 [n]."""
        own = RowPart(self, rank).pieces
        return indices_in_ranges(offsets_of(self.lengths)[own.document] + own.start, own.length)

    def _sum_on_ranks(self, of_piece: IntArray) -> IntArray:
        return sums_by(self.rank, of_piece, self.num_ranks)


@dataclass(frozen=True, eq=False)
class RowPart:
    """The part of a row that one rank of a block holds."""

    layout: RankLayout
    rank: int
    """The rank, from 0 in the block."""

    @property
    def pieces(self) -> Pieces:
        """The pieces of documents that the rank holds, in the order of the row."""
        return self.layout.pieces.take(np.flatnonzero(self.layout.rank == self.rank))


def lay_out(
    lengths: Sequence[int] | IntArray, ranks: int, max_tokens: int, linear_cost: float = LINEAR_COST
) -> RankLayout:
    """Lay the documents of a row out on the ranks of a block, with about equal work on all ranks.

    Documents are placed in turn, longest first, on the ranks with the least work so far that have room. The work of a
    document decides its number of equal parts. A part is both ends of what the parts before it have left. If too few
    ranks have room for equal parts, the ranks with the most room take as much as they have room for.

    Args:
        lengths: integers [documents], tokens: the length of each document of the row, at least 1. All together have at
            most ranks * max_tokens tokens.
        ranks: number of ranks in the block.
        max_tokens: the most tokens on a rank.
        linear_cost: time that linear layers take for one token, in units of the time that attention takes for one pair
            of tokens.

    Returns:
        RankLayout. The same arguments give the same layout. A rank is empty only if the row has fewer documents than
        there are ranks, and none of them has ranks * ranks tokens.

    Source:
        Two chunks for each rank, one from either end, are those of Llama 3, arXiv 2407.21783, Section 3.3.2.

    Example:
        >>> layout = lay_out([16, 4, 4], ranks=2, max_tokens=12)
        >>> [layout.places(rank).tolist() for rank in range(2)]
        [[0, 1, 2, 3, 12, 13, 14, 15, 16, 17, 18, 19], [4, 5, 6, 7, 8, 9, 10, 11, 20, 21, 22, 23]]
    """
    row = np.asarray(lengths, dtype=np.int64)
    assert row.min() > 0
    assert row.sum() <= ranks * max_tokens
    cost = linear_cost * row + row * row
    parts_of = np.ceil(cost * ranks / (cost.sum() * _SHARE)).clip(max=ranks).astype(int)
    room, work, found = [max_tokens] * ranks, [0.0] * ranks, []
    for document in np.argsort(-row, kind="stable").tolist():
        start, end, parts = 0, int(row[document]), int(parts_of[document])
        largest = -(-end // parts)
        if sorted(room)[-parts] < largest:
            largest = end  # each rank takes as much as it has room for
        for rank in sorted(range(ranks), key=lambda rank: (max(largest - room[rank], 0), work[rank])):
            tokens = min(room[rank], largest, end - start)
            tail = tokens // 2 if tokens < end - start else 0
            for first, last in ((start, start + tokens - tail), (end - tail, end)):
                if first < last:
                    found.append((rank, document, first, last))
                    work[rank] += linear_cost * (last - first) + last * last - first * first
            start, end = start + tokens - tail, end - tail
            room[rank] -= tokens
    on_rank, of_document, starts, ends = np.array(sorted(found), dtype=np.int64).T
    return RankLayout(row, Pieces(of_document, starts, ends - starts), on_rank, ranks)


@dataclass(frozen=True)
class LayoutCounts:
    """Counts of one epoch whose rows are laid out on several ranks."""

    ranks: int
    """Number of ranks in a block."""
    split: int
    """Number of documents that are on several ranks."""
    utilization: float
    """Mean work over ranks / maximum over ranks, averaged over micro-batches; 1 if no rank waits. Work is the time of
    all layers, or the number of tokens with balance="tokens"."""

    def __str__(self) -> str:
        return (
            f"blocks of {self.ranks} ranks: {self.split:,} documents are on several of them; utilization of the ranks "
            f"{self.utilization:.1%} by work"
        )


@dataclass(frozen=True, eq=False)
class Exchange:
    """Tokens that the ranks of a block send each other, so that each has all that its own tokens attend to."""

    seen: Pieces
    """For each piece of the layout, the slice of its document that its tokens attend to, which includes the piece."""
    spans: Pieces
    """The tokens that each rank needs, its own ones included: by receiver, then in the order of the row. Each span is
    held by one rank, and no rank needs a token twice."""
    sender: IntArray
    """int64 [spans]: the rank that holds each span."""
    receiver: IntArray
    """int64 [spans]: the rank that needs each span; the sender itself for its own tokens."""

    @property
    def num_received(self) -> int:
        """Number of tokens that ranks get from others."""
        return int(self.spans.length[self.sender != self.receiver].sum())


def plan_exchange(
    layout: RankLayout, *, is_causal: bool = True, window: int | None = None, chunk: int | None = None
) -> Exchange:
    """Plan which tokens the ranks of a block send each other, for layers that let a token attend to others.

    Args:
        layout: the layout of a row.
        is_causal: whether a token attends to no later token.
        window: a token only attends to tokens that are fewer than `window` places away; None for no limit.
        chunk: documents are cut into chunks of `chunk` tokens, and a token only attends to its own; None for no chunks.

    Example:
        >>> exchange = plan_exchange(lay_out([16], ranks=2, max_tokens=8))
        >>> spans = zip(exchange.sender.tolist(), exchange.receiver.tolist(), exchange.spans.length.tolist())
        >>> [*spans]  # the last 4 tokens are on rank 0, and attend to the 8 tokens of rank 1
        [(0, 0, 4), (1, 0, 8), (0, 0, 4), (0, 1, 4), (1, 1, 8)]
    """
    pieces, documents = layout.pieces, offsets_of(layout.lengths)
    seen = _seen_by(pieces, layout.lengths[pieces.document], is_causal, window, chunk)
    first = documents[pieces.document] + seen.start
    end = first + seen.length

    # what the pieces of a document see overlaps if their rank has two of them: merge it
    is_new = np.append(True, (np.diff(layout.rank) > 0) | (np.diff(pieces.document) > 0) | (first[1:] > end[:-1]))
    begins = np.flatnonzero(is_new)
    needed_from, needed_to = first[begins], end[np.append(begins[1:], len(first)) - 1]

    # then cut it where another rank's piece begins
    place = documents[pieces.document] + pieces.start
    by_place = np.argsort(place, kind="stable")
    borders = np.append(place[by_place], documents[-1])
    lowest = np.searchsorted(borders, needed_from, side="right") - 1
    held = np.searchsorted(borders, needed_to, side="left") - lowest
    part = indices_in_ranges(lowest, held)
    start = np.maximum(borders[part], np.repeat(needed_from, held))
    length = np.minimum(borders[part + 1], np.repeat(needed_to, held)) - start
    document = pieces.document[by_place][part]
    return Exchange(
        seen=seen,
        spans=Pieces(document, start - documents[document], length),
        sender=layout.rank[by_place][part],
        receiver=np.repeat(layout.rank[begins], held),
    )


def _seen_by(pieces: Pieces, lengths: IntArray, is_causal: bool, window: int | None, chunk: int | None) -> Pieces:
    """Return the slices of documents that the tokens of pieces attend to, given the lengths of the documents."""
    begin, end = pieces.start, pieces.start + pieces.length
    first, last = np.zeros_like(begin), end if is_causal else lengths
    if chunk is not None:
        first = begin // chunk * chunk
        last = np.minimum(last, -(-end // chunk) * chunk)
    if window is not None:
        first = np.maximum(first, begin - window + 1)
        last = np.minimum(last, end + window - 1)
    return Pieces(pieces.document, first, last - first)
