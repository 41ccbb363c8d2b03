"""Find the prefixes that documents share, by sorting documents.

Documents that begin with the same tokens are neighbors when all documents are sorted as strings of bytes, and what a
document has in common with its neighbor is what it shares with any document before it. So the sorted documents, with
the number of tokens that each shares with the one before it, describe all shared prefixes. Documents whose first tokens
no other document has are found by hashing, and are never sorted.

Documents share a token only if everything that belongs to the token is equal, since a row has each value of a shared
token once. Labels are the exception: a row says for each document which tokens it trains on. So labels are compared
only where they are neither -100 nor the token itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hf_packing.columns import IGNORED_LABEL, INPUT_IDS, LABELS, LOSS_MASKS
from hf_packing.planning.lengths import IntArray, Pieces, indices_in_ranges, sums_of
from hf_packing.rows.packed_rows import as_int32, read_labels
from hf_packing.rows.token_columns import TokenColumns, blocks_of_rows, column_of_values
from hf_packing.trees.forest import Forest
from hf_packing.trees.segments import Places, TreePaths, TreeSegments, segments_of

_HASHED_AT_ONCE = 1 << 22
_TOKENS_OF_BLOCK = 1 << 21
_SORTED_AT_ONCE = 1 << 21
"""Pieces are sorted as a whole if they have at most this many tokens together. More are sorted by a few tokens first,
to use little memory even if all documents begin alike."""
_FEWEST_AT_ONCE, _MOST_AT_ONCE = 64, 1024
"""The fewest and the most tokens by which pieces are then sorted at a time."""
_COMPARED_AT_ONCE = 1 << 20
_LONG = 512
"""Pairs of pieces of at least this many tokens are compared one by one, and shorter ones many at a time."""
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
        by_content, common = _sort_pieces(columns, pieces, block, splits)
        order.append(by_content)
        shared.append(_move_up(common, min_shared))
    return FoundTrees(_in_order(np.concatenate(order), np.concatenate(shared), length), splits)


def _blocks_of_candidates(columns: TokenColumns, pieces: Pieces, min_shared: int) -> list[IntArray]:
    """Return blocks of pieces, int64 [pieces of the block] each, whose first tokens other pieces of the block have too.

    Pieces that begin with the same `min_shared` tokens are in the same block. A few others may be in a block as well,
    since beginnings are compared by their hash.
    """
    long_enough = np.flatnonzero(pieces.length >= min_shared)
    hashes = np.empty(len(long_enough), dtype=np.uint64)
    step = max(1, _HASHED_AT_ONCE // min_shared)
    for begin in range(0, len(long_enough), step):
        some = pieces.take(long_enough[begin : begin + step])
        lengths = np.full(len(some.document), min_shared)
        beginnings = columns[INPUT_IDS].gather(some.document, some.start, lengths)
        hashes[begin : begin + step] = _hash(beginnings.astype(np.int64).reshape(-1, min_shared))
    _, first, group, sizes = np.unique(hashes, return_index=True, return_inverse=True, return_counts=True)
    several = np.flatnonzero(sizes[group] > 1)
    several = several[np.argsort(first[group[several]], kind="stable")]  # group by group, in the order of first pieces
    offsets = np.append(np.flatnonzero(np.diff(group[several], prepend=-1)), len(several))
    candidates = long_enough[several]
    tokens = sums_of(pieces.length[candidates], offsets)
    return [candidates[offsets[begin] : offsets[end]] for begin, end in blocks_of_rows(tokens, _TOKENS_OF_BLOCK)]


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
    offsets = np.append(np.flatnonzero(shared == 0), len(shared))
    trees = np.argsort(np.minimum.reduceat(order, offsets[:-1]))
    places = indices_in_ranges(offsets[trees], np.diff(offsets)[trees])
    return Forest(order[places], length[order[places]], shared[places])


class TokenKeys(NamedTuple):
    """The values to compare, as 32-bit words."""

    words: npt.NDArray[np.int32]
    """int32 [tokens, words]: the token, followed by the words of the other columns."""
    columns: tuple[str, ...]
    """For each word, the name of its column."""


def _sort_pieces(
    columns: TokenColumns, pieces: Pieces, some: IntArray, splits: dict[str, int]
) -> tuple[IntArray, IntArray]:
    """Sort some pieces by their tokens and by the other values of their tokens.

    Args:
        columns: the token columns of the documents.
        pieces: the pieces of all documents.
        some: int64 [pieces to sort]: indices of the pieces to sort.
        splits: by the name of a column, the number of neighbors that have fewer tokens in common because their values
            in this column differ; changed in place.

    Returns:
        The indices in a new order, in which pieces that begin with the same values are neighbors, and the number of
        tokens that each piece has in common with the one before it, both int64 [pieces to sort].
    """
    order, common = some.copy(), np.zeros(len(some), dtype=np.int64)
    waiting = [(0, len(some), 0)]  # places in the order, and the number of tokens that the pieces there have in common
    while waiting:
        begin, end, depth = waiting.pop()
        group = order[begin:end]
        left = pieces.length[group] - depth
        tokens = int(left.max()) + 1
        if end - begin > 1 and left.sum(dtype=np.int64) > _SORTED_AT_ONCE:
            tokens = min(max(_SORTED_AT_ONCE // len(group), _FEWEST_AT_ONCE), _MOST_AT_ONCE)
        following = Pieces(pieces.document[group], pieces.start[group] + depth, np.minimum(left, tokens))
        keys = read_keys(columns, following, are_beginnings=depth == 0)
        ends = np.cumsum(following.length, dtype=np.int64)
        by_content = _sort(keys.words, ends)
        length = following.length[by_content].astype(np.int64)
        same = _common_prefixes(keys.words, ends[by_content] - length, length)
        _count_splits(keys, ends[by_content] - length, length, same, splits)
        order[begin:end] = group[by_content]
        common[begin + 1 : end] = same[1:] + depth
        firsts = np.flatnonzero(same < tokens)
        sizes = np.diff(firsts, append=end - begin)
        for first, size in zip(firsts[sizes > 1].tolist(), sizes[sizes > 1].tolist(), strict=True):
            waiting.append((begin + first, begin + first + size, depth + tokens))
    return order, common


def _sort(words: npt.NDArray[np.int32], ends: IntArray) -> IntArray:
    """Return the order in which pieces that begin with the same words are neighbors, int64 [pieces].

    Args:
        words: int32 [tokens, words].
        ends: int64 [pieces]: index of each piece's last token, plus 1.
    """
    data = np.ascontiguousarray(words).tobytes()
    borders = [0, *(ends * 4 * words.shape[1]).tolist()]
    texts = [data[begin:end] for begin, end in pairwise(borders)]
    return np.array(sorted(range(len(texts)), key=texts.__getitem__), dtype=np.int64)


def _common_prefixes(words: npt.NDArray[np.int32], begin: IntArray, length: IntArray) -> IntArray:
    """Return the number of tokens that each piece has in common with the one before it, int64 [pieces]; first 0.

    Args:
        words: int32 [tokens, words].
        begin: int64 [pieces]: index of each piece's first token.
        length: int64 [pieces]: number of tokens in each piece.
    """
    common = np.zeros(len(begin), dtype=np.int64)
    most = np.minimum(length[:-1], length[1:])
    for right in (np.flatnonzero(most >= _LONG) + 1).tolist():
        a, b, n = begin[right - 1], begin[right], most[right - 1]
        differ = words[a : a + n] != words[b : b + n]
        differ = differ[:, 0] if differ.shape[1] == 1 else differ.any(axis=1)
        first = int(differ.argmax())
        common[right] = first if differ[first] else n
    short = np.flatnonzero(most < _LONG)
    for first, end in blocks_of_rows(most[short], _COMPARED_AT_ONCE):
        left = short[first:end]
        n = most[left]
        offset = np.cumsum(n) - n
        ramp = np.arange(int(n.sum()), dtype=np.int64)
        to_left = np.repeat(begin[left] - offset, n)
        to_left += ramp
        differ = words[to_left]
        to_left += np.repeat(begin[left + 1] - begin[left], n)
        unequal = (differ != words[to_left]).any(axis=1)
        places = np.append(np.flatnonzero(unequal), len(ramp))
        common[left + 1] = np.minimum(places[np.searchsorted(places, offset)] - offset, n)
    return common


def _count_splits(keys: TokenKeys, begin: IntArray, length: IntArray, common: IntArray, splits: dict[str, int]) -> None:
    """Add to `splits` the neighbors whose tokens are equal after their common prefix, while other values differ."""
    if len(keys.columns) == 1 or len(begin) < 2:
        return
    place = common[1:]
    both = np.flatnonzero(place < np.minimum(length[:-1], length[1:]))
    unequal = keys.words[begin[:-1][both] + place[both]] != keys.words[begin[1:][both] + place[both]]
    unequal = unequal[~unequal[:, 0]]
    for name in dict.fromkeys(keys.columns[1:]):
        mine = [number for number, of in enumerate(keys.columns) if of == name]
        if number := int(unequal[:, mine].any(axis=1).sum()):
            splits[name] = splits.get(name, 0) + number


def read_keys(columns: TokenColumns, pieces: Pieces, are_beginnings: bool) -> TokenKeys:
    """Return the values by which pieces are compared, piece by piece.

    Args:
        columns: the token columns of the documents.
        pieces: the pieces of documents to read; they may be empty.
        are_beginnings: whether the first token of each piece is one that it would have in a row, so that it is not
            trained on.

    Raises:
        PackingError: a loss mask has a value other than 0 and 1, or input_ids or labels do not fit in 32 bits.
    """
    where = (pieces.document, pieces.start, pieces.length)
    input_ids = as_int32(INPUT_IDS, columns[INPUT_IDS].gather(*where))
    words, names = [input_ids[:, None]], [INPUT_IDS]
    labels = read_labels(columns, pieces)
    if labels is not None:
        labels[(labels == input_ids)] = IGNORED_LABEL
        if are_beginnings:
            labels[np.cumsum(pieces.length, dtype=np.int64) - pieces.length] = IGNORED_LABEL
        if (labels != IGNORED_LABEL).any():
            words.append(labels[:, None])
            names.append(LABELS)
    for name, column in columns.items():
        if name not in (INPUT_IDS, LABELS, *LOSS_MASKS):
            words.append(_as_words(column.gather(*where)))
            names += [name] * words[-1].shape[1]
    return TokenKeys(np.concatenate(words, axis=1) if len(words) > 1 else words[0], tuple(names))


def _as_words(values: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Return the bits of numbers as int32 [values, words]; numbers of at most 32 bits have one word."""
    if values.dtype.itemsize < 4:
        values = values.view(f"i{values.dtype.itemsize}").astype(np.int32)
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
    begin = np.cumsum(length) - length
    of_tokens = {INPUT_IDS: input_ids, **others}
    columns = {name: column_of_values(name, values, length) for name, values in of_tokens.items()}
    forest = find_trees(columns, Pieces.whole(length), min_shared).forest
    paths = TreePaths(forest.length, forest.shared)
    segments = segments_of(paths, np.array([0, len(length)]))
    trees = TreeSegments.from_arrays(segments.lengths, segments.parents)
    first = begin[forest.order] + forest.shared
    taken = np.repeat(first - paths.begin, paths.own) + np.arange(trees.tokens)
    given = np.empty(len(input_ids), dtype=np.int64)
    for document, end in zip(forest.order.tolist(), segments.ends.tolist(), strict=True):
        given[begin[document] : begin[document] + length[document]] = trees.path_of(end)
    return BatchTrees(trees, taken, given)
