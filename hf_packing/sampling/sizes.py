"""What is known of the rows of a dataset before any of them is read: tokens, segments, cost of attention, bucket."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from datasets.utils import tqdm

from hf_packing.arrow.columns import INPUT_IDS, with_typed_empty_lists
from hf_packing.arrow.packed_rows import BUCKET, POSITION_IDS, SEQ_LENGTHS
from hf_packing.arrow.token_column import TokenColumn, is_token_type
from hf_packing.dataset import row_numbers
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray

SAMPLED_ROWS, SAMPLED_TOKENS = 64, 32


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
    """Sizes of the rows of a dataset. Of a `datasets.Dataset` no token is read.

    Args:
        dataset: map-style, packed (with `seq_lengths`) or of documents (with `input_ids`).

    Raises:
        PackingError: not map-style, neither column, or packed rows that carry their borders in position_ids alone.
    """
    if isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom":
        return sizes_in_table(dataset.data.table, row_numbers(dataset))
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__") or isinstance(dataset, dict):
        raise PackingError(
            f"dataset: expected a map-style dataset, whose length is known, got {type(dataset).__name__}"
        )
    return sizes_row_by_row(dataset)


def check_columns(names: Any) -> None:
    if SEQ_LENGTHS in names:
        return
    if INPUT_IDS not in names:
        raise PackingError(
            f"dataset: expected a column 'seq_lengths' or 'input_ids', got columns {', '.join(names) or 'none'}"
        )
    if POSITION_IDS in names:
        raise PackingError(
            "dataset: expected a column 'seq_lengths' beside 'position_ids', which alone does not say how long the "
            "segments of a row are; pack() makes both"
        )


def sizes_in_table(table: pa.Table, numbers: IntArray | None) -> RowSizes:
    check_columns(table.column_names)
    table = with_typed_empty_lists(table)
    if SEQ_LENGTHS not in table.column_names:
        if not is_token_type(table.schema.field(INPUT_IDS).type):
            raise PackingError(
                f"column 'input_ids': expected lists of integers, got {table.schema.field(INPUT_IDS).type}"
            )
        tokens = TokenColumn(INPUT_IDS, table.column(INPUT_IDS), numbers)
        return replace(sizes_of_documents(tokens.length), sample=sample_of(tokens))
    if not is_token_type(table.schema.field(SEQ_LENGTHS).type):
        raise PackingError(
            f"column 'seq_lengths': expected lists of integers, got {table.schema.field(SEQ_LENGTHS).type}"
        )
    column = TokenColumn(SEQ_LENGTHS, table.column(SEQ_LENGTHS), numbers)
    rows = np.arange(len(column.length))
    seq_lengths = column.gather(rows, np.zeros_like(rows), column.length)
    offsets = np.concatenate([[0], np.cumsum(column.length, dtype=np.int64)])
    bucket = None
    if BUCKET in table.column_names and pa.types.is_integer(table.schema.field(BUCKET).type):
        if table.column(BUCKET).null_count:
            raise PackingError("column 'bucket': expected an integer in every row, some have none")
        bucket = table.column(BUCKET).to_numpy()
        bucket = bucket if numbers is None else bucket[numbers]
    sizes = sizes_of_packs(seq_lengths, offsets, bucket)
    if INPUT_IDS not in table.column_names:
        return sizes
    return replace(sizes, sample=sample_of(TokenColumn(INPUT_IDS, table.column(INPUT_IDS), numbers)))


def sampled_rows(rows: int) -> IntArray:
    return np.unique(np.linspace(0, max(rows - 1, 0), SAMPLED_ROWS).astype(np.int64))[:rows]


def sample_of(tokens: TokenColumn) -> bytes:
    """The beginnings of rows from all over the dataset."""
    rows = sampled_rows(len(tokens.length))
    values = tokens.gather(rows, np.zeros_like(rows), np.minimum(tokens.length[rows], SAMPLED_TOKENS))
    return values.astype("<i8").tobytes()


def sizes_row_by_row(dataset: Any) -> RowSizes:
    """Where rows are made as they are read, all of them are read once."""
    lengths, sizes, buckets = [], [], []
    packed = False
    for number in tqdm(range(len(dataset)), desc="Reading the lengths of rows", unit=" rows"):
        row = dataset[number]
        if not isinstance(row, Mapping):
            raise PackingError(f"dataset: expected rows that are mappings, row {number} is a {type(row).__name__}")
        check_columns(row)
        packed = packed or SEQ_LENGTHS in row
        name = SEQ_LENGTHS if packed else INPUT_IDS
        values = row.get(name)
        if values is None or not hasattr(values, "__len__"):
            raise PackingError(
                f"column {name!r}: expected a list of integers in every row, row {number} has {values!r}"
            )
        lengths.append(np.asarray(values if packed else [len(values)], dtype=np.int64))
        sizes.append(len(lengths[-1]))
        buckets.append(row.get(BUCKET))
    seq_lengths = np.concatenate([np.zeros(0, dtype=np.int64), *lengths])
    if not packed:
        return sizes_of_documents(seq_lengths)
    offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    whole = all(isinstance(bucket, (int, np.integer)) for bucket in buckets)
    bucket = np.array(buckets) if buckets and whole else None
    return sizes_of_packs(seq_lengths, offsets, bucket)
