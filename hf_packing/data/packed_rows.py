"""Gather packed rows from the token columns of documents, by a plan; restore the documents from packed rows."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hf_packing.columns import (
    BUCKET,
    IGNORED_LABEL,
    INPUT_IDS,
    LABELS,
    LOSS_MASKS,
    POSITION_IDS,
    SEQ_LENGTHS,
    apply_loss_masks,
)
from hf_packing.data.token_columns import TokenColumn, TokenColumns, is_token_type
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray
from hf_packing.planning.plan import PackingPlan

_MAX_LIST_VALUES = 2**31 - 1
"""The most values that an Arrow list column with 32-bit offsets can hold."""


@dataclass(frozen=True)
class PackedRows:
    """Packed rows, and facts about their documents that the rows no longer show."""

    table: pa.Table
    """One pack a row: input_ids, labels, the other token columns, position_ids, seq_lengths, bucket."""
    first_labels: npt.NDArray[np.int32] | None
    """int32 [segments]: the labels that -100 replaced; None if the documents had neither labels nor loss masks."""
    trained_tokens: int
    """How many labels are not -100."""


def pack_rows(
    columns: TokenColumns,
    plan: PackingPlan,
    first_pack: int = 0,
    end_pack: int | None = None,
    position_ids: bool = True,
    bucket: bool = False,
) -> PackedRows:
    """Build the packs first_pack:end_pack of a plan. Loss masks are applied to the labels and dropped.

    Args:
        columns: token columns of the documents that the plan was made for.
        plan: which slice of which document goes where.
        first_pack: the first pack to build.
        end_pack: the first pack after those to build; None for all.
        position_ids: whether rows get that column.
        bucket: whether rows get a column with the capacity of their pack.
    """
    packs = slice(first_pack, plan.num_packs if end_pack is None else end_pack)
    offsets = plan.pack_offsets[packs.start : packs.stop + 1]
    segments = slice(int(offsets[0]), int(offsets[-1]))
    document, start = plan.segment_document[segments], plan.segment_start[segments]
    length = plan.segment_length[segments]
    row_tokens = (
        np.add.reduceat(length, offsets[:-1] - offsets[0], dtype=np.int64) if len(length) else np.zeros(0, np.int64)
    )
    packed = {name: _gather(column, document, start, length) for name, column in columns.items()}
    input_ids = packed.pop(INPUT_IDS)
    labels, first_labels = _make_labels(packed, input_ids, np.cumsum(length, dtype=np.int64) - length)
    large = {name: pa.types.is_large_list(column.type) for name, column in columns.items()}
    of_tokens = {INPUT_IDS: input_ids, LABELS: labels, **packed}
    arrays = {
        name: _list_array(values, row_tokens, large.get(name, large[INPUT_IDS])) for name, values in of_tokens.items()
    }
    if position_ids:
        arrays[POSITION_IDS] = _list_array(_positions(length), row_tokens, large[INPUT_IDS])
    arrays[SEQ_LENGTHS] = _list_array(length, np.diff(offsets))
    if bucket:
        arrays[BUCKET] = pa.array(plan.pack_capacity[packs], type=pa.int32())
    return PackedRows(pa.table(arrays), first_labels, int((labels != IGNORED_LABEL).sum()))


def check_bucket_is_free(column_names: list[str]) -> None:
    """Raise if documents have a column `bucket`, where packed rows store the capacity of their pack."""
    if BUCKET in column_names:
        raise PackingError(
            "column 'bucket': expected no such column among the documents, since packed rows store the capacity of "
            "their pack there; rename or remove it"
        )


def unpack_rows(packed: pa.Table, plan: PackingPlan, first_labels: npt.NDArray[np.int32] | None) -> pa.Table:
    """Restore the documents of packed rows, in their order, without the tokens that were dropped.

    Args:
        packed: all rows of the plan, in its order.
        plan: the plan that the rows were packed with.
        first_labels: int32 [segments]: the labels that -100 replaced; None leaves -100 there.

    Raises:
        PackingError: the rows were not packed with this plan.
    """
    _check_rows_of_plan(packed, plan)
    order = np.lexsort((plan.segment_start, plan.segment_document))
    length = plan.segment_length[order]
    pack = plan.pack_of_segment()
    begin = np.cumsum(plan.segment_length, dtype=np.int64) - plan.segment_length
    start_in_pack = begin - begin[plan.pack_offsets[:-1]][pack]
    document_tokens = np.zeros(plan.num_documents, dtype=np.int64)
    np.add.at(document_tokens, plan.segment_document, plan.segment_length)
    arrays = {}
    for name in packed.column_names:
        of_tokens = is_token_type(packed.schema.field(name).type)
        if name in (SEQ_LENGTHS, POSITION_IDS) or (name == BUCKET and not of_tokens):
            continue
        if not of_tokens:
            raise PackingError(
                f"column {name!r}: expected a number for each token, got {packed.schema.field(name).type}; remove it "
                "before unpacking"
            )
        column = TokenColumn(name, packed.column(name))
        values = column.gather(pack[order], start_in_pack[order], length)
        if name == LABELS and first_labels is not None:
            values[np.cumsum(length, dtype=np.int64) - length] = first_labels[order]
        arrays[name] = _list_array(values, document_tokens, pa.types.is_large_list(column.type))
    return pa.table(arrays)


def _make_labels(
    packed: dict[str, npt.NDArray[Any]], input_ids: npt.NDArray[np.int32], segment_begin: IntArray
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32] | None]:
    """Return the labels of packed tokens, and those that -100 replaced (None without labels and loss masks).

    Args:
        packed: the other columns, [tokens] each; labels and loss masks are taken out.
        input_ids: int32 [tokens], used as labels if the documents have none.
        segment_begin: int64 [segments]: where segments begin.
    """
    masks = {name: packed.pop(name) for name in LOSS_MASKS if name in packed}
    given = packed.pop(LABELS, None)
    labels = input_ids.copy() if given is None else given
    if masks:
        labels = apply_loss_masks(labels, masks)
    first_labels = labels[segment_begin] if given is not None or masks else None
    labels[segment_begin] = IGNORED_LABEL
    return labels, first_labels


def _gather(column: TokenColumn, document: IntArray, start: IntArray, length: IntArray) -> npt.NDArray[Any]:
    values = column.gather(document, start, length)
    return _as_int32(column.name, values) if column.name in (INPUT_IDS, LABELS) else values


def _as_int32(name: str, values: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    if values.dtype == np.int32:
        return values
    if values.dtype.kind not in "iu":
        raise PackingError(f"column {name!r}: expected integers, got {values.dtype}")
    if len(values) and (values.min() < -(2**31) or values.max() >= 2**31):
        raise PackingError(
            f"column {name!r}: expected 32-bit integers, got values from {values.min()} to {values.max()}"
        )
    return values.astype(np.int32)


def _positions(length: IntArray) -> npt.NDArray[np.int32]:
    """Return 0, 1, 2, ... for every segment, int32 [tokens]. Slicing one range is faster than subtracting starts."""
    ramp = np.arange(length.max(initial=0), dtype=np.int32)
    return np.concatenate([ramp[:0], *(ramp[:tokens] for tokens in length.tolist())])


def _list_array(values: npt.NDArray[Any], lengths: IntArray, large: bool = False) -> pa.Array:
    """Return flat values as a list array: a LargeList on request, or if 32-bit offsets are too small.

    Args:
        values: numbers [sum(lengths)].
        lengths: integers [rows], the values in each row.
        large: whether to make a LargeList in any case.
    """
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    flat = pa.array(values)
    if large or offsets[-1] > _MAX_LIST_VALUES:
        return pa.LargeListArray.from_arrays(pa.array(offsets), flat)
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), flat)


def _check_rows_of_plan(packed: pa.Table, plan: PackingPlan) -> None:
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
            "plan: expected the plan that these rows were packed with; their seq_lengths differ from its segments"
        )
    if POSITION_IDS in packed.column_names:
        found = pc.list_flatten(packed.column(POSITION_IDS)).to_numpy()
        if not np.array_equal(found, _positions(plan.segment_length)):
            raise PackingError(
                "column 'position_ids': expected positions that restart at 0 at every segment of seq_lengths; remove "
                "the column that is wrong"
            )
