"""Make a trainer with its own collator and loss train on micro-batches of whole rows: any head, DPO and reward models.

`attach` calls `attach_whole_rows` for these trainers. The trainer's collator pads the rows of a micro-batch, the
patched model takes the padding out again, and the trainer computes its own loss, which is then weighted by the
micro-batch's share of the optimizer step.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from hf_packing.attention import ProveInTraining, inner_model, predicts_tokens
from hf_packing.batch.collate import PackingCollator
from hf_packing.columns import IGNORED_LABEL, LABELS
from hf_packing.errors import PackingError
from hf_packing.sampling.sampler import EpochSummary
from hf_packing.sampling.token_budget import TokenBudget, with_documents_per_step, with_linear_cost
from hf_packing.training.checks import (
    check_accelerator,
    check_arguments,
    check_methods,
    check_not_dispatched,
    overridden_batch_methods,
)
from hf_packing.training.loss_units import UNITS
from hf_packing.training.max_length import lost_pairs
from hf_packing.training.planned_rows import PlannedRows
from hf_packing.training.ranks import (
    BatchesOfCheckpoint,
    StepCounts,
    check_accumulation,
    data_rank,
    items_counted,
    on_all_ranks,
)
from hf_packing.training.token_losses import TokenMean
from hf_packing.training.trainer_loss import subclass_with
from hf_packing.training.uneven_gather import gathering_uneven_tensors
from hf_packing.training.unpad import models_unpatched_on_error
from hf_packing.training.whole_rows import REAL_ROWS, refuse_streams_and_packs

UNITS_COUNTED = "units_counted"
"""Key of an entry of every batch in training: the number of units, as counted before the step."""

_PICTURES = {"image", "images", "pixel_values"}
"""Columns of pictures, as collators of TRL and processors of transformers name them."""


def keeps_rows_whole(trainer: Any) -> bool:
    """Return whether `attach` keeps the trainer's collator and loss, and forms micro-batches of whole rows.

    This is so for models that are not language models, for trainers of TRL that train on pairs, and for rows with
    pictures. All other trainers train on rows of tokens, which attach joins into packed rows.
    """
    if not isinstance(trainer, Trainer) or getattr(trainer, "model", None) is None:
        return False
    if hasattr(inner_model(trainer.model).config, "vision_config") and _has_pictures(trainer.train_dataset):
        return True
    of_trl = [base.__name__ for base in type(trainer).__mro__ if base.__module__.startswith("trl.")]
    if of_trl:
        return "SFTTrainer" not in of_trl
    inner = inner_model(trainer.model)
    names = {base.__name__ for base in type(inner).__mro__}
    if names & {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()}:
        return False
    return not isinstance(trainer.data_collator, PackingCollator) and not predicts_tokens(inner)


def _has_pictures(dataset: Any) -> bool:
    """Return whether the rows of a map-style dataset have pictures in one of the usual columns."""
    names = getattr(dataset, "column_names", None)
    if names is None and hasattr(dataset, "__getitem__") and len(dataset):
        names = dataset[0] if isinstance(dataset[0], Mapping) else None
    return not _PICTURES.isdisjoint(names or ())


class WholeRowTrainer(Trainer):  # type: ignore[misc]  # transformers has no types
    """A Trainer with its own collator and loss, whose micro-batches of whole rows `attach` planned."""

    planned_rows: PlannedRows

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        on_all_ranks(lambda _: self.planned_rows.check(self))
        self.planned_rows.step_counts = StepCounts()
        return super().train(*args, **kwargs)

    def get_train_dataloader(self) -> DataLoader[Any]:
        return self.planned_rows.training_loader(self, super().get_train_dataloader())

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Return this rank's micro-batches of a step, and the number of units in the step on all ranks."""
        planned = self.planned_rows
        check_accumulation(self, planned.accumulation)
        batches = list(islice(epoch_iterator, num_batches))
        if not batches:
            return batches, None
        processes_per_rank = self.accelerator.num_processes // data_rank(self.accelerator).world_size
        counts = torch.stack([planned.counts_of(batch) for batch in batches]).to(device)
        for batch, units in zip(batches, counts[:, -1], strict=True):
            batch[UNITS_COUNTED] = units
        everywhere = self.accelerator.gather(counts[None])[::processes_per_rank]
        planned.step_counts.add(everywhere)
        return batches, items_counted(everywhere)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log packing metrics together with the training loss."""
        if "loss" in logs:
            logs = {**logs, **self.planned_rows.step_counts.take(self.planned_rows.batching.max_tokens)}
        self.planned_rows.step_counts.correct_speed(logs)
        super().log(logs, *args, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
        **others: Any,
    ) -> Any:
        planned, inputs = self.planned_rows, dict(inputs)
        real_rows, counted = inputs.pop(REAL_ROWS, None), inputs.pop(UNITS_COUNTED, None)
        units = None
        if real_rows is not None:
            units = planned.units_in(inputs, real_rows)
        elif planned.evaluation is not None:
            inputs = _without_repeated_rows(inputs, self.accelerator)
            units = planned.units_in(inputs)
        weighted = num_items_in_batch is not None and (real_rows is not None or self.model.training)
        if weighted and (units is None or counted is None or int(units) != int(counted)):
            raise PackingError(
                f"trainer: expected the batches of the collator in compute_loss, but {planned.kind.__name__} has "
                f"changed a batch in training_step: {counted if counted is None else int(counted)} {planned.unit} were "
                f"planned, got {units if units is None else int(units)}. attach(trainer, None) keeps its batches"
            )
        with gathering_uneven_tensors(self.accelerator):
            loss = super().compute_loss(model, inputs, return_outputs, **others)
        loss, outputs = loss if return_outputs else (loss, None)
        if weighted:
            assert units is not None
            self.current_gradient_accumulation_steps = 1  # training_step may divide by it, but the share is of a step
            share = units.to(loss.device).double() / num_items_in_batch * data_rank(self.accelerator).world_size
            loss = loss * share if units else torch.nan_to_num(loss * 0)  # the mean over no labels is not a number
        elif planned.evaluation is not None and units is not None:
            planned.evaluation.add(loss * units if units else torch.zeros_like(loss), units)
        return (loss, outputs) if return_outputs else loss

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate as without attach. A loss that is a mean over labels is then the mean over all of their labels."""
        planned = self.planned_rows
        if planned.unit == "rows":
            return super().evaluation_loop(*args, **kwargs)
        planned.evaluation = TokenMean(self.args.device)
        try:
            output = super().evaluation_loop(*args, **kwargs)
            for name in [name for name in output.metrics if name.endswith("_loss")]:
                if planned.evaluation.batches and name == f"{_prefix(args, kwargs)}_loss":
                    summed, labels = planned.evaluation.over_ranks(self.accelerator)
                    output.metrics[name] = summed / labels if labels else math.nan
        finally:
            planned.evaluation = None
        return output


