"""Labels of a dataset, checked before training: they fit the trainer's loss masks, and do not just repeat the tokens.

SFTTrainer makes labels from loss masks (`completion_mask`, `assistant_masks`); Trainer drops such columns. A model that
sees the tokens that its labels ask for, such as a masked language model, would learn to copy them.
"""

from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
from torch import nn
from transformers import Trainer

from hf_packing.attention import inner_model, refuse_copied_labels, sees_labels
from hf_packing.collate import PackingCollator
from hf_packing.columns import (
    COMPLETION_MASK,
    IGNORED_LABEL,
    INPUT_IDS,
    LABELS,
    LOSS_MASKS,
    SEQ_LENGTHS,
    TOKEN_TYPE_IDS,
)
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
from hf_packing.sampling.row_sizes import RowSizes
from hf_packing.sampling.sampled_rows import SampledRows
from hf_packing.sampling.sampler import InOrder, RankBatchSampler
from hf_packing.training.trainer_loss import sft_trainer_of

_ROWS_READ = 16


def applies_masks(trainer: Trainer) -> bool:
    """Return whether the trainer makes labels from loss masks, as SFTTrainer does; Trainer drops such columns."""
    return sft_trainer_of(trainer) is not None


def ignored_masks(trainer: Trainer) -> tuple[str, ...]:
    """Return the loss masks that SFTTrainer ignores: without completion_only_loss it trains on prompts, too."""
    return (COMPLETION_MASK,) if applies_masks(trainer) and not trainer.completion_only_loss else ()


def check_loss_masks(trainer: Trainer, dataset: Any) -> None:
    """Refuse a dataset whose labels and loss masks disagree, under the trainer's settings.

    Rows that are made as they are read are left to the collator, which compares them batch by batch.

    Args:
        trainer: its settings decide which masks apply.
        dataset: for training or evaluation.

    Raises:
        PackingError: a loss mask without labels for a trainer that ignores it, labels to train on where a mask that
            applies has a 0, or masked labels where completion_only_loss=False asks for all of them.
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
    asked = getattr(trainer.args, "completion_only_loss", None)  # None: TRL looks for columns prompt and completion
    if applies_masks(trainer) and asked is False and not trainer.args.assistant_only_loss:
        _check_all_labels(dataset)
    ignored = ignored_masks(trainer) if SEQ_LENGTHS not in names or asked is not None else ()
    if compared := [name for name in masks if name not in ignored]:
        _check_masks_are_applied(dataset, compared)


def check_labels_are_hidden(dataset: Any, sizes: RowSizes, model: nn.Module) -> None:
    """Refuse labels that only repeat the tokens, for a model that sees the tokens its labels ask for.

    Reads a few rows from all over the dataset.

    Args:
        dataset: map-style, packed or of documents.
        sizes: of its rows.
        model: patched.

    Raises:
        PackingError: in these rows, every token is its own label.
    """
    inner = inner_model(model)
    rows = np.flatnonzero(sizes.tokens)
    if not sees_labels(inner) or not len(rows):
        return
    numbers = rows[np.unique(np.linspace(0, len(rows) - 1, _ROWS_READ).astype(np.int64))].tolist()
    read = SampledRows(dataset, RankBatchSampler(InOrder(1), sizes, world_size=1, rank=0), (TOKEN_TYPE_IDS,))
    labeled = [
        {name: row[name] for name in row if name not in LOSS_MASKS}
        for row in read.__getitems__([(number, False) for number in numbers])
    ]
    batch = PackingCollator(keep_first_labels=True)(labeled)
    refuse_copied_labels(inner, batch["input_ids"], batch["labels"], batch["cu_seq_lens_q"], is_sample=True)


def _check_masks_are_applied(dataset: datasets.Dataset, masks: list[str]) -> None:
    for rows, values, _ in _blocks(dataset, [LABELS, *masks]):
        if found := find_unmasked_label(values[LABELS], {name: values[name] for name in masks}):
            name, token = found
            raise PackingError(
                f"column {name!r}: expected labels that are -100 where it is 0, row {rows[token]} has the label "
                f"{values[LABELS][token]} there, and would be trained on it; apply the mask to the labels, or remove "
                "the column that is wrong"
            )


def _check_all_labels(dataset: datasets.Dataset) -> None:
    for rows, values, begins in _blocks(dataset, [LABELS]):
        masked = values[LABELS] == IGNORED_LABEL
        masked[begins] = False
        if masked.any():
            raise PackingError(
                "completion_only_loss: expected None, since labels already say what to train on, got False, which asks "
                f"for all tokens, while row {rows[int(masked.argmax())]} has labels of -100; to train on all tokens, "
                "remove the labels, and pack packed rows again without completion_mask"
            )


def _blocks(
    dataset: datasets.Dataset, names: list[str]
) -> Iterator[tuple[IntArray, dict[str, npt.NDArray[Any]], IntArray]]:
    """Read columns of a dataset, about half a million tokens at a time.

    Yields:
        The row of every token, the columns, flat, all [tokens], and the places where documents begin.
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
