"""The unit over which a trainer averages its loss: rows, labeled rows, labeled tokens or completion tokens.

Micro-batches of a token budget have different numbers of rows and tokens, so the mean loss of each has a weight: its
share of these units in the optimizer step. The unit is found by trial. The loss and the gradients of a few rows have to
be the means of those of two parts of them, weighted by the units in each. Gradients tell units apart where losses do
not: those of a model that knows nothing yet are about the same for all rows, and in half precision they are rounded.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from transformers import Trainer

from hf_packing.attention import Step, StepRunner, has_local_weights, inner_model, input_device
from hf_packing.columns import COMPLETION_MASK, IGNORED_LABEL, LABELS
from hf_packing.errors import PackingError
from hf_packing.training.losses import Batch
from hf_packing.training.models import models_of


class CheckedRows(NamedTuple):
    """Batches of a few rows with which the loss is checked."""

    whole: Batch
    """All rows."""
    parts: Sequence[tuple[Batch, int]]
    """One or two parts of them, each with its number of rows."""


def _labels(batch: Batch, _: int, begin: int = 0) -> Any:
    return (batch[LABELS][..., begin:] != IGNORED_LABEL).sum()


UNITS: dict[str, Callable[[Batch, int], Tensor]] = {
    "rows": lambda _, rows: torch.tensor(rows),
    "labeled rows": _labels,
    "labeled tokens": _labels,
    "labeled tokens but the first": partial(_labels, begin=1),
    "completion tokens": lambda batch, _: batch[COMPLETION_MASK][:, 1:].sum(),
    "tokens of chosen completions": lambda batch, _: batch[COMPLETION_MASK].chunk(2)[0][:, 1:].sum(),
}
"""The units of losses, and how they are counted in a collated batch of some rows of the dataset, an int64 scalar."""

_CLOSE = {torch.float64: (5e-7, 1e-5), torch.float32: (1e-5, 1e-3)}
"""Largest relative differences between equal losses, and between equal gradients, by the dtype of the weights. Parts of
a loss run in float32."""

_CLOSE_IN_HALF = 2e-2, 0.2

_FEW = 2**20
"""The most numbers in the gradients that are compared: those of the smallest parameters."""


def find_loss_unit(trainer: Trainer, checked: CheckedRows) -> str:
    """Return the unit over which a trainer averages its loss, a key of UNITS: the one that fits best.

    Args:
        trainer: a copy of the trainer without attach, whose models are patched.
        checked: batches of a few rows of the training dataset.

    Raises:
        PackingError: the loss is a mean of none of them, or cannot be computed.
    """
    model = trainer.model
    what = f"{type(trainer).__name__} with {type(inner_model(model)).__name__}"
    if not has_local_weights(model):
        raise PackingError(
            "model: expected weights in memory, since attach has to compute the loss of a few rows to find what the "
            "loss is the mean of; call attach before the model is sharded"
        )
    together, *steps = _steps(trainer, [checked.whole, *(batch for batch, _ in checked.parts)])
    losses = [each.loss for each in steps]
    if not all(map(math.isfinite, (together.loss, *losses))):
        raise PackingError(f"trainer: expected a finite loss, but the loss of {what} is {together.loss} on some rows")
    most, most_of_gradients = _CLOSE.get(next(inner_model(model).parameters()).dtype, _CLOSE_IN_HALF)
    most *= max(map(abs, (together.loss, *losses)))
    fitting: dict[str, float] = {}
    for unit in _units_of(checked.whole):
        counts = [float(UNITS[unit](*part)) for part in checked.parts]
        shares = [count / max(sum(counts), 1) for count in counts]
        mean = sum(share * loss for share, loss in zip(shares, losses, strict=True))
        apart = _apart(together, steps, shares)
        if len(counts) == 1 or (all(counts) and abs(mean - together.loss) <= most and apart <= most_of_gradients):
            fitting[unit] = apart
    if fitting:
        return min(fitting, key=fitting.__getitem__)
    raise PackingError(
        f"trainer: expected a loss that is a mean over {', '.join(UNITS)}, but that of {what} is {together.loss} on "
        f"some rows, and {' and '.join(map(str, losses))} on parts of them. Its gradient would depend on which rows "
        "share a micro-batch, as that of a loss which reads padding does. attach(trainer, None) keeps the trainer's "
        "batches, and takes out their padding"
    )


def _units_of(batch: Batch) -> list[str]:
    """Return the units that a batch may have, in the order in which they are tried: those of labels before rows."""
    labels = batch.get(LABELS)
    if isinstance(labels, Tensor):
        of_labels = ["labeled rows"] if labels.ndim == 1 else ["labeled tokens but the first", "labeled tokens"]
        return [*of_labels, "rows"]
    return ["rows", *(["completion tokens", "tokens of chosen completions"] if COMPLETION_MASK in batch else [])]


def _steps(trainer: Trainer, batches: Sequence[Batch]) -> list[Step]:
    """Return the losses that a trainer computes of batches, and the gradients of small parameters."""
    _, *others = models_of(trainer).values()
    runner = StepRunner(trainer.model, others, holders=[vars(trainer)], without=[trainer.train_dataset])
    with runner.undisturbed(training=True):
        total = 0
        for name, parameter in sorted(runner.parameters.items(), key=lambda each: each[1].numel()):
            total += parameter.numel()
            if total > max(_FEW, parameter.numel()):
                del runner.parameters[name]
        device = input_device(inner_model(trainer.model))
        return [
            runner.run(partial(trainer.compute_loss, trainer.model, send_to_device(dict(batch), device)))
            for batch in batches
        ]


def _apart(together: Step, parts: Sequence[Step], shares: Sequence[float]) -> float:
    """Return how far the gradients of a step are from the means of those of its parts, as a share of their size."""
    size = apart = 0.0
    for name, whole in together.gradients.items():
        mean = sum(
            share * step.gradients[name].double()
            for share, step in zip(shares, parts, strict=True)
            if name in step.gradients
        )
        size += float(whole.double().square().sum())
        apart += float((whole.double() - mean).square().sum())
    return math.sqrt(apart / size) if size else 0.0
