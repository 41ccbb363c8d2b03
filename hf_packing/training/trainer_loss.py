"""Decide who computes a trainer's loss, attach or the trainer itself, and what that loss is divided by.

A trainer that computes its own loss is probed once, to find out whether it divides the loss by num_items_in_batch.
SFTTrainer computes its loss without logits: its fused head returns `log_probs` [1, tokens - 1], and the loss is their
sum divided by num_items_in_batch. Only this file knows about the fused head.
"""

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer

from hf_packing.attention import has_local_weights, inner_model, input_device, random_documents, takes_argument
from hf_packing.collate import PackingCollator
from hf_packing.errors import PackingError
from hf_packing.training.losses import (
    ITEMS,
    PROBED_TOKENS,
    Loss,
    ModelLoss,
    exact_type,
    loss_of_model,
    refuse_unknown_loss,
    weights_of,
)
from hf_packing.training.ranks import data_rank

_MUCH = 1e-3
"""A loss that is divided by twice as many items becomes smaller by more than this share."""


_METRICS = "_metrics"
"""Where SFTTrainer collects metrics of the batches it sees."""


_ON_TRAINER = ("compute_loss_func", "label_smoother", "loss_is_scaled_for_ga", "model_accepts_loss_kwargs")


_IN_ARGUMENTS = ("label_smoothing_factor", "use_liger_kernel", "loss_type")


@dataclass(frozen=True)
class TrainerLoss:
    """How a trainer computed its loss before attach changed it."""

    kind: type[Trainer]
    """The trainer's class."""
    is_its_own: bool
    """Whether the trainer computes its own loss, whatever the loss of its model is."""
    sums_log_probs: bool
    """Whether the loss is the sum of the log-probabilities that SFTTrainer's fused head returns."""
    scaled_for_accumulation: bool
    """Whether the trainer says that its loss is already right for accumulated batches."""


@dataclass(frozen=True)
class SettledLoss:
    """Who computes the loss for one model of a trainer."""

    model: Callable[[], PreTrainedModel | None]
    """Returns the model; None once it no longer exists."""
    of_model: ModelLoss | None
    """The result of `loss_of_model`."""
    by_trainer: bool
    """Whether the trainer's own compute_loss is used; attach then only provides the divisor."""
    divided: bool
    """Whether the loss is divided by the items of a whole optimizer step."""


def sft_trainer_of(trainer: Trainer) -> type[Trainer] | None:
    """Return SFTTrainer if the trainer is one, or a subclass of it that is not part of TRL; else None."""
    of_trl = next((kind for kind in type(trainer).__mro__ if kind.__module__.startswith("trl.")), None)
    return of_trl if of_trl is not None and of_trl.__name__ == "SFTTrainer" else None


def computes_loss_as(kind: type[Trainer], other: type[Trainer]) -> bool:
    """Return whether two classes of trainers have the same compute_loss."""
    return kind.compute_loss is other.compute_loss


def loss_of_trainer(trainer: Trainer) -> TrainerLoss:
    """Return how a trainer that is not attached computes its loss."""
    kind, sft_trainer = type(trainer), sft_trainer_of(trainer)
    replaced = trainer.compute_loss_func is not None or trainer.label_smoother is not None
    return TrainerLoss(
        kind=kind,
        is_its_own=not computes_loss_as(kind, Trainer) or replaced or bool(trainer.args.use_liger_kernel),
        sums_log_probs=sft_trainer is not None
        and computes_loss_as(kind, sft_trainer)
        and trainer.args.loss_type == "nll"
        and not replaced,
        scaled_for_accumulation=bool(getattr(trainer, "loss_is_scaled_for_ga", None)),
    )


def loss_settings(trainer: Trainer) -> dict[str, Any]:
    """Return the attributes and arguments of a trainer that decide its loss, by name."""
    on_trainer = {name: getattr(trainer, name, None) for name in _ON_TRAINER}
    return on_trainer | {name: getattr(trainer.args, name, None) for name in _IN_ARGUMENTS}


def settle_loss(trainer: Trainer, own: TrainerLoss, loss: Loss) -> SettledLoss:
    """Decide who computes the loss, and have the trainer pass num_items_in_batch on where that is needed.

    Args:
        trainer: its model is patched.
        own: how the trainer computed its loss before it was attached.
        loss: what is averaged.

    Raises:
        PackingError: loss="sequence" with a model whose own loss is not known.
    """
    of_model = loss_of_model(trainer.model)
    by_trainer, divided = own.is_its_own, True
    if not by_trainer:
        if of_model is not None or not has_local_weights(trainer.model):
            trainer.model_accepts_loss_kwargs = True
        elif loss == "sequence":
            refuse_unknown_loss(trainer.model, loss)
        else:
            by_trainer = True
    if by_trainer and (divided := _is_divided(trainer, own.kind)):
        trainer.model_accepts_loss_kwargs = trainer.model_accepts_loss_kwargs or _takes_items(trainer)
    return SettledLoss(weakref.ref(inner_model(trainer.model)), of_model, by_trainer, divided)


