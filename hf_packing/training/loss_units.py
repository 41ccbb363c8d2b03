"""Find out what a trainer's loss is the mean of: rows, labeled rows, labeled tokens or completion tokens.

Micro-batches of a token budget have different numbers of rows and tokens. To weight the mean loss of each micro-batch
correctly, one has to know the unit over which the loss is averaged. A unit is right if the loss of two batches joined
is the mean of their two losses, weighted by the units in each. The question is asked with rows of the dataset, with
labels of which some are masked, and with an equal number of labels in every row; and with the trainer's weights as well
as with random ones. Otherwise a loss that compares rows with each other can look like a mean: as long as a policy
equals its reference model, every DPO loss is the same for every batch.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from transformers import Trainer

from hf_packing.attention import has_local_weights, inner_model, input_device
from hf_packing.columns import COMPLETION_MASK, IGNORED_LABEL, LABELS
from hf_packing.errors import PackingError
from hf_packing.training.whole_rows import Collate, collate_rows

Batch = Mapping[str, Any]
_Change = Callable[[list[Batch]], list[Batch] | None]
"""A function that changes the labels of three batches: all rows, the first rows, and the others."""

_TINY = 1e-30

ROWS_ASKED = 8
"""Number of rows with which the question is asked."""

_FIRST_ROWS = 3
"""Number of these rows in the first of the two batches."""

_NOISE = (0.0, 1.0, 3.0, 6.0, 10.0)
"""Standard deviations of noise on the weights, relative to their root mean square."""

_CLOSE = {torch.float64: 5e-7, torch.float32: 1e-5}
"""Largest relative difference between equal losses, by the dtype of the weights. Parts of a loss run in float32."""

_CLOSE_IN_HALF_PRECISION = 2e-2

_ERRORS = (IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""What collators and models raise for labels or columns that they do not take."""

_TRAINER_METRICS = "_metrics"
"""The attribute in which trainers of TRL collect metrics."""


def _rows(_: Batch, rows: int) -> Tensor:
    return torch.tensor(rows)


def _labeled_rows(batch: Batch, _: int) -> Tensor | None:
    labels = _integers(batch, LABELS, 1)
    return None if labels is None else (labels != IGNORED_LABEL).sum()


def _labeled_tokens(batch: Batch, _: int) -> Tensor | None:
    labels = _integers(batch, LABELS, 2)
    return None if labels is None else (labels != IGNORED_LABEL).sum()


def _labeled_next_tokens(batch: Batch, _: int) -> Tensor | None:
    labels = _integers(batch, LABELS, 2)
    return None if labels is None else (labels[:, 1:] != IGNORED_LABEL).sum()


def _completion_tokens(batch: Batch, _: int) -> Tensor | None:
    mask = _integers(batch, COMPLETION_MASK, 2)
    return None if mask is None else mask[:, 1:].sum()