def attach_whole_rows(
    trainer: Trainer,
    batching: Any,
    prove: ProveInTraining,
    documents_per_step: int | None,
    loss_unit: str | None,
    unused: dict[str, Any],
) -> EpochSummary:
    """Make a trainer train on micro-batches of whole rows, without padding, with its own collator and loss.

    Args:
        trainer: a Trainer whose model is not a language model, or a trainer of preference pairs.
        batching: a TokenBudget.
        prove: as described in `patch_model`.
        documents_per_step: mean number of rows in an optimizer step over all ranks; None to let the batching decide.
        loss_unit: what the trainer's loss is a mean of, a key of UNITS; None for a loss that is known.
        unused: the other arguments of `attach`, by name, which only language models can use.

    Raises:
        PackingError: the trainer, its dataset or an argument is not supported; or it is not known what the loss is a
            mean of, or the loss is not such a mean.
        ModelNotSupportedError: it cannot be proven that a model takes padded batches.
    """
    on_all_ranks(lambda _: _check(trainer, batching, loss_unit, unused))
    if documents_per_step is not None:
        batching = with_documents_per_step(batching, documents_per_step)
    batching = with_linear_cost(batching, inner_model(trainer.model).config)
    assert isinstance(batching, TokenBudget)
    planned = PlannedRows(trainer, batching, prove, loss_unit)
    with torch.random.fork_rng():  # making a loader may draw random numbers
        stock = trainer.get_train_dataloader()
    sampler = on_all_ranks(partial(planned.sampler, trainer, stock.dataset, stock.collate_fn))
    with models_unpatched_on_error(trainer):
        planned.settle(trainer, stock.dataset, stock.collate_fn)
        unpacked = trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps
        summary = sampler.summary(unpacked * sampler.world_size, planned)
    dropped, lost = lost_pairs(trainer, trainer.train_dataset)
    trainer.planned_rows = planned
    trainer.add_callback(BatchesOfCheckpoint(planned.unit))
    trainer.__class__ = subclass_with(WholeRowTrainer, type(trainer), "WholeRow")
    planned.remember_settings(trainer)
    return replace(summary, left_out=summary.left_out + dropped, lost_tokens=summary.lost_tokens + lost)


