"""Measure a dataset's rows before training: the tokens, segments, attention cost and bucket of every row.

Ranks exchange facts about these sizes and about the content of a few rows, to detect that their datasets differ.
"""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import torch
from datasets.utils import tqdm

from hf_packing.batch.segments import lengths_in_column
from hf_packing.batch.trees import read_tree_rows
from hf_packing.checks import check_whole_number, check_whole_numbers
from hf_packing.columns import (
    BUCKET,
    ENDS,
    INPUT_IDS,
    LABEL_COLUMNS,
    PARENTS,
    SEGMENT_COLUMNS,
    SEGMENT_LENGTHS,
    SEQ_LENGTHS,
    TREE_COLUMNS,
    TREE_INPUT_IDS,
    TREE_LABELS,
    check_columns,
    check_has_tokens,
)
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray, indices_in_groups, join_rows, offsets_of, sums_of, total_of
from hf_packing.rows.lazy import DocumentRows, lazy_rows, refuse_cells
from hf_packing.rows.packing_trace import refuse_lost_borders
from hf_packing.rows.token_columns import (
    TokenColumn,
    documents_in,
    is_token_type,
    read_rows,
    row_numbers,
    shows_table,
)
from hf_packing.trees.segments import attention_costs

_SAMPLED = (INPUT_IDS, *LABEL_COLUMNS, TREE_INPUT_IDS, TREE_LABELS)
"""The columns of which a sample is taken."""

_IN_ALL_ROWS = (SEQ_LENGTHS, TREE_INPUT_IDS, *LABEL_COLUMNS)
"""The columns that all rows have, or none."""

_SAMPLED_TOKENS = 64
"""The largest number of tokens to take from the beginning of each sampled row."""

_READ_TWICE = 32
"""The largest number of rows to read twice. Two reads of a row show whether the content of the row changes."""


@dataclass(frozen=True)
class TreeCounts:
    """Counts of the documents of a dataset whose rows are trees."""

    documents: int
    """Number of documents, or pieces of documents, in trees."""
    raw_tokens: int
    """Number of their tokens. Tokens that documents share are counted once for each document."""
    unique_tokens: int
    """Number of tokens in all trees. Tokens that documents share are counted once."""
    left_out: int = 0
    """Number of documents that are empty, or too long and dropped, so that they are in no tree."""
    lost_tokens: int = 0
    """Number of tokens in dropped documents and in the cut-off ends of truncated documents."""

    @property
    def shared_ratio(self) -> float:
        """The number of raw tokens for each token that stands in a row; 1 if nothing is shared."""
        return self.raw_tokens / max(self.unique_tokens, 1)

    def __str__(self) -> str:
        return (
            f"shared prefixes: {self.documents:,} documents of {self.raw_tokens:,} tokens are trees of "
            f"{self.unique_tokens:,} tokens, {self.shared_ratio:.2f} times fewer; the documents of a tree are in one "
            "optimizer step"
        )


@dataclass(frozen=True, eq=False)
class RowSizes:
    """The sizes of a dataset's rows, which are packs, trees or plain documents."""

    tokens: IntArray
    """int64 [rows]: the number of tokens in each row."""
    segments: IntArray
    """int64 [rows]: the number of segments in each row; 1 for a document, 0 for an empty row; documents of trees."""
    squared_lengths: IntArray
    """int64 [rows]: the attention cost: the sum of squared segment lengths, or `TreeSegments.attention_cost`."""
    bucket: IntArray | None = None
    """integers [rows], tokens: the capacity of each row's pack; None if rows have no bucket."""
    packed: bool = False
    """True if rows are packs, which cannot be cut."""
    patches: IntArray | None = None
    """int64 [rows]: the number of patches in the pictures of each row; None for rows of text."""
    sample: bytes = b""
    """The first tokens of a few rows, as bytes. They distinguish datasets whose rows have the same lengths."""
    trees: TreeCounts | None = None
    """Counts of the documents in rows of trees; None for other rows."""
    seq_lengths: IntArray | None = None
    """integers [segments], tokens: the lengths of all segments, row by row; None for rows of documents."""

    def __len__(self) -> int:
        return len(self.tokens)

    def __str__(self) -> str:
        return f"{len(self):,} rows and {total_of(self.tokens):,} tokens"

    @property
    def fingerprint(self) -> str:
        """A digest of all sizes and of the sampled tokens, as 16 hex digits."""
        digest = hashlib.sha256(self.sample)
        for array in (self.tokens, self.segments, self.squared_lengths, self.bucket):
            digest.update(b"none" if array is None else array.astype("<i8").tobytes())
        if self.patches is not None:
            digest.update(self.patches.astype("<i8").tobytes())
        return digest.hexdigest()[:16]


