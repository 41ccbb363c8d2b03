"""Read the rows that a sampler selects: whole rows, pieces of rows, or copies with masked labels."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from hf_packing.columns import (
    ATTENTION_MASK,
    COPIED_SEGMENT,
    ENDS,
    IGNORED_LABEL,
    INPUT_IDS,
    LABELS,
    LOSS_MASKS,
    OFFSET_MAPPING,
    PARENTS,
    SEGMENT_COLUMNS,
    SEGMENT_LENGTHS,
    SEQ_IDX,
    SEQ_LENGTHS,
    TOKEN_TYPE_IDS,
    TRAINED,
    TREE_INPUT_IDS,
    TREE_LABELS,
    apply_loss_masks,
)
from hf_packing.errors import PackingError
from hf_packing.rows.lazy import lazy_rows
from hf_packing.rows.token_columns import is_list, row_numbers, visible_columns
from hf_packing.sampling.batching import SampledRow
from hf_packing.sampling.sampler import RankBatchSampler

_PER_TOKEN = (INPUT_IDS, LABELS, ATTENTION_MASK, TOKEN_TYPE_IDS, *LOSS_MASKS, TREE_INPUT_IDS, TREE_LABELS)

_OF_SEGMENTS = (SEGMENT_LENGTHS, PARENTS, ENDS, TRAINED)

Row = dict[str, Any]


class SampledRows(torch.utils.data.Dataset[Row]):
    """A map-style dataset that a DataLoader indexes with the micro-batches of a RankBatchSampler.

    A micro-batch is a list of pairs (row number, True if the row is a copy). All labels of a copy are masked. A row
    without labels gets labels from its tokens and loss masks. If a row has labels and loss masks, the masks are passed
    on, and the collator compares the masks with the labels. If accelerate does not find the sampler, accelerate calls
    `set_epoch` on the dataset, so this class passes the epoch on to the sampler.

    Args:
        dataset: the map-style dataset that the sampler was made for.
        sampler: the sampler of this rank.
        unread: names of columns that are not read.
        apply_masks: whether to make labels for a row with loss masks but without labels; if False, the collator
            refuses such a row.
        more: names of further per-token columns to read.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: RankBatchSampler,
        unread: Sequence[str] = (),
        apply_masks: bool = True,
        more: Sequence[str] = (),
    ) -> None:
        self._arrow_rows: ArrowRows | None = None
        self._lazy = lazy_rows(dataset)
        if isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom":
            names = visible_columns(dataset)
            if INPUT_IDS not in names and TREE_INPUT_IDS not in names:
                raise PackingError(f"dataset: expected a column 'input_ids', got columns: {', '.join(names) or 'none'}")
            columns = _columns_to_read(names, unread, more)
            self._arrow_rows = ArrowRows.open(dataset, columns)
            dataset = dataset.with_format("numpy", columns=columns)
        self.dataset = dataset
        self.unread = unread
        self.more = more
        self.apply_masks = apply_masks
        self.sampler = sampler

    @property
    def batches(self) -> Iterable[list[Any]]:
        """The micro-batches that a DataLoader indexes the rows with."""
        return self.sampler

    def __len__(self) -> int:
        return len(self.sampler.rows.sizes)

    def plan_inputs(self) -> dict[str, str | int]:
        """Return all values that determine the batches, except the epoch. Checkpoints store these values."""
        return self.sampler.plan_inputs()

    def check_can_resume(self, saved: dict[str, str | int]) -> None:
        """Raise PackingError if a checkpoint was saved with different optimizer steps; `saved` is its `plan_inputs`."""
        self.sampler.check_can_resume(saved)

    def set_epoch(self, epoch: int) -> None:
        self.check_num_rows()
        self.sampler.set_epoch(epoch)

    def __getitem__(self, number: int) -> Row:
        return self.__getitems__([(number, False)])[0]

    def __getitems__(self, micro_batch: Sequence[SampledRow]) -> list[Row]:
        self.check_num_rows()
        sampled = [number for number, _ in micro_batch]
        pieces = self.sampler.rows.pieces
        numbers = sampled if pieces is None else pieces.document[sampled].tolist()
        rows = self._read(numbers)
        if len(rows) != len(numbers):
            raise PackingError(
                f"dataset: expected one row for each of {len(numbers)} row numbers, got {len(rows)} rows; a transform "
                "must return exactly one row for each input row"
            )
        self._check_lengths(numbers, rows)
        if pieces is not None:
            starts, lengths = pieces.start[sampled].tolist(), pieces.length[sampled].tolist()
            rows = [
                {name: values[start : start + length] for name, values in row.items()}
                for row, start, length in zip(rows, starts, lengths, strict=True)
            ]
        return [
            _with_masked_labels(row) if is_copy else self._with_labels(row)
            for row, (_, is_copy) in zip(rows, micro_batch, strict=True)
        ]

    def _read(self, numbers: Sequence[int]) -> list[Row]:
        """Return the columns to read of these rows, directly from the Arrow table if possible, since this is faster."""
        if self._arrow_rows is not None:
            return self._arrow_rows.read(numbers)
        names: Iterable[str] | None = None
        if self._lazy is not None:
            (lazy, packs), names = self._lazy, self.dataset.format["columns"]
            rows = lazy.read(packs[numbers])
        else:
            read = getattr(self.dataset, "__getitems__", None)
            rows = list(read(numbers)) if read else [self.dataset[number] for number in numbers]
        return [{name: row[name] for name in _columns_to_read(names or row, self.unread, self.more)} for row in rows]

    def check_num_rows(self) -> None:
        """Raise PackingError if rows were added or removed since the micro-batches were planned."""
        if (rows := len(self.dataset)) != (planned := len(self.sampler.sizes)):
            raise PackingError(
                f"dataset: expected {planned} rows, as when batches were planned, got {rows}; rows can only be "
                "added or removed between calls of train() or evaluate(), or before a call of prepare_dataloader"
            )

    def _with_labels(self, row: Row) -> Row:
        """Return the row with labels. If the row has none, they are made from its tokens and loss masks.

        If apply_masks is False, a row with loss masks but without labels stays unchanged, and the collator refuses it.
        """
        masks = [name for name in LOSS_MASKS if name in row]
        if LABELS in row or TREE_LABELS in row or (masks and not self.apply_masks):
            return row
        labels = row[INPUT_IDS]
        if masks:
            labels = apply_loss_masks(np.asarray(labels), {name: np.asarray(row.pop(name)) for name in masks})
        return {**row, LABELS: labels}

    def _check_lengths(self, numbers: Sequence[int], rows: Sequence[Row]) -> None:
        """Raise PackingError if a row does not have the length that was known when micro-batches were planned.

        Also raise PackingError if a row has no input_ids, or if a per-token column is not as long as input_ids.

        Args:
            numbers: numbers of the rows in the dataset.
            rows: the rows, as the dataset returned them.
        """
        all_planned = self.sampler.sizes.tokens[numbers].tolist()
        for number, row, planned in zip(numbers, rows, all_planned, strict=True):
            tokens_in = TREE_INPUT_IDS if TREE_INPUT_IDS in row else INPUT_IDS
            if tokens_in not in row:
                raise PackingError(
                    f"dataset: expected a column 'input_ids', but row {number} has columns: {', '.join(row) or 'none'}"
                )
            if (tokens := len(row[tokens_in])) != planned:
                raise PackingError(
                    f"dataset: expected {planned} tokens in row {number}, as when batches were planned, got "
                    f"{tokens}; rows must not change from one reading to the next"
                )
            for name in (*_PER_TOKEN, *self.more):
                expected = (tokens, 2) if name == OFFSET_MAPPING else (tokens,)
                if name in row and (shape := _shape_of(row[name])) != expected:
                    raise PackingError(
                        f"column {name!r}: expected {tokens} values in row {number}, as many as {tokens_in}, got shape "
                        f"{shape}"
                    )


