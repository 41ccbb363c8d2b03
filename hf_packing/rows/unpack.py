"""`unpack` restores the documents of a packed dataset."""

from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hf_packing.checks import check_type
from hf_packing.columns import (
    BUCKET,
    IGNORED_LABEL,
    INPUT_IDS,
    LABELS,
    POSITION_IDS,
    SEQ_LENGTHS,
    TRAINED,
    TREE_COLUMNS,
    TREE_INPUT_IDS,
    TREE_LABELS,
    check_columns,
)
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray, Pieces, count_ranges, offsets_of, sums_by, total_of
from hf_packing.planning.plan import PackingPlan
from hf_packing.rows.cache import ROWS, SAVED_ROWS, Origin
from hf_packing.rows.lazy import DocumentRows, lazy_rows, refuse_cells
from hf_packing.rows.packed_rows import list_array
from hf_packing.rows.token_columns import TokenColumn, is_token_type
from hf_packing.trees.rows import segment_columns
from hf_packing.trees.segments import TreePaths
from hf_packing.upstream.datasets import indices_of


def unpack(packed: datasets.Dataset, plan: PackingPlan | None = None) -> datasets.Dataset:
    """Restore the documents of a packed dataset, in the original order, with their token columns.

    Documents that were dropped come back empty. Truncated documents come back without the tokens that were cut off.

    Args:
        packed: a dataset that `pack` returned, neither shuffled, selected from, mapped nor joined.
        plan: the plan that the rows were packed with; None to use the plan that `pack` or `hf-packing pack` saved
            beside the rows. Pass a plan if the rows were saved elsewhere, without the saved plan. In this case, labels
            keep the -100 at the start of segments, and rows with equal seq_lengths can change places without an error.

    Returns:
        A Dataset in memory, with one row for each document.

    Raises:
        PackingError: the plan of the rows is unknown, or the rows do not match the plan.

    Example:
        >>> import datasets, hf_packing as hfp
        >>> documents = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5], [6]]})
        >>> hfp.unpack(hfp.pack(documents, hfp.BestFit(4)))["input_ids"][:]
        [[1, 2, 3], [4, 5], [6]]
    """
    check_type("packed", packed, datasets.Dataset, "a Dataset that pack() returned")
    if indices_of(packed) is not None:
        raise PackingError(
            "packed: expected all rows in the order of packing, but rows of this dataset were shuffled or selected"
        )
    if (lazy := lazy_rows(packed)) is not None:
        table, origin = _rebuild(*lazy)
    elif packed.format["type"] == "custom":
        raise PackingError(
            "packed: expected a dataset as pack() returned it, got one with another transform, or with columns that "
            "were added or replaced"
        )
    else:
        refuse_cells(packed)
        table, origin = packed.data.table, _stored_origin(packed, plan)
    if plan is not None and plan != origin.plan:
        raise PackingError(
            "plan: expected the plan that these rows were packed with, which has the fingerprint "
            f"{origin.plan.fingerprint}, got {plan!r}; leave plan out to use the stored plan"
        )
    documents = _documents_of(table, origin)
    if origin.facts["labels_made"] and LABELS in documents.column_names:
        documents = documents.drop_columns([LABELS])
    return datasets.Dataset(documents, split=packed.split)


