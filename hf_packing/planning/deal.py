"""Deal documents into the packs of a table: all at once, or shard by shard with the same result.

Which of the documents of equal length goes where, the order of the packs and the order inside them are random
permutations that are evaluated place by place, in blocks that stay in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_packing.errors import PackingError
from hf_packing.planning.cuts import Cuts
from hf_packing.planning.lengths import IntArray, check_whole_numbers, smallest_index_type, sort_by_length
from hf_packing.planning.patterns import Patterns
from hf_packing.planning.plan import PackingPlan
from hf_packing.planning.scramble import derive_key, keys_for, scramble

if TYPE_CHECKING:
    from hf_packing.planning.table import PatternTable

BLOCK = 1 << 16


@dataclass(frozen=True)
class DealtShard:
    """Where the segments of one shard's documents go, in the order of the documents."""

    document: IntArray
    """integers [segments]: the document a segment is cut from, numbered within the shard."""
    start: IntArray
    """int64 [segments], tokens: where in its document it begins."""
    length: IntArray
    """int32 [segments], tokens."""
    pack: IntArray
    """int64 [segments]: number of the pack among the packs of all shards."""
    place: IntArray
    """int64 [segments]: which segment of its pack it is, from 0."""


def deal_all(table: PatternTable, lengths: IntArray) -> PackingPlan:
    """The plan in which every document has its place; lengths are checked, and those that the table was made for."""
    pieces, piece_start = pieces_by_length(table.cuts, lengths, table.seed)
    pack_place, pack_offsets, pack_capacity = place_packs(table.patterns, table.seed)
    document = np.empty(len(pieces), dtype=smallest_index_type(len(lengths)))
    start = np.zeros(len(pieces), dtype=lengths.dtype)
    length = np.empty(len(pieces), dtype=np.int32)
    for begin in range(0, len(pieces), BLOCK):
        places, rank = table.slots.block(begin, min(begin + BLOCK, len(pieces)))
        target = pack_offsets[pack_place[places.pack]] + places.place
        document[target] = pieces[rank]
        length[target] = places.length
        if piece_start is not None:
            start[target] = piece_start[rank]
    return PackingPlan(
        document_length=lengths,
        segment_document=document,
        segment_start=start,
        segment_length=length,
        pack_offsets=pack_offsets,
        pack_capacity=pack_capacity,
        proven_lower_bound=table.proven_lower_bound,
        note=table.note,
    )


def deal_shard(table: PatternTable, lengths: IntArray, already_dealt: Any) -> DealtShard:
    """Where the documents of one shard go; see `PatternTable.deal`."""
    cuts = table.cuts
    order = sort_by_length(lengths)
    group, turn = group_of_documents(cuts, lengths[order], dealt_of_each_length(cuts, already_dealt), table.seed)
    pieces_each = cuts.pieces_each[group]
    nth = np.repeat(np.arange(len(order)), pieces_each)
    piece = np.repeat(cuts.piece_offsets[group], pieces_each) + steps(pieces_each)
    first_rank, step = table.piece_ranks
    document = order[nth]
    in_document_order = np.argsort(document, kind="stable")
    pack, place = np.empty(len(nth), dtype=np.int64), np.empty(len(nth), dtype=np.int64)
    for begin in range(0, len(nth), BLOCK):
        block = slice(begin, begin + BLOCK)
        rank = first_rank[piece[block]] + turn[nth[block]] * step[piece[block]]
        places = table.slots.find(cuts.piece_length[piece[block]], rank)
        pack[block], place[block] = final_place(places.pack, table.num_packs, table.seed), places.place
    return DealtShard(
        document=document[in_document_order],
        start=cuts.piece_start[piece][in_document_order],
        length=cuts.piece_length[piece][in_document_order],
        pack=pack[in_document_order],
        place=place[in_document_order],
    )


def steps(sizes: IntArray) -> IntArray:
    """0, 1, 2, ... up to each size in turn."""
    numbers: IntArray = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return numbers


def final_place(pack: IntArray, num_packs: int, seed: int | None) -> IntArray:
    """Which row a pack of the patterns becomes."""
    if seed is None:
        return pack
    return scramble(pack, np.array([num_packs]), np.array([derive_key(seed, "packs")]))


def place_packs(patterns: Patterns, seed: int | None) -> tuple[IntArray, IntArray, IntArray]:
    """Which row each pack of the patterns becomes, and the plan's pack_offsets and pack_capacity."""
    place = np.arange(patterns.num_packs)
    for begin in range(0, len(place), BLOCK):
        block = slice(begin, begin + BLOCK)
        place[block] = final_place(place[block], len(place), seed)
    size, capacity = np.empty_like(place), np.empty(len(place), dtype=patterns.capacity.dtype)
    size[place] = np.repeat(patterns.segments_per_pack(), patterns.packs)
    capacity[place] = np.repeat(patterns.capacity, patterns.packs)
    return place, np.concatenate([[0], np.cumsum(size)]), capacity


