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

from hf_packing.arrow.columns import INPUT_IDS, LABELS, with_typed_empty_lists
from hf_packing.arrow.packed_rows import BUCKET, POSITION_IDS, SEQ_LENGTHS
from hf_packing.arrow.token_column import TokenColumn, is_list
from hf_packing.collate import LOSS_MASKS
from hf_packing.dataset import row_numbers
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
        dataset: map-style, packed (with `seq_lengths`) or of documents (with `input_ids`).

    Raises:
        PackingError: not map-style, neither column, seq_lengths that do not add up, or packed rows that carry their
            borders in position_ids alone.
    """
    if isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom":
        return sizes_in_table(dataset.data.table, row_numbers(dataset))
    of_rows = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not of_rows or isinstance(dataset, (dict, torch.utils.data.IterableDataset)):
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
    columns = {
        name: TokenColumn(name, table.column(name), numbers)
        for name in (SEQ_LENGTHS, INPUT_IDS, LABELS, *LOSS_MASKS)
        if name in table.column_names and is_list_of_integers(name, table.schema.field(name).type)
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


def is_list_of_integers(name: str, kind: pa.DataType) -> bool:
    """Whether the column has tokens; those that say how long rows are must."""
    if is_list(kind) and pa.types.is_integer(kind.value_type):
        return True
    if name in (SEQ_LENGTHS, INPUT_IDS):
        raise PackingError(f"column {name!r}: expected lists of integers, got {kind}")
    return False


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
        for name in (SEQ_LENGTHS, BUCKET, LABELS):
            if (name in row) != (name in first):
                raise PackingError(f"column {name!r}: expected in all rows or in none, row {number} differs from row 0")
        name = SEQ_LENGTHS if SEQ_LENGTHS in row else INPUT_IDS
        values = row[name]
        if values is None or not hasattr(values, "__len__"):
            raise PackingError(
                f"column {name!r}: expected a list of integers in every row, row {number} has {values!r}"
            )
        lengths.append(
            check_whole_numbers(f"column 'seq_lengths', row {number}", values)
            if name == SEQ_LENGTHS
            else np.array([len(values)])
        )
        tokens.append(len(row[INPUT_IDS]) if INPUT_IDS in row else int(lengths[-1].sum()))
        buckets.append(bucket_of(row, number) if BUCKET in row else None)
    seq_lengths = np.concatenate([np.zeros(0, dtype=np.int64), *lengths])
    sample = (
        b"".join(sample_of_row(dataset[number]) for number in sampled_rows(len(lengths)))
        if isinstance(dataset, Sequence)
        else b""
    )
    if SEQ_LENGTHS not in first:
        return replace(sizes_of_documents(seq_lengths), sample=sample)
    offsets = np.concatenate([[0], np.cumsum([*map(len, lengths)], dtype=np.int64)])
    sizes = sizes_of_packs(seq_lengths, offsets, np.array(buckets) if BUCKET in first else None)
    check_seq_lengths(seq_lengths, sizes, np.array(tokens))
    return replace(sizes, sample=sample)


def bucket_of(row: Mapping[str, Any], number: int) -> int:
    try:
        return operator.index(row[BUCKET])
    except TypeError:
        raise PackingError(
            f"column 'bucket': expected an integer in every row, row {number} has {row[BUCKET]!r}"
        ) from None


def sample_of_row(row: Mapping[str, Any]) -> bytes:
    """Of rows that lie in memory as they are, and are not made anew at each reading."""
    columns = [np.asarray(row[name])[:SAMPLED_TOKENS] for name in (INPUT_IDS, LABELS, *LOSS_MASKS) if name in row]
    return b"".join(column.astype("<i8").tobytes() for column in columns)
