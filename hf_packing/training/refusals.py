"""Trainers whose batches or losses are their own, and arguments that mean something else here."""

from typing import Any

from transformers import Trainer

from hf_packing.errors import PackingError
from hf_packing.training.losses import Loss
from hf_packing.training.ranks import check_accelerator

OWN_BATCHES = ("get_train_dataloader", "_get_train_sampler")


def is_sft_trainer(trainer: Trainer) -> bool:
    return any(kind.__name__ == "SFTTrainer" and kind.__module__.startswith("trl.") for kind in type(trainer).__mro__)


def makes_its_own_loss(trainer: Trainer) -> bool:
    return type(trainer).compute_loss is not Trainer.compute_loss


def check_trainer(trainer: Any, loss: Loss) -> Trainer:
    """Refuse what would not be right.

    Raises:
        PackingError: not a Trainer; one with other batches or another loss; arguments that contradict the batches.
    """
    if not isinstance(trainer, Trainer):
        raise PackingError(f"trainer: expected a Trainer or an SFTTrainer, got {type(trainer).__name__}")
    name, module = type(trainer).__name__, type(trainer).__module__
    own = [method for method in OWN_BATCHES if getattr(type(trainer), method) is not getattr(Trainer, method)]
    if own or (module.startswith("trl.") and not is_sft_trainer(trainer)):
        what = f"{name}.{own[0]} makes its own" if own else f"{name} trains on other rows than tokens and labels"
        raise PackingError(f"trainer: expected a Trainer or an SFTTrainer, whose batches can be planned; {what}")
    if loss == "sequence" and makes_its_own_loss(trainer) and not is_sft_trainer(trainer):
        raise PackingError(f"loss: expected 'token', since {name}.compute_loss makes its own, got {loss!r}")
    check_accelerator(trainer.accelerator)
    check_arguments(trainer, loss)
    return trainer


def check_arguments(trainer: Trainer, loss: Loss) -> None:
    args = trainer.args
    wanted = {
        "average_tokens_across_devices": (True, "without it the gradient depends on the number of processes"),
        "auto_find_batch_size": (False, "the batching decides how large batches are"),
        "train_sampling_strategy": ("random", "the batching decides which rows share a batch, and in what order"),
    }
    for name, (value, why) in wanted.items():
        if getattr(args, name) != value:
            raise PackingError(f"{name}: expected {value!r}, since {why}, got {getattr(args, name)!r}")
    if args.n_gpu > 1:
        raise PackingError(
            f"n_gpu: expected a process for each of {args.n_gpu} GPUs, since nn.DataParallel would cut batches; start "
            "it with `accelerate launch` or `torchrun`"
        )
    if loss == "sequence":
        for name, given in (
            ("label_smoothing_factor", args.label_smoothing_factor != 0),
            ("compute_loss_func", trainer.compute_loss_func is not None),
            ("loss_type", getattr(args, "loss_type", "nll") != "nll"),
        ):
            if given:
                raise PackingError(f"{name}: expected none, since loss='sequence' replaces it")
