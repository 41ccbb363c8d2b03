"""Who makes a trainer's loss, settled by attach, and again where that changes; what may not change is refused."""

from typing import TYPE_CHECKING, Any

from transformers import Trainer

from hf_packing.attention import has_local_weights, inner_model, patch_model
from hf_packing.errors import PackingError
from hf_packing.training.isolate import isolate
from hf_packing.training.loss_of_model import own_loss, refuse_unknown_loss
from hf_packing.training.ranks import check_accelerator
from hf_packing.training.refusals import check_arguments, check_methods
from hf_packing.training.rows_loader import collator_for
from hf_packing.training.trainer_loss import accept_items, is_divided

if TYPE_CHECKING:
    from hf_packing.training.planned_batches import PlannedBatches

OF_LOSS = ("compute_loss_func", "label_smoother", "loss_is_scaled_for_ga", "model_accepts_loss_kwargs")
"""What a trainer holds that decides its loss."""
OF_LOSS_IN_ARGUMENTS = ("label_smoothing_factor", "use_liger_kernel", "loss_type")


def loss_settings(trainer: Trainer) -> dict[str, Any]:
    """What decides a trainer's loss, by name."""
    held = {name: getattr(trainer, name, None) for name in OF_LOSS}
    return held | {name: getattr(trainer.args, name, None) for name in OF_LOSS_IN_ARGUMENTS}


def settle_loss(trainer: Trainer, planned: "PlannedBatches") -> None:
    """Decide who makes the loss, and whether it is divided by what is in a whole step of the optimiser."""
    planned.own_loss = own_loss(trainer.model)
    planned.loss_of_trainer, planned.divided = planned.trainer_has_own, True
    if not planned.loss_of_trainer:
        if planned.own_loss is not None or not has_local_weights(trainer.model):
            trainer.model_accepts_loss_kwargs = True
            return
        if planned.loss == "sequence":
            refuse_unknown_loss(trainer.model, planned.loss)
        planned.loss_of_trainer = True
    planned.divided = is_divided(trainer)
    if planned.divided:
        accept_items(trainer)


def check_settings(trainer: Trainer, planned: "PlannedBatches") -> None:
    """Refuse what no longer fits what attach has seen.

    Raises:
        PackingError: another collator, method or setting that decides the loss.
    """
    if trainer.data_collator is not planned.collator:
        raise PackingError(
            f"data_collator: expected the one that attach has set, got {type(trainer.data_collator).__name__}, "
            "which would not keep the documents of planned batches apart"
        )
    check_methods(trainer)
    now = loss_settings(trainer)
    for name, before in planned.loss_settings.items():
        if now[name] is not before and now[name] != before:
            raise PackingError(
                f"{name}: expected the one that the trainer had when attach was called, {before!r}, got {now[name]!r}; "
                "set it before attach"
            )


def check_settings_of_training(trainer: Trainer, planned: "PlannedBatches") -> None:
    """As `check_settings`, with what counts for training alone.

    Raises:
        PackingError: also for arguments that contradict planned batches, and for a model that attach has not seen and
            that model_init has not made.
    """
    check_settings(trainer, planned)
    check_arguments(trainer, planned.loss)
    check_accelerator(trainer.accelerator)
    if trainer.model_init is None and planned.trained() is not inner_model(trainer.model):
        raise PackingError(
            f"model: expected the one that the trainer had when attach was called, got another "
            f"{type(inner_model(trainer.model)).__name__}, which the trainer's optimiser need not know; attach to a "
            "Trainer that is made with it"
        )


def check_accumulation(trainer: Trainer, planned: "PlannedBatches") -> None:
    """Losses are divided by what is in a step of the optimiser, and steps were planned when train() was called.

    Raises:
        PackingError: a callback, say, has changed how many micro-batches a step has.
    """
    if (accumulated := trainer.args.gradient_accumulation_steps) != planned.accumulation:
        raise PackingError(
            f"gradient_accumulation_steps: expected {planned.accumulation}, as when train() was called, got "
            f"{accumulated}; change it before train()"
        )


def settle_model(trainer: Trainer, planned: "PlannedBatches") -> None:
    """Patch the trainer's model, and find out who makes its loss, where it is another one by now or makes another.

    Raises:
        PackingError: its loss cannot be served.
        ModelNotSupportedError: it cannot be shown to keep documents apart.
    """
    if planned.settled_for() is not inner_model(trainer.model):
        isolate(trainer.model, trainer.accelerator, planned.prove)
        planned.collator = trainer.data_collator = collator_for(trainer.model)
    else:
        patch_model(trainer.model, prove=planned.prove)
        if own_loss(trainer.model) == planned.own_loss:
            return
    settle_loss(trainer, planned)
    planned.remember(trainer)