def _documents_of(rows: pa.Table, origin: Origin) -> pa.Table:
    """Return the documents of all rows, in the original order, without the tokens that packing dropped.

    Packed rows are read as rows of trees in which no document shares a token.

    Raises:
        PackingError: the rows were not packed with this plan.
    """
    plan, names = origin.plan, rows.column_names
    are_trees = TREE_INPUT_IDS in names
    check_columns(TREE_COLUMNS if are_trees else (INPUT_IDS, SEQ_LENGTHS), names, "in a packed dataset")
    length = plan.segment_length.astype(np.int64)
    shared = plan.segment_shared if are_trees else None
    paths = TreePaths(length, np.zeros_like(length) if shared is None else shared)
    expected = {SEQ_LENGTHS: list_array(plan.segment_length, np.diff(plan.pack_offsets))}
    if are_trees:
        expected = segment_columns(paths, plan.pack_offsets)
    for name, array in expected.items():
        if not rows.column(name).cast(array.type).equals(pa.chunked_array([array])):
            raise PackingError(
                "plan: expected the plan that these rows were packed with, but the segments of this plan differ from "
                f"{name} in the rows"
            )
    order = np.lexsort((plan.segment_start, plan.segment_document))
    length = length[order]
    ranges = paths.find(order, np.zeros_like(length), length).in_order()
    pack = plan.pack_of_segment()[order[ranges.part]]
    where = Pieces(pack, ranges.begin - paths.begin[plan.pack_offsets[pack]], ranges.length)
    begin = offsets_of(length)[:-1]
    document_tokens = sums_by(plan.segment_document, plan.segment_length, plan.num_documents)
    arrays = {}
    for stored in names:
        kind = rows.schema.field(stored).type
        if stored in (*expected, POSITION_IDS, TRAINED) or (stored == BUCKET and not is_token_type(kind)):
            continue
        if not is_token_type(kind):
            raise PackingError(
                f"column {stored!r}: expected lists of numbers, one for each token, got {kind}; remove the column "
                "before unpacking"
            )
        values = TokenColumn(stored, rows.column(stored)).gather(where)
        name = {TREE_INPUT_IDS: INPUT_IDS, TREE_LABELS: LABELS}.get(stored, stored)
        if stored == TREE_LABELS:
            values[~_are_trained(rows.column(TRAINED), plan, order, begin)] = IGNORED_LABEL
        if name == LABELS and origin.first_labels is not None:
            values[begin] = origin.first_labels[order]
        arrays[name] = list_array(values, document_tokens)
    return pa.table(arrays)


def _are_trained(trained: pa.ChunkedArray, plan: PackingPlan, order: IntArray, begin: IntArray) -> IntArray:
    """Return whether each token of all segments is trained on, bool [tokens].

    Args:
        trained: the column `trained` of all rows.
        plan: the plan of the rows.
        order: int64 [segments]: the order in which the segments are laid end to end.
        begin: int64 [segments]: where each segment begins in this order.
    """
    runs = pc.list_flatten(trained).to_numpy().reshape(-1, 3).astype(np.int64)
    row = pc.list_parent_indices(trained).to_numpy()[::3]
    begins = np.empty_like(begin)
    begins[order] = begin
    start = begins[plan.pack_offsets[row] + runs[:, 0]] + runs[:, 1]
    tokens = total_of(plan.segment_length)
    return np.asarray(count_ranges(start, runs[:, 2], tokens) > 0)


def _rebuild(rows: DocumentRows, packs: IntArray) -> tuple[pa.Table, Origin]:
    """Build all rows of a lazy dataset, and return what they are made from."""
    if not np.array_equal(packs, np.arange(rows.plan.num_packs)):
        raise PackingError(
            f"packed: expected all {rows.plan.num_packs} rows that were packed, in their order, got {len(packs)} rows, "
            "of which some are missing, repeated or in another place"
        )
    built = rows.build(packs)
    return built.table, Origin(rows.plan, {"labels_made": built.first_labels is None}, built.first_labels)


def _stored_origin(packed: datasets.Dataset, plan: PackingPlan | None) -> Origin:
    """Return what `pack` has stored beside the rows; if it has stored nothing, the plan that the user has given."""
    files = [Path(file["filename"]) for file in packed.cache_files]
    # map and flatten_indices write other files beside it; of slices that are joined, it is there several times
    is_stored = [file.name for file in files] in ([ROWS], [SAVED_ROWS])
    if is_stored and (origin := Origin.beside(files[0].parent)) is not None:
        if len(packed) != origin.plan.num_packs:
            raise PackingError(f"packed: expected all {origin.plan.num_packs} rows that were packed, got {len(packed)}")
        return origin
    if not isinstance(plan, PackingPlan):
        raise PackingError(
            "plan: expected the PackingPlan of these rows, since they are not as pack() has stored them beside their "
            f"plan, got {plan!r}; of rows that were mapped, shuffled or joined, unpack those that pack() returned"
        )
    return Origin(plan, {"labels_made": False})
