"""Sort pieces of documents by their content, and count the tokens that neighbors have in common."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hf_packing.planning.lengths import IntArray, Pieces
from hf_packing.rows.token_columns import TokenColumns, blocks_of_rows
from hf_packing.trees.token_keys import TokenKeys, read_keys

SORTED_AT_ONCE = 1 << 21
"""Pieces are sorted as a whole if they have at most this many tokens together. More are sorted by a few tokens first,
to use little memory even if all documents begin alike."""
_FEWEST_AT_ONCE, _MOST_AT_ONCE = 64, 1024
"""The fewest and the most tokens by which pieces are then sorted at a time."""
_COMPARED_AT_ONCE = 1 << 20
_LONG = 512
"""Pairs of pieces of at least this many tokens are compared one by one, and shorter ones many at a time."""


class SortedPieces(NamedTuple):
    """Pieces in the order of their content, in which those that begin with the same values are neighbors."""

    order: IntArray
    """int64 [pieces]: indices of the pieces."""
    common: IntArray
    """int64 [pieces]: number of tokens that each piece has in common with the one before it; 0 for the first."""


class _Group(NamedTuple):
    """Pieces that begin with the same values, not sorted yet, or neighbors that are sorted."""

    pieces: IntArray
    """int64 [pieces]: indices of the pieces."""
    depth: int
    """The number of tokens that all of them have in common; the rest of them is to be sorted. -1 if they are sorted."""
    common: IntArray
    """int64 [1 or pieces]: tokens that the first piece, or each sorted piece, has in common with the one before it."""


def sort_pieces(columns: TokenColumns, pieces: Pieces, some: IntArray, splits: dict[str, int]) -> SortedPieces:
    """Sort some pieces by their tokens and by the other values of their tokens.

    Args:
        columns: the token columns of the documents.
        pieces: the pieces of all documents.
        some: int64 [pieces to sort]: indices of the pieces to sort.
        splits: by the name of a column, the number of neighbors that have fewer tokens in common because their values
            in this column differ; changed in place.
    """
    done: list[_Group] = []
    waiting = [_Group(some, 0, np.zeros(1, dtype=np.int64))]
    while waiting:
        group = waiting.pop()
        if group.depth < 0:
            done.append(group)
            continue
        left = Pieces(
            pieces.document[group.pieces],
            pieces.start[group.pieces] + group.depth,
            pieces.length[group.pieces] - group.depth,
        )
        if int(left.length.sum(dtype=np.int64)) <= SORTED_AT_ONCE or len(group.pieces) == 1:
            order, common = _sort_by(columns, left, group.depth, splits)
            common[1:] += group.depth
            common[0] = group.common[0]
            done.append(_Group(group.pieces[order], -1, common))
            continue
        tokens = min(max(SORTED_AT_ONCE // len(group.pieces), _FEWEST_AT_ONCE), _MOST_AT_ONCE)
        window = Pieces(left.document, left.start, np.minimum(left.length, tokens))
        order, common = _sort_by(columns, window, group.depth, splits)
        waiting += _groups_of(group, order, common, window.length[order], tokens)[::-1]
    return SortedPieces(
        np.concatenate([group.pieces for group in done]), np.concatenate([group.common for group in done])
    )


def _groups_of(group: _Group, order: IntArray, common: IntArray, length: IntArray, tokens: int) -> list[_Group]:
    """Return the groups of pieces whose next `tokens` tokens are equal, and the sorted pieces between them.

    Args:
        group: the group that was sorted by the next tokens.
        order: int64 [pieces]: the order of its pieces.
        common: int64 [pieces]: how many of the next tokens each piece has in common with the one before it.
        length: integers [pieces]: how many of the next tokens each piece has, at most `tokens`.
        tokens: number of tokens by which the pieces were sorted.
    """
    equal = (common == tokens) & (length == tokens)  # to the piece before
    common = common + group.depth
    common[0] = group.common[0]
    begins = np.append(np.flatnonzero(~equal), len(order))
    sizes = np.diff(begins)
    groups: list[_Group] = []
    first = 0  # of the runs that are not in a group yet
    for run in [*np.flatnonzero(sizes > 1).tolist(), len(sizes)]:
        if run > first:
            alone = begins[first:run]
            groups.append(_Group(group.pieces[order[alone]], -1, common[alone]))
        if run < len(sizes):
            members = slice(begins[run], begins[run + 1])
            groups.append(_Group(group.pieces[order[members]], group.depth + tokens, common[begins[run] :][:1]))
        first = run + 1
    return groups


def _sort_by(columns: TokenColumns, pieces: Pieces, depth: int, splits: dict[str, int]) -> tuple[IntArray, IntArray]:
    """Return the order of pieces by their content, and what neighbors have in common; both int64 [pieces].

    Args:
        columns: the token columns of the documents.
        pieces: the pieces, from the token number `depth` on.
        depth: the number of tokens that pieces have before.
        splits: as in `sort_pieces`.
    """
    keys = read_keys(columns, pieces, are_beginnings=depth == 0)
    ends = np.cumsum(pieces.length, dtype=np.int64)
    order = _sort(keys.words, ends)
    length = pieces.length[order].astype(np.int64)
    begin = ends[order] - length
    common = _common_prefixes(keys.words, begin, length)
    _count_splits(keys, begin, length, common, splits)
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