def _check(trainer: Trainer, batching: Any, loss_unit: str | None, unused: dict[str, Any]) -> None:
    """Refuse a trainer, a batching or arguments of attach that do not work with whole rows."""
    kind, model = type(trainer).__name__, type(inner_model(trainer.model)).__name__
    if isinstance(trainer, WholeRowTrainer):
        raise PackingError("trainer: expected a trainer not yet attached, got an attached trainer; call attach once")
    if not isinstance(batching, TokenBudget):
        raise PackingError(
            f"batching: expected a TokenBudget for {kind} with {model}, whose rows stay whole, got "
            f"{type(batching).__name__}; or None, to keep the trainer's batches and take out their padding"
        )
    if loss_unit not in (None, *UNITS):
        raise PackingError(f"loss_unit: expected one of {', '.join(UNITS)}, got {loss_unit!r}")
    unused = {"length_schedule": batching.length_schedule, **unused}
    if given := [name for name, value in unused.items() if value is not None]:
        raise PackingError(
            f"{given[0]}: expected None for {kind} with {model}, which computes its own loss of padded batches, got "
            f"{unused[given[0]]!r}"
        )
    if own := overridden_batch_methods(type(trainer)):
        raise PackingError(
            f"trainer: expected a trainer that takes its batches from its dataset, got {kind}, which overrides "
            f"{own[0]}; attach(trainer, None) keeps the trainer's batches, and takes out their padding"
        )
    if getattr(trainer, "aux_loss_enabled", False):
        raise PackingError(
            f"router_aux_loss_coef: expected 0.0 with a batching, since {kind} adds the loss of the routers of "
            f"{model}, which depends on which rows share a micro-batch; got {trainer.router_aux_loss_coef}. "
            "attach(trainer, None) keeps the trainer's batches, and takes out their padding"
        )
    refuse_streams_and_packs("train_dataset", trainer.train_dataset)
    limit = getattr(trainer.args, "max_length", None)
    with_logps = getattr(trainer.args, "precompute_ref_log_probs", False)
    if limit is not None and (with_logps or _has_pictures(trainer.train_dataset)):
        raise PackingError(
            f"max_length: expected None with {'precompute_ref_log_probs' if with_logps else 'pictures'}, got {limit}, "
            f"since attach cannot count what {kind} cuts or drops then"
        )
    check_methods(trainer)
    check_arguments(trainer, None)
    check_accelerator(trainer.accelerator)
    check_not_dispatched(trainer.accelerator)


def _without_repeated_rows(inputs: dict[str, Any], accelerator: Any) -> dict[str, Any]:
    """Return a batch of an evaluation in which rows that only fill the last batches of ranks have no labels.

    With several processes, accelerate repeats rows of the dataset so that all ranks get batches of equal size. It
    drops the predictions of these rows later.
    """
    state, labels = accelerator.gradient_state, inputs.get(LABELS)
    if accelerator.num_processes == 1 or not state.end_of_dataloader or state.remainder <= 0:
        return inputs
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return inputs
    real = min(max(state.remainder - accelerator.process_index * len(labels), 0), len(labels))
    labels = labels.clone()
    labels[real:] = IGNORED_LABEL
    return {**inputs, LABELS: labels}


def _prefix(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the argument metric_key_prefix of `Trainer.evaluation_loop`."""
    return str(args[4] if len(args) > 4 else kwargs.get("metric_key_prefix", "eval"))
