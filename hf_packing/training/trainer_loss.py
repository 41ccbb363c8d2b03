"""Let a trainer compute its own loss of a packed micro-batch, weighted by its share of the optimizer step.

`losses` has the rule. DDP and FSDP take the mean of gradients over ranks, so a loss is multiplied by their number.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import Trainer

from hf_packing.batch.collate import is_tree_batch
from hf_packing.training.losses import Loss
from hf_packing.training.model_loss import WholeStep
from hf_packing.training.ranks import data_rank

Compute = Callable[..., Any]
"""A trainer's own compute_loss, given the inputs and num_items_in_batch: it returns a loss, or a loss and outputs."""


@dataclass(frozen=True)
class TrainerLoss:
    """The way in which a trainer computes its loss."""

    kind: type[Trainer]
    """The trainer's class before `attach` has changed it."""
    is_cross_entropy: bool
    """True if the loss is the one that the model or SFTTrainer computes, and not another one of the trainer's own."""
    sums_log_probs: bool
    """True if SFTTrainer computes it of log-probabilities, without logits."""

    def is_of_model(self, inputs: Mapping[str, Any], loss: Loss) -> bool:
        """Return whether a batch needs Trainer's own compute_loss, since SFTTrainer's has no logits to weight."""
        return is_tree_batch(inputs) or (loss == "sequence" and self.sums_log_probs)

    def of_micro_batch(
        self,
        trainer: Trainer,
        model: nn.Module,
        inputs: Mapping[str, Any],
        compute: Compute,
        loss: Loss,
        items: Tensor | None,
    ) -> tuple[Any, Tensor]:
        """Return what a trainer's compute_loss returns, with the contribution of a micro-batch to its optimizer step,
        and the number of items in the micro-batch.

        Args:
            trainer: the attached trainer.
            model: the model with its wrappers.
            inputs: a packed batch with labels, or a batch of trees.
            compute: the trainer's own compute_loss.
            loss: "token" or "sequence".
            items: the items of the optimizer step on all ranks; None for the mean over those of the batch.
        """
        step = WholeStep.of(model, inputs, loss)
        with _as_one_micro_batch(trainer), step.observed(model):
            found = compute(dict(step.inputs), num_items_in_batch=step.items)
        share = step.share_of(items)
        if items is not None:
            share = share * data_rank(trainer.accelerator).world_size
        return (found[0] * share, found[1]) if isinstance(found, tuple) else found * share, step.own


def sft_trainer_of(trainer: Trainer) -> type[Trainer] | None:
    """Return TRL's class SFTTrainer if the trainer is an instance of it, else None.

    The result is also None for a subclass that TRL itself defines, since such a class may make its own batches.
    """
    of_trl = next((kind for kind in type(trainer).__mro__ if kind.__module__.startswith("trl.")), None)
    return of_trl if of_trl is not None and of_trl.__name__ == "SFTTrainer" else None


def loss_of_trainer(trainer: Trainer) -> TrainerLoss:
    """Return the way in which a trainer computes its loss; call this before `attach` changes the trainer."""
    kind, sft_trainer, args = type(trainer), sft_trainer_of(trainer), trainer.args
    is_stock = trainer.compute_loss_func is None and trainer.label_smoother is None and not args.use_liger_kernel
    sums_log_probs = sft_trainer is not None and kind.compute_loss is sft_trainer.compute_loss
    is_cross_entropy = args.loss_type == "nll" if sums_log_probs else kind.compute_loss is Trainer.compute_loss
    return TrainerLoss(kind, is_stock and is_cross_entropy, sums_log_probs)


@contextmanager
def _as_one_micro_batch(trainer: Trainer) -> Iterator[None]:
    """Context manager: within the block, the trainer takes a micro-batch for the whole optimizer step on all ranks.

    The trainer divides by no other number of micro-batches afterwards; transformers before 5.19 did in any case.
    """
    args = trainer.args  # a compute_loss may divide by these steps itself
    before = args.gradient_accumulation_steps, args.average_tokens_across_devices
    trainer.current_gradient_accumulation_steps = 1
    args.gradient_accumulation_steps, args.average_tokens_across_devices = 1, False
    try:
        yield
    finally:
        args.gradient_accumulation_steps, args.average_tokens_across_devices = before


def subclass_with(methods: type[Trainer], kind: type[Trainer], prefix: str) -> type[Any]:
    """Return the class that a trainer of class `kind` has after attach, whose `methods` run first.

    Raises:
        TypeError: `kind` cannot be subclassed.
    """
    if kind is Trainer:
        return methods
    return type(f"{prefix}{kind.__name__}", (methods, kind), {"__module__": methods.__module__})
