"""Let a trainer compute its own loss of a packed micro-batch, as a part of the loss of the optimizer step.

n = items of the optimizer step (labels, or documents), A = its micro-batches on each rank, W = ranks. The trainer's own
compute_loss runs as if the micro-batch were the whole step, but with n / (A W) items, and its result is divided by A.
A loss a / n + b then becomes a W / n + b / A, of which DDP and FSDP take the mean over ranks: what the trainer divides
by n is exact, and what it does not divide is a mean over micro-batches and ranks. A loss that does not depend on n at
all is weighted by the micro-batch's share of items. SFTTrainer computes its loss without logits: the model's output
layer, called the fused LM head, returns `log_probs` [1, tokens - 1], whose negative sum is divided by n.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from transformers import Trainer

from hf_packing.batch.collate import is_tree_batch
from hf_packing.columns import LABELS
from hf_packing.errors import PackingError
from hf_packing.training.head import called_on_outputs, is_compiled, observed_logits
from hf_packing.training.losses import ITEMS, Loss, exact_type, items_in, weights_of
from hf_packing.training.model_loss import (
    MUCH,
    check_is_weighted,
    only_cross_entropy,
    weighting_of,
    with_a_label,
    with_labels,
)
from hf_packing.training.ranks import data_rank
from hf_packing.training.token_losses import TokenLosses

_METRICS = ("_metrics", "_total_train_tokens")
"""Attributes in which SFTTrainer collects metrics of batches."""

_SETTINGS = (
    *("compute_loss_func", "label_smoother", "loss_is_scaled_for_ga", "model_accepts_loss_kwargs"),
    *("label_smoothing_factor", "use_liger_kernel", "loss_type"),
)
"""Attributes of a trainer or of its arguments that decide how it computes its loss."""

Compute = Callable[..., Any]
"""A trainer's own compute_loss, given the inputs and num_items_in_batch: it returns a loss, or a loss and outputs."""


