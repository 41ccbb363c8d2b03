"""Estimate the tokens that documents of different files share, which rows repeat, since trees are found within a file.

The first 16 tokens of a document are a prefix, the first 32, and so on, if 16 is the fewest tokens to share. Each file
keeps the smallest hashes of its prefixes. So of two files that have a prefix, both keep it, or neither does, and what
is kept tells how many tokens files have in common. No file is read again.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hf_packing.columns import INPUT_IDS
from hf_packing.planning.lengths import IntArray
from hf_packing.planning.plan import PackingPlan
from hf_packing.rows.token_columns import TOKENS_AT_ONCE, TokenColumns, blocks_of_rows

_KEPT = 512
"""The most prefixes that a file keeps. The estimate is off by about 2 % of the tokens of a file."""
_KNOWN = 1 << 16
"""The most prefixes of all files that are known at the same time, so that memory stays bounded."""
_ALL = 1 << 64
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_MIXERS = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))
_HALF = np.uint64(33)


def sample_prefixes(columns: TokenColumns, plan: PackingPlan, step: int) -> list[int]:
    """Return the smallest hashes of the prefixes of a file's documents, ascending.

    If there are more than are kept, one more is returned, so that it is known up to where the file has kept all.

    Args:
        columns: the token columns of the file.
        plan: the plan of the file.
        step: the number of tokens from prefix to prefix of a document.
    """
    smallest = np.zeros(0, dtype=np.uint64)
    for first, end in blocks_of_rows(plan.segment_length, TOKENS_AT_ONCE):
        length = plan.segment_length[first:end].astype(np.int64)
        tokens = columns[INPUT_IDS].gather(plan.segment_document[first:end], plan.segment_start[first:end], length)
        smallest = np.unique(np.concatenate([smallest, _hash_prefixes(tokens, length, step)]))[: _KEPT + 1]
    return [int(each) for each in smallest]


class SharedBetween:
    """The tokens that files share with earlier files.

    Args:
        step: the number of tokens from prefix to prefix of a document.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        self._limit = _ALL
        """Of prefixes with smaller hashes, all files so far have kept all they have."""
        self._repeated: dict[int, int] = {}
        """By the hash of a prefix: in how many files it is, but the first."""

    def add(self, prefixes: Sequence[int]) -> None:
        """Compare a file's prefixes with those of earlier files."""
        if len(prefixes) > _KEPT:
            self._forget(prefixes[_KEPT])
        for each in prefixes:
            if each < self._limit:
                self._repeated[each] = self._repeated.get(each, -1) + 1
        if len(self._repeated) > _KNOWN:
            self._forget(sorted(self._repeated)[_KNOWN // 2])

    def tokens(self) -> int:
        """Return an estimate of the tokens that files have in common with earlier files."""
        return round(self._step * sum(self._repeated.values()) * (_ALL / self._limit))

    def _forget(self, limit: int) -> None:
        """Forget the prefixes whose hashes are not smaller than a limit."""
        if limit < self._limit:
            self._limit = limit
            self._repeated = {each: number for each, number in self._repeated.items() if each < limit}


def _hash_prefixes(tokens: npt.NDArray[np.integer], length: IntArray, step: int) -> npt.NDArray[np.uint64]:
    """Return a hash of each prefix of documents, uint64 [prefixes]. The hashes are the same in every process.

    The hash of a prefix is made of the sum of its tokens, each times a power of a number. Sums may overflow.

    Args:
        tokens: integers [tokens]: the tokens of all documents, laid end to end.
        length: int64 [documents]: number of tokens of each document.
        step: the number of tokens from prefix to prefix of a document.
    """
    begin = np.cumsum(length) - length
    place = np.arange(len(tokens)) - np.repeat(begin, length)
    powers = np.cumprod(np.full(length.max(), _FACTOR))
    terms = _mix(tokens.astype(np.uint64) + np.uint64(1)) * powers[place]  # 0 would make no difference to a sum
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms)])
    ends = np.flatnonzero(place % step == step - 1) + 1
    return _mix(sums[ends] - np.repeat(sums[begin], length // step))


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return numbers whose bits all depend on all bits of the given ones (the last steps of MurmurHash3)."""
    for mixer in _MIXERS:
        values = (values ^ (values >> _HALF)) * mixer
    return values ^ (values >> _HALF)