def sizes_of_documents(lengths: IntArray) -> RowSizes:
    """Return the sizes of rows that hold one document each.

    Args:
        lengths: integers [rows], tokens: the length of each document.
    """
    tokens = lengths.astype(np.int64)
    return RowSizes(tokens, (tokens > 0).astype(np.int64), tokens**2)


def sizes_of_packs(
    seq_lengths: IntArray, offsets: IntArray, bucket: IntArray | None = None, depths: IntArray | int = 0
) -> RowSizes:
    """Return the sizes of rows that hold one pack each.

    Args:
        seq_lengths: integers [segments], tokens: the lengths of all segments, row by row.
        offsets: integers [rows + 1]: the segments of row r have lengths seq_lengths[offsets[r]:offsets[r + 1]].
        bucket: integers [rows], tokens: the capacity of each pack; None if packs have no bucket.
        depths: integers [segments]: the number of tokens above each segment in a tree; 0 for packs of documents.
    """
    lengths = seq_lengths.astype(np.int64)
    work = sums_of(attention_costs(lengths, depths), offsets)
    return RowSizes(sums_of(lengths, offsets), np.diff(offsets), work, bucket, packed=True, seq_lengths=seq_lengths)


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
    if shows_table(dataset):
        return _sizes_in_table(dataset)
    if (lazy := lazy_rows(dataset)) is not None:
        _columns_of_sizes(dataset.format["columns"])
        return sizes_of_planned(*lazy, dataset.format["columns"])
    if isinstance(known := getattr(dataset, "sizes", None), RowSizes):
        return known
    check_map_style("dataset", dataset)
    return _sizes_by_reading(dataset)


def check_map_style(name: str, dataset: Any) -> None:
    """Raise PackingError, which begins with a name, unless a dataset has a length and numbered rows."""
    is_map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not is_map_style or isinstance(dataset, (dict, torch.utils.data.IterableDataset)):
        raise PackingError(
            f"{name}: expected a map-style dataset, with a length and numbered rows, got {type(dataset).__name__}; of "
            "streams, attach and prepare_dataloader take an IterableDataset of datasets to train on"
        )
    if hasattr(dataset, "set_epoch"):
        raise PackingError(
            f"{name}: expected a dataset that has the same rows in every epoch, which are planned once, got "
            f"{type(dataset).__name__} with set_epoch; make one dataset of the rows of all epochs, or train on one for "
            "each epoch"
        )


def _sizes_in_table(dataset: datasets.Dataset) -> RowSizes:
    """Return the sizes of the rows in a table, of which only the lists that hold sizes are read."""
    table, numbers = documents_in(dataset), row_numbers(dataset)
    names = table.column_names
    tokens_in, of_segments = _columns_of_sizes(names)
    for name in (tokens_in, *of_segments):
        kind = table.schema.field(name).type
        if not is_token_type(kind) or not pa.types.is_integer(kind.value_type):
            raise PackingError(f"column {name!r}: expected lists of integers, got {kind}")
    columns = {
        name: TokenColumn(name, table.column(name), numbers)
        for name in (tokens_in, *of_segments, *_SAMPLED)
        if name in names and is_token_type(table.schema.field(name).type)
    }
    bucket = None
    if of_segments and BUCKET in names:
        bucket = check_whole_numbers("column 'bucket'", table.column(BUCKET).to_numpy())[numbers]
    lists = {name: columns[name].read(np.arange(len(dataset))) for name in of_segments}
    sample = _sample_of_rows(read_rows(columns, rows_to_sample(len(dataset))))
    return replace(_sizes(lists, columns[tokens_in].length, bucket), sample=sample)


