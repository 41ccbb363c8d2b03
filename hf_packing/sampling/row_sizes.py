"""Measure a dataset's rows before training: the tokens, segments, attention cost and bucket of every row."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch
from datasets.utils import tqdm

from hf_packing.checks import check_whole_numbers
from hf_packing.columns import (
    BUCKET,
    INPUT_IDS,
    LABELS,
    LOSS_MASKS,
    SEGMENT_COLUMNS,
    SEQ_LENGTHS,
    TREE_COLUMNS,
    TREE_INPUT_IDS,
    TREE_LABELS,
    check_has_tokens,
)
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray, indices_in_ranges, offsets_of
from hf_packing.rows.lazy import DocumentRows, lazy_rows, refuse_cells
from hf_packing.rows.packing_trace import refuse_lost_borders
from hf_packing.rows.token_columns import (
    TokenColumn,
    is_list,
    is_token_type,
    row_numbers,
    visible_columns,
    with_typed_empty_lists,
)
from hf_packing.sampling.epoch_plan import RowSizes
from hf_packing.sampling.tree_sizes import (
    check_tree_columns,
    sizes_of_tree_rows,
    sizes_of_tree_table,
)

_OF_TREES = (TREE_INPUT_IDS, TREE_LABELS)
"""The columns of rows of trees of which a sample is taken."""

_SAMPLED_ROWS = 256
SAMPLED_TOKENS = 64
"""The largest number of tokens to take from the beginning of each sampled row."""


def sizes_of_documents(lengths: IntArray) -> RowSizes:
    """Return the sizes of rows that hold one document each.

    Args:
        lengths: integers [rows], tokens: the length of each document.
    """
    tokens = lengths.astype(np.int64)
    return RowSizes(tokens, (tokens > 0).astype(np.int64), tokens**2)


def sizes_of_packs(seq_lengths: IntArray, offsets: IntArray, bucket: IntArray | None = None) -> RowSizes:
    """Return the sizes of rows that hold one pack each.

    Args:
        seq_lengths: integers [segments], tokens: the lengths of all segments, row by row.
        offsets: integers [rows + 1]: the segments of row r have lengths seq_lengths[offsets[r]:offsets[r + 1]].
        bucket: integers [rows], tokens: the capacity of each pack; None if packs have no bucket.
    """
    lengths = seq_lengths.astype(np.int64)
    tokens, squared = (np.diff(offsets_of(values)[offsets]) for values in (lengths, lengths**2))
    return RowSizes(tokens, np.diff(offsets), squared, None if bucket is None else bucket.astype(np.int64), packed=True)


def sizes_of(dataset: Any) -> RowSizes:
    """Return the sizes of a dataset's rows.

    For a `datasets.Dataset` without a transform, the sizes come from the Arrow columns, and the tokens of only a few
    rows are read. A dataset may also have the sizes of its rows as an attribute `sizes`, such as TreesOfDocuments. For
    any other dataset, all rows are read.

    Args:
        dataset: a map-style dataset of packed rows, with a column `seq_lengths`, of rows of trees, with a column
            `tree_input_ids`, or of documents, with a column `input_ids`. Columns that the dataset's format hides are
            ignored.

    Raises:
        PackingError: the dataset is not map-style, or has neither column; the seq_lengths of a row do not add up to its
            number of tokens; the rows are packed, but the dataset's format or transform hides the segment borders; or
            the rows have a column with segment borders, such as position_ids, but no column seq_lengths.
    """
    refuse_cells(dataset)
    if isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom":
        return _sizes_in_table(dataset)
    if (lazy := lazy_rows(dataset)) is not None and lazy[0].plan.segment_shared is None:
        return _sizes_of_lazy_rows(*lazy, dataset.format["columns"])
    if isinstance(known := getattr(dataset, "sizes", None), RowSizes):
        return known
    map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not map_style or isinstance(dataset, (dict, torch.utils.data.IterableDataset)):
        raise PackingError(
            f"dataset: expected a map-style dataset, with a length and numbered rows, got {type(dataset).__name__}; of "
            "streams, attach and prepare_dataloader take an IterableDataset of datasets to train on"
        )
    sizes = _sizes_by_reading(dataset)
    if isinstance(dataset, datasets.Dataset) and not sizes.packed:
        _check_transform_keeps_borders(dataset)
    return sizes


def rows_to_sample(num_rows: int) -> IntArray:
    """Return the numbers of the rows to sample, int64 [sampled rows]. These rows are spread evenly over a dataset."""
    return np.unique(np.linspace(0, max(num_rows - 1, 0), _SAMPLED_ROWS).astype(np.int64))[:num_rows]


def sample_of_rows(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the first tokens, labels and mask values of the given rows as bytes, one column after another.

    `_sizes_in_table` makes the same bytes from an Arrow table of these rows.
    """
    columns = ([row[name] for row in rows if name in row] for name in (INPUT_IDS, LABELS, *LOSS_MASKS, *_OF_TREES))
    return b"".join(_sample_of_values(values) for column in columns for values in column)


