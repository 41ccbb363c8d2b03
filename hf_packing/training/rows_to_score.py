"""Plan the rows in which a model runs the tokens of documents that it scores: packed rows, and rows of trees."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hf_packing.batch.collate import PackingCollator
from hf_packing.columns import INPUT_IDS, PARENTS, SEGMENT_LENGTHS
from hf_packing.planning.lengths import IntArray, Pieces
from hf_packing.rows.token_columns import column_of_values
from hf_packing.strategies.base import plan_packing
from hf_packing.strategies.greedy import BestFit
from hf_packing.trees.find import find_trees
from hf_packing.trees.forest import Forest, cut_large_trees, plan_forest
from hf_packing.trees.segments import TreePaths, segments_of

Tokens = npt.NDArray[np.int64]


class RowToScore(NamedTuple):
    """Sequences of tokens that a model runs in one row."""

    sequences: IntArray
    """int64 [sequences]: index of each sequence."""
    paths: TreePaths
    """The length of each sequence, and the tokens that it shares with the sequence before it, which the row has once;
    none in a packed row."""

    @property
    def tokens(self) -> int:
        """The number of tokens of the row."""
        return int(self.paths.own.sum())

    def inputs(self, all_sequences: Sequence[Tokens]) -> dict[str, Any]:
        """Return the model's inputs: a packed batch, or a batch of trees if the sequences share tokens."""
        shared = self.paths.shared.tolist()
        own = [all_sequences[each][start:] for each, start in zip(self.sequences.tolist(), shared, strict=True)]
        if not any(shared):
            return PackingCollator()([{INPUT_IDS: tokens} for tokens in own])
        segments = segments_of(self.paths, np.array([0, len(own)]))
        columns = {SEGMENT_LENGTHS: segments.lengths, PARENTS: segments.parents, INPUT_IDS: np.concatenate(own)[None]}
        return {name: torch.from_numpy(values) for name, values in columns.items()}

    def places(self) -> Iterator[Tokens]:
        """Yield, for each sequence, the indices of its tokens in the row, int64 [tokens]."""
        for first, end in pairwise([0, *np.cumsum(self.paths.length).tolist()]):
            yield self.paths.tokens[first:end]


def rows_to_score(sequences: Sequence[Tokens], max_tokens: int, fewest_shared: int | None) -> list[RowToScore]:
    """Plan the rows for sequences of tokens, the longest row first.

    Args:
        sequences: the tokens of each sequence; none is empty, and no two are equal.
        max_tokens: number of tokens in a row. A longer sequence is in a row of its own, together with sequences that
            share its prefix. Such a row has at most `max_tokens` tokens more than the longest sequence.
        fewest_shared: the fewest tokens that sequences share; None to share none.
    """
    lengths = np.array([len(each) for each in sequences], dtype=np.int64)
    alone, rows = np.arange(len(lengths)), list[RowToScore]()
    if fewest_shared is not None and len(lengths):
        columns = {INPUT_IDS: column_of_values(INPUT_IDS, np.concatenate(sequences), lengths)}
        forest = find_trees(columns, Pieces.whole(lengths), fewest_shared).forest
        alone, rows = _rows_of_trees(forest, lengths, max_tokens)
    rows += _packed_rows(np.sort(alone), lengths, max_tokens)
    return sorted(rows, key=lambda row: -row.tokens)


def _rows_of_trees(forest: Forest, lengths: IntArray, max_tokens: int) -> tuple[IntArray, list[RowToScore]]:
    """Return the sequences that share nothing, and rows of the others. Packed rows are faster for those alone."""
    sizes, longest = np.diff(forest.offsets), _longest(forest)
    rows: list[RowToScore] = []
    fitting = [forest.select(np.flatnonzero((sizes > 1) & (longest <= max_tokens)))]
    for tree in np.flatnonzero((sizes > 1) & (longest > max_tokens)):
        parts = cut_large_trees(forest.select(np.array([tree])), int(longest[tree]) + max_tokens)
        fits = _longest(parts) <= max_tokens
        long = parts.select(np.flatnonzero(~fits))
        rows += _rows(long.order, long.length, long.shared, long.offsets)
        fitting.append(parts.select(np.flatnonzero(fits)))
    trees = Forest(
        *(np.concatenate([getattr(each, name) for each in fitting]) for name in ("order", "length", "shared"))
    )
    if len(trees.order):
        plan = plan_forest(trees, Pieces.whole(lengths), lengths, max_tokens, BestFit(max_tokens).plan_lengths)
        assert plan.segment_shared is not None
        rows += _rows(plan.segment_document, plan.segment_length, plan.segment_shared, plan.pack_offsets)
    return forest.order[np.repeat(sizes == 1, sizes)], rows


def _longest(forest: Forest) -> IntArray:
    """Return the length of the longest sequence of each tree, int64 [trees]."""
    return np.maximum.reduceat(forest.length, forest.offsets[:-1])


def _packed_rows(chosen: IntArray, lengths: IntArray, max_tokens: int) -> list[RowToScore]:
    """Return packed rows of the chosen sequences."""
    fits = lengths[chosen] <= max_tokens
    long, short = chosen[~fits], chosen[fits]
    rows = _rows(long, lengths[long], np.zeros(len(long), np.int64), np.arange(len(long) + 1))
    if len(short):
        plan = plan_packing(lengths[short], BestFit(max_tokens))
        of_segments = short[plan.segment_document]
        rows += _rows(of_segments, lengths[of_segments], np.zeros(len(of_segments), np.int64), plan.pack_offsets)
    return rows


def _rows(sequences: IntArray, length: IntArray, shared: IntArray, offsets: IntArray) -> list[RowToScore]:
    """Return rows of sequences that are laid end to end; those of row r are offsets[r]:offsets[r + 1]."""
    slices = [slice(first, end) for first, end in pairwise(offsets.tolist())]
    return [RowToScore(sequences[each], TreePaths(length[each], shared[each])) for each in slices]
