"""Refuse trainers, arguments, accelerators and labels that planned batches do not support.

SFTTrainer makes labels from loss masks (`completion_mask`, `assistant_masks`); Trainer drops such columns. A model that
sees the tokens that its labels ask for, such as a masked language model, would learn to copy them.
"""

import os
from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
from accelerate import Accelerator
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
    find_unmasked_label,
)
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
"""Methods that attach wraps. A method set on the trainer instance would be called instead of the wrapper."""

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

_ROWS_READ = 16


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
        what = (
            f"{kind.__name__}.{own[0]} makes its own batches"
            if own
            else f"{kind.__name__} makes its own batches or losses"
        )
        raise PackingError(f"trainer: expected a Trainer or an SFTTrainer, whose batches can be planned; {what}")
    if loss == "sequence" and not computes_loss_as(kind, sft_trainer or Trainer):
        raise PackingError(f"loss: expected 'token', since {kind.__name__} has its own compute_loss, got {loss!r}")
    check_methods(trainer)
    _check_collator(trainer.data_collator)
    check_accelerator(trainer.accelerator)
    if trainer.get_tp_size() != getattr(parallelism_of(trainer.accelerator), "tp_size", 1):
        raise PackingError(
            f"tp_size: expected the same as in accelerate's parallelism_config, got {trainer.get_tp_size()} from the "
            "model or DeepSpeed; ranks that share a model would get different rows"
        )
    check_arguments(trainer, loss)


def check_methods(trainer: Trainer) -> None:
    """Refuse methods that are set on the trainer instance: they would be called instead of those of attach."""
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
            "dispatch_batches: expected False, got True: one process would read all batches, join them, and cut them "
            "in other places"
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


def check_loss_masks(trainer: Trainer, dataset: Any) -> None:
    """Refuse a dataset whose labels and loss masks disagree, under the trainer's settings.

    Rows that are computed when read are left to the collator, which compares them batch by batch.

    Args:
        trainer: its settings decide which masks apply.
        dataset: the dataset to train or evaluate on.

    Raises:
        PackingError: a loss mask without labels, for a trainer that ignores the mask; labels other than -100 where an
            applied mask is 0; or labels of -100 with completion_only_loss=False, which asks for all tokens.
    """
    if not isinstance(dataset, datasets.Dataset) or dataset.format["type"] == "custom":
        return
    names = visible_columns(dataset)
    masks = [name for name in LOSS_MASKS if name in names]
    if masks and LABELS not in names and not applies_masks(trainer):
        raise PackingError(
            f"column {masks[0]!r}: expected a column 'labels' too, since {type(trainer).__name__} ignores this mask; "
            "pack(dataset, strategy) applies it to the labels, and so does SFTTrainer"
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

    Reads a few rows, spread over the dataset.

    Args:
        dataset: map-style, packed or of documents.
        sizes: the sizes of its rows.
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


def applies_masks(trainer: Trainer) -> bool:
    """Return whether the trainer makes labels from loss masks, as SFTTrainer does; Trainer drops such columns."""
    return sft_trainer_of(trainer) is not None


def ignored_masks(trainer: Trainer) -> tuple[str, ...]:
    """Return the loss masks that SFTTrainer ignores: without completion_only_loss it trains on prompts, too."""
    return (COMPLETION_MASK,) if applies_masks(trainer) and not trainer.completion_only_loss else ()


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
        f"{name}; attach replaces this collator, so make its changes to labels in the dataset instead"
    )


def _check_masks_are_applied(dataset: datasets.Dataset, masks: list[str]) -> None:
    for rows, values, _ in _blocks(dataset, [LABELS, *masks]):
        if found := find_unmasked_label(values[LABELS], {name: values[name] for name in masks}):
            name, token = found
            raise PackingError(
                f"column {name!r}: expected labels that are -100 where it is 0, row {rows[token]} has the label "
                f"{values[LABELS][token]} there, which would be trained on; apply the mask to the labels, or remove "
                "the column that is wrong"
            )


def _check_all_labels(dataset: datasets.Dataset) -> None:
    for rows, values, begins in _blocks(dataset, [LABELS]):
        masked = values[LABELS] == IGNORED_LABEL
        masked[begins] = False
        if masked.any():
            raise PackingError(
                "completion_only_loss: expected None, got False, which asks to train on all tokens; but row "
                f"{rows[int(masked.argmax())]} has labels of -100, and labels already say what to train on. To train "
                "on all tokens, remove the labels; if rows are packed, pack them again without completion_mask"
            )


def _blocks(
    dataset: datasets.Dataset, names: list[str]
) -> Iterator[tuple[IntArray, dict[str, npt.NDArray[Any]], IntArray]]:
    """Read columns of a dataset, about half a million tokens at a time.

    Yields:
        The row number of every token [tokens], the columns as flat arrays [tokens], and where documents begin.
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
