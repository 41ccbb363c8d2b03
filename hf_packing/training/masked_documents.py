"""Read documents that are masked anew in every epoch, for the training of masked language models."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import datasets
import numpy as np
from transformers import TrainingArguments

from hf_packing.columns import LABELS, LOSS_MASKS, OFFSET_MAPPING, SPECIAL_TOKENS_MASK
from hf_packing.errors import PackingError
from hf_packing.rows.token_columns import visible_columns
from hf_packing.sampling.evaluation import InOrder
from hf_packing.sampling.rows import Row, SampledRows
from hf_packing.sampling.sampler import RankBatchSampler
from hf_packing.training.masking import Masking, masking_of
from hf_packing.training.ranks import PlannedFrom

_EVALUATION = -1
"""The number that stands for the epoch in the seeds of an evaluation, so that every evaluation has the same masks."""

_SAMPLED = 64
"""Number of rows in which words are looked for."""

_SEVERAL = 8
"""Rows with at least this number of tokens are expected to have several words."""


class MaskedRows(SampledRows):
    """The rows that a sampler selects, masked anew in every epoch. The rows have no labels in the dataset.

    The rows of evaluations, which are in the order of the dataset, are masked in the same way each time.

    Args:
        dataset: the map-style dataset that the sampler was made for.
        sampler: the sampler of this rank.
        unread: names of columns that are not read.
        apply_masks: has no effect, since rows with loss masks are refused.
        more: names of further per-token columns to read.
        masking: how tokens are masked.

    Raises:
        PackingError: the dataset has labels or loss masks, or lacks a column that the masking needs; or words cannot be
            told from the offsets of tokens.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: RankBatchSampler,
        unread: Sequence[str] = (),
        apply_masks: bool = True,
        more: Sequence[str] = (),
        *,
        masking: Masking,
    ) -> None:
        more = [*more, SPECIAL_TOKENS_MASK, *([OFFSET_MAPPING] if masking.whole_words else [])]
        super().__init__(dataset, sampler, unread, apply_masks, more)
        self.masking = masking
        sampler.more_inputs["data_collator"] = str(masking)
        self._same_masks = isinstance(sampler.batching, InOrder)
        if isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom":
            self._check_columns(visible_columns(dataset))
        if masking.whole_words:
            self._check_words()

    @property
    def batches(self) -> Iterable[list[Any]]:
        return _WithEpoch(self.sampler)

    def __getitems__(self, micro_batch: Sequence[tuple[Any, ...]]) -> list[Row]:
        """Return the rows of a micro-batch: a list of (row number, True if the row is a copy, epoch)."""
        sampled = [(number, is_copy) for number, is_copy, *_ in micro_batch]
        rows, pieces = super().__getitems__(sampled), self.sampler.rows.pieces
        masked = [place for place, (_, is_copy) in enumerate(sampled) if not is_copy]
        if not masked:
            return rows
        numbers = [sampled[place][0] for place in masked]
        starts = [0] * len(numbers)
        if pieces is not None:
            numbers, starts = pieces.document[numbers].tolist(), pieces.start[numbers].tolist()
        of_batch = (*micro_batch[0], self.sampler.epoch.number)[2]  # a worker's own sampler may be in an earlier epoch
        epoch = _EVALUATION if self._same_masks else of_batch
        found = self.masking.mask([rows[place] for place in masked], zip(numbers, starts, strict=True), epoch)
        for place, row in zip(masked, found, strict=True):
            rows[place] = row
        return rows

    def _with_labels(self, row: Row) -> Row:
        return row

    def _check_lengths(self, number: int, row: Row) -> None:
        super()._check_lengths(number, row)
        self._check_columns(row)

    def _check_words(self) -> None:
        """Raise PackingError if no gaps divide words in a sample of rows, so that a row is masked as a whole or not."""
        sampled = np.unique(np.linspace(0, len(self.sampler.rows.sizes) - 1, _SAMPLED).round().astype(int)).tolist()
        rows = super().__getitems__([(number, False) for number in sampled])
        in_rows = [offsets for row in rows if len(offsets := _of_characters(row)) >= _SEVERAL]
        if in_rows and not any((offsets[1:, 0] != offsets[:-1, 1]).any() for offsets in in_rows):
            raise PackingError(
                f"{OFFSET_MAPPING}: expected gaps between words, by which {type(self.masking.collator).__name__} finds "
                f"whole words, but {len(in_rows)} rows with {_SEVERAL} tokens or more have none, and each would be one "
                "word. Use a tokenizer whose offsets leave out spaces, or whole_word_mask=False"
            )

    def _check_columns(self, names: Iterable[str]) -> None:
        names = set(names).difference(self.unread)
        collator = type(self.masking.collator).__name__
        if found := names.intersection((LABELS, *LOSS_MASKS)):
            raise PackingError(
                f"data_collator: expected a collator that does not mask tokens, since the dataset has a column "
                f"{min(found)!r}, got {collator} with mlm=True, which would overwrite the labels. Remove the column, "
                "or pass a collator that does not mask tokens"
            )
        if self.masking.whole_words and OFFSET_MAPPING not in names:
            raise PackingError(
                f"dataset: expected a column {OFFSET_MAPPING!r}, since {collator} has whole_word_mask=True, got "
                f"columns: {', '.join(sorted(names)) or 'none'}; call the tokenizer with return_offsets_mapping=True"
            )


def _of_characters(row: Row) -> Any:
    """Return the offsets of the tokens that stand for characters, and are not special, int64 [tokens, 2]."""
    offsets = np.array(row[OFFSET_MAPPING], dtype=np.int64).reshape(-1, 2)
    return offsets[offsets[:, 1] > offsets[:, 0]]


class _WithEpoch:
    """A batch sampler that adds the epoch to every row, since workers do not learn that an epoch has begun."""

    def __init__(self, sampler: RankBatchSampler) -> None:
        self._sampler = sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def set_epoch(self, number: int) -> None:
        self._sampler.set_epoch(number)

    def __iter__(self) -> Iterator[list[tuple[int, bool, int]]]:
        epoch = self._sampler.epoch.number
        return ([(*row, epoch) for row in batch] for batch in self._sampler)


def masked_rows(
    collator: Any, args: TrainingArguments, planned_from: PlannedFrom | None = None
) -> Callable[..., MaskedRows]:
    """Return the class of the rows that a Trainer with a masking collator reads; see `masking_of`."""
    return partial(MaskedRows, masking=masking_of(collator, args, planned_from))
