"""Whole rows of a dataset, which the trainer's own collator makes batches of: what it makes is measured, then planned.

For models with heads and for trainers of preference pairs, a row of the dataset stays whole, and the trainer's collator
turns the rows of a micro-batch into a padded batch. The size of a row is the number of tokens that are not padding when
the collator gets this row alone.

Micro-batches of a token budget have different numbers of rows and tokens. To weight the mean loss of each micro-batch
correctly, one has to know the unit over which the loss is averaged: rows, labeled rows, labeled tokens or completion
tokens. For trainers of TRL and heads of transformers, it stands in a table; for other losses, the user names it. One
check follows: the loss of a few rows has to be the mean of the losses of two parts of them, weighted by the units in
each.
"""

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import datasets
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from datasets.utils import tqdm
from torch import Tensor
from transformers import Trainer

from hf_packing.attention import has_local_weights, in_mode, inner_model, input_device
from hf_packing.columns import ATTENTION_MASK, COMPLETION_MASK, IGNORED_LABEL, INPUT_IDS, LABELS
from hf_packing.errors import PackingError
from hf_packing.rows.token_columns import visible_columns
from hf_packing.sampling.batching import SampledRow
from hf_packing.sampling.sampler import EpochSummary, RankBatchSampler
from hf_packing.sampling.sizes import RowSizes, rows_to_sample, sizes_of
from hf_packing.training.checks import classes_of_trl
from hf_packing.training.loader import batches_loader, on_device
from hf_packing.training.losses import COUNTS, Batch

Collate = Callable[[list[Any]], Any]

_SHORT_ROWS = 6
"""The most rows in the first part of the rows with which a loss is checked."""


