"""Find the prefixes that documents share, by sorting documents; and measure how much smaller that makes them.

Documents that begin with the same tokens are neighbors when all documents are sorted as strings of bytes, and what a
document has in common with its neighbor is what it shares with any document before it. So the sorted documents, with
the number of tokens that each shares with the one before it, describe all shared prefixes. Documents whose first tokens
no other document has are found by hashing, and are never sorted.

Documents share a token only if everything that belongs to the token is equal, since a row has each value of a shared
token once. Labels are the exception: a row says for each document which tokens it trains on. So labels are compared
only where they are neither -100 nor the token itself. Weights in the loss are compared where documents train on the
token, and those that train on it share it with no document that does not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import datasets
import numpy as np
import numpy.typing as npt

from hf_packing.columns import IGNORED_LABEL, INPUT_IDS, LABEL_COLUMNS, LOSS_WEIGHTS
from hf_packing.planning.lengths import (
    Array,
    Int32Array,
    IntArray,
    Pieces,
    check_lengths,
    cut_to_pieces,
    indices_in_ranges,
    offsets_of,
    sums_of,
    total_of,
)
from hf_packing.rows.packed_rows import as_int32, read_labels
from hf_packing.rows.token_columns import (
    TokenColumns,
    blocks_of_rows,
    column_of_values,
    find_token_columns,
    row_numbers,
)
from hf_packing.trees.forest import FEWEST_SHARED, Forest, cut_large_trees
from hf_packing.trees.segments import Places, TreePaths, TreeSegments, segments_of

_TOKENS_OF_BLOCK = 1 << 21
"""Pieces are hashed and sorted in blocks of about this many tokens. All pieces that begin alike are in one block."""
_SORTED_AT_ONCE = 1 << 22
"""A block is sorted by so many tokens at a time, to use little memory even if all pieces begin alike; mostly, these are
twice the mean length of a piece."""
_FEWEST_AT_ONCE = 64
"""The fewest tokens of each piece that are sorted at a time."""


def find_trees(columns: TokenColumns, pieces: Pieces, min_shared: int, capacity: int) -> Forest:
    """Find the prefixes that pieces of documents share, and cut trees that are larger than a row.

    Where documents branch off fewer than `min_shared` tokens after an earlier branching, they branch off there instead,
    and repeat the tokens in between. So all shared segments have at least `min_shared` tokens, except those that end
    with a document or below a branching that was moved.

    Args:
        columns: the token columns of the documents.
        pieces: the pieces of documents; no piece is empty, or longer than a row.
        min_shared: the fewest tokens that documents share, at least 1.
        capacity: the most tokens of a tree, which is cut where the fewest tokens are repeated.

    Returns:
        The forest, with trees in the order of their first pieces.
    """
    alone = np.ones(len(pieces.length), dtype=bool)
    order, shared = [], []
    for block in _blocks_of_candidates(columns, pieces, min_shared):
        by_content, common = _sort_pieces(columns, pieces, block)
        alone[by_content] = False
        order.append(by_content)
        shared.append(_move_up(common, min_shared))
    order.append(np.flatnonzero(alone))
    shared.append(np.zeros_like(order[-1]))
    places = np.concatenate(order)
    forest = Forest(places, pieces.length[places].astype(np.int64), np.concatenate(shared))
    in_order = forest.select(np.argsort(np.minimum.reduceat(places, forest.offsets[:-1])))
    return cut_large_trees(in_order, capacity)


def _blocks_of_candidates(columns: TokenColumns, pieces: Pieces, min_shared: int) -> list[IntArray]:
    """Return blocks of pieces, int64 [pieces of the block] each, whose first tokens other pieces of the block have too.

    Pieces that begin with the same `min_shared` tokens are in the same block. A few others may be in a block as well,
    since beginnings are compared by their hash.
    """
    long_enough = np.flatnonzero(pieces.length >= min_shared)
    hashes = np.empty(len(long_enough), dtype=np.uint64)
    step = max(1, _TOKENS_OF_BLOCK // min_shared)
    for begin in range(0, len(long_enough), step):
        some = pieces.take(long_enough[begin : begin + step])
        beginnings = columns[INPUT_IDS].gather(replace(some, length=np.full(len(some.length), min_shared)))
        hashes[begin : begin + step] = _hash(beginnings.reshape(-1, min_shared))
    _, first, group, sizes = np.unique(hashes, return_index=True, return_inverse=True, return_counts=True)
    several = np.flatnonzero(sizes[group] > 1)
    several = several[np.argsort(first[group[several]], kind="stable")]  # group by group, in the order of first pieces
    offsets = np.append(np.flatnonzero(np.diff(group[several], prepend=-1)), len(several))
    candidates = long_enough[several]
    tokens = sums_of(pieces.length[candidates], offsets)
    return [candidates[offsets[begin] : offsets[end]] for begin, end in blocks_of_rows(tokens, _TOKENS_OF_BLOCK)]


def _hash(rows: IntArray) -> npt.NDArray[np.uint64]:
    """Return a hash of each row of integers, uint64 [rows]: the sum of its values, each times a random number."""
    factors = np.random.default_rng(0).integers(2**64, size=rows.shape[1], dtype=np.uint64)
    return rows.astype(np.uint64) @ factors


def _move_up(common: IntArray, min_shared: int) -> IntArray:
    """Return the number of tokens that each piece shares with the one before it, after branchings have moved up.

    A branching that is fewer than `min_shared` tokens below the branching above it moves up to it. The root of all
    branchings is at 0 tokens.

    Args:
        common: int64 [pieces]: number of tokens that each piece has in common with the one before it.
        min_shared: the fewest tokens between two branchings.
    """
    depth = [*common.tolist(), 0]
    above, path = [0] * len(depth), [0]  # of each place, the nearest place with a branching above its own
    for place in range(1, len(depth)):
        while depth[path[-1]] > depth[place]:
            closed = path.pop()
            above[closed] = max(path[-1], place, key=depth.__getitem__)
        path.append(place)
    moved = [0] * len(depth)
    for place in np.argsort(common, kind="stable").tolist():
        highest = moved[above[place]]
        moved[place] = depth[place] if depth[place] - highest >= min_shared else highest
    return np.array(moved[:-1], dtype=np.int64)


def _sort_pieces(columns: TokenColumns, pieces: Pieces, some: IntArray) -> tuple[IntArray, IntArray]:
    """Sort some pieces by their tokens and by the other values of their tokens, a part of each piece at a time.

    Args:
        columns: the token columns of the documents.
        pieces: the pieces of all documents.
        some: int64 [pieces to sort]: indices of the pieces to sort.

    Returns:
        The indices in a new order, in which pieces that begin with the same values are neighbors, and the number of
        tokens that each piece has in common with the one before it, both int64 [pieces to sort].
    """
    order, common = some.copy(), np.zeros(len(some), dtype=np.int64)
    waiting = [(0, len(some), 0)]  # places in the order, and the number of tokens that the pieces there have in common
    while waiting:
        begin, end, depth = waiting.pop()
        group = order[begin:end]
        tokens = max(_SORTED_AT_ONCE // len(group), _FEWEST_AT_ONCE)
        length = np.minimum(pieces.length[group] - depth, tokens)
        following = Pieces(pieces.document[group], pieces.start[group] + depth, length)
        values, per_token = _read_values(columns, following, are_beginnings=depth == 0)
        by_content = sorted(range(len(group)), key=values.__getitem__)
        same = _compare_neighbors([values[place] for place in by_content], length[by_content], per_token)
        order[begin:end] = group[by_content]
        common[begin + 1 : end] = same + depth
        firsts = np.append(0, np.flatnonzero(same < tokens) + 1)
        sizes = np.diff(firsts, append=end - begin)
        for first, size in zip(firsts[sizes > 1].tolist(), sizes[sizes > 1].tolist(), strict=True):
            waiting.append((begin + first, begin + first + size, depth + tokens))
    return order, common


def _compare_neighbors(values: list[bytes], length: IntArray, per_token: int) -> IntArray:
    """Return the number of tokens that each piece but the first has in common with the one before it.

    Args:
        values: the values of each piece, as `_read_values` returns them.
        length: integers [pieces]: number of tokens in each piece.
        per_token: the number of 32-bit integers that a token has in `values`.
    """
    most = np.minimum(length[:-1], length[1:])
    offsets = offsets_of(most)
    sizes = (4 * per_token * most).tolist()
    left, right = (
        np.frombuffer(b"".join([each[:size] for each, size in zip(some, sizes, strict=True)]), np.int32)
        for some in (values[:-1], values[1:])
    )
    differing = np.append(np.flatnonzero(left != right), len(left))
    first = differing[np.searchsorted(differing, offsets[:-1] * per_token)] // per_token
    shared: IntArray = np.minimum(first - offsets[:-1], most)
    return shared


def _read_values(columns: TokenColumns, pieces: Pieces, are_beginnings: bool) -> tuple[list[bytes], int]:
    """Return the values by which pieces are compared, as 32-bit integers, token by token.

    Args:
        columns: the token columns of the documents.
        pieces: the pieces of documents to read; they may be empty.
        are_beginnings: whether the first token of each piece is one that it would have in a row, so that it is not
            trained on.

    Returns:
        The values of each piece as bytes, and the number of integers that a token has there.

    Raises:
        PackingError: a loss mask has a value other than 0 and 1, or input_ids or labels do not fit in 32 bits.
    """
    offsets = offsets_of(pieces.length)
    input_ids = as_int32(INPUT_IDS, columns[INPUT_IDS].gather(pieces))
    found = [input_ids[:, None]]
    labels = read_labels(columns, pieces)
    is_trained = np.ones(len(input_ids), dtype=bool) if labels is None else labels != IGNORED_LABEL
    if are_beginnings:
        is_trained[offsets[:-1]] = False
    if labels is not None:
        labels[~is_trained | (labels == input_ids)] = IGNORED_LABEL
        if (labels != IGNORED_LABEL).any():
            found.append(labels[:, None])
    for name, column in columns.items():
        if name not in (INPUT_IDS, *LABEL_COLUMNS):
            values = column.gather(pieces)
            if name == LOSS_WEIGHTS:  # without a meaning where nothing is trained on, which is not a weight of 0
                values = np.where(is_trained, values, np.nan)
            found.append(_as_integers(values))
    joined = np.concatenate(found, axis=1)
    as_bytes, borders = joined.tobytes(), (offsets * 4 * joined.shape[1]).tolist()
    return [as_bytes[begin:end] for begin, end in pairwise(borders)], joined.shape[1]


def _as_integers(values: Array) -> Int32Array:
    """Return the bits of numbers as int32 [values, integers]; numbers of at most 32 bits have one integer."""
    if values.dtype.itemsize < 4:
        values = values.astype(np.float32)
    return values.view(np.int32).reshape(len(values), values.dtype.itemsize // 4)


class BatchTrees(NamedTuple):
    """The trees of the documents of a batch."""

    trees: TreeSegments
    taken: Places
    """int64 [tokens of the trees]: for each token, its index among the tokens of all documents, laid end to end."""
    given: Places
    """int64 [tokens of all documents]: for each token, its index in the trees."""


def find_in_batch(
    input_ids: IntArray, others: Mapping[str, IntArray], lengths: Sequence[int], min_shared: int
) -> BatchTrees:
    """Find the trees of documents that are laid end to end.

    Args:
        input_ids: integers [tokens of all documents].
        others: other integers of the tokens, by name, [tokens of all documents] each. Documents share a token only if
            they are equal, too.
        lengths: number of tokens in each document, at least 1.
        min_shared: the fewest tokens that documents share.

    Example:
        >>> found = find_in_batch(np.array([5, 6, 7, 5, 6, 8, 9]), {}, [3, 4], 2)
        >>> found.trees.lengths, found.trees.parents, found.taken.tolist(), found.given.tolist()
        ((2, 1, 2), (-1, 0, 0), [0, 1, 2, 5, 6], [0, 1, 2, 0, 1, 3, 4])
    """
    length = np.array(lengths, dtype=np.int64)
    begin = offsets_of(length)[:-1]
    of_tokens = {INPUT_IDS: input_ids, **others}
    columns = {name: column_of_values(name, values, length) for name, values in of_tokens.items()}
    forest = find_trees(columns, Pieces.whole(length), min_shared, len(input_ids))
    paths = TreePaths(forest.length, forest.shared)
    segments = segments_of(paths, np.array([0, len(length)]))
    trees = TreeSegments.from_arrays(segments.lengths, segments.parents)
    taken = indices_in_ranges(begin[forest.order] + forest.shared, paths.own)
    given = np.empty(len(input_ids), dtype=np.int64)
    given[indices_in_ranges(begin[forest.order], forest.length)] = paths.tokens
    return BatchTrees(trees, taken, given)


MEASURED_TOKENS = 1 << 23
"""Prefixes are looked for in the first documents that have about this many tokens together."""
_WORTH_SAYING = 1.05
"""The smallest ratio that is said."""


@dataclass(frozen=True)
class SharedPrefixes:
    """Factor by which documents become smaller if they share their prefixes."""

    ratio: float
    """Tokens of the documents / tokens of rows of trees; 1 if no prefixes are shared."""
    documents: int
    """The number of documents in which prefixes were looked for: the first ones."""
    is_sample: bool
    """True if there are further documents."""

    def sentence(self) -> str:
        """Return what to say about the documents; empty if it is not worth it to share prefixes."""
        if self.ratio < _WORTH_SAYING:
            return ""
        source = f" (measured on the first {self.documents:,} documents)" if self.is_sample else ""
        gain = f"your data would shrink {self.ratio:.1f} times"
        return f"documents share prefixes: with share_prefixes=True, {gain}{source}"


def measure_shared_prefixes(documents: datasets.Dataset, max_length: int) -> SharedPrefixes:
    """Measure how many times smaller documents become if they share prefixes of at least 16 tokens.

    Only tokens are compared: neither labels nor other columns, which may split prefixes.

    Args:
        documents: documents with input_ids.
        max_length: capacity of a row in tokens. Longer documents are cut, and trees of documents that are larger.
    """
    columns = find_token_columns(documents.data.table.select([INPUT_IDS]), row_numbers(documents))
    lengths = check_lengths(columns[INPUT_IDS].length)
    first = max(1, int(np.searchsorted(np.cumsum(lengths, dtype=np.int64), MEASURED_TOKENS)))
    pieces = cut_to_pieces(lengths[:first], max_length, "split")
    forest = find_trees(columns, pieces, FEWEST_SHARED, max_length)
    tokens, unique = total_of(forest.length), total_of(forest.sizes)
    measured = min(first, len(lengths))
    return SharedPrefixes(tokens / unique if unique else 1.0, measured, measured < len(lengths))
