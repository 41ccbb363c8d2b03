"""Restore documents from rows of trees."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hf_packing.columns import (
    ENDS,
    PARENTS,
    SEGMENT_LENGTHS,
    TRAINED,
    TREE_COLUMNS,
)
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import count_ranges, offsets_of
from hf_packing.planning.plan import PackingPlan
from hf_packing.rows.packed_rows import check_rows_of_plan, read_documents
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
    segments = segments_of(paths, plan.pack_offsets)
    expected = {
        SEGMENT_LENGTHS: (segments.lengths, segments.per_row),
        PARENTS: (segments.parents, segments.per_row),
        ENDS: (segments.ends, np.diff(plan.pack_offsets)),
    }
    check_rows_of_plan(rows, plan, expected, needed=TREE_COLUMNS)
    order = np.lexsort((plan.segment_start, plan.segment_document))
    length = plan.segment_length[order].astype(np.int64)
    ranges = paths.find(order, np.zeros_like(length), length).in_order()
    pack = plan.pack_of_segment()[order[ranges.part]]
    before = offsets_of(plan.pack_tokens())
    where = pack, ranges.begin - before[pack], ranges.length
    trained = _trained(rows, plan, order)
    return read_documents(rows, plan, order, where, (*expected, TRAINED), first_labels, trained)


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