def _sample_of_values(values: Any) -> bytes:
    """Return the first values of a row's column as bytes. Malformed values raise no error here, but in the collator."""
    try:
        with np.errstate(invalid="ignore"):  # converting NaN or infinity to integers warns
            return np.asarray(values)[:SAMPLED_TOKENS].astype("<i8").tobytes()
    except (TypeError, ValueError, IndexError):
        return repr(values).encode()


def _sample_of_column(column: TokenColumn) -> bytes:
    rows = rows_to_sample(len(column.length))
    values = column.gather(rows, np.zeros_like(rows), np.minimum(column.length[rows], SAMPLED_TOKENS))
    return values.astype("<i8").tobytes()


def _sizes_in_table(dataset: datasets.Dataset) -> RowSizes:
    table, numbers = dataset.data.table.select(visible_columns(dataset)), row_numbers(dataset)
    _check_columns(table.column_names)
    if TREE_INPUT_IDS in table.column_names:
        sampled = [_sample_of_column(TokenColumn(name, table.column(name), numbers)) for name in _OF_TREES]
        bucket = _buckets_in_table(table, numbers)
        return replace(sizes_of_tree_table(table, numbers), sample=b"".join(sampled), bucket=bucket)
    table = with_typed_empty_lists(table)
    columns = {
        name: TokenColumn(name, table.column(name), numbers)
        for name in (SEQ_LENGTHS, INPUT_IDS, LABELS, *LOSS_MASKS)
        if name in table.column_names and _has_number_per_token(name, table.schema.field(name).type)
    }
    sample = b"".join(_sample_of_column(column) for name, column in columns.items() if name != SEQ_LENGTHS)
    if SEQ_LENGTHS not in columns:
        return replace(sizes_of_documents(columns[INPUT_IDS].length), sample=sample)
    column = columns[SEQ_LENGTHS]
    rows = np.arange(len(column.length))
    seq_lengths = column.gather(rows, np.zeros_like(rows), column.length)
    offsets = offsets_of(column.length)
    sizes = sizes_of_packs(seq_lengths, offsets, _buckets_in_table(table, numbers))
    _check_seq_lengths(seq_lengths, sizes, columns[INPUT_IDS].length if INPUT_IDS in columns else sizes.tokens)
    return replace(sizes, sample=sample)


def _sizes_of_lazy_rows(rows: DocumentRows, packs: IntArray, names: Sequence[str]) -> RowSizes:
    """Return the sizes of rows of `pack(..., lazy=True)`, of which only a few are built."""
    _check_columns(names)
    plan = rows.plan
    segments = np.diff(plan.pack_offsets)[packs]
    lengths = plan.segment_length[indices_in_ranges(plan.pack_offsets[packs], segments)]
    sizes = sizes_of_packs(lengths, offsets_of(segments), plan.pack_capacity[packs] if BUCKET in names else None)
    sampled = [{name: row[name] for name in names} for row in rows.read(packs[rows_to_sample(len(packs))])]
    return replace(sizes, sample=sample_of_rows(sampled))


def _has_number_per_token(name: str, kind: pa.DataType) -> bool:
    if name in (SEQ_LENGTHS, INPUT_IDS) and not (is_list(kind) and pa.types.is_integer(kind.value_type)):
        raise PackingError(f"column {name!r}: expected lists of integers, got {kind}")
    return is_token_type(kind)


def _buckets_in_table(table: pa.Table, numbers: IntArray | None) -> IntArray | None:
    if BUCKET not in table.column_names:
        return None
    column = table.column(BUCKET)
    if not pa.types.is_integer(column.type):
        raise PackingError(f"column 'bucket': expected an integer in every row, got {column.type}")
    if column.null_count:
        raise PackingError(f"column 'bucket': expected an integer in every row, got nulls in {column.null_count} rows")
    bucket: IntArray = column.to_numpy()
    return bucket if numbers is None else bucket[numbers]


