"""What is known of the rows of a dataset before any of them is read: tokens, segments, cost of attention, bucket."""

import hashlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch
from datasets.utils import tqdm

from hf_packing.columns import BUCKET, INPUT_IDS, LABELS, LOSS_MASKS, SEGMENT_COLUMNS, SEQ_LENGTHS
from hf_packing.data.token_columns import (
    TokenColumn,
    is_list,
    is_token_type,
    row_numbers,
    visible_columns,
    with_typed_empty_lists,
)
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray, check_whole_numbers

SAMPLED_ROWS, SAMPLED_TOKENS = 256, 64


@dataclass(frozen=True, eq=False)
class RowSizes:
    """Sizes of the rows of a dataset, whether packed or plain documents."""

    tokens: IntArray
    """int64 [rows]."""
    segments: IntArray
    """int64 [rows]: one each where rows are documents; none in an empty row."""
    squares: IntArray
    """int64 [rows]: the sum of squared segment lengths, what attention costs."""
    bucket: IntArray | None = None
    """int64 [rows], tokens: the capacity of the pack that a row is; None where rows have none."""
    packed: bool = False
    """Whether rows are packs, which cannot be cut."""
    sample: bytes = b""
    """The tokens of a few rows, to tell datasets apart whose rows have the same lengths."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def fingerprint(self) -> str:
        """16 hex digits: all sizes, on which micro-batches depend, and a sample of the tokens."""
        digest = hashlib.sha256(self.sample)
        for array in (self.tokens, self.segments, self.squares, self.bucket):
            digest.update(b"none" if array is None else np.ascontiguousarray(array, dtype="<i8").tobytes())
        return digest.hexdigest()[:16]


def sizes_of_documents(lengths: IntArray) -> RowSizes:
    """Sizes where every row is one document.

    Args:
        lengths: integers [rows], tokens.
    """
    tokens = lengths.astype(np.int64)
    return RowSizes(tokens, (tokens > 0).astype(np.int64), tokens**2)


def sizes_of_packs(seq_lengths: IntArray, offsets: IntArray, bucket: IntArray | None = None) -> RowSizes:
    """Sizes where every row is a pack.

    Args:
        seq_lengths: integers [segments], tokens, row by row.
        offsets: integers [rows + 1]: segments of row r are offsets[r]:offsets[r + 1].
        bucket: integers [rows], tokens, or None.
    """
    lengths = seq_lengths.astype(np.int64)
    tokens, squares = (np.diff(np.concatenate([[0], np.cumsum(values)])[offsets]) for values in (lengths, lengths**2))
    return RowSizes(tokens, np.diff(offsets), squares, None if bucket is None else bucket.astype(np.int64), packed=True)


def sizes_of(dataset: Any) -> RowSizes:
    """Sizes of the rows of a dataset. Of a `datasets.Dataset` no token is read, but for a sample.

    Args:
        dataset: map-style, packed (with `seq_lengths`) or of documents (with `input_ids`). Columns that its format
            hides are not there.

    Raises:
        PackingError: not map-style, neither column, seq_lengths that do not add up, packed rows that carry their
            borders in position_ids alone, or whose borders are hidden.
    """
    if isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom":
        return sizes_in_table(dataset.data.table.select(visible_columns(dataset)), row_numbers(dataset))
    of_rows = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not of_rows or isinstance(dataset, (dict, torch.utils.data.IterableDataset)):
        raise PackingError(
            f"dataset: expected a map-style dataset, whose length is known, got {type(dataset).__name__}"
        )
    sizes = sizes_row_by_row(dataset)
    if isinstance(dataset, datasets.Dataset):
        check_borders_are_kept(dataset, sizes)
    return sizes


def check_borders_are_kept(dataset: datasets.Dataset, sizes: RowSizes) -> None:
    """Refuse packed rows whose transform, such as one for documents that `map` has kept, returns no borders."""
    if not sizes.packed and (borders := [name for name in SEGMENT_COLUMNS if name in dataset.column_names]):
        raise PackingError(
            f"column {borders[0]!r}: expected in the rows that the dataset's transform returns, since they are packed; "
            "call .with_format(None) if the transform is one of the documents, or remove the column if rows are not "
            "packed"
        )


def check_columns(names: Any) -> None:
    if SEQ_LENGTHS in names:
        return
    if INPUT_IDS not in names:
        raise PackingError(
            f"dataset: expected a column 'seq_lengths' or 'input_ids', got columns {', '.join(names) or 'none'}"
        )
    if packed := [name for name in SEGMENT_COLUMNS if name in names]:
        raise PackingError(
            f"dataset: expected a column 'seq_lengths' beside {packed[0]!r}, which alone does not say how long the "
            "segments of a row are; pack() makes it"
        )


def sizes_in_table(table: pa.Table, numbers: IntArray | None) -> RowSizes:
    check_columns(table.column_names)
    table = with_typed_empty_lists(table)
    columns = {
        name: TokenColumn(name, table.column(name), numbers)
        for name in (SEQ_LENGTHS, INPUT_IDS, LABELS, *LOSS_MASKS)
        if name in table.column_names and is_list_of_numbers(name, table.schema.field(name).type)
    }
    sample = b"".join(sample_of(column) for name, column in columns.items() if name != SEQ_LENGTHS)
    if SEQ_LENGTHS not in columns:
        return replace(sizes_of_documents(columns[INPUT_IDS].length), sample=sample)
    column = columns[SEQ_LENGTHS]
    rows = np.arange(len(column.length))
    seq_lengths = column.gather(rows, np.zeros_like(rows), column.length)
    offsets = np.concatenate([[0], np.cumsum(column.length, dtype=np.int64)])
    sizes = sizes_of_packs(seq_lengths, offsets, buckets_in_table(table, numbers))
    check_seq_lengths(seq_lengths, sizes, columns[INPUT_IDS].length if INPUT_IDS in columns else sizes.tokens)
    return replace(sizes, sample=sample)


def is_list_of_numbers(name: str, kind: pa.DataType) -> bool:
    """Whether the column has a number for each token; those that say how long rows are must have integers."""
    if name in (SEQ_LENGTHS, INPUT_IDS) and not (is_list(kind) and pa.types.is_integer(kind.value_type)):
        raise PackingError(f"column {name!r}: expected lists of integers, got {kind}")
    return is_token_type(kind)


def buckets_in_table(table: pa.Table, numbers: IntArray | None) -> IntArray | None:
    if BUCKET not in table.column_names:
        return None
    column = table.column(BUCKET)
    if not pa.types.is_integer(column.type) or column.null_count:
        kind = "some have none" if pa.types.is_integer(column.type) else f"got {column.type}"
        raise PackingError(f"column 'bucket': expected an integer in every row, {kind}")
    bucket: IntArray = column.to_numpy()
    return bucket if numbers is None else bucket[numbers]


def check_seq_lengths(seq_lengths: IntArray, sizes: RowSizes, tokens: IntArray) -> None:
    """Refuse rows whose segments are not all of their tokens.

    Args:
        seq_lengths: integers [segments].
        sizes: that came of them.
        tokens: integers [rows], of input_ids.
    """
    of_row = np.repeat(np.arange(len(sizes)), sizes.segments)
    wrong = sizes.tokens != tokens
    wrong[of_row[seq_lengths < 1]] = True
    if wrong.any():
        row = int(wrong.argmax())
        raise PackingError(
            f"column 'seq_lengths': expected positive lengths that add up to the {tokens[row]} tokens of row {row}, "
            f"got {seq_lengths[of_row == row].tolist()}"
        )


def sampled_rows(rows: int) -> IntArray:
    return np.unique(np.linspace(0, max(rows - 1, 0), SAMPLED_ROWS).astype(np.int64))[:rows]


def sample_of(tokens: TokenColumn) -> bytes:
    """The beginnings of rows from all over the dataset."""
    rows = sampled_rows(len(tokens.length))
    values = tokens.gather(rows, np.zeros_like(rows), np.minimum(tokens.length[rows], SAMPLED_TOKENS))
    return values.astype("<i8").tobytes()


def sizes_row_by_row(dataset: Any) -> RowSizes:
    """Where rows are made as they are read, all of them are read once."""
    lengths: list[IntArray] = []
    rows = tqdm(range(len(dataset)), desc="Reading the lengths of rows", unit=" rows")
    first: Mapping[str, Any] = {}
    tokens, buckets = [], []
    for number in rows:
        row = dataset[number]
        if not isinstance(row, Mapping):
            raise PackingError(f"dataset: expected rows that are mappings, row {number} is a {type(row).__name__}")
        check_columns(row)
        first = first or row
        check_like_first(row, first, number)
        if INPUT_IDS in row:
            check_one_dimension(INPUT_IDS, row[INPUT_IDS], number)
        if SEQ_LENGTHS in row:
            check_one_dimension(SEQ_LENGTHS, row[SEQ_LENGTHS], number)
            lengths.append(check_whole_numbers(f"column 'seq_lengths', row {number}", row[SEQ_LENGTHS]))
            buckets.append(bucket_of(row, number) if BUCKET in row else None)
        else:
            lengths.append(np.array([len(row[INPUT_IDS])]))
        tokens.append(len(row[INPUT_IDS]) if INPUT_IDS in row else int(lengths[-1].sum()))
    seq_lengths = np.concatenate([np.zeros(0, dtype=np.int64), *lengths])
    sample = (
        sample_of_rows([dataset[number] for number in sampled_rows(len(lengths))])
        if isinstance(dataset, Sequence)
        else b""
    )
    if SEQ_LENGTHS not in first:
        return replace(sizes_of_documents(seq_lengths), sample=sample)
    offsets = np.concatenate([[0], np.cumsum([*map(len, lengths)], dtype=np.int64)])
    sizes = sizes_of_packs(seq_lengths, offsets, np.array(buckets) if BUCKET in first else None)
    check_seq_lengths(seq_lengths, sizes, np.array(tokens))
    return replace(sizes, sample=sample)


def check_like_first(row: Mapping[str, Any], first: Mapping[str, Any], number: int) -> None:
    """Refuse a row that says more than the first, or less, about what is trained on or what it is packed from."""
    of_packs = (SEQ_LENGTHS, BUCKET) if SEQ_LENGTHS in row else (SEQ_LENGTHS,)
    for name in (*of_packs, LABELS, *LOSS_MASKS):
        if (name in row) != (name in first):
            raise PackingError(f"column {name!r}: expected in all rows or in none, row {number} differs from row 0")


def check_one_dimension(name: str, values: Any, number: int) -> None:
    dimensions = getattr(values, "ndim", None)
    if dimensions is None and hasattr(values, "__len__") and not isinstance(values, str):
        dimensions = 1 + (np.ndim(values[0]) if len(values) else 0)
    if dimensions != 1:
        shown = f"shape {tuple(values.shape)}" if hasattr(values, "shape") else repr(values)[:80]
        raise PackingError(f"column {name!r}: expected a list of integers in every row, row {number} has {shown}")


def bucket_of(row: Mapping[str, Any], number: int) -> int:
    try:
        return operator.index(row[BUCKET])
    except TypeError:
        raise PackingError(
            f"column 'bucket': expected an integer in every row, row {number} has {row[BUCKET]!r}"
        ) from None


def sample_of_rows(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """The beginnings of rows, column by column, as those of a table."""
    columns = ([row[name] for row in rows if name in row] for name in (INPUT_IDS, LABELS, *LOSS_MASKS))
    return b"".join(beginning(values) for column in columns for values in column)


def beginning(values: Any) -> bytes:
    """Of one value for each token. What else there is, the collator refuses; it knows the row."""
    try:
        with np.errstate(invalid="ignore"):  # NaN and infinity, as integers
            return np.asarray(values)[:SAMPLED_TOKENS].astype("<i8").tobytes()
    except (TypeError, ValueError, IndexError):
        return repr(values).encode()
