"""Decide whether attach or the trainer computes the loss, and find out whether the loss is divided correctly.

If a trainer computes its own loss, a test finds out whether the trainer divides that loss by num_items_in_batch.
SFTTrainer computes its loss without logits: the model's output layer, called the fused LM head, returns `log_probs`
[1, tokens - 1]. The loss is the negative sum of `log_probs`, divided by num_items_in_batch.
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
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from hf_packing.attention import (
    has_local_weights,
    inner_model,
    input_device,
    predicts_tokens,
    random_documents,
    takes_argument,
    unpatched_on_error,
)
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
"""If doubling num_items_in_batch changes a loss by more than this share, the loss counts as divided by that number."""


_METRICS = "_metrics"
"""The attribute in which SFTTrainer collects metrics of batches."""


_PICTURES = {"image", "images", "pixel_values"}
"""Columns of pictures, as collators of TRL and processors of transformers name them."""


_ON_TRAINER = ("compute_loss_func", "label_smoother", "loss_is_scaled_for_ga", "model_accepts_loss_kwargs")


_IN_ARGUMENTS = ("label_smoothing_factor", "use_liger_kernel", "loss_type")


@dataclass(frozen=True)
class TrainerLoss:
    """The way in which a trainer computed its loss before `attach` changed the trainer."""

    kind: type[Trainer]
    """The trainer's class."""
    is_its_own: bool
    """True if the trainer computes the loss itself instead of taking the loss from the model's outputs."""
    sums_log_probs: bool
    """True if the loss is the negative sum of the log-probabilities that SFTTrainer's fused LM head returns."""
    scaled_for_accumulation: bool
    """True if the trainer's loss_is_scaled_for_ga says that the loss is already scaled for gradient accumulation."""


@dataclass(frozen=True)
class SettledLoss:
    """The decision whether attach or the trainer computes the loss, made once for each model of a trainer."""

    model: Callable[[], PreTrainedModel | None]
    """A function that returns the model, or None if the model no longer exists."""
    of_model: ModelLoss | None
    """The kind of the model's own loss, as `loss_of_model` returned it."""
    by_trainer: bool
    """True if the trainer's own compute_loss is used; attach then only provides num_items_in_batch."""
    divided: bool
    """True if the loss is divided by the number of tokens or documents in a whole optimizer step."""


def sft_trainer_of(trainer: Trainer) -> type[Trainer] | None:
    """Return TRL's class SFTTrainer if the trainer is an instance of it, else None.

    The result is also None for a subclass that TRL itself defines, since such a class may make its own batches.
    """
    of_trl = next((kind for kind in type(trainer).__mro__ if kind.__module__.startswith("trl.")), None)
    return of_trl if of_trl is not None and of_trl.__name__ == "SFTTrainer" else None


def computes_loss_as(kind: type[Trainer], other: type[Trainer]) -> bool:
    """Return whether two trainer classes have the same method compute_loss."""
    return kind.compute_loss is other.compute_loss


def loss_of_trainer(trainer: Trainer) -> TrainerLoss:
    """Return the way in which a trainer computes its loss; call this before `attach` changes the trainer."""
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
    """Return the trainer's attributes and arguments that decide how the trainer computes its loss, by name."""
    on_trainer = {name: getattr(trainer, name, None) for name in _ON_TRAINER}
    return on_trainer | {name: getattr(trainer.args, name, None) for name in _IN_ARGUMENTS}


def refuse_changed_settings(before: dict[str, Any], trainer: Trainer) -> None:
    """Raise PackingError if a setting that decides the loss is not as it was when `loss_settings` returned `before`."""
    now = loss_settings(trainer)
    for name, value in before.items():
        if now[name] is not value and now[name] != value:
            raise PackingError(
                f"{name}: expected {value!r}, the value when attach was called, got {now[name]!r}; set the value "
                "before you call attach"
            )


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


