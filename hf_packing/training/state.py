"""The state that `attach` gives a trainer: what it has decided, the source of the batches, and a check for changes."""

from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from reprlib import repr as short_repr
from textwrap import shorten
from typing import Any

import torch
from transformers import Trainer

from hf_packing.attention import ProveInTraining, inner_model, is_patched, temporarily
from hf_packing.batch.collate import PackingCollator
from hf_packing.checks import expect
from hf_packing.errors import PackingError
from hf_packing.sampling.batching import Batching, Shapes
from hf_packing.sampling.evaluation import InOrder
from hf_packing.sampling.sampler import EpochSummary, RankBatchSampler
from hf_packing.sampling.token_budget import TokenBudget, with_linear_cost
from hf_packing.training.checks import WRAPPED_METHODS, lost_pairs, refuse_cut_documents, sft_trainer_of
from hf_packing.training.first_batch import FirstBatchProof
from hf_packing.training.kinds.split import ranks_of
from hf_packing.training.leveling import Leveling
from hf_packing.training.loss_unit import find_loss_unit
from hf_packing.training.losses import Loss, TokenMean
from hf_packing.training.model_loss import collator_for
from hf_packing.training.models import (
    check_takes_rows,
    patch_models,
    unpad_models,
)
from hf_packing.training.own_collator import check_as_own_collator
from hf_packing.training.ranks import PlannedFrom, data_rank, on_all_ranks
from hf_packing.training.sources import Reading, Source, open_source
from hf_packing.training.step_cases import without_attach
from hf_packing.training.step_counts import Predictions, StepCounts
from hf_packing.training.whole_rows import WholeRows, pixels_per_patch_of, sizes_of_rows
from hf_packing.upstream.transformers import worker_context

TEST_DATASET = "test_dataset"
"""The name of the dataset of predict() in messages."""

_DECIDED = (
    *("train_dataset", "data_collator", "compute_loss_func", "label_smoother", "model_accepts_loss_kwargs"),
    *("gradient_accumulation_steps", "average_tokens_across_devices", "auto_find_batch_size"),
    *("train_sampling_strategy", "label_smoothing_factor", "use_liger_kernel", "neftune_noise_alpha"),
    *("predict_with_generate", "loss_type", "packing", "eval_packing", "dispatch_batches", "split_batches"),
    *WRAPPED_METHODS,
)
"""Attributes of a trainer, its arguments and its accelerator that decide batches and losses. A method counts if it is
set on the trainer object."""


class AttachedBatches:
    """The state that `attach` stores as `trainer.attached`, of a trainer that keeps its own batches."""

    def __init__(self, trainer: Trainer, prove: ProveInTraining) -> None:
        self.kind: Any = type(trainer)
        """The trainer's class before attach."""
        self.own_collator = self.collator = trainer.data_collator
        """The trainer's collator before attach, and after it."""
        self.prove = prove
        self.first_batch_proof = FirstBatchProof() if prove == "first batch" else None
        """Proves the first batch; None if nothing is proven of it."""
        self.leveling: Leveling | None = None
        """The exchange of rows that were sampled; None if rows stay where they are."""


class Attached(AttachedBatches, ABC):
    """The state of a trainer whose batches attach has planned."""

    source: Source | WholeRows
    """What the trainer trains on."""
    loss: Any
    """What the loss is a mean of: "token", "sequence", or the unit of a trainer whose rows stay whole."""

    def __init__(self, trainer: Trainer, batching: Batching, prove: ProveInTraining) -> None:
        super().__init__(trainer, prove)
        self.batching = with_linear_cost(batching, inner_model(trainer.model).config)
        """The batching that was passed to attach, with linear_cost and match_documents_per_step filled in."""
        self.max_tokens = batching.most_tokens
        """The largest number of tokens that a micro-batch may have, including padding; None if there is none."""
        self.step_counts = StepCounts()
        """Counts of tokens and documents in the optimizer steps since the trainer last logged."""
        self.first_step: int | None = None
        """The number of optimizer steps before the first one of the training."""
        self.expected: dict[str, Any] = {}
        """What must not change after attach, by name."""

    @abstractmethod
    def settle(self, trainer: Trainer) -> None:
        """Patch the trainer's models, and check that they and the trainer's loss take the batches."""

    def summary(self, trainer: Trainer) -> Any:
        """Return what attach returns."""
        args = trainer.args
        ranks = data_rank(trainer.accelerator).world_size
        unpacked = args.per_device_train_batch_size * args.gradient_accumulation_steps * ranks
        return self.source.summary(unpacked, self)

    def check(self, trainer: Trainer) -> None:
        """Raise PackingError if something that decides batches or losses is not as it was when attach was called."""
        for name, current in decided_by(trainer).items():
            before = self.expected[name]
            if current is not before and current != before:
                was, got = (shorten(short_repr(each), 60) for each in (before, current))
                got = "another one" if got == was else got
                raise PackingError(
                    f"{name}: expected {was}, as when attach was called, got {got}; call attach again after a change"
                )

    def loader_of(self, trainer: Trainer, source: Any) -> Any:
        """Return a loader of a source, with the settings of the trainer's arguments."""
        args = trainer.args
        return source.loader(
            trainer.accelerator,
            self.collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and trainer.accelerator.device.type != "cpu",
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=worker_context(args),
        )