def sizes_of_planned(rows: DocumentRows, packs: IntArray, names: Sequence[str]) -> RowSizes:
    """Return the sizes of rows that are built when they are read, from their plan.

    Args:
        rows: builds the rows.
        packs: integers [rows]: the number of each row's pack.
        names: the columns to read, of which a few rows are sampled.
    """
    plan = rows.plan
    chosen, segments = indices_in_groups(plan.pack_offsets, packs)
    own = plan.segment_own()[chosen]
    depths = plan.segment_length[chosen] - own
    bucket = plan.pack_capacity[packs] if BUCKET in names else None
    sizes = sizes_of_packs(own, offsets_of(segments), bucket, depths)
    if plan.segment_shared is not None:
        tokens = total_of(sizes.tokens)
        sizes = replace(sizes, trees=TreeCounts(len(own), tokens + total_of(depths), tokens))
    sampled = rows.read(packs[rows_to_sample(len(packs))])
    return replace(sizes, sample=_sample_of_rows([{name: row[name] for name in names} for row in sampled]))


def _sizes_by_reading(dataset: Any) -> RowSizes:
    """Read all rows of a dataset and return their sizes, for a dataset whose rows are computed on access."""
    first: Mapping[str, Any] = {}
    tokens, buckets, lists = [], [], defaultdict(list)
    for number in tqdm(range(len(dataset)), desc="Reading the lengths of rows", unit=" rows"):
        row = dataset[number]
        if not isinstance(row, Mapping):
            raise PackingError(f"dataset: expected rows that are mappings, but row {number} is a {type(row).__name__}")
        tokens_in, of_segments = _columns_of_sizes(row)
        first = first or row
        if differing := [name for name in _IN_ALL_ROWS if (name in row) != (name in first)]:
            raise PackingError(
                f"column {differing[0]!r}: expected this column in all rows or in none, but row {number} differs from "
                "row 0"
            )
        for name in of_segments:
            lists[name].append(check_whole_numbers(f"column {name!r}, row {number}", row[name]))
        if of_segments and BUCKET in first:
            buckets.append(check_whole_number(f"column 'bucket', row {number}", row.get(BUCKET)))
        ids = row[tokens_in]
        check_whole_numbers(f"column {tokens_in!r}, row {number}", ids[:1] if hasattr(ids, "__getitem__") else ids)
        tokens.append(len(ids))
    if isinstance(dataset, datasets.Dataset):  # whose transform may be one for documents
        refuse_lost_borders(dataset, first, stored=() if TREE_INPUT_IDS in first else dataset.column_names)
    sizes = _sizes(lists, np.array(tokens, dtype=np.int64), np.array(buckets) if buckets else None)
    if not isinstance(dataset, Sequence):
        return sizes
    return replace(sizes, sample=_sample_of_rows([dataset[number] for number in rows_to_sample(len(tokens))]))


def _sizes(lists: Mapping[str, Sequence[IntArray]], tokens: IntArray, bucket: IntArray | None) -> RowSizes:
    """Return the sizes of rows, from the columns with the sizes of segments and the number of tokens of each row."""
    if SEGMENT_LENGTHS in lists:
        trees, ends, documents = read_tree_rows(lists, tokens)
        offsets = offsets_of([*map(len, lists[SEGMENT_LENGTHS])])
        own = np.diff(trees.begins)
        sizes = sizes_of_packs(own, offsets, bucket, trees.depths)
        raw = int((trees.depths + own)[ends].sum())
        return replace(sizes, segments=documents, trees=TreeCounts(len(ends), raw, trees.tokens))
    if SEQ_LENGTHS not in lists:
        return sizes_of_documents(tokens)
    lengths, segments = join_rows(lists[SEQ_LENGTHS])
    offsets = offsets_of(segments)
    sizes = sizes_of_packs(lengths, offsets, bucket)
    wrong = (sizes.tokens != tokens) | (sums_of(lengths < 1, offsets) > 0)
    for row in np.flatnonzero(wrong)[:1].tolist():
        lengths_in_column(SEQ_LENGTHS, lists[SEQ_LENGTHS][row], int(tokens[row]), row)  # raises the error
    return sizes


