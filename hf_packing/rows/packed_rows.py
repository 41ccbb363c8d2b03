"""Build packed rows from the token columns of documents according to a plan."""

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from hf_packing.columns import (
    IGNORED_LABEL,
    INPUT_IDS,
    LABEL_COLUMNS,
    LABELS,
    POSITION_IDS,
    SEQ_LENGTHS,
    apply_loss_masks,
    loss_masks_in,
)
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import Array, Int32Array, IntArray, Pieces, indices_in_groups, offsets_of, sums_of
from hf_packing.planning.plan import PackingPlan
from hf_packing.rows.token_columns import TokenColumns

_MAX_LIST_VALUES = 2**31 - 1
"""The most values that an Arrow list column with 32-bit offsets can hold."""


class Rows(NamedTuple):
    """Packed rows, or rows of trees, and the labels that are not in them."""

    table: pa.Table
    """One row for each pack."""
    first_labels: Int32Array | None
    """int32 [segments]: the original label of each segment's first token; None without labels and loss masks."""
    trained_tokens: int
    """The number of tokens that are trained on; in a row of trees, once for each document that trains on a token."""


def pack_rows(
    columns: TokenColumns, plan: PackingPlan, packs: IntArray, position_ids: bool, keep_first_labels: bool
) -> Rows:
    """Build some of a plan's packs, and return one packed row for each.

    Loss masks are applied to the labels, and are not columns of packed rows.

    Args:
        columns: token columns of the documents for which the plan was made.
        plan: the plan, which assigns slices of documents to packs.
        packs: integers [rows]: numbers of packs, in any order.
        position_ids: whether packed rows get a column `position_ids`.
        keep_first_labels: whether the first token of a segment keeps its label.
    """
    segments, sizes = indices_in_groups(plan.pack_offsets, packs)
    pieces = plan.segments.take(segments)
    length = pieces.length
    row_tokens = sums_of(length, offsets_of(sizes))
    others = {name: column.gather(pieces) for name, column in columns.items() if name not in LABEL_COLUMNS}
    input_ids = as_int32(INPUT_IDS, others.pop(INPUT_IDS))
    given = read_labels(columns, pieces, input_ids)
    labels = input_ids.copy() if given is None else given
    begin = offsets_of(length)[:-1]
    first_labels = None if given is None else labels[begin]
    if not keep_first_labels:
        labels[begin] = IGNORED_LABEL
    of_tokens = {INPUT_IDS: input_ids, LABELS: labels, **others}
    if position_ids:
        of_tokens[POSITION_IDS] = positions_of(length)
    arrays = {name: list_array(values, row_tokens) for name, values in of_tokens.items()}
    arrays[SEQ_LENGTHS] = list_array(length, sizes)
    return Rows(pa.table(arrays), first_labels, int(np.count_nonzero(labels != IGNORED_LABEL)))


def read_labels(columns: TokenColumns, pieces: Pieces, input_ids: Int32Array | None = None) -> Int32Array | None:
    """Return the labels of pieces with loss masks applied, int32 [tokens]; None without labels and loss masks.

    The label of a piece's first token is included, although no earlier token can predict it.

    Args:
        columns: the token columns of the documents.
        pieces: the pieces of documents to read.
        input_ids: int32 [tokens]: the tokens of the pieces, if they are at hand.
    """
    masks = {name: columns[name].gather(pieces) for name in loss_masks_in(columns)}
    if LABELS in columns:
        labels = as_int32(LABELS, columns[LABELS].gather(pieces))
    elif not masks:
        return None
    else:
        labels = as_int32(INPUT_IDS, columns[INPUT_IDS].gather(pieces)) if input_ids is None else input_ids
    return apply_loss_masks(labels, masks) if masks else labels


def as_int32(name: str, values: Array) -> Int32Array:
    """Return the values of a column as int32. Raise PackingError if they are not integers, or do not fit."""
    if values.dtype == np.int32:
        return values
    if values.dtype.kind not in "iu":
        raise PackingError(f"column {name!r}: expected integers, got {values.dtype}")
    if len(values) and (values.min() < -(2**31) or values.max() >= 2**31):
        raise PackingError(
            f"column {name!r}: expected 32-bit integers, got values from {values.min()} to {values.max()}"
        )
    return values.astype(np.int32)


def positions_of(length: IntArray) -> Int32Array:
    """Return the position of every token in the token's segment, int32 [tokens], given the segment lengths.

    Every segment gets the beginning of one range from 0. Joining these slices is faster than subtracting the start of
    each token's segment from the token's index.
    """
    ramp = np.arange(length.max(initial=0), dtype=np.int32)
    return np.concatenate([ramp[:0], *(ramp[:tokens] for tokens in length.tolist())])


def list_array(values: Array, lengths: IntArray) -> pa.Array:
    """Return an Arrow list array with one list per row: a LargeListArray if needed, else a ListArray.

    Args:
        values: numbers [sum(lengths)]: the values of all rows, concatenated.
        lengths: integers [rows]: the number of values in each row.
    """
    offsets = offsets_of(lengths)
    flat = pa.array(values)
    if offsets[-1] > _MAX_LIST_VALUES:
        return pa.LargeListArray.from_arrays(pa.array(offsets), flat)
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), flat)
