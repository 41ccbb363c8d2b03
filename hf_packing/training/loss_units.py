"""Say what a trainer's loss is the mean of: rows, labeled rows, labeled tokens or completion tokens.

Micro-batches of a token budget have different numbers of rows and tokens. To weight the mean loss of each micro-batch
correctly, one has to know the unit over which the loss is averaged. For trainers of TRL and heads of transformers, it
stands in a table; for other losses, the user names it. One check follows: the loss of a few rows has to be the mean of
the losses of two parts of them, weighted by the units in each.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from transformers import Trainer

from hf_packing.attention import has_local_weights, in_mode, inner_model, input_device
from hf_packing.columns import COMPLETION_MASK, IGNORED_LABEL, LABELS
from hf_packing.errors import PackingError

Batch = Mapping[str, Any]
Collate = Callable[[list[Any]], Any]


def collate_rows(collate: Collate, rows: Sequence[Any]) -> Any:
    """Return the batch that a collator makes of some rows. It gets copies, since some collators change their rows."""
    return collate([dict(row) if isinstance(row, Mapping) else row for row in rows])


class _Unit(NamedTuple):
    """A unit that is counted in a column of integers with one of these numbers of axes."""

    column: str
    axes: tuple[int, ...]
    number_in: Callable[[Tensor], Tensor]


def _trained(labels: Tensor) -> Tensor:
    return (labels != IGNORED_LABEL).sum()


UNITS: dict[str, _Unit | None] = {
    "rows": None,
    "labeled rows": _Unit(LABELS, (1, 2), _trained),
    "labeled tokens": _Unit(LABELS, (2,), _trained),
    "labeled tokens but the first": _Unit(LABELS, (2,), lambda labels: _trained(labels[:, 1:])),
    "completion tokens": _Unit(COMPLETION_MASK, (2,), lambda mask: mask[:, 1:].sum()),
    "tokens of chosen completions": _Unit(COMPLETION_MASK, (2,), lambda mask: mask[: len(mask) // 2, 1:].sum()),
}
"""The units of losses. Rows are counted by their number, and the others in a column of the collated batch."""

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

_OF_BATCHES = {"aot", "aot_unpaired"}
"""Losses of DPOTrainer that compare the pairs of a batch."""

_CLOSE = {torch.float64: 5e-7, torch.float32: 1e-5}
"""Largest relative difference between equal losses, by the dtype of the weights. Parts of a loss run in float32."""

_CLOSE_IN_HALF_PRECISION = 2e-2

_ERRORS = (IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""What collators and models raise for labels or columns that they do not take."""

_WAY_OUT = "attach(trainer, None) keeps the trainer's batches, and takes out their padding"


def count_units(unit: str, batch: Batch, rows: int) -> Tensor:
    """Return the number of units, of UNITS, in a collated batch of some rows of the dataset, an int64 scalar."""
    if (counted := UNITS[unit]) is None:
        return torch.tensor(rows)
    values = batch.get(counted.column)
    if not isinstance(values, Tensor) or values.ndim not in counted.axes or values.is_floating_point():
        raise PackingError(f"data_collator: expected batches with {unit}, got a batch with columns {', '.join(batch)}")
    return counted.number_in(values)


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
    batches = _collated(collate, ([*parts[0], *parts[1]], *parts))
    known = _known_unit(trainer, kind, batches[0])
    if known is None and named is None:
        raise PackingError(
            f"loss_unit: expected one of {', '.join(UNITS)}, since it is not known what the loss of {what} is a mean "
            f"of, got None. If the loss is none of these means, {_WAY_OUT}"
        )
    if None not in (known, named) and known != named:
        raise PackingError(
            f"loss_unit: expected None or {known!r}, of which the loss of {what} is the mean, got {named!r}"
        )
    unit = named or known
    assert unit is not None
    _check(trainer, kind, unit, batches, [len(part) for part in parts], what)
    return unit


