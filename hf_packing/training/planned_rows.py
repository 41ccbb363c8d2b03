"""The state that `attach` gives a trainer of whole rows: what its loss is a mean of, the plan, and the data loader."""

import weakref
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.data_loader import prepare_data_loader
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer

from hf_packing.attention import ProveInTraining, inner_model
from hf_packing.errors import PackingError
from hf_packing.sampling.sampler import RankBatchSampler
from hf_packing.sampling.sizes import RowSizes
from hf_packing.sampling.token_budget import TokenBudget
from hf_packing.training.checks import check_accelerator, check_arguments, check_methods, check_not_dispatched
from hf_packing.training.loss_units import count_units, find_loss_unit
from hf_packing.training.ranks import PlannedFrom, StepCounts, data_rank, on_all_ranks
from hf_packing.training.token_losses import TokenMean
from hf_packing.training.trainer_loss import loss_settings, refuse_changed_settings
from hf_packing.training.unpad import UnpaddedModels, unpad_models
from hf_packing.training.whole_rows import (
    REAL_ROWS,
    Collate,
    lengths_in,
    pixels_per_patch_of,
    read_rows,
    refuse_long_rows,
    sizes_of_rows,
    whole_rows_loader,
)


class _MeasuredRows(NamedTuple):
    """The sizes of a dataset's rows, and the dataset and collator for which they were measured."""

    dataset: Any
    collator: Any
    sizes: RowSizes


