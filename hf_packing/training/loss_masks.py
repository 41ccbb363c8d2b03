"""Which loss masks a trainer applies, and whether that agrees with the labels that a dataset has already."""

from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
from transformers import Trainer

from hf_packing.columns import COMPLETION_MASK, IGNORED_LABEL, INPUT_IDS, LABELS, LOSS_MASKS, SEQ_LENGTHS
from hf_packing.data.loss_masks import find_unmasked_label
from hf_packing.data.token_columns import (
    TOKENS_AT_ONCE,
    TokenColumn,
    blocks_of_rows,
    check_same_lengths,
    is_token_type,
    row_numbers,
    visible_columns,
)
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray
from hf_packing.training.refusals import sft_trainer_of


def applies_masks(trainer: Trainer) -> bool:
    """Whether the trainer makes labels of loss masks; SFTTrainer does, Trainer drops such columns."""
    return sft_trainer_of(trainer) is not None


def masks_left_alone(trainer: Trainer) -> tuple[str, ...]:
    """Loss masks that the trainer ignores: without completion_only_loss, SFTTrainer trains on prompts, too."""
    return (COMPLETION_MASK,) if applies_masks(trainer) and not trainer.completion_only_loss else ()


def check_loss_masks(trainer: Trainer, dataset: Any) -> None:
    """Refuse a dataset whose labels say other than the trainer what to train on.

    Rows that are made as they are read are compared by the collator, one batch after the other.

    Args:
        trainer: whose settings decide.
        dataset: for training or evaluation.

    Raises:
        PackingError: a loss mask without labels for a trainer that ignores it, labels to train on where a mask that
            applies has a 0, or labels that are masked where completion_only_loss=False asks for all.
    """
    if not isinstance(dataset, datasets.Dataset) or dataset.format["type"] == "custom":
        return
    names = visible_columns(dataset)
    masks = [name for name in LOSS_MASKS if name in names]
    if masks and LABELS not in names and not applies_masks(trainer):
        raise PackingError(
            f"column {masks[0]!r}: expected labels beside it, since {type(trainer).__name__} ignores it; pack(dataset, "
            "strategy) applies it to the labels, and so does SFTTrainer"
        )
    if LABELS not in names or not is_token_type(dataset.data.schema.field(LABELS).type):
        return
    if wants_all_labels(trainer):
        check_all_labels(dataset)
    ignored = masks_left_alone(trainer) if SEQ_LENGTHS not in names or is_explicit(trainer) else ()
    if compared := [name for name in masks if name not in ignored]:
        check_masks_are_applied(dataset, compared)


def is_explicit(trainer: Trainer) -> bool:
    """Whether the user has said if prompts are trained on; unset, TRL looks for raw prompts and completions."""
    return getattr(trainer.args, "completion_only_loss", None) is not None


def wants_all_labels(trainer: Trainer) -> bool:
    args = trainer.args
    return applies_masks(trainer) and args.completion_only_loss is False and not args.assistant_only_loss


def check_masks_are_applied(dataset: datasets.Dataset, masks: list[str]) -> None:
    for rows, values, _ in blocks(dataset, [LABELS, *masks]):
        if found := find_unmasked_label(values[LABELS], {name: values[name] for name in masks}):
            name, token = found
            raise PackingError(
                f"column {name!r}: expected labels that are -100 where it is 0, row {rows[token]} has the label "
                f"{values[LABELS][token]} there, and labels are what is trained on; apply the mask to them, or remove "
                "the column that is wrong"
            )


def check_all_labels(dataset: datasets.Dataset) -> None:
    for rows, values, begins in blocks(dataset, [LABELS]):
        masked = values[LABELS] == IGNORED_LABEL
        masked[begins] = False
        if masked.any():
            raise PackingError(
                "completion_only_loss: expected None, since labels say already what to train on, got False, which asks "
                f"for all tokens, while row {rows[int(masked.argmax())]} has labels of -100; remove the labels, and "
                "with packed rows pack again without completion_mask, to train on all tokens"
            )


def blocks(
    dataset: datasets.Dataset, names: list[str]
) -> Iterator[tuple[IntArray, dict[str, npt.NDArray[Any]], IntArray]]:
    """Columns of a dataset, about half a million tokens at once.

    Returns:
        For each block the row of every token, the columns flat, all [tokens], and where documents begin.
    """
    table, numbers = dataset.data.table, row_numbers(dataset)
    columns = {name: TokenColumn(name, table.column(name), numbers) for name in (INPUT_IDS, *names)}
    check_same_lengths(columns)
    segments = (
        TokenColumn(SEQ_LENGTHS, table.column(SEQ_LENGTHS), numbers) if SEQ_LENGTHS in table.column_names else None
    )
    length = columns[LABELS].length
    for first, end in blocks_of_rows(length, TOKENS_AT_ONCE):
        rows = np.arange(first, end)
        whole = np.zeros_like(rows)
        values = {name: columns[name].gather(rows, whole, length[rows]) for name in names}
        lengths = length[rows] if segments is None else segments.gather(rows, whole, segments.length[rows])
        begins = np.cumsum(lengths, dtype=np.int64) - lengths
        yield np.repeat(rows, length[rows]), values, begins[lengths > 0]
