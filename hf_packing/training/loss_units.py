"""Say what a trainer's loss is the mean of: rows, labeled rows, labeled tokens or completion tokens.

Micro-batches of a token budget have different numbers of rows and tokens. To weight the mean loss of each micro-batch
correctly, one has to know the unit over which the loss is averaged. For trainers of TRL and heads of transformers, it
stands in a table; for other losses, the user names it. One check follows: the loss of a few rows has to be the mean of
the losses of two parts of them, weighted by the units in each.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from transformers import Trainer

from hf_packing.attention import has_local_weights, in_mode, inner_model, input_device
from hf_packing.columns import COMPLETION_MASK, IGNORED_LABEL, LABELS
from hf_packing.errors import PackingError
from hf_packing.training.checks import classes_of_trl
from hf_packing.training.losses import Batch

Collate = Callable[[list[Any]], Any]


def collate_rows(collate: Collate, rows: Sequence[Any]) -> Any:
    """Return the batch that a collator makes of some rows. It gets copies, since some collators change their rows."""
    return collate([dict(row) if isinstance(row, Mapping) else row for row in rows])


def _labels(batch: Batch, begin: int = 0) -> Tensor:
    labels: Tensor = batch[LABELS]
    return (labels[..., begin:] != IGNORED_LABEL).sum()


UNITS: dict[str, Callable[[Batch, int], Tensor]] = {
    "rows": lambda _, rows: torch.tensor(rows),
    "labeled rows": lambda batch, _: _labels(batch),
    "labeled tokens": lambda batch, _: _labels(batch),
    "labeled tokens but the first": lambda batch, _: _labels(batch, begin=1),
    "completion tokens": lambda batch, _: batch[COMPLETION_MASK][:, 1:].sum(),
    "tokens of chosen completions": lambda batch, _: batch[COMPLETION_MASK].chunk(2)[0][:, 1:].sum(),
}
"""The units of losses, and how they are counted in a collated batch of some rows of the dataset, an int64 scalar."""

_OF_HEADS = {
    "ForSequenceClassification": "labeled rows",
    "ForMultipleChoice": "labeled rows",
    "ForNextSentencePrediction": "labeled rows",
    "ForTokenClassification": "labeled tokens",
    "ForCausalLM": "labeled tokens but the first",
    "ForConditionalGeneration": "labeled tokens but the first",
}
"""The units of transformers' own losses, by a part of the name of the model's class."""

_OF_PAIRS = {
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down"),
    *("discopop", "sigmoid_norm"),
}
"""Losses of DPOTrainer that are means over pairs, each of which is a row."""

_CLOSE = {torch.float64: 5e-7, torch.float32: 1e-5}
"""Largest relative difference between equal losses, by the dtype of the weights. Parts of a loss run in float32."""

_CLOSE_IN_HALF_PRECISION = 2e-2

_WAY_OUT = "attach(trainer, None) keeps the trainer's batches, and takes out their padding"


def find_loss_unit(
    trainer: Trainer,
    kind: type[Trainer],
    parts: tuple[Sequence[Any], Sequence[Any]],
    collate: Collate,
    named: str | None,
) -> str:
    """Return the unit over which a trainer averages its loss, a key of UNITS, once it has passed the check.

    Args:
        trainer: a trainer whose models are patched.
        kind: the trainer's class without attach.
        parts: rows of the training dataset in two parts, of which the first has at least one.
        collate: the trainer's collator.
        named: the unit that the user has named; None if there is none.
    """
    what = f"{kind.__name__} with {type(inner_model(trainer.model)).__name__}"
    if not has_local_weights(trainer.model):
        raise PackingError(
            "model: expected weights in memory, since attach has to compute the loss of a few rows to check what the "
            "loss is the mean of; call attach before the model is sharded"
        )
    batches = [dict(collate_rows(collate, part)) for part in ([*parts[0], *parts[1]], *parts) if part]
    known = _known_unit(trainer, kind, batches[0])
    unit = known or named
    if unit is None or (named or unit) != unit:
        raise PackingError(
            f"loss_unit: expected {known or 'one of ' + ', '.join(UNITS)}, what the loss of {what} is a mean of, got "
            f"{named}. If the loss is none of these means, {_WAY_OUT}"
        )
    together, *losses = (loss_of_batch(trainer, kind, batch) for batch in batches)
    counts = [float(UNITS[unit](batch, len(part))) for batch, part in zip(batches[1:], parts, strict=False)]
    if len(counts) < 2 or not all(counts):  # nothing to compare
        return unit
    mean = sum(count * loss for count, loss in zip(counts, losses, strict=True)) / sum(counts)
    difference = abs(mean - together) / max(abs(together), *map(abs, losses), torch.finfo(torch.float32).tiny)
    dtype = next(inner_model(trainer.model).parameters()).dtype
    if not difference <= _CLOSE.get(dtype, _CLOSE_IN_HALF_PRECISION):  # also if it is no number
        raise PackingError(
            f"trainer: expected a finite loss that is a mean over {unit}, but the loss of {what} is {together} on some "
            f"rows, and {losses[0]} and {losses[1]} on two parts of them (relative difference to the weighted mean: "
            f"{difference:.0e}), so its gradient depends on which rows share a micro-batch. {_WAY_OUT}"
        )
    return unit


def _known_unit(trainer: Any, kind: type[Trainer], batch: Batch) -> str | None:
    """Return the unit of a loss of TRL or transformers, or None for another loss."""
    own = [base for base in kind.__mro__ if base.__module__.split(".")[0] not in ("builtins", "transformers", "trl")]
    if trainer.compute_loss_func is not None or any("loss" in name for base in own for name in vars(base)):
        return None
    of_trl = {base.__name__ for base in classes_of_trl(kind)}
    if "RewardTrainer" in of_trl:
        return "rows"
    if "DPOTrainer" in of_trl:
        losses = set(trainer.loss_types)
        return "tokens of chosen completions" if losses == {"sft"} else "rows" if losses <= _OF_PAIRS else None
    model = type(inner_model(trainer.model))
    if of_trl - {"SFTTrainer", "_BaseTrainer"} or not model.forward.__module__.startswith("transformers."):
        return None
    heads = (unit for part, unit in _OF_HEADS.items() for base in model.__mro__ if part in base.__name__)
    unit, labels = next(heads, None), batch.get(LABELS)
    if unit == "labeled rows" and isinstance(labels, Tensor) and labels.is_floating_point():
        return "rows"  # regression, or several labels for each row
    return unit


def loss_of_batch(trainer: Trainer, kind: type[Trainer], batch: Batch) -> float:
    """Return the loss of a batch that a trainer of class `kind` computes, with no effect on metrics and randomness."""
    asked: Any = copy.copy(trainer)
    asked.__class__ = kind
    if hasattr(trainer, "_metrics"):  # in which trainers of TRL collect metrics
        asked._metrics = copy.deepcopy(asked._metrics)
    inputs = send_to_device(dict(batch), input_device(inner_model(trainer.model)))
    with in_mode(trainer.model, training=False), torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        return float(asked.compute_loss(trainer.model, inputs))
