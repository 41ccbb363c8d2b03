"""Packs by the lengths of their segments: the half of a counted plan that is about packs.

Identical packs are one pattern, so the size depends on the distinct lengths and not on the number of documents.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hf_packing.planning.lengths import IntArray


class Run(NamedTuple):
    """One move of a counting strategy: consecutive packs that each receive the same copies of one length."""

    length: int
    first_pack: int
    packs: int
    copies: int


class Pattern(NamedTuple):
    """Equal packs: how many, of which capacity, and how many copies of which length each of them has."""

    packs: int
    capacity: int
    copies: Sequence[tuple[int, int]]
    """(length, copies), each length once."""


@dataclass(frozen=True)
class Patterns:
    """Patterns of packs; pattern i stands for `packs[i]` equal packs, numbered one pattern after the other."""

    packs: IntArray
    """int64 [patterns]: how many packs are made like this."""
    capacity: IntArray
    """int32 [patterns], tokens."""
    entry_offsets: IntArray
    """int64 [patterns + 1]: entries of pattern i are entry_offsets[i]:entry_offsets[i + 1]."""
    entry_length: IntArray
    """int32 [entries], tokens: a segment length in the pattern."""
    entry_copies: IntArray
    """int64 [entries]: how many segments of that length each pack has."""

    @cached_property
    def num_packs(self) -> int:
        return int(self.packs.sum())

    @property
    def entry_pattern(self) -> IntArray:
        """int64 [entries]: the pattern an entry belongs to."""
        return np.repeat(np.arange(len(self.packs)), np.diff(self.entry_offsets))

    def segments_per_pack(self) -> IntArray:
        """int64 [patterns]: segments in each pack of a pattern."""
        total = np.concatenate([[0], np.cumsum(self.entry_copies)])
        return np.diff(total[self.entry_offsets])

    def tokens_per_pack(self) -> IntArray:
        """int64 [patterns]: tokens in each pack of a pattern."""
        total = np.concatenate([[0], np.cumsum(self.entry_copies * self.entry_length)])
        return np.diff(total[self.entry_offsets])

    def without_empty(self) -> "Patterns":
        """Without the patterns that have no segment."""
        entries = np.diff(self.entry_offsets)
        kept = entries > 0
        offsets = np.concatenate([[0], np.cumsum(entries[kept])])
        return Patterns(self.packs[kept], self.capacity[kept], offsets, self.entry_length, self.entry_copies)

    def counts(self) -> IntArray:
        """int64 [longest + 1]: how many segments of each length there is room for."""
        slots = self.packs[self.entry_pattern] * self.entry_copies
        counts = np.zeros(int(self.entry_length.max(initial=0)) + 1, dtype=np.int64)
        np.add.at(counts, self.entry_length, slots)
        return counts


@dataclass(frozen=True)
class Solution:
    """Packs for counted segments, with what the search for them has learnt."""

    patterns: Patterns
    lower_bound: int = 0
    """Packs that any plan under the strategy's limits needs, where more is proven than the lengths tell."""
    note: str = ""
    """How it went, where there is something to say."""
    gave_up: bool = False
    """Whether its limits left nothing but a simpler strategy."""


def patterns_from_list(patterns: Sequence[Pattern]) -> Patterns:
    """Patterns that are known pack by pack."""
    sizes = [len(pattern.copies) for pattern in patterns]
    entries = np.array([entry for pattern in patterns for entry in pattern.copies], dtype=np.int64).reshape(-1, 2)
    return Patterns(
        packs=np.array([pattern.packs for pattern in patterns], dtype=np.int64),
        capacity=np.array([pattern.capacity for pattern in patterns], dtype=np.int32),
        entry_offsets=np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]),
        entry_length=entries[:, 0].astype(np.int32),
        entry_copies=entries[:, 1].copy(),
    )


def patterns_from_runs(runs: Iterable[Run], num_packs: int, capacity: int) -> Patterns:
    """The patterns of packs that a sequence of runs has filled.

    Args:
        runs: moves in the order they were made; their packs are intervals of range(num_packs).
        num_packs: packs opened in all.
        capacity: tokens of every pack.
    """
    length, first, packs, copies = np.array(list(runs), dtype=np.int64).reshape(-1, 4).T
    borders = np.unique(np.concatenate([first, first + packs, [0, num_packs]]))
    first_pattern, end_pattern = np.searchsorted(borders, first), np.searchsorted(borders, first + packs)
    spans = end_pattern - first_pattern
    run = np.repeat(np.arange(len(spans)), spans)
    pattern = first_pattern[run] + np.arange(len(run)) - np.repeat(np.cumsum(spans) - spans, spans)
    by_pattern = np.argsort(pattern, kind="stable")
    run = run[by_pattern]
    patterns = len(borders) - 1
    return Patterns(
        packs=np.diff(borders),
        capacity=np.full(patterns, capacity, dtype=np.int32),
        entry_offsets=np.concatenate([[0], np.cumsum(np.bincount(pattern, minlength=patterns))]),
        entry_length=length[run].astype(np.int32),
        entry_copies=copies[run],
    )