@dataclass
class TrainerLoss:
    """The way in which a trainer computes its loss."""

    kind: type[Trainer]
    """The trainer's class before `attach` has changed it."""
    is_its_own: bool
    """True if the trainer computes the loss itself instead of taking the loss from the model's outputs."""
    sums_log_probs: bool
    """True if the loss is the negative sum of the log-probabilities that SFTTrainer's fused LM head returns."""
    is_divided: bool | None = None
    """True if the loss depends on num_items_in_batch; None until the first micro-batch has shown it."""
    micro_batches: int = 1
    """The number of micro-batches of each rank in the current optimizer step."""

    def of_micro_batch(
        self,
        trainer: Trainer,
        model: nn.Module,
        inputs: Mapping[str, Any],
        compute: Compute,
        loss: Loss,
        items: Tensor | None,
        token_losses: TokenLosses | None,
    ) -> Any:
        """Return what a trainer's compute_loss returns, with the contribution of a micro-batch to its optimizer step.

        Args:
            trainer: the attached trainer.
            model: the model with its wrappers.
            inputs: a packed batch with labels, or a batch of trees.
            compute: the trainer's own compute_loss.
            loss: "token" or "sequence".
            items: the items of the optimizer step on all ranks; None for a batch outside of train().
            token_losses: where the cross-entropies of all labels are kept; None to keep none.
        """
        own, micro_batches, ranks = items_in(inputs, loss), 1, 1
        if items is not None:
            micro_batches, ranks = self.micro_batches, data_rank(trainer.accelerator).world_size
        items = (own.clamp(min=1) if items is None else items).to(exact_type(own.device))
        given = items / (micro_batches * ranks)
        if sft_trainer_of(trainer) is not None:
            given = given.clamp(min=1)  # as SFTTrainer would do
        factor = given * ranks / items
        sums_log_probs = self.sums_log_probs and not is_tree_batch(inputs)
        weighting = None if sums_log_probs else weighting_of(model, inputs, loss, given)
        weights = weights_of(inputs, loss) if sums_log_probs and loss == "sequence" else None
        given_inputs = with_labels(inputs)

        def run(inputs: dict[str, Any], given: Any) -> Any:
            with (
                _as_one_micro_batch(trainer),
                summed_log_probs(model, weights, token_losses) as log_probs,
                observed_logits(model, inputs[LABELS].shape, weighting) as observed,
            ):
                found = compute(dict(inputs), num_items_in_batch=given.item() if _casts_inputs(model) else given)
            if weighting is not None:
                check_is_weighted(model, len(observed.sums))
            if weights is not None and not log_probs:
                raise PackingError(
                    "loss: expected log_probs of all tokens from SFTTrainer's fused LM head for loss='sequence', but "
                    "the model returned none. This version of TRL may not be supported; use loss='token'"
                )
            return found

        if weighting is not None or self.is_divided:
            found = run(given_inputs, given)
        elif self.is_divided is None:
            found, self.is_divided = _run_and_ask(run, given_inputs, with_a_label(given_inputs, own), given, trainer)
            if not self.is_divided and getattr(trainer, "loss_is_scaled_for_ga", None):
                raise PackingError(
                    f"loss_is_scaled_for_ga: expected None or False for {self.kind.__name__}, whose loss does not "
                    f"depend on {ITEMS}, got True; attach weights the loss of each micro-batch by its labels. Divide "
                    f"the loss by {ITEMS}, or by nothing, and leave loss_is_scaled_for_ga alone"
                )
        else:
            found = run(with_a_label(given_inputs, own), given)
        if weighting is None and not self.is_divided:
            factor = own * ranks / items
        return (found[0] * factor, found[1]) if isinstance(found, tuple) else found * factor

    def of_evaluation(
        self, trainer: Trainer, model: nn.Module, inputs: Mapping[str, Any], compute: Compute
    ) -> tuple[Any, Tensor, Tensor]:
        """Return what compute_loss returns in an evaluation, the sum of the losses of labels, and their number.

        The losses are the cross-entropy alone, if the model computes one of its logits, without losses of routers and
        whatever else it adds; a trainer with a compute_loss of its own may add more. The arguments are those of
        `of_micro_batch`.
        """
        tokens = items_in(inputs, "token")
        items = tokens.clamp(min=1)
        weighting = weighting_of(model, inputs, "token", items)
        given_inputs = with_labels(inputs)
        with (
            _as_one_micro_batch(trainer),
            summed_log_probs(model) as log_probs,
            observed_logits(model, given_inputs[LABELS].shape, weighting) as observed,
            only_cross_entropy(model, observed, items),
        ):
            found = compute(given_inputs, num_items_in_batch=items)
        loss = found[0] if isinstance(found, tuple) else found
        if self.sums_log_probs and log_probs:
            total = -log_probs[0]
        elif not self.is_its_own and len(observed.sums) == 1:
            total = observed.sums[0]
        else:
            total = torch.where(tokens > 0, loss * tokens, torch.zeros_like(loss))
        loss = total / items
        return ((loss, found[1]) if isinstance(found, tuple) else loss), total, tokens


def sft_trainer_of(trainer: Trainer) -> type[Trainer] | None:
    """Return TRL's class SFTTrainer if the trainer is an instance of it, else None.

    The result is also None for a subclass that TRL itself defines, since such a class may make its own batches.
    """
    of_trl = next((kind for kind in type(trainer).__mro__ if kind.__module__.startswith("trl.")), None)
    return of_trl if of_trl is not None and of_trl.__name__ == "SFTTrainer" else None


def loss_of_trainer(trainer: Trainer) -> TrainerLoss:
    """Return the way in which a trainer computes its loss; call this before `attach` changes the trainer."""
    kind, sft_trainer = type(trainer), sft_trainer_of(trainer)
    replaced = trainer.compute_loss_func is not None or trainer.label_smoother is not None
    return TrainerLoss(
        kind=kind,
        is_its_own=kind.compute_loss is not Trainer.compute_loss or replaced or bool(trainer.args.use_liger_kernel),
        sums_log_probs=sft_trainer is not None
        and kind.compute_loss is sft_trainer.compute_loss
        and trainer.args.loss_type == "nll"
        and not replaced,
    )


def loss_settings(trainer: Trainer) -> dict[str, Any]:
    """Return what decides how the trainer computes its loss, by name."""
    return {name: getattr(trainer, name, getattr(trainer.args, name, None)) for name in _SETTINGS}