def _sizes_by_reading(dataset: Any) -> RowSizes:
    """Read all rows of a dataset and return their sizes, for a dataset whose rows are computed on access."""
    first: Mapping[str, Any] = {}
    packs, tokens, buckets, trees = [], [], [], []
    for number in tqdm(range(len(dataset)), desc="Reading the lengths of rows", unit=" rows"):
        row = dataset[number]
        if not isinstance(row, Mapping):
            raise PackingError(f"dataset: expected rows that are mappings, but row {number} is a {type(row).__name__}")
        _check_columns(row)
        first = first or row
        _check_columns_like_first(row, first, number)
        if TREE_INPUT_IDS in row:
            trees.append({name: row[name] for name in TREE_COLUMNS})
            buckets.append(_bucket_of_row(row[BUCKET], number) if BUCKET in row else 0)
            continue
        if INPUT_IDS in row:
            _check_list(INPUT_IDS, row[INPUT_IDS], number)
        if SEQ_LENGTHS in row:
            packs.append(_seq_lengths_of_row(row, number))
            buckets.append(_bucket_of_row(row[BUCKET], number) if BUCKET in row else 0)
        tokens.append(len(row[INPUT_IDS]) if INPUT_IDS in row else int(packs[-1].sum()))
    if TREE_INPUT_IDS in first:
        return replace(sizes_of_tree_rows(trees), bucket=np.array(buckets) if BUCKET in first else None)
    sample = b""
    if isinstance(dataset, Sequence):
        sample = sample_of_rows([dataset[number] for number in rows_to_sample(len(tokens))])
    if SEQ_LENGTHS not in first:
        return replace(sizes_of_documents(np.array(tokens, dtype=np.int64)), sample=sample)
    seq_lengths = np.concatenate([np.zeros(0, dtype=np.int64), *packs])
    offsets = np.cumsum([0, *map(len, packs)], dtype=np.int64)
    sizes = sizes_of_packs(seq_lengths, offsets, np.array(buckets) if BUCKET in first else None)
    _check_seq_lengths(seq_lengths, sizes, np.array(tokens))
    return replace(sizes, sample=sample)


def _seq_lengths_of_row(row: Mapping[str, Any], number: int) -> IntArray:
    _check_list(SEQ_LENGTHS, row[SEQ_LENGTHS], number)
    return check_whole_numbers(f"column 'seq_lengths', row {number}", row[SEQ_LENGTHS])


def _bucket_of_row(bucket: Any, number: int) -> int:
    try:
        return operator.index(bucket)
    except TypeError:
        raise PackingError(
            f"column 'bucket': expected an integer in every row, but row {number} has {bucket!r}"
        ) from None


def _check_columns(names: Any) -> None:
    if TREE_INPUT_IDS in names:
        check_tree_columns(names)
        return
    if SEQ_LENGTHS in names:
        return
    check_has_tokens(names)
    if packed := [name for name in SEGMENT_COLUMNS if name in names]:
        raise PackingError(
            f"dataset: expected a column 'seq_lengths', since rows with a column {packed[0]!r} count as packed rows; "
            "pack() writes both columns"
        )


def _check_columns_like_first(row: Mapping[str, Any], first: Mapping[str, Any], number: int) -> None:
    """Raise PackingError if a row does not have the same columns as the first row of the dataset.

    Only the columns for labels, loss masks, segment lengths and buckets are compared.
    """
    of_packs = (SEQ_LENGTHS, BUCKET) if SEQ_LENGTHS in row else (SEQ_LENGTHS,)
    for name in (*of_packs, TREE_INPUT_IDS, LABELS, *LOSS_MASKS):
        if (name in row) != (name in first):
            raise PackingError(
                f"column {name!r}: expected this column in all rows or in none, but row {number} differs from row 0"
            )


def _check_list(name: str, values: Any, number: int) -> None:
    dimensions = getattr(values, "ndim", None)
    if dimensions is None and hasattr(values, "__len__") and not isinstance(values, str):
        dimensions = 1 + (np.ndim(values[0]) if len(values) else 0)
    if dimensions != 1:
        shown = f"shape {tuple(values.shape)}" if hasattr(values, "shape") else repr(values)[:80]
        raise PackingError(f"column {name!r}: expected a list of integers in every row, but row {number} has {shown}")


def _check_seq_lengths(seq_lengths: IntArray, sizes: RowSizes, tokens: IntArray) -> None:
    """Raise PackingError if the segments of a row do not cover all tokens of the row, or if a segment is empty.

    Args:
        seq_lengths: integers [segments]: the lengths of all segments, row by row.
        sizes: the sizes of the rows, computed from seq_lengths.
        tokens: integers [rows]: the length of each row's input_ids.
    """
    row_of_segment = np.repeat(np.arange(len(sizes)), sizes.segments)
    wrong = sizes.tokens != tokens
    wrong[row_of_segment[seq_lengths < 1]] = True
    if wrong.any():
        row = int(wrong.argmax())
        raise PackingError(
            f"column 'seq_lengths': expected positive lengths that add up to the {tokens[row]} tokens of row {row}, "
            f"got {seq_lengths[row_of_segment == row].tolist()}"
        )


def _check_transform_keeps_borders(dataset: datasets.Dataset) -> None:
    """Raise PackingError if the dataset stores packed rows, but its transform removes the columns with segment borders.

    This happens, for example, if a dataset with a transform for documents was packed by `map`, which keeps the
    transform.
    """
    refuse_lost_borders(dataset, dataset.column_names)
    if borders := [name for name in SEGMENT_COLUMNS if name in dataset.column_names]:
        raise PackingError(
            f"column {borders[0]!r}: expected this column in the output of the dataset's transform, since the stored "
            "rows have this column; call .with_format(None) to remove a transform that was made for documents, or "
            "remove the column if the rows are not packed"
        )