def refuse_undivided(trainer: Trainer, own: TrainerLoss, settled: SettledLoss) -> None:
    """Refuse a loss that is not divided by the items of a whole optimizer step, unless a step is one micro-batch.

    Raises:
        PackingError: the loss is not divided by num_items_in_batch, and a step has more than one micro-batch.
    """
    micro_batches = trainer.args.gradient_accumulation_steps * data_rank(trainer.accelerator).world_size
    if micro_batches > 1 and not (settled.divided or own.scaled_for_accumulation):
        raise PackingError(
            f"trainer: expected a loss that is divided by {ITEMS}, {own.kind.__name__} with "
            f"{type(inner_model(trainer.model)).__name__} does not divide, so its gradient would depend on how a step "
            f"is split into {micro_batches} micro-batches; use gradient_accumulation_steps=1 on one process"
        )


def _takes_items(trainer: Trainer) -> bool:
    return takes_argument(inner_model(trainer.model), ITEMS)


def _is_divided(trainer: Trainer, kind: type[Trainer]) -> bool:
    """Return whether twice as many items make the loss of a short document smaller.

    SFTTrainer is known to divide, unless the user gave it a loss function. A model whose weights are not in memory
    cannot be probed, and is assumed to divide.
    """
    sft_trainer = sft_trainer_of(trainer)
    if sft_trainer is not None and computes_loss_as(kind, sft_trainer) and trainer.compute_loss_func is None:
        return True
    if not has_local_weights(trainer.model):
        return True
    if not _takes_items(trainer) and trainer.compute_loss_func is None and trainer.label_smoother is None:
        return False
    once, twice = (_probed_loss(trainer, kind, items) for items in (PROBED_TOKENS, 2 * PROBED_TOKENS))
    return abs(once - twice) > _MUCH * abs(once)


def _probed_loss(trainer: Trainer, kind: type[Trainer], items: int) -> float:
    """Return the trainer's own loss of a random document, in training mode; metrics and random state are restored."""
    model = trainer.model
    documents, others = random_documents(inner_model(model), [PROBED_TOKENS], seed=0)
    row = {"input_ids": documents[0], "labels": others[0]}  # a masked model refuses labels that repeat its tokens
    batch = send_to_device(PackingCollator()([row]), input_device(inner_model(model)))
    probed: Any = copy.copy(trainer)
    probed.__class__ = kind
    probed.model_accepts_loss_kwargs = trainer.model_accepts_loss_kwargs or _takes_items(trainer)
    probed.current_gradient_accumulation_steps = 1
    if hasattr(trainer, _METRICS):
        setattr(probed, _METRICS, copy.deepcopy(getattr(trainer, _METRICS)))
    was_training = model.training
    model.train()
    try:
        with torch.no_grad(), torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # gradient checkpointing warns without gradients
            torch.manual_seed(0)
            return float(probed.compute_loss(model, batch, num_items_in_batch=torch.tensor(items)))
    except Exception as error:  # compute_loss is the user's code
        raise PackingError(
            f"trainer: expected a compute_loss that takes a packed batch, {kind.__name__}.compute_loss raises "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        model.train(was_training)


@contextmanager
def weighted_log_probs(model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[None]:
    """Within the block, weight the log-probabilities of a fused head so that all documents weigh the same."""
    weights = weights_of(inputs, "sequence")[:, 1:]

    def weight(outputs: Any) -> None:
        found = getattr(outputs, "log_probs", None)
        if found is None or found.shape != weights.shape:
            raise PackingError(
                f"loss: expected log_probs of shape {tuple(weights.shape)} from SFTTrainer's fused head for "
                f"loss='sequence', this version of TRL returns {type(outputs).__name__}; loss='token' needs none"
            )
        outputs.log_probs = found * weights.to(found)

    with _seeing_outputs(model, weight):
        yield


@contextmanager
def summed_log_probs(model: nn.Module) -> Iterator[list[Tensor]]:
    """Within the block, append the sum of log-probabilities to the list at each call of a fused head."""
    sums: list[Tensor] = []

    def add(outputs: Any) -> None:
        if isinstance(found := getattr(outputs, "log_probs", None), Tensor):
            sums.append(found.detach().to(exact_type(found.device)).sum())

    with _seeing_outputs(model, add):
        yield sums


@contextmanager
def _seeing_outputs(model: nn.Module, see: Callable[[Any], None]) -> Iterator[None]:
    handle = model.register_forward_hook(lambda _, __, outputs: see(outputs))
    try:
        yield
    finally:
        handle.remove()
