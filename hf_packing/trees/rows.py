"""Plan documents that share prefixes, and build their rows of trees.

A document takes its first tokens from the document before it, and that one may have taken some of them from an earlier
one. Only the rest, its own tokens, is added to the row. So the tokens of a document are a few ranges of the row, one
for each of these documents.
"""

import numpy as np
import pyarrow as pa

from hf_packing.columns import (
    ENDS,
    IGNORED_LABEL,
    INPUT_IDS,
    LABEL_COLUMNS,
    PARENTS,
    SEGMENT_LENGTHS,
    TRAINED,
    TREE_INPUT_IDS,
    TREE_LABELS,
)
from hf_packing.planning.lengths import (
    Array,
    BoolArray,
    Int32Array,
    IntArray,
    Pieces,
    check_lengths,
    count_ranges,
    cut_to_pieces,
    indices_in_groups,
    indices_in_ranges,
    offsets_of,
    sums_of,
    total_of,
)
from hf_packing.planning.plan import PackingPlan
from hf_packing.rows.packed_rows import Rows, as_int32, list_array, read_labels
from hf_packing.rows.token_columns import TokenColumns
from hf_packing.strategies.base import Strategy
from hf_packing.trees.find import find_trees
from hf_packing.trees.segments import TreePaths, segments_of


def plan_trees(columns: TokenColumns, strategy: Strategy, fewest: int) -> PackingPlan:
    """Find the prefixes that documents share, and plan the documents.

    Trees that are larger than a pack are cut where the fewest tokens are repeated.

    Args:
        columns: the token columns of the documents.
        strategy: the strategy.
        fewest: the fewest tokens that documents share.

    Returns:
        The plan, with `segment_shared`.
    """
    capacity = strategy.largest_capacity
    lengths = check_lengths(columns[INPUT_IDS].length)
    pieces = cut_to_pieces(lengths, capacity, strategy.overflow)
    forest = find_trees(columns, pieces, fewest, capacity)
    plan = strategy.plan_lengths(check_lengths(forest.sizes))
    assert plan.num_segments == len(forest.sizes)  # none was cut or dropped
    planned = forest.select(plan.segment_document)
    segments = pieces.take(planned.order)
    return PackingPlan(
        document_length=lengths,
        segment_document=segments.document,
        segment_start=segments.start,
        segment_length=segments.length,
        pack_offsets=planned.offsets[plan.pack_offsets],
        pack_capacity=plan.pack_capacity,
        segment_shared=planned.shared,
        proven_lower_bound=plan.proven_lower_bound,
        note=plan.note,
    )


def tokens_not_shared(columns: TokenColumns, plan: PackingPlan, fewest: int) -> int:
    """Count the tokens that a plan of trees repeats because other columns than those of tokens and labels differ, at
    least.

    Args:
        columns: the token columns of the documents.
        plan: the plan that `plan_trees` made of them.
        fewest: the fewest tokens that documents share.
    """
    compared = {name: column for name, column in columns.items() if name in (INPUT_IDS, *LABEL_COLUMNS)}
    if len(compared) == len(columns) or not plan.num_packs:
        return 0
    assert plan.segment_shared is not None
    forest = find_trees(compared, plan.segments, fewest, int(plan.pack_capacity.max()))
    # branchings that are too near to others are moved, so that fewer columns may share fewer tokens
    return max(0, total_of(plan.segment_length) - total_of(plan.segment_shared) - total_of(forest.sizes))


