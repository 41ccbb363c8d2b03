"""Strategies that need the document lengths in order: FixedLength, FirstCome and Multipack."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

import numpy as np

from hf_packing.checks import check_choice, check_seed, check_whole_number, set_fields
from hf_packing.errors import PackingError
from hf_packing.planning.best_fit import best_fit_patterns, first_fit_patterns
from hf_packing.planning.lengths import (
    IntArray,
    Overflow,
    Pieces,
    check_fitting,
    cut_to_pieces,
    offsets_of,
    smallest_index_type,
    sort_by_length,
)
from hf_packing.planning.permutation import order_of_packs, random_order, shuffle_packs
from hf_packing.planning.plan import PackingPlan
from hf_packing.planning.table import pieces_of_packs
from hf_packing.planning.windows import WindowPlan
from hf_packing.strategies.base import Strategy, register_strategy

_Order = Literal["random", "longest_first", "dataset"]


@register_strategy
@dataclass(frozen=True)
class FixedLength(Strategy):
    """A baseline strategy that concatenates all documents and cuts the result every `max_length` tokens.

    TRL calls this strategy "wrapped". Only the last pack has padding. A document that crosses the end of a pack is cut.

    Args:
        max_length: capacity of each pack in tokens, at least 1.
        seed: seed for shuffling the packs and the segments in each pack; None for no shuffling.

    Raises:
        PackingError: an argument does not match its description above.

    Example:
        >>> import hf_packing as hfp
        >>> hfp.FixedLength(4, seed=None)({"input_ids": [[1, 2, 3], [4, 5], [6]]})["input_ids"]
        [[1, 2, 3, 4], [5, 6]]
    """

    fills_one_pack_at_a_time: ClassVar[bool] = True

    max_length: int
    _: KW_ONLY
    seed: int | None = 0

    def plan_lengths(self, lengths: IntArray) -> PackingPlan:
        return concatenate_and_cut(lengths, (self.max_length,), self.seed)


def concatenate_and_cut(lengths: IntArray, capacities: Sequence[int], seed: int | None) -> PackingPlan:
    """Return a plan that concatenates the documents of each bucket, and cuts them into packs of the bucket's capacity.

    Each document goes to the smallest bucket that holds the document. Documents longer than the largest bucket go to
    the largest bucket.

    Args:
        lengths: integers [documents]: document lengths in tokens, already checked.
        capacities: capacity of each bucket in tokens, ascending.
        seed: seed for shuffling the packs and the segments in each pack; None for no shuffling. Without shuffling,
            packs are sorted by capacity, and documents keep their order.
    """
    bucket = np.minimum(np.searchsorted(capacities, lengths), len(capacities) - 1)
    pieces, sizes = [], []
    for number, capacity in enumerate(capacities):
        documents = np.flatnonzero(bucket == number)
        offsets = offsets_of(lengths[documents])
        borders = np.sort(np.concatenate([offsets, np.arange(0, offsets[-1], capacity)]), kind="stable")
        begin, length = borders[:-1], np.diff(borders)
        begin, length = begin[length > 0], length[length > 0]  # documents and packs often end at the same token
        nth = np.searchsorted(offsets, begin, side="right") - 1
        pieces.append((documents[nth], begin - offsets[nth], length))
        sizes.append(np.bincount(begin // capacity))
    columns = (np.concatenate(each) for each in zip(*pieces, strict=True))
    capacity_of_pack = np.repeat(capacities, [len(each) for each in sizes])
    return _plan_pieces(lengths, Pieces(*columns), offsets_of(np.concatenate(sizes)), capacity_of_pack, seed)


def _plan_pieces(
    lengths: IntArray, pieces: Pieces, offsets: IntArray, capacity: IntArray, seed: int | None, lower_bound: int = 0
) -> PackingPlan:
    """Return the plan of packs of pieces, shuffled if there is a seed.

    Args:
        lengths: integers [documents]: document lengths in tokens.
        pieces: the pieces of all packs, pack by pack.
        offsets: int64 [packs + 1]: the pieces of pack p are offsets[p]:offsets[p + 1].
        capacity: integers [packs]: capacity of each pack, in tokens.
        seed: seed for shuffling the packs and the pieces in each pack; None for no shuffling.
        lower_bound: proven lower bound on the number of packs.
    """
    if seed is not None:
        order, offsets, packs = shuffle_packs(offsets, seed)
        pieces, capacity = pieces.take(order), capacity[packs]
    return PackingPlan(
        document_length=lengths,
        segment_document=pieces.document,
        segment_start=pieces.start,
        segment_length=pieces.length,
        pack_offsets=offsets,
        pack_capacity=capacity,
        proven_lower_bound=lower_bound,
    )


@register_strategy
@dataclass(frozen=True)
class FirstCome(Strategy):
    """A strategy that fills one pack at a time with documents in a fixed or random order.

    If a document does not fit in the current pack, the pack is finished, and the document starts a new pack. In arXiv
    2407.09105, FirstCome with order="random" is called RandomPacking, and FirstCome with order="longest_first" is
    called SortedPacking.

    Args:
        max_length: capacity of each pack in tokens, at least 1.
        order: order in which documents are packed: "random", "longest_first" (with a seed, documents of equal length
            are shuffled) or "dataset" (the order of the dataset).
        overflow: treatment of documents longer than max_length. "split" cuts such a document into chunks of max_length
            tokens and a remainder, "truncate" keeps the first max_length tokens, "drop" leaves the document out, and
            "error" raises PackingError.
        max_documents: maximum number of segments in a pack; None for no limit.
        seed: seed for the random order of documents, and for shuffling the packs and the segments in each pack; None
            for no shuffling. With order="random", a seed is required.

    Raises:
        PackingError: an argument does not match its description above.

    Example:
        >>> import hf_packing as hfp
        >>> first_come = hfp.FirstCome(4, order="dataset", seed=None)
        >>> first_come({"input_ids": [[1, 2, 3], [4, 5], [6]]})["input_ids"]
        [[1, 2, 3], [4, 5, 6]]
    """

    keeps_fitting_documents_whole: ClassVar[bool] = True

    max_length: int
    _: KW_ONLY
    order: _Order = "random"
    overflow: Overflow = "split"
    max_documents: int | None = None
    seed: int | None = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("order", self.order, _Order)
        if self.seed is None and self.order == "random":
            raise PackingError("seed: expected an integer with order='random', got None")

    def plan_window(self, lengths: IntArray, number: int) -> WindowPlan:
        strategy = self.with_seed_for(f"window {number}")
        plan = strategy.plan_lengths(lengths)
        filled_at = order_of_packs(plan.num_packs, strategy.seed)
        return WindowPlan(plan, filled_at == plan.num_packs - 1, all_wait=True)

    def plan_lengths(self, lengths: IntArray) -> PackingPlan:
        pieces = cut_to_pieces(lengths, self.max_length, self.overflow)
        if self.order != "dataset":
            turn = random_order(len(pieces.length), self.seed, "documents")
            if self.order == "longest_first":
                turn = turn[sort_by_length(pieces.length[turn])[::-1]]
            pieces = pieces.take(turn)
        first = _first_of_each_pack(pieces.length, self.max_length, self.max_documents or len(pieces.length))
        bound = -(-len(pieces.length) // self.max_documents) if self.max_documents else 0
        capacity = np.full(len(first), self.max_length)
        return _plan_pieces(lengths, pieces, np.append(first, len(pieces.length)), capacity, self.seed, bound)


def _first_of_each_pack(length: IntArray, capacity: int, max_documents: int) -> IntArray:
    """Fill one pack at a time with pieces in order, and return the index of each pack's first piece, int64 [packs].

    For every piece p, a binary search finds the piece that would start the next pack if a pack started with p. This is
    the first piece that no longer fits, or piece p + max_documents if that piece comes earlier.

    Args:
        length: integers [pieces]: length of each piece, in tokens.
        capacity: capacity of each pack, in tokens.
        max_documents: maximum number of pieces in a pack.
    """
    end = np.cumsum(length, dtype=np.int64)
    beyond = np.searchsorted(end, end - length + capacity, side="right")
    following = np.minimum(beyond, np.arange(len(length)) + max_documents)
    first, piece = [], 0
    while piece < len(length):
        first.append(piece)
        piece = int(following[piece])
    return np.array(first, dtype=np.int64)


@register_strategy
@dataclass(frozen=True)
class Multipack(Strategy):
    """A strategy that shuffles the documents, splits the shuffled documents into windows, and packs each window.

    Each window is packed by first-fit decreasing or best-fit decreasing, whichever needs fewer packs. Only documents of
    the same window can share a pack, so the seed affects which documents share a pack. The strategy is named after the
    multipack sampler (see arXiv 2407.09105), which uses first-fit decreasing and drops the last documents of an epoch.
    This strategy drops no documents at the end of an epoch.

    Args:
        max_length: capacity of each pack in tokens, at least 1.
        window: number of documents in a window, at least 1.
        overflow: treatment of documents longer than max_length. "split" cuts such a document into chunks of max_length
            tokens and a remainder, "truncate" keeps the first max_length tokens, "drop" leaves the document out, and
            "error" raises PackingError.
        seed: seed for shuffling the documents, the packs and the segments in each pack.

    Raises:
        PackingError: an argument does not match its description above.

    Example:
        >>> import hf_packing as hfp
        >>> hfp.plan_packing([3, 2, 1, 4, 2], hfp.Multipack(4, window=5))
        PackingPlan(5 documents, 5 segments, 3 packs, efficiency 1.0000)
        >>> hfp.plan_packing([3, 2, 1, 4, 2], hfp.Multipack(4, window=1))
        PackingPlan(5 documents, 5 segments, 5 packs, efficiency 0.6000)
    """

    keeps_fitting_documents_whole: ClassVar[bool] = True

    max_length: int
    _: KW_ONLY
    window: int = 100_000
    overflow: Overflow = "split"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed(self.seed)
        set_fields(self, window=check_whole_number("window", self.window))

    def plan_lengths(self, lengths: IntArray) -> PackingPlan:
        check_fitting(lengths, self.max_length, self.overflow)
        documents = len(lengths)
        shuffled = random_order(documents, self.seed, "documents").astype(smallest_index_type(documents), copy=False)
        pieces = cut_to_pieces(lengths[shuffled], self.max_length, self.overflow)
        windows = np.searchsorted(pieces.document, np.arange(0, documents + self.window, self.window))
        order, sizes = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        for begin, end in zip(windows[:-1].tolist(), windows[1:].tolist(), strict=True):
            window_order, window_sizes = _pack_window(pieces.length[begin:end], self.max_length)
            order.append(begin + window_order)
            sizes.append(window_sizes)
        pieces = pieces.take(np.concatenate(order))
        pieces = Pieces(shuffled[pieces.document], pieces.start, pieces.length)
        offsets = offsets_of(np.concatenate(sizes))
        return _plan_pieces(lengths, pieces, offsets, np.full(len(offsets) - 1, self.max_length), self.seed)


def _pack_window(lengths: IntArray, capacity: int) -> tuple[IntArray, IntArray]:
    """Pack the pieces of one window by best-fit or first-fit decreasing, whichever needs fewer packs.

    Args:
        lengths: integers [pieces]: length of each piece, in tokens.
        capacity: capacity of each pack, in tokens.

    Returns:
        int64 [pieces]: indices of the pieces, listed pack by pack; int64 [packs]: number of pieces in each pack.
    """
    counts = np.bincount(lengths, minlength=1)
    patterns = min(
        best_fit_patterns(counts, capacity), first_fit_patterns(counts, capacity), key=lambda made: made.num_packs
    )
    sizes = np.repeat(patterns.segments_per_pack(), patterns.packs)
    by_length, offsets = sort_by_length(lengths), offsets_of(sizes)
    order = np.empty(len(lengths), dtype=np.int64)
    for packs, pieces in pieces_of_packs(patterns):
        order[offsets[packs, None] + np.arange(pieces.shape[1])] = by_length[pieces]
    return order, sizes
