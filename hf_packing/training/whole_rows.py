"""Whole rows of a dataset, which the trainer's own collator makes batches of: what it makes is measured, then planned.

For models with heads and for trainers of preference pairs, a row of the dataset stays whole, and the trainer's collator
turns the rows of a micro-batch into a padded batch. The size of a row is the number of tokens that are not padding when
the collator gets this row alone. What the loss is a mean of is found by trial (loss_unit).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from datasets.utils import tqdm
from torch import Tensor

from hf_packing.columns import ATTENTION_MASK, INPUT_IDS
from hf_packing.errors import PackingError
from hf_packing.rows.token_columns import rows_of_each_value, shows_table, visible_columns
from hf_packing.sampling.batching import SampledRow
from hf_packing.sampling.rows import rows_by_number
from hf_packing.sampling.sampler import EpochSummary, RankBatchSampler
from hf_packing.sampling.sizes import RowSizes, content_of, rows_to_sample, sizes_of
from hf_packing.sampling.token_budget import TokenBudget
from hf_packing.training.loader import batches_loader, on_device
from hf_packing.training.loss_unit import UNITS, CheckedRows
from hf_packing.training.losses import COUNTS, Batch

Collate = Callable[[list[Any]], Any]

_SHORT_ROWS = 6
"""The most rows in the first part of the rows with which a loss is checked."""


class WholeRows(torch.utils.data.Dataset[Any]):
    """A map-style dataset whose rows stay whole, planned for this rank: a DataLoader indexes it with micro-batches.

    Args:
        dataset: the dataset, as the collator gets it.
        sampler: the sampler of this rank.
        collate: the trainer's collator.
    """

    def __init__(self, dataset: Any, sampler: RankBatchSampler, collate: Collate) -> None:
        assert isinstance(sampler.batching, TokenBudget)
        self.dataset, self.sampler, self.collate = dataset, sampler, collate
        self.most_tokens = sampler.batching.most_tokens
        """The most tokens of a micro-batch."""
        self.unit = "rows"
        """What the loss is a mean of, a key of UNITS."""

    def __len__(self) -> int:
        return len(self.sampler.rows.sizes)

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def __getitems__(self, micro_batch: Sequence[SampledRow]) -> list[tuple[Any, bool]]:
        rows = rows_by_number(self.dataset, [number for number, _ in micro_batch])
        return [(row, is_copy) for row, (_, is_copy) in zip(rows, micro_batch, strict=True)]

    def collated(self, rows: Sequence[tuple[Any, bool]]) -> Batch:
        """Return what the trainer's collator makes of rows, with counts of the batch."""
        return self._with_counts(self.collate([row for row, _ in rows]), sum(not is_copy for _, is_copy in rows))

    def _with_counts(self, batch: Batch, rows: int) -> Batch:
        """Return a batch of so many rows that are no copies with its counts."""
        tokens, squares = _tokens_and_squares(batch)
        units = int(UNITS[self.unit](batch, rows)) if rows else 0
        return {**batch, COUNTS: torch.tensor([tokens, rows, squares, units])}

    def collate_parts(self, equal: bool = False) -> "CheckedRows | None":
        """Return the batches of rows with which the loss is checked, without counts; None if there are no rows."""
        parts = self._rows_to_check(equal)
        if not parts:
            return None

        def batch_of(rows: Sequence[Any]) -> Batch:
            return dict(collate_rows(self.collate, rows))

        return CheckedRows(batch_of([*chain(*parts)]), [(batch_of(rows), len(rows)) for rows in parts])

    def counted(self, checked: "CheckedRows") -> list[Batch]:
        """Return the parts with their counts."""
        return [self._with_counts(*part) for part in checked.parts]

    def _rows_to_check(self, equal: bool) -> list[list[Any]]:
        """Return rows with which the loss is checked, in two parts that fit into a micro-batch together.

        They are the shortest rows, a row for each value of columns with few values, such as rare classes, and a long
        row. The parts have other values and other numbers of tokens for each row. There is one part if no two rows fit
        into a micro-batch.

        Args:
            equal: whether all of them have to have equally many tokens; there may then be no part.
        """
        tokens, most, fitting = self.sampler.sizes.tokens, self.most_tokens, self.sampler.rows.kept
        by_length = fitting[np.argsort(tokens[fitting], kind="stable")]
        if equal:
            number_of = np.bincount(tokens[by_length])
            by_length = by_length[(tokens[by_length] == number_of.argmax()) & (number_of.max() > 1)]
        kinds = [number for number in rows_of_each_value(self.dataset) if number in by_length][:_SHORT_ROWS]
        rows = [*dict.fromkeys([*by_length[:1].tolist(), *kinds, *by_length[:_SHORT_ROWS].tolist()])]
        rows = rows[: int((tokens[rows].cumsum() <= most).sum())]
        long = by_length[tokens[by_length] <= most - tokens[rows].sum()][-1:].tolist()
        second = {*rows[2::3], *kinds, *long} - {*rows[:1]}
        chosen = dict.fromkeys([*rows, *long])
        parts = [each for each in chosen if each not in second], [each for each in chosen if each in second]
        return [rows_by_number(self.dataset, part) for part in parts if part]

    def summary(self, unpacked: int, isolation: object) -> EpochSummary:
        """Return the summary of the current epoch; see `RankBatchSampler.summary`."""
        return self.sampler.summary(unpacked, isolation)

    def loader(self, accelerator: Accelerator, _: Any, **options: Any) -> Any:
        """Return the loader of this rank, which puts micro-batches on the device; options are those of DataLoader."""
        return on_device(batches_loader(self, self.collated, **options), accelerator)


