"""Find the prefixes that the documents of one batch share."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hf_packing.columns import INPUT_IDS
from hf_packing.planning.lengths import IntArray, Pieces
from hf_packing.rows.token_columns import column_of_values
from hf_packing.trees.find_trees import find_trees
from hf_packing.trees.segments import Places, TreeSegments
from hf_packing.trees.tree_paths import TreePaths, segments_of


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