def _columns_to_read(names: Iterable[str], unread: Iterable[str], more: Iterable[str]) -> list[str]:
    """Return the columns to read: per-token columns, columns with segment borders and `more`, except `unread`."""
    known = set(names).difference(unread)
    return [name for name in (*_PER_TOKEN, *SEGMENT_COLUMNS, *_OF_SEGMENTS, *more) if name in known]


def _shape_of(values: Any) -> tuple[int | str, ...]:
    try:
        return tuple(np.shape(values))
    except ValueError:  # nested lists of different lengths
        return (len(values), "several lengths")


def _with_masked_labels(row: Row) -> Row:
    """Return the row with all labels masked, and with segments that are marked as those of a copy."""
    if TREE_LABELS in row:
        return {**row, TREE_LABELS: np.full(len(row[TREE_INPUT_IDS]), IGNORED_LABEL), TRAINED: np.zeros(0, np.int32)}
    tokens = len(row[INPUT_IDS])
    lengths = np.asarray(row.get(SEQ_LENGTHS, [tokens]), np.int64)  # np.repeat refuses uint64
    segments = np.repeat(COPIED_SEGMENT - np.arange(len(lengths)), lengths)
    return {**row, LABELS: np.full(tokens, IGNORED_LABEL), SEQ_IDX: segments}