def _tokens_and_squares(batch: Any) -> tuple[int, int]:
    """Return the number of tokens of a padded batch, and the sum of the squared lengths of its sequences.

    The batch has attention_mask, integers [..., tokens]; or input_ids of this shape, if there is no padding.

    Raises:
        PackingError: the batch has neither.
    """
    mapping = batch if isinstance(batch, Mapping) else {}
    mask, ids = mapping.get(ATTENTION_MASK), mapping.get(INPUT_IDS)
    if mask is None and isinstance(ids, Tensor):
        mask = torch.ones_like(ids)
    if not isinstance(mask, Tensor):
        raise PackingError(
            f"data_collator: expected batches with input_ids and attention_mask, whose tokens attach can count, got "
            f"{', '.join(map(str, mapping)) or type(batch).__name__}. attach(trainer, None) keeps the trainer's "
            "batches, and takes out their padding"
        )
    lengths = mask.sum(-1)
    return int(lengths.sum()), int(lengths.square().sum())


def patches_in(batch: Batch, pixels_per_patch: int) -> int:
    """Return the number of patches of the pictures in a batch.

    Args:
        batch: a batch with pixel_values: numbers [patches, values], [pictures, patches, values] or [..., pictures,
            channels, height, width]; or without pictures.
        pixels_per_patch: height times width of a patch.
    """
    patches = 0
    for name, pixels in batch.items():
        if name.startswith("pixel_values") and isinstance(pixels, Tensor) and pixels.numel():
            if pixels.ndim <= 3:
                patches += pixels[..., 0].numel()
            else:
                patches += -(-pixels.select(-3, 0).numel() // pixels_per_patch)
    return patches


def pixels_per_patch_of(config: Any) -> int | None:
    """Return height times width of the patches of a model's vision tower; None for a model without one."""
    vision = getattr(config, "vision_config", None)
    if vision is None:
        return None
    size = getattr(vision, "patch_size", None) or 1
    return math.prod(size) if isinstance(size, (list, tuple)) else int(size) ** 2


def sizes_of_rows(dataset: Any, collate: Collate, pixels_per_patch: int | None = None) -> RowSizes:
    """Return the sizes of a dataset's rows, in tokens and patches that the collator makes of each row alone.

    The collator gets a few rows, among them the shortest and the longest. If it makes as many tokens as the column
    `input_ids` has, the other sizes are the lengths in this column. Otherwise, or if the model takes pictures, the
    collator gets every row.

    Args:
        dataset: a map-style dataset, as the collator gets it.
        collate: the trainer's collator.
        pixels_per_patch: height times width of a patch; None for a model without a vision tower.

    Raises:
        PackingError: the collator makes batches whose tokens cannot be counted.
    """

    def alone(number: int) -> Any:
        return collate_rows(collate, rows_by_number(dataset, [number]))

    sample = content_of(dataset, len(dataset))
    if pixels_per_patch is None and (in_column := _sizes_in_column(dataset)) is not None:
        by_length = np.argsort(in_column.tokens, kind="stable")
        asked = {*rows_to_sample(len(dataset)).tolist(), *by_length[:8].tolist(), *by_length[-8:].tolist()}
        tokens, squares = in_column.tokens, in_column.squared_lengths
        if all(_tokens_and_squares(alone(row)) == (tokens[row], squares[row]) for row in asked):
            return replace(in_column, sample=sample)
    measured = []
    for number in tqdm(range(len(dataset)), desc="Measuring rows with the collator", unit=" rows"):
        batch = alone(number)
        patches = 0 if pixels_per_patch is None else patches_in(batch, pixels_per_patch)
        measured.append((*_tokens_and_squares(batch), patches))
    tokens, squares, of_pictures = np.array(measured, dtype=np.int64).reshape(-1, 3).T
    return RowSizes(
        tokens,
        (tokens > 0).astype(np.int64),
        squares,
        patches=of_pictures if of_pictures.any() else None,
        sample=sample,
    )


def _sizes_in_column(dataset: Any) -> RowSizes | None:
    """Return the lengths of `input_ids` as sizes; None if there is no such column of documents."""
    if shows_table(dataset) and INPUT_IDS in visible_columns(dataset):
        with suppress(PackingError):  # several sequences in a row, as for multiple choice
            return sizes_of(dataset.select_columns([INPUT_IDS]))
    return None


def collate_rows(collate: Collate, rows: Sequence[Any]) -> Any:
    """Return the batch that a collator makes of some rows. It gets copies, since some collators change their rows."""
    return collate([dict(row) if isinstance(row, Mapping) else row for row in rows])
