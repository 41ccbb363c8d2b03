"""Restore documents from rows of trees."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hf_packing.columns import (
    BUCKET,
    ENDS,
    IGNORED_LABEL,
    INPUT_IDS,
    LABELS,
    PARENTS,
    SEGMENT_LENGTHS,
    TRAINED,
    TREE_COLUMNS,
    TREE_INPUT_IDS,
    TREE_LABELS,
)
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import count_ranges, offsets_of
from hf_packing.planning.plan import PackingPlan
from hf_packing.rows.packed_rows import check_num_rows, list_array, token_column_of
from hf_packing.rows.token_columns import is_token_type
from hf_packing.trees.segments import TreePaths, segments_of


def unpack_tree_rows(rows: pa.Table, plan: PackingPlan, first_labels: npt.NDArray[np.int32] | None) -> pa.Table:
    """Return the documents of rows of trees, in the original order, without the tokens that packing dropped.

    Args:
        rows: all rows, in the order of the plan.
        plan: the plan that the rows were packed with.
        first_labels: int32 [segments]: the labels of the first tokens of segments, which are not in the rows; None to
            return -100 for them.

    Raises:
        PackingError: the rows were not packed with this plan.
    """
    if plan.segment_shared is None:
        raise PackingError("plan: expected a plan with segment_shared, since these rows are trees, got a plan without")
    paths = TreePaths(plan.segment_length, plan.segment_shared)
    _check_rows_of_plan(rows, plan, paths)
    order = np.lexsort((plan.segment_start, plan.segment_document))
    length = plan.segment_length[order].astype(np.int64)
    ranges = paths.find(order, np.zeros_like(length), length).in_order()
    pack = plan.pack_of_segment()[order[ranges.part]]
    before = offsets_of(plan.pack_tokens())
    start = ranges.begin - before[pack]
    document_tokens = np.zeros(plan.num_documents, dtype=np.int64)
    np.add.at(document_tokens, plan.segment_document, plan.segment_length)
    arrays = {}
    for name in rows.column_names:
        of_tokens = is_token_type(rows.schema.field(name).type)
        if (name in TREE_COLUMNS and name not in (TREE_INPUT_IDS, TREE_LABELS)) or (name == BUCKET and not of_tokens):
            continue
        column = token_column_of(rows, name)
        values = column.gather(pack, start, ranges.length)
        if name == TREE_LABELS:
            values[~_trained(rows, plan, order)] = IGNORED_LABEL
            if first_labels is not None:
                values[np.cumsum(length) - length] = first_labels[order]
        name = {TREE_INPUT_IDS: INPUT_IDS, TREE_LABELS: LABELS}.get(name, name)
        arrays[name] = list_array(values, document_tokens, pa.types.is_large_list(column.type))
    return pa.table(arrays)


def _trained(rows: pa.Table, plan: PackingPlan, order: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return whether each token of all segments is trained on, bool [tokens].

    Args:
        rows: all rows.
        plan: the plan of the rows.
        order: int64 [segments]: the order in which the segments are laid end to end.
    """
    trained = rows.column(TRAINED)
    runs = pc.list_flatten(trained).to_numpy().reshape(-1, 3).astype(np.int64)
    row = np.repeat(np.arange(len(trained)), pc.list_value_length(trained).to_numpy() // 3)
    begin = np.empty(plan.num_segments, dtype=np.int64)
    begin[order] = np.cumsum(plan.segment_length[order]) - plan.segment_length[order]
    start = begin[plan.pack_offsets[row] + runs[:, 0]] + runs[:, 1]
    return count_ranges(start, runs[:, 2], int(plan.segment_length.sum(dtype=np.int64))) > 0


def _check_rows_of_plan(rows: pa.Table, plan: PackingPlan, paths: TreePaths) -> None:
    if missing := [name for name in TREE_COLUMNS if name not in rows.column_names]:
        raise PackingError(
            f"column {missing[0]!r}: expected rows of trees, got the columns {', '.join(rows.column_names)}"
        )
    check_num_rows(rows, plan)
    segments = segments_of(paths, plan.pack_offsets)
    expected = {
        SEGMENT_LENGTHS: (segments.lengths, segments.per_row),
        PARENTS: (segments.parents, segments.per_row),
        ENDS: (segments.ends, np.diff(plan.pack_offsets)),
    }
    for name, (values, per_row) in expected.items():
        column = rows.column(name)
        same = np.array_equal(pc.list_value_length(column).to_numpy(), per_row)
        if not same or not np.array_equal(pc.list_flatten(column).to_numpy(), values):
            raise PackingError(
                f"plan: expected the plan that these rows were packed with, but the segments of this plan differ from "
                f"{name} in the rows"
            )
