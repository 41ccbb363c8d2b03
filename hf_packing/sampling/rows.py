"""The rows of a dataset as a sampler asks for them: whole, as pieces, or as copies whose labels are masked."""

from collections.abc import Iterable, Sequence
from typing import Any

import datasets
import numpy as np
import torch

from hf_packing.arrow.columns import ATTENTION_MASK, INPUT_IDS, LABELS, TOKEN_TYPE_IDS
from hf_packing.arrow.packed_rows import IGNORED_LABEL, SEQ_LENGTHS
from hf_packing.collate import LOSS_MASKS
from hf_packing.errors import PackingError
from hf_packing.sampling.sampler import RankBatchSampler

OF_TOKENS = (INPUT_IDS, LABELS, ATTENTION_MASK, TOKEN_TYPE_IDS, *LOSS_MASKS)

Row = dict[str, Any]


def columns_read(names: Iterable[str], unread: Iterable[str] = ()) -> list[str]:
    """Columns that a batch is made of; masks of what to train on count only where there are no labels."""
    known = set(names).difference(unread)
    if LABELS in known:
        known.difference_update(LOSS_MASKS)
    return [name for name in (*OF_TOKENS, SEQ_LENGTHS) if name in known]


class SampledRows(torch.utils.data.Dataset[Row]):
    """A map-style dataset whose indices are those of the sampler's micro-batches.

    An index below zero, ~i, is row i with all labels masked. Accelerate tells a dataset which epoch begins wherever it
    does not find the sampler, so the epoch is passed on.
    """

    def __init__(self, dataset: Any, sampler: RankBatchSampler, unread: Sequence[str] = ()) -> None:
        if isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom":
            if INPUT_IDS not in dataset.column_names:
                raise PackingError(f"dataset: expected a column 'input_ids', got {', '.join(dataset.column_names)}")
            dataset = dataset.with_format("numpy", columns=columns_read(dataset.column_names, unread))
        self.dataset = dataset
        self.unread = unread
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler.cut.sizes)

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def __getitem__(self, index: int) -> Row:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Row]:
        known = [~index if index < 0 else index for index in indices]
        pieces = self.sampler.cut.pieces
        numbers = known if pieces is None else pieces.document[known].tolist()
        read = getattr(self.dataset, "__getitems__", None)
        rows = read(numbers) if read else [self.dataset[number] for number in numbers]
        rows = [{name: row[name] for name in columns_read(row, self.unread)} for row in rows]
        self.check_lengths(numbers, rows)
        if pieces is not None:
            rows = [
                {name: row[name][start : start + length] for name in row}
                for row, start, length in zip(
                    rows, pieces.start[known].tolist(), pieces.length[known].tolist(), strict=True
                )
            ]
        return [masked(row) if index < 0 else with_labels(row) for index, row in zip(indices, rows, strict=True)]

    def check_lengths(self, numbers: Sequence[int], rows: Sequence[Row]) -> None:
        """Micro-batches were planned for rows that have the lengths they had before."""
        for number, row in zip(numbers, rows, strict=True):
            if (tokens := len(row[INPUT_IDS])) != (planned := int(self.sampler.sizes.tokens[number])):
                raise PackingError(
                    f"dataset: expected the {planned} tokens that row {number} had when batches were planned, it has "
                    f"{tokens} now; rows must not change from one reading to the next"
                )
            for name in OF_TOKENS:
                if name in row and np.shape(row[name]) != (tokens,):
                    raise PackingError(
                        f"column {name!r}: expected {tokens} values in row {number}, as many as input_ids, got shape "
                        f"{np.shape(row[name])}"
                    )


def with_labels(row: Row) -> Row:
    return row if LABELS in row else {**row, LABELS: row[INPUT_IDS]}


def masked(row: Row) -> Row:
    """The row, with nothing in it to train on."""
    return {**row, LABELS: np.full(len(row[INPUT_IDS]), IGNORED_LABEL)}