def settle_loss(trainer: Trainer, own: TrainerLoss, loss: Loss) -> SettledLoss:
    """Decide whether attach or the trainer computes the loss, and return the decision.

    If the loss is divided by num_items_in_batch, the function may set trainer.model_accepts_loss_kwargs to True. Then
    the trainer passes num_items_in_batch on, and does not divide the loss by gradient_accumulation_steps too.

    Args:
        trainer: a trainer whose model is patched.
        own: the way in which the trainer computed its loss before attach was called.
        loss: "token" or "sequence".

    Raises:
        PackingError: `loss` is "sequence", and the model's own loss is not the cross-entropy of its logits.
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
    """Refuse a loss that is not divided by num_items_in_batch, unless an optimizer step is a single micro-batch.

    Raises:
        PackingError: the loss is not divided by num_items_in_batch, and a step has more than one micro-batch.
    """
    micro_batches = trainer.args.gradient_accumulation_steps * data_rank(trainer.accelerator).world_size
    if micro_batches > 1 and not (settled.divided or own.scaled_for_accumulation):
        raise PackingError(
            f"trainer: expected a loss that is divided by {ITEMS}, but {own.kind.__name__} with "
            f"{type(inner_model(trainer.model)).__name__} does not divide the loss. The gradient would depend on how a "
            f"step is split into {micro_batches} micro-batches; divide the loss, or train on one process with "
            "gradient_accumulation_steps=1"
        )


def _takes_items(trainer: Trainer) -> bool:
    return takes_argument(inner_model(trainer.model), ITEMS)


def _is_divided(trainer: Trainer, kind: type[Trainer]) -> bool:
    """Return whether the trainer's loss is divided by num_items_in_batch.

    The test computes the loss of a short document for two values of num_items_in_batch. No test is needed for
    SFTTrainer, which divides its loss, unless the user set compute_loss_func. No test is possible if the model's
    weights are not in memory; the loss then counts as divided.
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
    """Return the trainer's own loss on a random document, in training mode, without effect on metrics and random state.

    Args:
        trainer: the trainer, whose model is patched.
        kind: the trainer's class before attach.
        items: the value of num_items_in_batch.
    """
    model = trainer.model
    documents, others = random_documents(inner_model(model), [PROBED_TOKENS], seed=0)
    row = {"input_ids": documents[0], "labels": others[0]}  # a masked model refuses labels that repeat tokens
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
            warnings.simplefilter("ignore")  # gradient checkpointing warns if gradients are off
            torch.manual_seed(0)
            return float(probed.compute_loss(model, batch, num_items_in_batch=torch.tensor(items)))
    except Exception as error:  # compute_loss may be the user's code
        raise PackingError(
            f"trainer: expected a compute_loss that takes a packed batch, but {kind.__name__}.compute_loss "
            f"raises {type(error).__name__}: {error}"
        ) from error
    finally:
        model.train(was_training)


@contextmanager
def weighted_log_probs(model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[None]:
    """Context manager: within the block, weight the log_probs of SFTTrainer's fused LM head for loss="sequence".

    With these weights, all documents in `inputs`, a packed batch, count equally in the loss.
    """
    weights = weights_of(inputs, "sequence")[:, 1:]

    def weight(outputs: Any) -> None:
        found = getattr(outputs, "log_probs", None)
        if found is None or found.shape != weights.shape:
            raise PackingError(
                f"loss: expected log_probs of shape {tuple(weights.shape)} from SFTTrainer's fused LM head for "
                f"loss='sequence', but the model returned {type(outputs).__name__} without such log_probs. This "
                "version of TRL may not be supported; use loss='token'"
            )
        outputs.log_probs = found * weights.to(found)

    with _seeing_outputs(model, weight):
        yield


@contextmanager
def summed_log_probs(model: nn.Module) -> Iterator[list[Tensor]]:
    """Context manager: yield a list, to which every forward pass of the model appends the sum of its `log_probs`.

    Only SFTTrainer's fused LM head returns `log_probs`; for other models, the list stays empty.
    """
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


@contextmanager
def as_it_was_on_error(trainer: Trainer) -> Iterator[None]:
    """Context manager: if the block raises an error, unpatch the trainer's model and restore the trainer's settings."""
    accepts_items = trainer.model_accepts_loss_kwargs
    try:
        with unpatched_on_error(trainer.model):
            yield
    except Exception:
        trainer.model_accepts_loss_kwargs = accepts_items
        raise


def subclass_with(methods: type[Trainer], kind: type[Trainer], prefix: str) -> type[Any]:
    """Return the class that a trainer of class `kind` has after attach; the result is `methods` if `kind` is Trainer.

    Args:
        methods: a subclass of Trainer, whose methods run first, and call the methods of `kind` through super().
        kind: the class of the trainer.
        prefix: text before the name of `kind`, for the name of the new class.

    Raises:
        TypeError: `kind` cannot be subclassed.
    """
    if kind is Trainer:
        return methods
    return type(f"{prefix}{kind.__name__}", (methods, kind), {"__module__": methods.__module__})