class PlannedRows:
    """The state that `attach` stores as `trainer.planned_rows`, with methods that check, count and load batches."""

    def __init__(
        self, trainer: Trainer, batching: TokenBudget, prove: ProveInTraining, loss_unit: str | None = None
    ) -> None:
        self.kind = type(trainer)
        """The trainer's class before attach."""
        self.batching = batching
        self.prove = prove
        self.unit = "rows"
        """What the loss is a mean of, a key of UNITS."""
        self.evaluation: TokenMean | None = None
        """The mean loss of the evaluation that is running; None if there is none, or if the loss is a mean of rows."""
        self.step_counts = StepCounts()
        self.accumulation = trainer.args.gradient_accumulation_steps
        self.models = UnpaddedModels({})
        """How each model of the trainer runs padded batches."""
        self._loss_unit = loss_unit
        self._collator = trainer.data_collator
        self._settings: dict[str, Any] = {}
        self._model = weakref.ref(inner_model(trainer.model))
        self._measured: _MeasuredRows | None = None

    def __str__(self) -> str:
        return f"the loss is a mean of {self.unit}\n{self.models}"

    def remember_settings(self, trainer: Trainer) -> None:
        """Store the settings that decide the trainer's loss, so that `check` notices changes."""
        self._settings = loss_settings(trainer)

    def check(self, trainer: Trainer) -> None:
        """Refuse changes, made to the trainer after attach, that do not work with planned batches.

        Raises:
            PackingError: the collator, the model, a method or a setting that decides the loss has changed.
        """
        if trainer.data_collator is not self._collator:
            raise PackingError(
                f"data_collator: expected the collator that the trainer had when attach was called, got another "
                f"{type(trainer.data_collator).__name__}; set the collator before you call attach"
            )
        check_methods(trainer)
        check_arguments(trainer, None)
        check_accelerator(trainer.accelerator)
        check_not_dispatched(trainer.accelerator)
        refuse_changed_settings(self._settings, trainer)
        if trainer.model_init is None and self._model() is not inner_model(trainer.model):
            raise PackingError(
                f"model: expected the model that the trainer had when attach was called, got a different "
                f"{type(inner_model(trainer.model)).__name__}; make a new Trainer, and call attach on it"
            )

    def sampler(self, trainer: Trainer, dataset: Any, collate: Collate, planned_from: PlannedFrom) -> RankBatchSampler:
        """Return a sampler that plans this rank's micro-batches.

        Args:
            trainer: the attached trainer.
            dataset: the training dataset as the collator gets it, without unused columns.
            collate: the trainer's collator.
            planned_from: notes the data and settings, to compare them with the other ranks.
        """
        accumulation = trainer.args.gradient_accumulation_steps
        planned_from.note_settings(batching=self.batching, gradient_accumulation_steps=accumulation)
        sizes = self._sizes(trainer, dataset, collate)
        planned_from.note_data("train_dataset", dataset, sizes)
        refuse_long_rows("train_dataset", sizes, self.batching.max_tokens, self.batching.overflow)
        rank, world_size = data_rank(trainer.accelerator)
        return RankBatchSampler(self.batching, sizes, world_size, rank, accumulation)

    def settle(self, trainer: Trainer, dataset: Any, collate: Collate) -> None:
        """Patch and prove the trainer's models, and check what the loss is a mean of.

        Raises:
            PackingError: it is not known what the loss is a mean of, or the loss is not such a mean.
            ModelNotSupportedError: it cannot be proven that a model takes padded batches.
        """
        self.models = unpad_models(trainer, self.prove, {}, self.batching.fewest_shared)
        numbers = _rows_to_check(self._sizes(trainer, dataset, collate), self.batching.max_tokens)
        short, long = (read_rows(dataset, part) for part in numbers)
        self.unit = find_loss_unit(trainer, self.kind, (short, long), collate, self._loss_unit)

    def units_in(self, batch: dict[str, Any], real_rows: Tensor | None = None) -> Tensor:
        """Return the number of units in a batch over which the loss is averaged, 0 for copies of rows.

        Args:
            batch: the batch that the trainer's collator returned.
            real_rows: number of rows that are not copies; None for a batch of an evaluation, without copies.
        """
        if real_rows is None:
            return count_units(self.unit, batch, 0)
        return count_units(self.unit, batch, int(real_rows)) if real_rows else torch.zeros_like(real_rows)

    def counts_of(self, batch: dict[str, Any]) -> Tensor:
        """Return the tokens, rows, attention cost and units of a batch, int64 [4]; see `micro_batch_counts`.

        Raises:
            PackingError: the batch has more tokens than planned, so the collator makes more of a row than when it was
                asked for the row alone.
        """
        lengths, real_rows = lengths_in(batch), batch[REAL_ROWS]
        tokens = lengths.sum()
        if tokens > self.batching.max_tokens:
            raise PackingError(
                f"data_collator: expected at most {self.batching.max_tokens} tokens in a micro-batch, as planned, got "
                f"{int(tokens)}. The collator makes more tokens of the rows together than of each row alone: it has to "
                "return an attention_mask that is 0 on padding, and must not add tokens at random"
            )
        counts = (tokens, real_rows, lengths.square().sum(), self.units_in(batch, real_rows))
        return torch.stack([each.to(lengths.device).long() for each in counts])

    def training_loader(self, trainer: Trainer, stock: DataLoader[Any]) -> DataLoader[Any]:
        """Return a loader of planned micro-batches.

        Args:
            trainer: the attached trainer.
            stock: the loader that the trainer made itself, whose dataset and collator are used.
        """
        self.check(trainer)
        if self._model() is not inner_model(trainer.model):
            self.settle(trainer, stock.dataset, stock.collate_fn)
            self._model = weakref.ref(inner_model(trainer.model))
        sampler = on_all_ranks(partial(self.sampler, trainer, stock.dataset, stock.collate_fn))
        self.accumulation = sampler.accumulation
        args = trainer.args
        loader = whole_rows_loader(
            stock.dataset,
            sampler,
            stock.collate_fn,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and trainer.accelerator.device.type != "cpu",
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=getattr(args, "dataloader_multiprocessing_context", None),
        )
        # tell accelerate that there is one process, since the sampler already divides rows among ranks
        prepared: DataLoader[Any] = prepare_data_loader(
            loader,
            trainer.accelerator.device,
            num_processes=1,
            process_index=0,
            put_on_device=True,
            non_blocking=trainer.accelerator.non_blocking,
        )
        return prepared

    def _sizes(self, trainer: Trainer, dataset: Any, collate: Collate) -> RowSizes:
        """Return the sizes of the training dataset's rows; they are measured again only if the dataset has changed."""
        known = self._measured
        current = trainer.train_dataset
        if known is None or known.dataset is not current or len(known.sizes) != len(dataset):
            pixels = pixels_per_patch_of(inner_model(trainer.model).config)
            known = self._measured = _MeasuredRows(current, collate, sizes_of_rows(dataset, collate, pixels))
        return known.sizes


_SHORT_ROWS = 6
"""The most rows in the first part of the rows with which a loss is checked."""


def _rows_to_check(sizes: RowSizes, max_tokens: int) -> tuple[list[int], list[int]]:
    """Return the numbers of the rows with which the loss is checked, in two parts that fit into a micro-batch together.

    The first part has the shortest rows, and the second part one or two long ones, so that the parts have other numbers
    of tokens for each row. The second part is empty if no two rows fit into a micro-batch.
    """
    by_length = np.argsort(sizes.tokens, kind="stable")
    by_length = by_length[sizes.tokens[by_length] > 0]
    taken = sizes.tokens[by_length].cumsum()
    number = max(1, int((taken[:_SHORT_ROWS] <= max_tokens // 2).sum()))
    left = max_tokens - taken[number - 1]
    two, one = (by_length[sizes.tokens[by_length] <= most][-rows:] for rows, most in ((2, left // 2), (1, left)))
    return by_length[:number].tolist(), (two if len(two) else one).tolist()
