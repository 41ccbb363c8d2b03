"""Build packed rows from documents and a plan, and documents from packed rows."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hf_packing.arrow.columns import INPUT_IDS, LABELS, TokenColumns
from hf_packing.arrow.loss_masks import IGNORED_LABEL, apply_loss_masks, masks_among
from hf_packing.arrow.token_column import TokenColumn, is_token_type, list_array
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray
from hf_packing.planning.plan import PackingPlan

SEQ_LENGTHS, POSITION_IDS, BUCKET = "seq_lengths", "position_ids", "bucket"


@dataclass(frozen=True)
class PackedRows:
    """Packed rows, and what they no longer tell about their documents."""

    table: pa.Table
    """input_ids, labels, position_ids, seq_lengths, bucket and the other token columns; a row is a pack."""
    first_labels: npt.NDArray[np.int32] | None
    """int32 [segments]: the labels that -100 replaced; None where the documents had neither labels nor loss masks."""
    trained_tokens: int
    """Labels that are not -100."""


def pack_rows(
    columns: TokenColumns,
    plan: PackingPlan,
    first_pack: int = 0,
    end_pack: int | None = None,
    position_ids: bool = True,
    bucket: bool = False,
) -> PackedRows:
    """The packs first_pack:end_pack of a plan, as rows. Loss masks are applied to the labels, and dropped.

    Args:
        columns: token columns of the documents the plan was made for.
        plan: which slice of which document goes where.
        first_pack: the first pack wanted.
        end_pack: the first pack no longer wanted; None for all.
        position_ids: whether the rows have that column.
        bucket: whether the rows have a column with the capacity of their pack.
    """
    packs = slice(first_pack, plan.num_packs if end_pack is None else end_pack)
    offsets = plan.pack_offsets[packs.start : packs.stop + 1]
    segments = slice(int(offsets[0]), int(offsets[-1]))
    where = plan.segment_document[segments], plan.segment_start[segments], plan.segment_length[segments]
    length = where[2]
    segment_begin = np.cumsum(length, dtype=np.int64) - length
    row_tokens = (
        np.add.reduceat(length, offsets[:-1] - offsets[0], dtype=np.int64) if len(length) else np.zeros(0, np.int64)
    )
    packed = {name: gathered(column, *where) for name, column in columns.items()}
    masks = {name: packed.pop(name) for name in masks_among(packed)}
    labels_made = LABELS not in packed and not masks
    labels = packed[LABELS] if LABELS in packed else packed[INPUT_IDS].copy()
    labels = apply_loss_masks(labels, masks) if masks else labels
    first_labels = None if labels_made else labels[segment_begin]
    labels[segment_begin] = IGNORED_LABEL
    packed[LABELS] = labels
    large = {name: pa.types.is_large_list(column.type) for name, column in columns.items()}
    arrays = {
        name: list_array(values, row_tokens, large.get(name, large[INPUT_IDS]))
        for name, values in in_order(packed).items()
    }
    if position_ids:
        arrays[POSITION_IDS] = list_array(positions(length), row_tokens, large[INPUT_IDS])
    arrays[SEQ_LENGTHS] = list_array(length, np.diff(offsets))
    if bucket:
        arrays[BUCKET] = pa.array(plan.pack_capacity[packs], type=pa.int32())
    return PackedRows(pa.table(arrays), first_labels, int((labels != IGNORED_LABEL).sum()))


def check_bucket_is_free(column_names: list[str]) -> None:
    if BUCKET in column_names:
        raise PackingError(
            "column 'bucket': expected no such column among the documents, since rows carry the capacity of their pack "
            "there; rename or remove it"
        )


def in_order(packed: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    first = {name: packed[name] for name in (INPUT_IDS, LABELS)}
    return first | {name: values for name, values in packed.items() if name not in first}


def gathered(column: TokenColumn, document: IntArray, start: IntArray, length: IntArray) -> npt.NDArray[Any]:
    values = column.gather(document, start, length)
    return as_int32(column.name, values) if column.name in (INPUT_IDS, LABELS) else values


def as_int32(name: str, values: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    if values.dtype == np.int32:
        return values
    if values.dtype.kind not in "iu":
        raise PackingError(f"column {name!r}: expected integers, got {values.dtype}")
    if len(values) and (values.min() < -(2**31) or values.max() >= 2**31):
        raise PackingError(f"column {name!r}: expected 32-bit values, got {values.min()}..{values.max()}")
    return values.astype(np.int32)


def positions(length: IntArray) -> npt.NDArray[np.int32]:
    """int32 [tokens]: 0, 1, 2, ... restarting at every segment; slices of one ramp are quicker than arithmetic."""
    ramp = np.arange(length.max(initial=0), dtype=np.int32)
    return np.concatenate([ramp[:0], *(ramp[:tokens] for tokens in length.tolist())])


def unpack_rows(packed: pa.Table, plan: PackingPlan, first_labels: npt.NDArray[np.int32] | None) -> pa.Table:
    """The documents that packed rows were made from, in their order; what was dropped is missing from them.

    Args:
        packed: all rows of the plan, in its order.
        plan: the plan they were made with.
        first_labels: int32 [segments]: labels to put back where -100 replaced them; None leaves -100 there.

    Raises:
        PackingError: rows that are not those of the plan.
    """
    check_rows_of_plan(packed, plan)
    order = np.lexsort((plan.segment_start, plan.segment_document))
    length = plan.segment_length[order]
    pack = plan.pack_of_segment()
    begin = np.cumsum(plan.segment_length, dtype=np.int64) - plan.segment_length
    start_in_pack = begin - begin[plan.pack_offsets[:-1]][pack]
    document_tokens = np.zeros(plan.num_documents, dtype=np.int64)
    np.add.at(document_tokens, plan.segment_document, plan.segment_length)
    arrays = {}
    for name in packed.column_names:
        token_type = is_token_type(packed.schema.field(name).type)
        if name in (SEQ_LENGTHS, POSITION_IDS) or (name == BUCKET and not token_type):
            continue
        if not token_type:
            raise PackingError(f"column {name!r}: expected one number for each token, remove it before unpacking")
        column = TokenColumn(name, packed.column(name))
        values = column.gather(pack[order], start_in_pack[order], length)
        if name == LABELS and first_labels is not None:
            values[np.cumsum(length, dtype=np.int64) - length] = first_labels[order]
        arrays[name] = list_array(values, document_tokens, pa.types.is_large_list(column.type))
    return pa.table(arrays)


def check_rows_of_plan(packed: pa.Table, plan: PackingPlan) -> None:
    if missing := [name for name in (INPUT_IDS, SEQ_LENGTHS) if name not in packed.column_names]:
        raise PackingError(
            f"column {missing[0]!r}: expected a packed dataset, got columns {', '.join(packed.column_names)}"
        )
    if packed.num_rows != plan.num_packs:
        raise PackingError(
            f"plan: expected one with {packed.num_rows} packs, as many as there are rows, got {plan.num_packs}"
        )
    lengths = pc.list_flatten(packed.column(SEQ_LENGTHS)).to_numpy()
    segments = pc.list_value_length(packed.column(SEQ_LENGTHS)).to_numpy()
    if not np.array_equal(segments, np.diff(plan.pack_offsets)) or not np.array_equal(lengths, plan.segment_length):
        raise PackingError(
            "plan: expected the plan these rows were packed with; their seq_lengths differ from its segments"
        )
    if POSITION_IDS in packed.column_names:
        found = pc.list_flatten(packed.column(POSITION_IDS)).to_numpy()
        if not np.array_equal(found, positions(plan.segment_length)):
            raise PackingError(
                "column 'position_ids': expected positions that restart at 0 where seq_lengths begin a segment; remove "
                "the column that is wrong"
            )