def tree_rows(columns: TokenColumns, plan: PackingPlan, packs: IntArray) -> Rows:
    """Build some of a plan's packs, and return one row of trees for each.

    Loss masks are applied to the labels, and are not columns of the rows.

    Args:
        columns: token columns of the documents for which the plan was made.
        plan: a plan with `segment_shared`.
        packs: integers [rows]: numbers of packs, in any order.
    """
    documents, sizes = indices_in_groups(plan.pack_offsets, packs)
    offsets = offsets_of(sizes)
    whole = plan.segments.take(documents)
    assert plan.segment_shared is not None
    paths = TreePaths(whole.length, plan.segment_shared[documents])
    own = Pieces(whole.document, whole.start + paths.shared, paths.own)
    values = {name: column.gather(own) for name, column in columns.items() if name not in LABEL_COLUMNS}
    input_ids = as_int32(INPUT_IDS, values.pop(INPUT_IDS))
    labels = read_labels(columns, whole)
    begin = offsets_of(paths.length)[:-1]
    first_labels = None
    if labels is None:
        longer = np.flatnonzero(paths.length > 1)
        runs = Pieces(longer, np.ones_like(longer), paths.length[longer] - 1)
    else:
        first_labels = labels[begin]
        labels[begin] = IGNORED_LABEL
        runs = _runs_of(labels != IGNORED_LABEL, begin)
    tree_labels = _merge_labels(paths, runs, labels, input_ids)
    row_tokens = sums_of(paths.own, offsets)
    row_runs = np.diff(np.searchsorted(runs.document, offsets))
    in_row = runs.document - np.repeat(offsets[:-1], row_runs)
    trained = np.stack([in_row, runs.start, runs.length], axis=1)
    arrays = {
        TREE_INPUT_IDS: list_array(input_ids, row_tokens),
        TREE_LABELS: list_array(tree_labels, row_tokens),
        **{name: list_array(of_tokens, row_tokens) for name, of_tokens in values.items()},
        **segment_columns(paths, offsets),
        TRAINED: list_array(trained.astype(np.int32).ravel(), 3 * row_runs),
    }
    return Rows(pa.table(arrays), first_labels, total_of(runs.length))


def segment_columns(paths: TreePaths, row_documents: IntArray) -> dict[str, pa.Array]:
    """Return the columns that say which documents of a row share which tokens, given what `segments_of` needs."""
    segments = segments_of(paths, row_documents)
    return {
        SEGMENT_LENGTHS: list_array(segments.lengths.astype(np.int32), segments.per_row),
        PARENTS: list_array(segments.parents.astype(np.int32), segments.per_row),
        ENDS: list_array(segments.ends.astype(np.int32), np.diff(row_documents)),
    }


def _runs_of(trains: BoolArray, begin: IntArray) -> Pieces:
    """Return the runs of tokens that documents train on.

    Args:
        trains: bool [tokens]: whether each token of all documents, laid end to end, is trained on; never the first
            token of a document, so that no run crosses from one document into the next.
        begin: int64 [documents]: index of each document's first token.
    """
    edges = np.flatnonzero(np.diff(trains, prepend=False, append=False))
    start, end = edges[::2], edges[1::2]
    document = np.searchsorted(begin, start, side="right") - 1
    return Pieces(document, start - begin[document], end - start)


def _merge_labels(paths: TreePaths, runs: Pieces, labels: Int32Array | None, input_ids: Int32Array) -> Int32Array:
    """Return the label of each token of the rows: that of any document that trains on it, otherwise -100.

    Args:
        paths: the documents of all rows.
        runs: the tokens that documents train on.
        labels: int32 [tokens of all documents]; None if documents train on all tokens but their first one.
        input_ids: int32 [tokens of all rows].
    """
    merged: Array = input_ids.copy()
    if labels is not None:
        # a label other than the token is compared with the tokens, so it is that of the document that adds the token
        of_adding = labels[indices_in_ranges(offsets_of(paths.length)[:-1] + paths.shared, paths.own)]
        merged = np.where(of_adding == IGNORED_LABEL, merged, of_adding)
    ranges = paths.find(runs.document, runs.start, runs.start + runs.length)
    merged[count_ranges(ranges.begin, ranges.length, len(input_ids)) == 0] = IGNORED_LABEL
    return merged
