"""Find the prefixes that documents share, by sorting documents.

Documents that begin with the same tokens are neighbors when all documents are sorted as strings of bytes, and what a
document has in common with its neighbor is what it shares with any document before it. So the sorted documents, with
the number of tokens that each shares with the one before it, describe all shared prefixes. Documents whose first tokens
no other document has are found by hashing, and are never sorted.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hf_packing.columns import INPUT_IDS
from hf_packing.planning.forest import Forest
from hf_packing.planning.lengths import IntArray, Pieces, indices_in_ranges, offsets_of
from hf_packing.rows.token_columns import TokenColumns, blocks_of_rows
from hf_packing.trees.sort_pieces import SORTED_AT_ONCE, sort_pieces
from hf_packing.trees.token_keys import read_beginnings

_HASHED_AT_ONCE = 1 << 22
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)


@dataclass(frozen=True)
class FoundTrees:
    """The forest of a dataset, and the prefixes that were split although their tokens are equal."""

    forest: Forest
    splits: dict[str, int] = field(default_factory=dict)
    """By the name of a column: how many neighbors share fewer tokens, because their values in this column differ."""


def find_trees(columns: TokenColumns, pieces: Pieces, min_shared: int) -> FoundTrees:
    """Find the prefixes that pieces of documents share.

    Where documents branch off fewer than `min_shared` tokens after an earlier branching, they branch off there instead,
    and repeat the tokens in between. So all shared segments have at least `min_shared` tokens, except those that end
    with a document or below a branching that was moved.

    Args:
        columns: the token columns of the documents.
        pieces: the pieces of documents; no piece is empty.
        min_shared: the fewest tokens that documents share, at least 1.

    Returns:
        The forest, with trees in the order of their first pieces, and the number of splits by column.
    """
    length = pieces.length.astype(np.int64)
    splits: dict[str, int] = {}
    order, shared = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for block in _blocks_of_candidates(columns, pieces, min_shared):
        by_content = sort_pieces(columns, pieces, block, splits)
        order.append(by_content.order)
        shared.append(_move_up(by_content.common, min_shared))
    return FoundTrees(_in_order(np.concatenate(order), np.concatenate(shared), length), splits)


def _blocks_of_candidates(columns: TokenColumns, pieces: Pieces, min_shared: int) -> list[IntArray]:
    """Return blocks of pieces, int64 [pieces of the block] each, whose first tokens other pieces of the block have too.

    Pieces that begin with the same `min_shared` tokens are in the same block. A few others may be in a block as well,
    since beginnings are compared by their hash.
    """
    long_enough = np.flatnonzero(pieces.length >= min_shared)
    hashes = np.empty(len(long_enough), dtype=np.uint64)
    step = max(1, _HASHED_AT_ONCE // min_shared)
    for first in range(0, len(long_enough), step):
        some = long_enough[first : first + step]
        hashes[first : first + step] = _hash(read_beginnings(columns[INPUT_IDS], pieces.take(some), min_shared))
    by_hash = np.argsort(hashes, kind="stable")
    hashes = hashes[by_hash]
    begins = np.append(np.flatnonzero(np.diff(hashes, prepend=hashes[:1] + np.uint64(1))), len(hashes))
    sizes = np.diff(begins)
    several = np.flatnonzero(sizes > 1)
    several = several[np.argsort(by_hash[begins[several]])]  # in the order of first pieces
    sizes = sizes[several]
    offsets = offsets_of(sizes)
    pieces_of_groups = long_enough[by_hash[indices_in_ranges(begins[several], sizes)]]
    before = offsets_of(pieces.length[pieces_of_groups])
    tokens = np.diff(before[offsets])
    blocks = blocks_of_rows(tokens, SORTED_AT_ONCE)
    return [pieces_of_groups[offsets[first] : offsets[end]] for first, end in blocks]


def _hash(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return a hash of each row of integers, uint64 [rows]. The hash is the same in every process."""
    hashes = np.full(len(rows), len(rows[0]) if len(rows) else 0, dtype=np.uint64)
    for column in rows.T.astype(np.uint64):
        hashes = (hashes ^ column) * _GAMMA
        hashes ^= hashes >> _HALF
    return hashes


def _move_up(common: IntArray, min_shared: int) -> IntArray:
    """Return the number of tokens that each piece shares with the one before it, after branchings have moved up.

    A branching that is fewer than `min_shared` tokens below the branching above it moves up to it. The root of all
    branchings is at 0 tokens.

    Args:
        common: int64 [pieces]: number of tokens that each piece has in common with the one before it.
        min_shared: the fewest tokens between two branchings.
    """
    depths, parents, path, branching = [0], [0], [0], []
    for depth in common.tolist():
        below = 0
        while depths[path[-1]] > depth:
            below = path.pop()
        if depths[path[-1]] < depth:
            new = len(depths)
            depths.append(depth)
            parents.append(path[-1])
            if below:
                parents[below] = new
            path.append(new)
        branching.append(path[-1])
    kept = [0] * len(depths)
    for number in np.argsort(np.array(depths), kind="stable").tolist():
        above = kept[parents[number]]
        kept[number] = depths[number] if depths[number] - above >= min_shared else above
    return np.array(kept, dtype=np.int64)[branching]


def _in_order(order: IntArray, shared: IntArray, length: IntArray) -> Forest:
    """Return the forest of all pieces, with trees in the order of their first pieces.

    Args:
        order: int64 [candidates]: pieces in depth-first order; other pieces share nothing.
        shared: int64 [candidates]: tokens that each of them shares with the one before it.
        length: int64 [pieces]: length of all pieces.
    """
    alone = np.ones(len(length), dtype=bool)
    alone[order] = False
    order = np.concatenate([order, np.flatnonzero(alone)])
    shared = np.concatenate([shared, np.zeros(len(order) - len(shared), dtype=np.int64)])
    begins = np.flatnonzero(shared == 0)
    if len(begins):
        sizes = np.diff(np.append(begins, len(shared)))
        by_first = np.argsort(np.minimum.reduceat(order, begins))
        begins, sizes = begins[by_first], sizes[by_first]
        places = indices_in_ranges(begins, sizes)
        order, shared = order[places], shared[places]
    return Forest(order, length[order], shared)