def decided_by(trainer: Trainer) -> dict[str, Any]:
    """Return everything that decides batches and losses, by name."""
    holders = ChainMap(vars(trainer), vars(trainer.args), vars(trainer.accelerator.dataloader_config))
    found = {name: holders.get(name) for name in _DECIDED}
    data, model = trainer.train_dataset, inner_model(trainer.model)
    return found | {
        "train_dataset.format": getattr(data, "format", None),
        "len(train_dataset)": len(data) if hasattr(data, "__len__") else None,
        "model": type(model) if trainer.model_init is not None else model,
    }


class AttachedPacks(Attached):
    """The state of a trainer that trains, evaluates and predicts on packed batches."""

    source: Source
    loss: Loss

    def __init__(
        self,
        trainer: Trainer,
        batching: Batching,
        prove: ProveInTraining,
        loss: Loss,
        shapes: Shapes,
        planned_from: PlannedFrom,
    ) -> None:
        """Check the trainer's datasets and the arguments, and plan the first epoch. The trainer does not change."""
        data, own = trainer.train_dataset, trainer.data_collator
        refuse_cut_documents(trainer, "train_dataset", data)
        if isinstance(own, PackingCollator):
            shapes = (own.tokens, own.max_segments) if shapes == (None, None) else shapes
            if own.align_tokens > 1:
                expect(own.align_tokens, "in the batching, as in the collator", align_tokens=batching.align_tokens)
        if shapes != (None, None):
            batching = batching.within(shapes)
        super().__init__(trainer, batching, prove)
        self.loss = loss
        self.max_tokens = shapes[0] or batching.most_tokens
        self.collator = collator_for(trainer.model, *shapes, batching.align_tokens)
        self.reading = Reading.of_trainer(trainer)
        if self.reading.masking is not None and not self.collator.keep_first_labels:
            raise PackingError(
                f"data_collator: expected a collator that does not mask tokens, since "
                f"{type(inner_model(trainer.model)).__name__} predicts the next token, got {type(own).__name__} with "
                "mlm=True; pass mlm=False"
            )
        sft_trainer = sft_trainer_of(trainer)
        is_of_trl = sft_trainer is not None and self.kind.compute_loss is sft_trainer.compute_loss
        self.sums_log_probs = is_of_trl and trainer.args.loss_type == "nll"
        """True if SFTTrainer computes the cross-entropy: of log-probabilities, without logits."""
        self.predictions = Predictions(trainer.accelerator)
        """What was predicted in the evaluation that is running."""
        self.evaluation: TokenMean | None = None
        """The mean loss of the evaluation that is running, or None if no evaluation is running."""
        self.lost: dict[str, int] = {}
        """What the documents of the latest evaluation lose, where they are cut or dropped."""
        self._compares = False
        self._compared: list[Any] = []
        """The datasets of which documents were compared with what the trainer's own collator makes of their rows."""
        self.source = open_source(
            "train_dataset",
            data,
            self.batching,
            trainer.accelerator,
            self.reading,
            planned_from,
            accumulation=trainer.args.gradient_accumulation_steps,
            loss=loss,
        )
        planned_from.note_settings(tokens=shapes[0], max_segments=shapes[1])
        evaluation, named = trainer.eval_dataset, {"eval_dataset": trainer.eval_dataset}
        if isinstance(evaluation, dict):
            named = {f"eval_dataset[{name!r}]": each for name, each in evaluation.items()}
        self.evaluated = {
            name: (self.open_evaluation(trainer, name, each, planned_from), each)
            for name, each in named.items()
            if each is not None
        }
        """The sources of the evaluation datasets that the trainer has at attach, and the datasets, by name."""

    def __str__(self) -> str:
        if self.prove == "first batch":
            return str(self.first_batch_proof)
        how = "on a small copy of the model" if self.prove == "small" else "when the model was patched"
        return f"isolation: proven {how}"

    def open_evaluation(
        self, trainer: Trainer, name: str, dataset: Any, planned_from: PlannedFrom, ranks: int = 1
    ) -> Source:
        """Return the source of an evaluation: rows in the order of the dataset, each on one or more ranks."""
        if name != TEST_DATASET:  # which SFTTrainer does not prepare
            refuse_cut_documents(trainer, name, dataset)
        rows, max_segments = trainer.args.per_device_eval_batch_size, self.collator.max_segments
        in_order = InOrder(rows, max_tokens=self.batching.most_tokens and ranks * self.batching.most_tokens)
        if max_segments is not None:  # batches of fixed shapes
            in_order = InOrder(max_tokens=self.max_tokens, max_documents=max_segments - 1)
        if isinstance(self.batching, TokenBudget):
            in_order = replace(in_order, max_length=self.batching.max_length, overflow=self.batching.overflow)
        source = open_source(
            name,
            dataset,
            self.batching,
            trainer.accelerator,
            self.reading,
            planned_from,
            in_order=in_order,
            ranks=ranks,
        )
        planned_from.note_settings(per_device_eval_batch_size=rows)  # after the data, of which a rank may have none
        return source

    @contextmanager
    def on_all_ranks(self, trainer: Trainer) -> Iterator[None]:
        """Context manager for a method that all ranks call, such as evaluate(): they compare data in its first loader.

        Other loaders may be made on one rank alone, such as those of callbacks.
        """
        on_all_ranks(lambda _: self.check(trainer))
        with temporarily(self, _compares=True):
            yield

    def loader_in_order(self, trainer: Trainer, name: str, dataset: Any) -> Any:
        """Return a loader for evaluation or prediction, with rows in the order of the dataset."""

        def open_rows(planned_from: PlannedFrom) -> Source:
            if not is_patched(inner_model(trainer.model)):
                self.settle(trainer)
            source = self.open_evaluation(trainer, name, dataset, planned_from, ranks)
            self._check_rows(trainer, source)
            self._compare_rows(trainer, source, name, dataset)
            self.lost = source.lost
            return source

        only_loss = trainer.compute_metrics is None or trainer.args.prediction_loss_only
        # predictions have the flat shape of whole rows, and callbacks may run a loader on one rank alone
        ranks = ranks_of(self.batching) if self._compares and only_loss and name != TEST_DATASET else 1
        compares, self._compares = self._compares, False
        return self.loader_of(trainer, on_all_ranks(open_rows) if compares else open_rows(PlannedFrom()))

    def settle(self, trainer: Trainer) -> None:
        patch_models(trainer, self.prove, ranks_of(self.batching))
        proves = self.prove == "first batch" or ranks_of(self.batching) > 1 or self.source.shares_prefixes
        self.first_batch_proof = FirstBatchProof() if proves else None
        sources = {"train_dataset": (self.source, trainer.train_dataset), **self.evaluated}
        for source, _ in sources.values():
            self._check_rows(trainer, source)
        self.source.count_labels(self.collator)
        for name, (source, dataset) in sources.items():
            self._compare_rows(trainer, source, name, dataset)

    def _check_rows(self, trainer: Trainer, source: Source) -> None:
        """Check that the model takes the rows."""
        check_takes_rows(trainer.model, source, self.batching, (self.collator.tokens, self.collator.max_segments))

    def _compare_rows(self, trainer: Trainer, source: Source, name: str, dataset: Any) -> None:
        """Check once that the rows of a dataset are those of the trainer's own collator."""
        if name != TEST_DATASET and not any(dataset is each for each in self._compared):
            self._compared.append(dataset)
            keep_first = self.collator.keep_first_labels
            check_as_own_collator(without_attach(trainer), name, dataset, source, keep_first)