def pieces_by_length(cuts: Cuts, lengths: IntArray, seed: int | None) -> tuple[IntArray, IntArray | None]:
    """The document of every piece, and where in it the piece begins, in the order of the pieces' ranks.

    Returns:
        integers [pieces], and int64 [pieces] or None where every piece begins its document.
    """
    order = sort_by_length(lengths).astype(smallest_index_type(len(lengths)), copy=False)
    order = spread_over_groups(cuts, order, seed)
    if cuts.whole.all():
        return order, None
    stays_whole = np.repeat(cuts.whole, cuts.documents)
    whole, cut = order[stays_whole], order[~stays_whole]
    group = np.repeat(np.flatnonzero(~cuts.whole), cuts.documents[~cuts.whole])
    pieces_each = cuts.pieces_each[group]
    piece = np.repeat(cuts.piece_offsets[group], pieces_each) + steps(pieces_each)
    document = np.repeat(cut, pieces_each)
    by_length = sort_by_length(cuts.piece_length[piece])
    document, piece = document[by_length], piece[by_length]
    whole_up_to = np.concatenate([[0], np.cumsum(cuts.documents[cuts.whole])])
    at = whole_up_to[np.searchsorted(cuts.document_length[cuts.whole], cuts.piece_length[piece], side="right")]
    start = None
    if cuts.piece_start.any():
        start = np.zeros(len(whole) + len(document), dtype=np.int64)
        start[at + np.arange(len(at))] = cuts.piece_start[piece]
    return np.insert(whole, at, document), start


def spread_over_groups(cuts: Cuts, order: IntArray, seed: int | None) -> IntArray:
    """Where documents of one length are cut in several ways, which of them are cut how is random."""
    if seed is None or not len(order) or (np.diff(cuts.document_length) > 0).all():
        return order
    length, first_group = np.unique(cuts.document_length, return_index=True)
    documents = np.add.reduceat(cuts.documents, first_group)
    several = np.diff(np.append(first_group, len(cuts.documents))) > 1
    number = steps(documents[several])
    begin = np.repeat((np.cumsum(documents) - documents)[several], documents[several])
    size = np.repeat(documents[several], documents[several])
    place = place_among_equals(np.repeat(length[several], documents[several]), number, size, seed)
    spread = order.copy()
    spread[begin + place] = order[begin + number]
    return spread


def place_among_equals(length: IntArray, number: IntArray, documents: IntArray, seed: int) -> IntArray:
    """The random place of the number-th of so many documents of a length among them; all arrays are as long."""
    return scramble(number, documents, keys_for(length, derive_key(seed, "cuts")))


def group_of_documents(
    cuts: Cuts, lengths: IntArray, already_dealt: IntArray, seed: int | None
) -> tuple[IntArray, IntArray]:
    """For documents sorted by length: the group each falls into, and its number among the documents of that group."""
    length, first_group = np.unique(cuts.document_length, return_index=True)
    documents = np.add.reduceat(cuts.documents, first_group) if len(first_group) else cuts.documents
    kind = np.searchsorted(length, lengths)
    unknown = kind == len(length)
    unknown[~unknown] = length[kind[~unknown]] != lengths[~unknown]
    if unknown.any():
        raise PackingError(f"lengths: expected only lengths that were counted, got {lengths[unknown][0]}")
    opens = np.flatnonzero(np.append(True, np.diff(kind) != 0)[: len(kind)])
    sizes = np.diff(np.append(opens, len(kind)))
    number = already_dealt[kind] + steps(sizes)
    if (beyond := number >= documents[kind]).any():
        first = kind[beyond][0]
        raise PackingError(
            f"lengths: expected at most {documents[first]} documents of length {length[first]} in all shards, as "
            f"counted; {already_dealt[first]} were already dealt and this shard has {(kind == first).sum()}"
        )
    first_document = np.cumsum(cuts.documents) - cuts.documents
    several = np.diff(np.append(first_group, len(cuts.documents))) > 1
    if seed is not None and several.any():
        chosen = np.flatnonzero(several[kind])
        number[chosen] = place_among_equals(
            lengths[chosen].astype(np.int64), number[chosen], documents[kind[chosen]], seed
        )
    number += first_document[first_group][kind]
    group = np.searchsorted(np.cumsum(cuts.documents), number, side="right")
    return group, number - first_document[group]


def dealt_of_each_length(cuts: Cuts, already_dealt: Any) -> IntArray:
    """How many documents of each length that occurs were dealt before, from a histogram that may be shorter."""
    length, first_group = np.unique(cuts.document_length, return_index=True)
    documents = np.add.reduceat(cuts.documents, first_group) if len(first_group) else cuts.documents
    if already_dealt is None:
        return np.zeros(len(length), dtype=np.int64)
    dealt = check_whole_numbers("already_dealt", already_dealt)
    if dealt.size and dealt.dtype.kind == "i" and dealt.min() < 0:
        first = int(np.argmax(dealt < 0))
        raise PackingError(f"already_dealt: expected no negative count, got {dealt[first]} documents of length {first}")
    inside = length < len(dealt)
    uncounted = dealt.copy()
    uncounted[length[inside]] = 0
    if uncounted.any():
        first = int(np.argmax(uncounted != 0))
        raise PackingError(f"already_dealt: expected none of length {first}, as counted, got {dealt[first]}")
    beyond = dealt[length[inside]] > documents[inside]
    if beyond.any():
        first = int(length[inside][beyond][0])
        raise PackingError(
            f"already_dealt: expected at most {documents[inside][beyond][0]} documents of length {first}, as counted, "
            f"got {dealt[first]}"
        )
    result = np.zeros(len(length), dtype=np.int64)
    result[inside] = dealt[length[inside]]
    return result
