"""Trainers, arguments and accelerators that cannot be served with planned batches."""

import os
from typing import Any

from accelerate import Accelerator
from transformers import Trainer

from hf_packing.collate import PackingCollator
from hf_packing.errors import PackingError
from hf_packing.training.losses import Loss
from hf_packing.training.ranks import parallelism_of
from hf_packing.training.trainer_loss import computes_loss_as, sft_trainer_of

_BATCH_METHODS = (
    "get_train_dataloader",
    "_get_train_sampler",
    "get_eval_dataloader",
    "get_test_dataloader",
    "get_batch_samples",
)
"""Methods that attach replaces: those of a subclass would no longer be called."""

_LOSS_METHODS = ("compute_loss", "evaluation_loop")
"""Methods that attach wraps. One that is set on the trainer itself would be called instead of the wrapper."""

_REPLACED_COLLATORS = (
    "default_data_collator",
    "DefaultDataCollator",
    "DataCollatorWithPadding",
    "DataCollatorWithFlattening",
    "DataCollatorForSeq2Seq",
    "DataCollatorForLanguageModeling",
)
"""Collators that only pad or flatten rows, and make labels from input_ids."""

_EXPECTED_ARGUMENTS = {
    "average_tokens_across_devices": (True, "without it the gradient depends on the number of processes"),
    "auto_find_batch_size": (False, "the batching decides how large batches are"),
    "train_sampling_strategy": ("random", "the batching decides which rows share a batch, and in what order"),
    "packing": (False, "rows are packed here; TRL's packing would hide documents in them"),
    "eval_packing": (False, "rows are packed here; TRL's packing would hide documents in them"),
}
"""Arguments that contradict planned batches unless they have these values, and why."""


def check_trainer(trainer: Any, loss: Loss) -> None:
    """Refuse a trainer whose batches cannot be planned.

    Raises:
        PackingError: not a Trainer; one with its own batches or a different loss; arguments that contradict planned
            batches.
    """
    if not isinstance(trainer, Trainer):
        raise PackingError(f"trainer: expected a Trainer or an SFTTrainer, got {type(trainer).__name__}")
    kind, sft_trainer = type(trainer), sft_trainer_of(trainer)
    own = [method for method in _BATCH_METHODS if getattr(kind, method) is not getattr(Trainer, method)]
    of_trl = any(base.__module__.startswith("trl.") for base in kind.__mro__)
    if own or (of_trl and sft_trainer is None):
        what = f"{kind.__name__}.{own[0]} makes its own" if own else f"{kind.__name__} makes its own batches or losses"
        raise PackingError(f"trainer: expected a Trainer or an SFTTrainer, whose batches can be planned; {what}")
    if loss == "sequence" and not computes_loss_as(kind, sft_trainer or Trainer):
        raise PackingError(f"loss: expected 'token', since {kind.__name__} has its own compute_loss, got {loss!r}")
    check_methods(trainer)
    _check_collator(trainer.data_collator)
    check_accelerator(trainer.accelerator)
    if trainer.get_tp_size() != getattr(parallelism_of(trainer.accelerator), "tp_size", 1):
        raise PackingError(
            f"tp_size: expected that of accelerate's parallelism_config, got {trainer.get_tp_size()} from the model or "
            "DeepSpeed, whose ranks would get different rows"
        )
    check_arguments(trainer, loss)


def check_methods(trainer: Trainer) -> None:
    """Refuse methods that are set on the trainer itself: they would be called instead of those of attach."""
    for name in (*_BATCH_METHODS, *_LOSS_METHODS):
        if name in vars(trainer):
            raise PackingError(
                f"{name}: expected the method of {type(trainer).__name__}, got {vars(trainer)[name]!r}; define it in a "
                "subclass instead"
            )


def check_arguments(trainer: Trainer, loss: Loss) -> None:
    """Refuse arguments that contradict planned batches or the loss."""
    args = trainer.args
    for name, (value, why) in _EXPECTED_ARGUMENTS.items():
        given = getattr(args, name, value)
        if given is not None and given != value:
            raise PackingError(f"{name}: expected {value!r}, since {why}; got {given!r}")
    if args.n_gpu > 1:
        raise PackingError(
            f"n_gpu: expected one process for each of the {args.n_gpu} GPUs, since nn.DataParallel would cut batches; "
            "start with `accelerate launch` or `torchrun`"
        )
    if loss == "sequence":
        for name, given in (
            ("label_smoothing_factor", args.label_smoothing_factor != 0),
            ("compute_loss_func", trainer.compute_loss_func is not None),
            ("use_liger_kernel", args.use_liger_kernel),
            ("loss_type", getattr(args, "loss_type", "nll") != "nll"),
        ):
            if given:
                raise PackingError(f"{name}: expected none, since it cannot be combined with loss='sequence'")


def check_accelerator(accelerator: Accelerator) -> None:
    """Refuse settings that would cut planned batches, or split documents across processes.

    Raises:
        PackingError: dispatch_batches, split_batches, context or sequence parallelism; processes that do not know of
            each other.
    """
    if (launched := int(os.environ.get("WORLD_SIZE", 1))) > accelerator.num_processes:
        raise PackingError(
            f"accelerator: expected one that knows of all {launched} launched processes, this one knows of "
            f"{accelerator.num_processes}, and each would train on all rows; on CPUs use Accelerator(cpu=True)"
        )
    if accelerator.dispatch_batches:
        raise PackingError(
            "dispatch_batches: expected False, got True: one process would read all batches, join them and cut them "
            "elsewhere"
        )
    if accelerator.split_batches:
        raise PackingError("split_batches: expected False, got True: planned batches would be split across processes")
    if not accelerator.gradient_state.sync_with_dataloader:
        raise PackingError(
            "sync_with_dataloader: expected True, got False: the last gradients of an epoch would be lost"
        )
    config = parallelism_of(accelerator)
    for size in ("cp_size", "sp_size"):
        if (ranks := getattr(config, size, 1) if config else 1) > 1:
            raise PackingError(
                f"{size}: expected 1, got {ranks}: documents are not isolated in rows that are split across processes"
            )


def _check_collator(collator: Any) -> None:
    """Refuse a collator that does more than make a batch of rows, since attach replaces it."""
    if getattr(collator, "mlm", False):
        raise PackingError(
            f"data_collator: expected tokens that are masked in the dataset, for example by with_transform, got "
            f"{type(collator).__name__} with mlm=True; attach replaces this collator"
        )
    name = getattr(collator, "__name__", type(collator).__name__)
    module = getattr(collator, "__module__", "") if hasattr(collator, "__name__") else type(collator).__module__
    if type(collator) is PackingCollator or (
        name in _REPLACED_COLLATORS and module.split(".")[0] in ("transformers", "trl")
    ):
        return
    raise PackingError(
        f"data_collator: expected one that PackingCollator can replace, such as {', '.join(_REPLACED_COLLATORS)}, got "
        f"{name}; attach replaces this collator, so do what it does to labels in the dataset"
    )