class AttachedRows(Attached):
    """The state of a trainer whose rows stay whole, with its own collator, loss and evaluation."""

    source: WholeRows
    batching: TokenBudget

    def __init__(
        self,
        trainer: Trainer,
        batching: Batching,
        prove: ProveInTraining,
        planned_from: PlannedFrom,
    ) -> None:
        """Measure the training dataset, and plan the first epoch. The trainer does not change."""
        super().__init__(trainer, batching, prove)
        accumulation = trainer.args.gradient_accumulation_steps
        planned_from.note_settings(batching=self.batching, gradient_accumulation_steps=accumulation)
        with torch.random.fork_rng():  # making a loader may draw random numbers
            stock = trainer.get_train_dataloader()
        patch = pixels_per_patch_of(inner_model(trainer.model).config)
        sizes = sizes_of_rows(stock.dataset, stock.collate_fn, patch)
        planned_from.note_data("train_dataset", stock.dataset, sizes)
        rank, world_size = data_rank(trainer.accelerator)
        sampler = RankBatchSampler(self.batching, sizes, world_size, rank, accumulation)
        self.source = WholeRows(stock.dataset, sampler, stock.collate_fn)

    def __str__(self) -> str:
        step = f"\n{self.first_batch_proof}" if self.first_batch_proof else ""
        return f"the loss is a mean of {self.loss}\n{self.models}{step}"

    def settle(self, trainer: Trainer) -> None:
        self.models = unpad_models(trainer, self.prove, self.batching.fewest_shared)
        """How each model of the trainer runs padded batches."""
        self.first_batch_proof = FirstBatchProof() if self.prove == "first batch" else None
        self.checked = self.source.collate_parts()
        assert self.checked is not None
        self.loss = find_loss_unit(without_attach(trainer), self.checked)
        self.source.unit = self.source.sampler.more_inputs["loss"] = self.loss  # also of a checkpoint

    def summary(self, trainer: Trainer) -> EpochSummary:
        summary: EpochSummary = super().summary(trainer)
        dropped, lost = lost_pairs(trainer, trainer.train_dataset)
        return replace(summary, left_out=summary.left_out + dropped, lost_tokens=summary.lost_tokens + lost)