class WholeRows(torch.utils.data.Dataset[Any]):
    """A map-style dataset whose rows stay whole, planned for this rank: a DataLoader indexes it with micro-batches.

    Args:
        dataset: the dataset, as the collator gets it.
        sampler: the sampler of this rank.
        collate: the trainer's collator.
    """

    def __init__(self, dataset: Any, sampler: RankBatchSampler, collate: Collate) -> None:
        self.dataset, self.sampler, self.collate = dataset, sampler, collate
        self.unit = "rows"
        """What the loss is a mean of, a key of UNITS."""

    def __len__(self) -> int:
        return len(self.sampler.rows.sizes)

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def __getitems__(self, micro_batch: Sequence[SampledRow]) -> list[tuple[Any, bool]]:
        rows = read_rows(self.dataset, [number for number, _ in micro_batch])
        return [(row, is_copy) for row, (_, is_copy) in zip(rows, micro_batch, strict=True)]

    def _collated(self, rows: Iterable[tuple[Any, bool]]) -> Batch:
        """Return what the trainer's collator makes of rows, with counts of the batch."""
        most, rows = self.sampler.batching.most_tokens, list(rows)
        batch = self.collate([row for row, _ in rows])
        tokens, squares = _tokens_and_squares(batch)
        assert most is not None
        if tokens > most:
            raise PackingError(
                f"data_collator: expected at most {most} tokens in a micro-batch, as planned, got {tokens}"
                ". The collator makes more tokens of the rows together than of each row alone: it has to return an "
                "attention_mask that is 0 on padding, and must not add tokens at random"
            )
        real_rows = sum(not is_copy for _, is_copy in rows)
        units = int(UNITS[self.unit](batch, real_rows)) if real_rows else 0
        return {**batch, COUNTS: torch.tensor([tokens, real_rows, squares, units])}

    def rows_to_check(self) -> tuple[list[Any], list[Any]]:
        """Return rows with which the loss is checked, in two parts that fit into a micro-batch together.

        The first part has the shortest rows, and the second part a long one, so that the parts have other numbers of
        tokens for each row. The second part is empty if no two rows fit into a micro-batch.
        """
        tokens, most = self.sampler.sizes.tokens, self.sampler.batching.most_tokens
        assert most is not None
        by_length = np.argsort(tokens, kind="stable")
        by_length = by_length[tokens[by_length] > 0]
        taken = tokens[by_length].cumsum()
        number = max(1, int((taken[:_SHORT_ROWS] <= most // 2).sum()))
        long = by_length[tokens[by_length] <= most - taken[number - 1]][-1:]
        parts = by_length[:number], long
        return tuple(read_rows(self.dataset, part.tolist()) for part in parts)  # type: ignore[return-value]

    def summary(self, unpacked: int | None = None, isolation: object = None) -> EpochSummary:
        """Return the summary of the current epoch; see `RankBatchSampler.summary`."""
        return self.sampler.summary(unpacked, isolation)

    def loader(self, accelerator: Accelerator, _: Any, **options: Any) -> Any:
        """Return the loader of this rank, which puts micro-batches on the device; options are those of DataLoader."""
        return on_device(batches_loader(self, self.sampler, self._collated, **options), accelerator)


def read_rows(dataset: Any, numbers: Sequence[int]) -> list[Any]:
    """Return the rows with these numbers, as a DataLoader reads them."""
    if hasattr(dataset, "__getitems__"):
        return list(dataset.__getitems__(list(numbers)))
    return [dataset[number] for number in numbers]


def _tokens_and_squares(batch: Any) -> tuple[int, int]:
    """Return the number of tokens of a padded batch, and the sum of the squared lengths of its sequences.

    The batch has attention_mask, integers [..., tokens]; or input_ids of this shape, if there is no padding.

    Raises:
        PackingError: the batch has neither.
    """
    mapping = batch if isinstance(batch, Mapping) else {}
    mask, ids = mapping.get(ATTENTION_MASK), mapping.get(INPUT_IDS)
    if mask is None and isinstance(ids, Tensor):
        mask = torch.ones_like(ids)
    if not isinstance(mask, Tensor):
        raise PackingError(
            f"data_collator: expected batches with input_ids and attention_mask, whose tokens attach can count, got "
            f"{', '.join(map(str, mapping)) or type(batch).__name__}. attach(trainer, None) keeps the trainer's "
            "batches, and takes out their padding"
        )
    lengths = mask.sum(-1)
    return int(lengths.sum()), int(lengths.square().sum())


def patches_in(batch: Batch, pixels_per_patch: int) -> int:
    """Return the number of patches of the pictures in a batch.

    Args:
        batch: a batch with pixel_values: numbers [patches, values], [pictures, patches, values] or [..., pictures,
            channels, height, width]; or without pictures.
        pixels_per_patch: height times width of a patch.
    """
    patches = 0
    for name, pixels in batch.items():
        if name.startswith("pixel_values") and isinstance(pixels, Tensor) and pixels.numel():
            if pixels.ndim <= 3:
                patches += pixels[..., 0].numel()
            else:
                patches += -(-pixels.select(-3, 0).numel() // pixels_per_patch)
    return patches


def pixels_per_patch_of(config: Any) -> int | None:
    """Return height times width of the patches of a model's vision tower; None for a model without one."""
    vision = getattr(config, "vision_config", None)
    if vision is None:
        return None
    size = getattr(vision, "patch_size", None) or 1
    return math.prod(size) if isinstance(size, (list, tuple)) else int(size) ** 2


def sizes_of_rows(dataset: Any, collate: Collate, pixels_per_patch: int | None = None) -> RowSizes:
    """Return the sizes of a dataset's rows, in tokens and patches that the collator makes of each row alone.

    The collator gets a few rows, among them the shortest and the longest. If it makes as many tokens as the column
    `input_ids` has, the other sizes are the lengths in this column. Otherwise, or if the model takes pictures, the
    collator gets every row.

    Args:
        dataset: a map-style dataset, as the collator gets it.
        collate: the trainer's collator.
        pixels_per_patch: height times width of a patch; None for a model without a vision tower.

    Raises:
        PackingError: the collator makes batches whose tokens cannot be counted.
    """

    def alone(number: int) -> Any:
        return collate_rows(collate, read_rows(dataset, [number]))

    def sampled(number: int) -> bytes:
        once, twice = (_digest(alone(number)) for _ in range(2))
        return once if once == twice else bytes(8)  # the collator is random

    numbers = rows_to_sample(len(dataset)).tolist()
    if pixels_per_patch is None and (in_column := _sizes_in_column(dataset)) is not None:
        by_length = np.argsort(in_column.tokens, kind="stable")
        asked = {*numbers, *by_length[:8].tolist(), *by_length[-8:].tolist()}
        expected = {row: (in_column.tokens[row], in_column.squared_lengths[row]) for row in asked}
        if all(_tokens_and_squares(alone(row)) == size for row, size in expected.items()):
            return replace(in_column, sample=b"".join(map(sampled, numbers)))
    measured = []
    for number in tqdm(range(len(dataset)), desc="Measuring rows with the collator", unit=" rows"):
        batch = alone(number)
        patches = 0 if pixels_per_patch is None else patches_in(batch, pixels_per_patch)
        measured.append((*_tokens_and_squares(batch), patches))
    tokens, squares, of_pictures = np.array(measured, dtype=np.int64).reshape(-1, 3).T
    sizes = RowSizes(tokens, (tokens > 0).astype(np.int64), squares, sample=b"".join(map(sampled, numbers)))
    return replace(sizes, patches=of_pictures) if of_pictures.any() else sizes


def _sizes_in_column(dataset: Any) -> RowSizes | None:
    """Return the lengths of `input_ids` as sizes; None if there is no such column of documents."""
    if not isinstance(dataset, datasets.Dataset) or dataset.format["type"] == "custom":
        return None
    if INPUT_IDS not in visible_columns(dataset):
        return None
    with suppress(PackingError):  # several sequences in a row, as for multiple choice
        return sizes_of(dataset.select_columns([INPUT_IDS]))
    return None


def _digest(batch: Batch) -> bytes:
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(batch):
        if isinstance(value := batch[name], Tensor):
            exact = value.double() if value.is_floating_point() else value
            digest.update(name.encode() + exact.cpu().numpy().tobytes())
    return digest.digest()


def collate_rows(collate: Collate, rows: Sequence[Any]) -> Any:
    """Return the batch that a collator makes of some rows. It gets copies, since some collators change their rows."""
    return collate([dict(row) if isinstance(row, Mapping) else row for row in rows])


def _labels(batch: Batch, _: int, begin: int = 0) -> Any:
    return (batch[LABELS][..., begin:] != IGNORED_LABEL).sum()


UNITS: dict[str, Callable[[Batch, int], Tensor]] = {
    "rows": lambda _, rows: torch.tensor(rows),
    "labeled rows": _labels,
    "labeled tokens": _labels,
    "labeled tokens but the first": lambda batch, rows: _labels(batch, rows, begin=1),
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
    if not difference <= _CLOSE.get(dtype, 2e-2):  # in half precision; also if it is no number
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
    with in_mode(trainer.model, training=False, probed=True), torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        return float(asked.compute_loss(trainer.model, inputs))
