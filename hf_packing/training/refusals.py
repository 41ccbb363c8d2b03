"""Trainers whose batches or losses are their own, and arguments that mean something else here."""

from typing import Any

from transformers import Trainer

from hf_packing.collate import PackingCollator
from hf_packing.errors import PackingError
from hf_packing.training.losses import Loss
from hf_packing.training.ranks import check_accelerator, parallelism

OF_BATCHES = (
    "get_train_dataloader",
    "_get_train_sampler",
    "get_eval_dataloader",
    "get_test_dataloader",
    "get_batch_samples",
)
"""What attach replaces; a trainer's own would not be called any more."""

OF_LOSSES = ("compute_loss", "evaluation_loop")
"""What attach puts before a class's own, and one that is set on a trainer itself would be called instead of."""

REPLACED = (
    "default_data_collator",
    "DefaultDataCollator",
    "DataCollatorWithPadding",
    "DataCollatorWithFlattening",
    "DataCollatorForSeq2Seq",
    "DataCollatorForLanguageModeling",
)
"""Collators that only pad or flatten rows, and make labels of input_ids."""

EXPECTED = {
    "average_tokens_across_devices": (True, "without it the gradient depends on the number of processes"),
    "auto_find_batch_size": (False, "the batching decides how large batches are"),
    "train_sampling_strategy": ("random", "the batching decides which rows share a batch, and in what order"),
    "packing": (False, "rows are packed here; TRL's packing would hide documents in them"),
    "eval_packing": (False, "rows are packed here; TRL's packing would hide documents in them"),
}
"""Arguments that contradict planned batches unless they have these values."""


def sft_trainer_of(trainer: Trainer) -> type[Trainer] | None:
    """SFTTrainer, where the trainer is one or a subclass of it that is not TRL's."""
    of_trl = next((kind for kind in type(trainer).__mro__ if kind.__module__.startswith("trl.")), None)
    return of_trl if of_trl is not None and of_trl.__name__ == "SFTTrainer" else None


def has_loss_of(trainer: Trainer, kind: type[Trainer]) -> bool:
    """Whether the trainer's compute_loss is that of a class."""
    return type(trainer).compute_loss is kind.compute_loss


def check_trainer(trainer: Any, loss: Loss) -> Trainer:
    """Refuse what would not be right.

    Raises:
        PackingError: not a Trainer; one with other batches or another loss; arguments that contradict the batches.
    """
    if not isinstance(trainer, Trainer):
        raise PackingError(f"trainer: expected a Trainer or an SFTTrainer, got {type(trainer).__name__}")
    name, sft_trainer = type(trainer).__name__, sft_trainer_of(trainer)
    own = [method for method in OF_BATCHES if getattr(type(trainer), method) is not getattr(Trainer, method)]
    of_trl = any(kind.__module__.startswith("trl.") for kind in type(trainer).__mro__)
    if own or (of_trl and sft_trainer is None):
        what = f"{name}.{own[0]} makes its own" if own else f"{name} makes batches or losses of its own"
        raise PackingError(f"trainer: expected a Trainer or an SFTTrainer, whose batches can be planned; {what}")
    if loss == "sequence" and not has_loss_of(trainer, sft_trainer or Trainer):
        raise PackingError(f"loss: expected 'token', since {name}.compute_loss makes its own, got {loss!r}")
    check_methods(trainer)
    check_collator(trainer.data_collator)
    check_accelerator(trainer.accelerator)
    if trainer.get_tp_size() != getattr(parallelism(trainer.accelerator), "tp_size", 1):
        raise PackingError(
            f"tp_size: expected that of accelerate's parallelism_config, got {trainer.get_tp_size()} from the model or "
            "DeepSpeed, whose ranks would get different rows"
        )
    check_arguments(trainer, loss)
    return trainer


def check_methods(trainer: Trainer) -> None:
    """Refuse methods that are set on the trainer itself, which would be called instead of those of attach."""
    for name in (*OF_BATCHES, *OF_LOSSES):
        if name in vars(trainer):
            raise PackingError(
                f"{name}: expected the method of {type(trainer).__name__}, got {vars(trainer)[name]!r}; a subclass can "
                "have one of its own"
            )


def check_collator(collator: Any) -> None:
    """Refuse a collator that does more than to make a batch of rows, since it will not be called any more."""
    if getattr(collator, "mlm", False):
        raise PackingError(
            f"data_collator: expected tokens that are masked in the dataset, as by its with_transform, got "
            f"{type(collator).__name__} with mlm=True, which would not be called any more"
        )
    name = getattr(collator, "__name__", type(collator).__name__)
    module = getattr(collator, "__module__", "") if hasattr(collator, "__name__") else type(collator).__module__
    if type(collator) is PackingCollator or (name in REPLACED and module.split(".")[0] in ("transformers", "trl")):
        return
    raise PackingError(
        f"data_collator: expected one whose work PackingCollator does, such as {', '.join(REPLACED)}, got {name}, "
        "which would not be called any more; what it does to labels can be done in the dataset"
    )


def check_arguments(trainer: Trainer, loss: Loss) -> None:
    args = trainer.args
    for name, (value, why) in EXPECTED.items():
        given = getattr(args, name, value)
        if given is not None and given != value:
            raise PackingError(f"{name}: expected {value!r}, since {why}; got {given!r}")
    if args.n_gpu > 1:
        raise PackingError(
            f"n_gpu: expected a process for each of {args.n_gpu} GPUs, since nn.DataParallel would cut batches; start "
            "it with `accelerate launch` or `torchrun`"
        )
    if loss == "sequence":
        for name, given in (
            ("label_smoothing_factor", args.label_smoothing_factor != 0),
            ("compute_loss_func", trainer.compute_loss_func is not None),
            ("use_liger_kernel", args.use_liger_kernel),
            ("loss_type", getattr(args, "loss_type", "nll") != "nll"),
        ):
            if given:
                raise PackingError(f"{name}: expected none, since loss='sequence' makes another loss")