def refuse_changed_settings(before: dict[str, Any], trainer: Trainer) -> None:
    """Raise PackingError if a setting that decides the loss is not as it was when `loss_settings` returned `before`."""
    now = loss_settings(trainer)
    for name, value in before.items():
        if now[name] is not value and now[name] != value:
            raise PackingError(
                f"{name}: expected {value!r}, the value when attach was called, got {now[name]!r}; set the value "
                "before you call attach"
            )


def _run_and_ask(
    run: Callable[[dict[str, Any], Tensor], Any],
    inputs: dict[str, Any],
    labeled: dict[str, Any],
    items: Tensor,
    trainer: Any,
) -> tuple[Any, bool]:
    """Run compute_loss, and find out whether its loss depends on the number of items that it is given.

    Usually the gradient with respect to that number tells. If there is none, since the loss does not depend on the
    number or since compute_loss makes a float of it, compute_loss runs once more with another number, with the same
    randomness, and without an entry in the trainer's metrics. All ranks do the same.

    Args:
        labeled: the inputs, with at least one label.
    """
    device, model = items.device, trainer.model_wrapped
    cuda = [device] if device.type == "cuda" else []
    states = torch.get_rng_state(), *(torch.cuda.get_rng_state(each) for each in cuda)
    # torch.compile would compile once more for a number with a gradient, and keeps no graph to ask twice
    has_gradient = not _casts_inputs(model) and not any(map(is_compiled, model.modules()))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Converting a tensor with requires_grad=True")  # compute_loss may do so
        found = run(inputs, items.requires_grad_(has_gradient))
    loss = _loss_in(found)
    if has_gradient and loss.requires_grad:
        (gradient,) = torch.autograd.grad(loss, items, retain_graph=True, allow_unused=True)
        if gradient is not None:
            return found, True
    metrics = {name: copy.deepcopy(vars(trainer)[name]) for name in _METRICS if name in vars(trainer)}
    with torch.random.fork_rng(devices=cuda):
        torch.set_rng_state(states[0])
        for each, state in zip(cuda, states[1:], strict=True):
            torch.cuda.set_rng_state(state, each)
        again = run(labeled, 2 * items.detach())
    vars(trainer).update(metrics)
    differs = ((_loss_in(again) - loss).detach().abs() > MUCH * loss.detach().abs()).to(torch.int32)
    is_divided = bool(trainer.accelerator.reduce(differs, reduction="sum"))  # a loss of no labels may be no number
    return found if is_divided else again, is_divided


def _loss_in(found: Any) -> Tensor:
    loss: Tensor = found[0] if isinstance(found, tuple) else found
    return loss


def _casts_inputs(model: nn.Module) -> bool:
    """Return whether wrappers of a model may cast its inputs to 16 bits, as FSDP's mixed precision does."""
    return any(isinstance(module, (FSDPModule, FullyShardedDataParallel)) for module in model.modules())


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


@contextmanager
def summed_log_probs(
    model: nn.Module, weights: Tensor | None = None, token_losses: TokenLosses | None = None
) -> Iterator[list[Tensor]]:
    """Context manager: yield a list, to which every forward pass of SFTTrainer's fused LM head appends a sum.

    For other models, which return no `log_probs`, the list stays empty.

    Args:
        weights: float [1, tokens], by which log_probs are multiplied afterwards; None to leave them as they are.
        token_losses: where the losses of all labels are kept; None to keep none.
    """
    sums: list[Tensor] = []

    def see(outputs: Any) -> None:
        if not isinstance(found := getattr(outputs, "log_probs", None), Tensor):
            return
        sums.append(found.detach().to(exact_type(found.device)).sum())
        if token_losses is not None:
            token_losses.put(-found[0], torch.arange(found.shape[1]))
        if weights is not None:
            outputs.log_probs = found * weights[:, 1:].to(found)

    with called_on_outputs(model, see):
        yield sums


def subclass_with(methods: type[Trainer], kind: type[Trainer], prefix: str) -> type[Any]:
    """Return the class that a trainer of class `kind` has after attach, whose `methods` run first.

    Raises:
        TypeError: `kind` cannot be subclassed.
    """
    if kind is Trainer:
        return methods
    return type(f"{prefix}{kind.__name__}", (methods, kind), {"__module__": methods.__module__})