def _chosen_tokens(batch: Batch, _: int) -> Tensor | None:
    mask = _integers(batch, COMPLETION_MASK, 2)
    return None if mask is None else mask[: len(mask) // 2, 1:].sum()


UNITS: dict[str, Callable[[Batch, int], Tensor | None]] = {
    "rows": _rows,
    "labeled rows": _labeled_rows,
    "labeled tokens": _labeled_tokens,
    "labeled tokens but the first": _labeled_next_tokens,
    "completion tokens": _completion_tokens,
    "tokens of chosen completions": _chosen_tokens,
}
"""Functions that count units in a collated batch, given also its number of rows; None if the batch has no such unit."""


def count_units(unit: str, batch: Batch, rows: int) -> Tensor:
    """Return the number of units in a collated batch, an int64 scalar.

    Args:
        unit: a key of UNITS.
        batch: the batch that the trainer's collator returned.
        rows: number of rows of the dataset in the batch.

    Raises:
        PackingError: the batch has no such unit, since its columns differ from those of earlier batches.
    """
    found = UNITS[unit](batch, rows)
    if found is None:
        raise PackingError(f"data_collator: expected batches with {unit}, got a batch with columns {', '.join(batch)}")
    return found


def find_loss_unit(trainer: Trainer, kind: type[Trainer], rows: Sequence[Any], collate: Collate) -> str:
    """Return the unit over which a trainer averages its loss, a key of UNITS.

    Args:
        trainer: a trainer whose models are patched.
        kind: the trainer's class without attach.
        rows: ROWS_ASKED rows of the training dataset.
        collate: the trainer's collator.

    Raises:
        PackingError: the loss is a mean over none of the units, the collator or the model does not take the rows, or
            the weights of the model are not in memory.
    """
    if not has_local_weights(trainer.model):
        raise PackingError(
            "model: expected weights in memory, since attach has to compute the loss of a few rows to find out what "
            "the loss is the mean of; call attach before the model is sharded"
        )
    dtype = next(inner_model(trainer.model).parameters()).dtype
    close = _CLOSE.get(dtype, _CLOSE_IN_HALF_PRECISION)
    possible = list(UNITS)
    apart = dict.fromkeys(UNITS, 0.0)
    for noise in _NOISE:
        with _noisy_weights(trainer.model, noise):
            for change in (_unchanged, _with_fewer_labels, _with_equal_labels):
                asked = _ask(trainer, kind, rows, collate, change)
                if asked is None:
                    continue
                for unit, difference in asked.items():
                    apart[unit] = max(apart[unit], difference)
                possible = [unit for unit in possible if asked.get(unit, float("inf")) <= close]
        if not possible:
            break
    if not possible:
        tried = ", ".join(f"{unit} ({apart[unit]:.0e})" for unit in UNITS if apart[unit])
        raise PackingError(
            f"trainer: expected a loss that is a mean over rows or over labeled tokens, but the loss of "
            f"{kind.__name__} with {type(inner_model(trainer.model)).__name__} on {len(rows)} rows is not the weighted "
            f"mean of the losses of {_FIRST_ROWS} and {len(rows) - _FIRST_ROWS} of them (relative differences: "
            f"{tried}), so its gradient depends on which rows share a micro-batch. attach(trainer, None) keeps the "
            "trainer's batches, and takes out their padding"
        )
    return possible[0]


def loss_of_batch(trainer: Trainer, kind: type[Trainer], batch: Batch) -> float:
    """Return the trainer's own loss of a batch in evaluation mode, with no effect on metrics and random state.

    Args:
        trainer: a trainer whose models are patched.
        kind: the trainer's class without attach.
        batch: the batch that the trainer's collator returned.
    """
    asked: Any = copy.copy(trainer)
    asked.__class__ = kind
    if hasattr(trainer, _TRAINER_METRICS):
        setattr(asked, _TRAINER_METRICS, copy.deepcopy(getattr(trainer, _TRAINER_METRICS)))
    inputs = send_to_device(dict(batch), input_device(inner_model(trainer.model)))
    modes = {module: module.training for module in trainer.model.modules()}
    trainer.model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            return float(asked.compute_loss(trainer.model, inputs))
    finally:
        for module, training in modes.items():
            module.training = training


def _ask(
    trainer: Trainer, kind: type[Trainer], rows: Sequence[Any], collate: Collate, change: _Change
) -> dict[str, float] | None:
    """Return, for each unit, the relative difference between a loss and the weighted mean of its two parts.

    The result is None if the change makes no other batch, or a batch that the trainer does not take.
    """
    parts = [list(rows), list(rows[:_FIRST_ROWS]), list(rows[_FIRST_ROWS:])]
    try:
        collated: list[Batch] = [dict(collate_rows(collate, part)) for part in parts]
    except _ERRORS as error:
        raise PackingError(
            f"data_collator: expected a collator that pads rows of different lengths, got "
            f"{getattr(collate, '__name__', type(collate).__name__)}, which raised {type(error).__name__}: {error}"
        ) from error
    batches = change(collated)
    if batches is None:
        return None
    try:
        together, first, second = (loss_of_batch(trainer, kind, batch) for batch in batches)
    except _ERRORS as error:
        if change is not _unchanged:
            return None
        raise PackingError(
            f"trainer: expected a loss of {len(rows)} rows of train_dataset, but {kind.__name__} with "
            f"{type(inner_model(trainer.model)).__name__} raised {type(error).__name__}: {error}. Do the labels have "
            "the shape and the values that the model takes?"
        ) from error
    differences = {}
    for unit, count in UNITS.items():
        here, there = (count(batch, len(part)) for batch, part in zip(batches[1:], parts[1:], strict=True))
        if here is None or there is None or not here or not there:
            continue
        mean = (float(here) * first + float(there) * second) / float(here + there)
        differences[unit] = abs(mean - together) / max(abs(together), abs(first), abs(second), _TINY)
    return differences


def _unchanged(batches: list[Batch]) -> list[Batch] | None:
    return batches


def _with_fewer_labels(batches: list[Batch]) -> list[Batch] | None:
    """Mask half of the labels of the first row, or its only label. The last batch does not have this row."""

    def without_half(labeled: Tensor) -> Tensor:
        kept = labeled.clone()
        kept[0] = False if labeled.ndim == 1 else labeled[0] & (labeled[0].cumsum(0) <= labeled[0].sum() // 2)
        return kept

    changed = [_with_labels(batch, without_half) for batch in batches[:2]]
    return [*changed, batches[2]] if any(new is not old for new, old in zip(changed, batches, strict=False)) else None


def _with_equal_labels(batches: list[Batch]) -> list[Batch] | None:
    """Mask labels so that every row has as many as the row with the fewest, or two."""
    counts = [each.sum(1) for each in _labeled(batches[0]).values() if each.ndim == 2]
    if not counts:
        return None
    fewest = torch.cat(counts).min().clamp(min=2)
    return [_with_labels(batch, lambda labeled: labeled & (labeled.cumsum(-1) <= fewest)) for batch in batches]


def _with_labels(batch: Batch, keep: Callable[[Tensor], Tensor]) -> Batch:
    """Return a batch in which only the labels, or tokens of completions, that `keep` returns still count.

    Args:
        batch: the batch that the trainer's collator returned.
        keep: a function from bool [rows] or [rows, tokens] to a tensor of the same shape.
    """
    changed = {name: batch[name].masked_fill(~keep(found), _IGNORED[name]) for name, found in _labeled(batch).items()}
    return {**batch, **changed} if changed else batch


def _labeled(batch: Batch) -> dict[str, Tensor]:
    """Return what counts in each column with labels or a mask of completions, bool [rows] or [rows, tokens]."""
    columns = {name: _integers(batch, name, 1, 2) for name in _IGNORED}
    return {name: values != _IGNORED[name] for name, values in columns.items() if values is not None}


_IGNORED = {LABELS: IGNORED_LABEL, COMPLETION_MASK: 0}
"""Columns that say which tokens or rows count, with the value of those that do not."""


def _integers(batch: Batch, name: str, *dimensions: int) -> Tensor | None:
    values = batch.get(name)
    if not isinstance(values, Tensor) or values.ndim not in dimensions or values.is_floating_point():
        return None
    return values


@contextmanager
def _noisy_weights(model: nn.Module, noise: float) -> Iterator[None]:
    """Context manager: within the block, the trained weights of a model have random noise added.

    Args:
        model: a model whose weights are in memory.
        noise: standard deviation of the noise, relative to the root mean square of each weight tensor.
    """
    own = {each: each.data for each in model.parameters() if each.requires_grad and each.is_floating_point()}
    if not noise:
        own = {}
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            for parameter, data in own.items():
                size = data.float().square().mean().sqrt().clamp(min=0.02).to(data.dtype)
                parameter.data = data + noise * size * torch.randn_like(data)
        yield
    finally:
        for parameter, data in own.items():
            parameter.data = data