def _columns_of_sizes(names: Any) -> tuple[str, tuple[str, ...]]:
    """Return the column with the tokens, and those with the sizes of segments, of which a document has none.

    Raises:
        PackingError: there are no tokens, or some of the columns of packed rows or of trees are missing.
    """
    if TREE_INPUT_IDS in names:
        check_columns(TREE_COLUMNS, names, f"beside {TREE_INPUT_IDS}, in rows of documents that share prefixes")
        return TREE_INPUT_IDS, (SEGMENT_LENGTHS, PARENTS, ENDS)
    check_has_tokens(names)
    if SEQ_LENGTHS in names:
        return INPUT_IDS, (SEQ_LENGTHS,)
    if packed := [name for name in SEGMENT_COLUMNS if name in names]:
        raise PackingError(
            f"dataset: expected a column 'seq_lengths', since rows with a column {packed[0]!r} count as packed rows; "
            "pack() writes both columns"
        )
    return INPUT_IDS, ()


def rows_to_sample(num_rows: int, most: int = 256) -> IntArray:
    """Return the numbers of the rows to sample, int64 [sampled rows]. These rows are spread evenly over a dataset."""
    return np.unique(np.linspace(0, max(num_rows - 1, 0), most).astype(np.int64))[:num_rows]


def _sample_of_rows(rows: Sequence[Mapping[str, Any]]) -> bytes:
    return b"".join(
        _sample_of(row[name]) for name in _SAMPLED for row in rows if isinstance(row, Mapping) and name in row
    )


def _sample_of(values: Any) -> bytes:
    """Return the first values of a row's column as bytes. Malformed values raise no error here, but in the collator."""
    try:
        with np.errstate(invalid="ignore"):  # converting NaN or infinity to integers warns
            return np.asarray(values)[:_SAMPLED_TOKENS].astype("<i8").tobytes()
    except (TypeError, ValueError, IndexError):
        return repr(values).encode()


class DataFacts(NamedTuple):
    """Facts about one rank's dataset, small enough to send to all other ranks."""

    rows: str
    """The numbers of rows and tokens."""
    sizes: str
    """The digest of the sizes of all rows."""
    content: str
    """The digest of a few rows; empty if rows change between two reads."""


def data_facts(dataset: Any, sizes: RowSizes) -> DataFacts:
    """Return the facts about this rank's dataset, for comparison with the datasets of other ranks.

    Args:
        dataset: a map-style dataset.
        sizes: sizes of the dataset's rows, as `sizes_of(dataset)` returns them.
    """
    content = sizes.sample or content_of(dataset, len(sizes))
    digest = hashlib.blake2b(content, digest_size=8).hexdigest()
    return DataFacts(
        rows=str(sizes),
        sizes=f"lengths, segments and buckets with the digest {replace(sizes, sample=b'').fingerprint}",
        content=f"tokens and labels with the digest {digest}" if content else "",
    )


def content_of(dataset: Any, rows: int) -> bytes:
    """Return a few rows as bytes: those that a Dataset stores, before any transform; or nothing, if rows change."""
    numbers = rows_to_sample(rows, _READ_TWICE).tolist()
    if isinstance(dataset, datasets.Dataset):
        return repr(dataset.with_format("arrow")[numbers].to_pydict()).encode()
    once, twice = (_sample_of_rows([dataset[number] for number in numbers]) for _ in range(2))
    return once if once == twice else b""
