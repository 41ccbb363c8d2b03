"""The rows of a dataset as a sampler asks for them: whole, as pieces, or as copies whose labels are masked."""

from collections.abc import Iterable, Sequence
from typing import Any

import datasets
import numpy as np
import torch

from hf_packing.columns import (
    ATTENTION_MASK,
    IGNORED_LABEL,
    INPUT_IDS,
    LABELS,
    LOSS_MASKS,
    SEGMENT_COLUMNS,
    TOKEN_TYPE_IDS,
)
from hf_packing.data.loss_masks import apply_loss_masks
from hf_packing.data.token_columns import visible_columns
from hf_packing.errors import PackingError
from hf_packing.sampling.sampler import RankBatchSampler

OF_TOKENS = (INPUT_IDS, LABELS, ATTENTION_MASK, TOKEN_TYPE_IDS, *LOSS_MASKS)

Row = dict[str, Any]


def columns_read(names: Iterable[str], unread: Iterable[str] = ()) -> list[str]:
    """Columns that a batch is made of, and those that its segments are checked by."""
    known = set(names).difference(unread)
    return [name for name in (*OF_TOKENS, *SEGMENT_COLUMNS) if name in known]


class SampledRows(torch.utils.data.Dataset[Row]):
    """A map-style dataset whose indices are those of the sampler's micro-batches.

    An index below zero, ~i, is row i with all labels masked. Accelerate tells a dataset which epoch begins wherever it
    does not find the sampler, so the epoch is passed on. A row without labels gets them from its tokens and loss masks;
    masks beside labels are passed on, for the collator to compare.

    Args:
        dataset: map-style, the rows the sampler was made for.
        sampler: of this rank.
        unread: columns that are left out of rows.
        apply_masks: whether loss masks make labels where a row has none; otherwise the collator refuses such a row.
    """

    def __init__(
        self, dataset: Any, sampler: RankBatchSampler, unread: Sequence[str] = (), apply_masks: bool = True
    ) -> None:
        if isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom":
            names = visible_columns(dataset)
            if INPUT_IDS not in names:
                raise PackingError(f"dataset: expected a column 'input_ids', got {', '.join(names) or 'none'}")
            dataset = dataset.with_format("numpy", columns=columns_read(names, unread))
        self.dataset = dataset
        self.unread = unread
        self.apply_masks = apply_masks
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler.cut.sizes)

    def set_epoch(self, epoch: int) -> None:
        self.check_number()
        self.sampler.set_epoch(epoch)

    def __getitem__(self, index: int) -> Row:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Row]:
        self.check_number()
        known = [~index if index < 0 else index for index in indices]
        pieces = self.sampler.cut.pieces
        numbers = known if pieces is None else pieces.document[known].tolist()
        read = getattr(self.dataset, "__getitems__", None)
        rows = list(read(numbers)) if read else [self.dataset[number] for number in numbers]
        if len(rows) != len(numbers):
            raise PackingError(
                f"dataset: expected {len(numbers)} rows for as many numbers, got {len(rows)}; a transform must return "
                "a row for each that it is given"
            )
        rows = [{name: row[name] for name in columns_read(row, self.unread)} for row in rows]
        self.check_lengths(numbers, rows)
        if pieces is not None:
            rows = [
                {name: row[name][start : start + length] for name in row}
                for row, start, length in zip(
                    rows, pieces.start[known].tolist(), pieces.length[known].tolist(), strict=True
                )
            ]
        return [masked(row) if index < 0 else self.with_labels(row) for index, row in zip(indices, rows, strict=True)]

    def with_labels(self, row: Row) -> Row:
        """The row with labels, unless that is the collator's to refuse."""
        masks = [name for name in LOSS_MASKS if name in row]
        if LABELS in row or (masks and not self.apply_masks):
            return row
        labels = row[INPUT_IDS]
        if masks:
            labels = apply_loss_masks(np.asarray(labels), {name: np.asarray(row.pop(name)) for name in masks})
        return {**row, LABELS: labels}

    def check_number(self) -> None:
        """Micro-batches were planned for all rows that there were."""
        if (rows := len(self.dataset)) != (planned := len(self.sampler.sizes)):
            raise PackingError(
                f"dataset: expected the {planned} rows that it had when batches were planned, it has {rows} now; rows "
                "that come or go are counted at the next train() or evaluate(), or by another prepare_dataloader"
            )

    def check_lengths(self, numbers: Sequence[int], rows: Sequence[Row]) -> None:
        """Micro-batches were planned for rows that have the lengths they had before."""
        for number, row in zip(numbers, rows, strict=True):
            if INPUT_IDS not in row:
                raise PackingError(
                    f"dataset: expected a column 'input_ids', row {number} has {', '.join(row) or 'none'}"
                )
            if (tokens := len(row[INPUT_IDS])) != (planned := int(self.sampler.sizes.tokens[number])):
                raise PackingError(
                    f"dataset: expected the {planned} tokens that row {number} had when batches were planned, it has "
                    f"{tokens} now; rows must not change from one reading to the next"
                )
            for name in OF_TOKENS:
                if name in row and (shape := shape_of(row[name])) != (tokens,):
                    raise PackingError(
                        f"column {name!r}: expected {tokens} values in row {number}, as many as input_ids, got shape "
                        f"{shape}"
                    )


def shape_of(values: Any) -> tuple[int | str, ...]:
    try:
        return tuple(np.shape(values))
    except ValueError:  # lists of several lengths
        return (len(values), "several lengths")


def masked(row: Row) -> Row:
    """The row, with nothing in it to train on."""
    return {**row, LABELS: np.full(len(row[INPUT_IDS]), IGNORED_LABEL)}