class ArrowRows:
    """Rows of a Dataset, as dicts of NumPy arrays that share memory with the Arrow table.

    Args:
        dataset: a Dataset.
        names: the columns to read. Every column has lists of numbers, or of pairs of integers, without nulls.
    """

    def __init__(self, dataset: datasets.Dataset, names: Sequence[str]) -> None:
        self._dataset = dataset
        self._indices = row_numbers(dataset)
        self._columns = {name: _ListColumn(dataset.data.table.column(name)) for name in names}

    @classmethod
    def open(cls, dataset: datasets.Dataset, names: Sequence[str]) -> "ArrowRows | None":
        """Return the rows of a dataset; None if they have to be read through the dataset.

        This is the case if a column has anything but lists of numbers or lists of lists of integers, or has nulls, and
        if the dataset is an instance of a subclass of Dataset, which may change rows when they are read.
        """
        table = dataset.data.table
        plain = type(dataset) is datasets.Dataset and all(_has_numbers_only(table.column(name)) for name in names)
        return cls(dataset, names) if plain else None

    def read(self, numbers: Sequence[int]) -> list[dict[str, npt.NDArray[Any]]]:
        """Return the rows with these numbers.

        Args:
            numbers: row numbers in the dataset; negative numbers count from the end.

        Returns:
            One dict for each number, from column name to the read-only values of the row, in the column's dtype. A list
            of pairs is an array [tokens, 2].

        Raises:
            IndexError: a number is out of range.
        """
        rows = len(self._dataset)
        for number in numbers:
            if not -rows <= number < rows:
                raise IndexError(f"row {number} of a dataset with {rows} rows")
        stored = [number % rows for number in numbers]
        if self._indices is not None:
            stored = self._indices[stored].tolist()
        columns = [column.read(stored) for column in self._columns.values()]
        return [dict(zip(self._columns, values, strict=True)) for values in zip(*columns, strict=True)]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the dataset and the names, since views of memory-mapped files would be pickled as copies."""
        return type(self), (self._dataset, list(self._columns))


class _ListColumn:
    """A column of lists, whose rows are slices of the values of one chunk.

    Args:
        column: lists of numbers, or of lists of integers, without nulls.
    """

    def __init__(self, column: pa.ChunkedArray) -> None:
        chunks = [_with_offsets(chunk) for chunk in column.chunks if len(chunk)]
        self._offsets = [chunk.offsets.to_numpy() for chunk in chunks]
        nested = is_list(column.type.value_type)
        self._values = [_Pairs(chunk.values) if nested else chunk.values.to_numpy() for chunk in chunks]
        self._first_row = list(accumulate(map(len, chunks), initial=0))

    def read(self, rows: Sequence[int]) -> list[npt.NDArray[Any]]:
        """Return the values of these rows. A batch has few rows, so a loop is faster than np.searchsorted."""
        found = []
        for row in rows:
            chunk = bisect_right(self._first_row, row) - 1
            offsets, inside = self._offsets[chunk], row - self._first_row[chunk]
            found.append(self._values[chunk][offsets[inside] : offsets[inside + 1]])
        return found


class _Pairs:
    """The values of a chunk of lists of pairs: a slice is an array [values, 2].

    Args:
        values: lists of integers without nulls.
    """

    def __init__(self, values: pa.Array) -> None:
        values = _with_offsets(values)
        self._offsets, self._numbers = values.offsets.to_numpy(), values.values.to_numpy()

    def __getitem__(self, part: slice) -> npt.NDArray[Any]:
        borders = self._offsets[part.start : part.stop + 1]
        if (np.diff(borders) != 2).any():
            raise PackingError("dataset: expected pairs of integers in a column of lists of lists, got other lengths")
        pairs: npt.NDArray[Any] = self._numbers[borders[0] : borders[-1]].reshape(-1, 2)
        return pairs


def _has_numbers_only(column: pa.ChunkedArray) -> bool:
    """Return whether a column has lists of integers or floats, or lists of lists of integers, and no nulls."""
    if not is_list(column.type):
        return False
    kind = column.type.value_type
    if is_list(kind):
        return pa.types.is_integer(kind.value_type) and not any(
            chunk.null_count or chunk.values.null_count or chunk.values.values.null_count for chunk in column.chunks
        )
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return number and not any(chunk.null_count or chunk.values.null_count for chunk in column.chunks)


def _with_offsets(chunk: pa.Array) -> pa.Array:
    """Return a chunk of lists as an array with offsets, which lists of a fixed size do not have."""
    return chunk.cast(pa.list_(chunk.type.value_type)) if pa.types.is_fixed_size_list(chunk.type) else chunk