def _known_unit(trainer: Trainer, kind: type[Trainer], batch: Batch) -> str | None:
    """Return the unit of a loss of TRL or transformers, or None for another loss."""
    own = [base for base in kind.__mro__ if base.__module__.split(".")[0] not in ("builtins", "transformers", "trl")]
    if trainer.compute_loss_func is not None or any("loss" in name for base in own for name in vars(base)):
        return None
    of_trl = {base.__name__ for base in kind.__mro__ if base.__module__.startswith("trl.")}
    if "RewardTrainer" in of_trl:
        return "rows"
    if "DPOTrainer" in of_trl:
        return _unit_of_pairs(trainer)
    model = type(inner_model(trainer.model))
    if of_trl - {"SFTTrainer", "_BaseTrainer"} or not model.forward.__module__.startswith("transformers."):
        return None
    if any("ForQuestionAnswering" in base.__name__ for base in model.__mro__):
        raise PackingError(
            f"batching: expected None for {model.__name__}, whose loss counts the logits of padding, so it depends on "
            f"which rows share a micro-batch. {_WAY_OUT}"
        )
    heads = (unit for part, unit in _OF_HEADS.items() for base in model.__mro__ if part in base.__name__)
    unit, labels = next(heads, None), batch.get(LABELS)
    if unit == "labeled rows" and isinstance(labels, Tensor) and labels.is_floating_point():
        return "rows"  # regression, or several labels for each row
    return unit


def _unit_of_pairs(trainer: Any) -> str | None:
    """Return the unit of the losses of a DPOTrainer, or None if a loss is not known; raise if no unit fits."""
    losses = set(trainer.loss_types)
    if losses & _OF_BATCHES or (len(losses) > 1 and "sft" in losses):
        raise PackingError(
            f"loss_type: expected a loss that is a mean over rows or over labeled tokens, got "
            f"{' and '.join(trainer.loss_types)}, whose gradient depends on which rows share a micro-batch. {_WAY_OUT}"
        )
    if losses == {"sft"}:
        return "tokens of chosen completions"
    return "rows" if losses <= _OF_PAIRS else None


def _collated(collate: Collate, parts: Sequence[Sequence[Any]]) -> list[Batch]:
    """Return the batches that a collator makes of some rows; none of a part without rows."""
    try:
        return [dict(collate_rows(collate, part)) for part in parts if part]
    except _ERRORS as error:
        raise PackingError(
            f"data_collator: expected a collator that pads rows of different lengths, got "
            f"{getattr(collate, '__name__', type(collate).__name__)}, which raised {type(error).__name__}: {error}"
        ) from error


def _check(trainer: Trainer, kind: type[Trainer], unit: str, batches: list[Batch], rows: list[int], what: str) -> None:
    """Raise PackingError unless the loss of the first batch is the mean of the losses of the others, weighted by their
    units. The model is run, but nothing can be compared, if there is only one other, or one without units."""
    try:
        together, *losses = (loss_of_batch(trainer, kind, batch) for batch in batches)
    except _ERRORS as error:
        raise PackingError(
            f"trainer: expected a loss of {sum(rows)} rows of train_dataset, but {what} raised {type(error).__name__}: "
            f"{error}. Do the labels have the shape and the values that the model takes?"
        ) from error
    counts = [float(count_units(unit, batch, number)) for batch, number in zip(batches[1:], rows, strict=False)]
    if len(counts) < 2 or not all(counts):
        return
    dtype = next(inner_model(trainer.model).parameters()).dtype
    if not all(map(math.isfinite, (together, *losses))):
        raise PackingError(
            f"trainer: expected finite losses of {sum(rows)} rows and of {rows[0]} and {rows[1]} of them, but {what}, "
            f"with weights in {str(dtype).removeprefix('torch.')}, has {together}, {losses[0]} and {losses[1]}. If "
            "values overflow, load the model in float32 or bfloat16"
        )
    mean = sum(count * loss for count, loss in zip(counts, losses, strict=True)) / sum(counts)
    difference = abs(mean - together) / max(abs(together), *map(abs, losses), torch.finfo(torch.float32).tiny)
    if difference > _CLOSE.get(dtype, _CLOSE_IN_HALF_PRECISION):
        raise PackingError(
            f"trainer: expected a loss that is a mean over {unit}, but the loss of {what} on {sum(rows)} rows is not "
            f"the weighted mean of the losses of {rows[0]} and {rows[1]} of them (relative difference: "
            f"{difference:.0e}), so its gradient depends on which rows share a micro-batch. {_WAY_OUT}"
        )


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
