"""Refuse trainers, arguments, accelerators and labels that do not work with planned batches.

SFTTrainer makes labels from loss masks (`completion_mask`, `assistant_masks`); Trainer drops such columns. A masked
language model sees the input token at each label's position, so it would only learn to copy its input if the labels
repeat the input tokens. Such labels are refused.

What trainers of TRL cut or drop because of their argument max_length is refused or counted. SFTTrainer cuts documents
when it is built, and `attach` does not see what is lost. DPOTrainer cuts pairs in its collator, and DPOTrainer and
RewardTrainer drop pairs, all of whose tokens are still in the table of the dataset.
"""

import os
from typing import Any

import datasets
import numpy as np
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer

from hf_packing.attention import has_local_weights, inner_model, refuse_copied_labels, sees_labels
from hf_packing.batch.collate import PackingCollator
from hf_packing.checks import check_type, expect
from hf_packing.columns import INPUT_IDS, LABELS
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray
from hf_packing.rows.packing_trace import refuse_lost_first_labels
from hf_packing.rows.token_columns import TokenColumn, row_numbers
from hf_packing.training.losses import Loss
from hf_packing.training.model_loss import predicts_next
from hf_packing.training.ranks import data_rank
from hf_packing.upstream.transformers import TRAIN_SAMPLER
from hf_packing.upstream.trl import cuts_in_collator, hides_logits

_BATCH_METHODS = (
    "get_train_dataloader",
    TRAIN_SAMPLER,
    "get_eval_dataloader",
    "get_test_dataloader",
    "get_batch_samples",
)
"""Methods of Trainer that attach replaces. A class that overrides one is refused, since attach would hide the override.
"""

WRAPPED_METHODS = (*_BATCH_METHODS, "compute_loss", "evaluation_loop")
"""Methods of Trainer that attach wraps. A function set on the trainer instance would be called instead of the wrapper.
"""

_REPLACED_COLLATORS = (
    "default_data_collator",
    "DefaultDataCollator",
    "DataCollatorWithPadding",
    "DataCollatorWithFlattening",
    "DataCollatorForSeq2Seq",
    "DataCollatorForLanguageModeling",
)
"""Names of collators that attach replaces: such collators only pad or flatten rows, and make labels from input_ids."""

_ROWS_READ = 16
"""The number of rows whose labels are compared with the input tokens."""

_Expected = dict[str, tuple[Any, str]]
"""Training arguments that are restricted: the name, the value that is needed, and the reason."""

_BY_PLANS: _Expected = {
    "average_tokens_across_devices": (True, "otherwise the gradient depends on the number of processes"),
    "auto_find_batch_size": (False, "the batching decides how large batches are"),
    "train_sampling_strategy": ("random", "the batching decides the order of rows, and which rows share a batch"),
    "packing": (False, "attach packs rows itself, and TRL's packing would hide where documents begin"),
    "eval_packing": (False, "attach packs rows itself, and TRL's packing would hide where documents begin"),
}

_BY_PACKED_ROWS: _Expected = {
    "predict_with_generate": (False, "evaluation batches are packed rows; generate from prompts after evaluate()"),
}

_BY_DOCUMENT_MEANS: _Expected = {
    "loss_type": ("nll", "loss='sequence' weights the cross-entropy"),
    "label_smoothing_factor": (0, "loss='sequence' weights the cross-entropy"),
}


def classes_of_trl(kind: type[Any]) -> list[type[Any]]:
    """Return a class of a trainer and its bases, as far as TRL defines them."""
    return [base for base in kind.__mro__ if base.__module__.startswith("trl.")]


def sft_trainer_of(trainer: Trainer) -> type[Trainer] | None:
    """Return TRL's class SFTTrainer if the trainer is an instance of it, else None.

    The result is also None for a subclass that TRL itself defines, since such a class may make its own batches.
    """
    of_trl = classes_of_trl(type(trainer))
    return of_trl[0] if of_trl and of_trl[0].__name__ == "SFTTrainer" else None


def check_trainer(trainer: Any, loss: Loss | None) -> None:
    """Refuse a trainer that `attach` does not support with a loss of packed rows; None if rows stay whole.

    Raises:
        PackingError: the object is not a Trainer; the trainer makes its own batches; or the trainer's methods,
            collator, accelerator or arguments do not work with planned batches.
    """
    check_type("trainer", trainer, Trainer, "a Trainer or an SFTTrainer")
    kind = type(trainer)
    own = [method for method in _BATCH_METHODS if getattr(kind, method) is not getattr(Trainer, method)]
    if own or (classes_of_trl(kind) and sft_trainer_of(trainer) is None and loss is not None):
        raise PackingError(
            f"trainer: expected a Trainer or an SFTTrainer without its own batches, got {kind.__name__}, which "
            f"{f'overrides {own[0]}' if own else 'makes its own batches or losses'}; attach(trainer, None) keeps its "
            "batches, and takes out their padding"
        )
    if found := [name for name in WRAPPED_METHODS if name in vars(trainer)]:
        raise PackingError(
            f"{found[0]}: expected the method of {kind.__name__}, got {vars(trainer)[found[0]]!r}, set on the trainer "
            "object; remove this attribute. To change compute_loss or evaluation_loop, define the method in a subclass"
        )
    collator = trainer.data_collator
    made_by = collator if hasattr(collator, "__name__") else type(collator)
    is_stock = made_by.__name__ in _REPLACED_COLLATORS and made_by.__module__.split(".")[0] in ("transformers", "trl")
    if loss is not None and not (is_stock or made_by is PackingCollator or masks_tokens(collator)):
        raise PackingError(
            f"data_collator: expected a standard collator, such as {', '.join(_REPLACED_COLLATORS)}, got "
            f"{made_by.__name__}. attach would replace this collator; make labels, weights and other numbers for each "
            "token in the dataset's map or with_transform, or keep the collator and its batches with "
            "attach(trainer, None), which takes out their padding"
        )
    if loss is not None and sft_trainer_of(trainer) is not None and hides_logits(trainer.args):
        raise PackingError(
            "loss_type: expected SFTConfig(loss_type='nll') before TRL 1.16, got 'chunked_nll', which gives the model "
            "a forward without logits; attach lets losses be computed in chunks, too"
        )
    check_accelerator(trainer.accelerator)
    if trainer.get_tp_size() != getattr(trainer.accelerator.parallelism_config, "tp_size", 1):
        raise PackingError(
            f"tp_size: expected {trainer.get_tp_size()} in accelerate's ParallelismConfig, as in the model or "
            "DeepSpeed; otherwise ranks that share a model by tensor parallelism would get different rows"
        )
    if trainer.args.n_gpu > 1:
        raise PackingError(
            f"n_gpu: expected 1 GPU for each process, got {trainer.args.n_gpu}, since nn.DataParallel would split "
            "batches; start one process for each GPU, with `accelerate launch` or `torchrun`"
        )
    by_loss = {None: {}, "token": _BY_PACKED_ROWS, "sequence": _BY_PACKED_ROWS | _BY_DOCUMENT_MEANS}
    for name, (value, why) in (_BY_PLANS | by_loss[loss]).items():
        given = getattr(trainer.args, name, value)
        if given is not None and given != value:
            raise PackingError(f"{name}: expected {value!r}, since {why}; got {given!r}")


def check_accelerator(accelerator: Accelerator) -> None:
    """Refuse accelerator settings that do not work with planned batches.

    Raises:
        PackingError: dispatch_batches, split_batches, context or sequence parallelism is on; sync_with_dataloader is
            off; or the accelerator has fewer processes than were launched.
    """
    if (launched := int(os.environ.get("WORLD_SIZE", 1))) > accelerator.num_processes:
        raise PackingError(
            f"accelerator: expected num_processes={launched}, the number of launched processes, got "
            f"{accelerator.num_processes}; every process would train on all rows. On CPUs, use Accelerator(cpu=True)"
        )
    expect(False, "since every rank reads its own batches", dispatch_batches=bool(accelerator.dispatch_batches))
    expect(False, "since accelerate would split every planned batch", split_batches=accelerator.split_batches)
    last = "so that an optimizer step uses the gradients of the last micro-batches of an epoch"
    expect(True, last, sync_with_dataloader=accelerator.gradient_state.sync_with_dataloader)
    for size in ("cp_size", "sp_size"):
        if (ranks := getattr(accelerator.parallelism_config, size, 1)) > 1:
            raise PackingError(
                f"{size}: expected 1, got {ranks}; for documents on several processes, pass "
                f"TokenBudget(max_tokens, max_ranks_per_document={ranks})"
            )


def check_labels_are_hidden(source: Any, model: nn.Module) -> None:
    """Refuse labels that only repeat the input tokens, if the model sees the input token at each label's position.

    A masked language model is such a model.

    Args:
        source: packed rows or a stream, of which a few rows are read.
        model: a patched model.

    Raises:
        PackingError: in the rows, every label is the input token at the same position, or first tokens have lost their
            labels.
    """
    inner = inner_model(model)
    if source.shares_prefixes or not sees_labels(inner):
        return
    if read := [row for row in source.first_rows(_ROWS_READ) if len(row[INPUT_IDS])]:
        lost = None
        try:
            batch = PackingCollator(keep_first_labels=True)(read)
        except PackingError as error:  # labels of first tokens are lost
            batch, lost = PackingCollator()(read), error
        refuse_copied_labels(inner, batch[INPUT_IDS], batch[LABELS], batch["cu_seq_lens_q"])
        if lost is not None:
            raise lost
    if not predicts_next(model):
        refuse_lost_first_labels(source.dataset)


def masks_tokens(collator: Any) -> bool:
    """Return whether a collator masks tokens, as `DataCollatorForLanguageModeling` of transformers does."""
    return bool(getattr(collator, "mlm", False)) and callable(getattr(collator, "torch_mask_tokens", None))


_PROMPT, _CHOSEN, _REJECTED = "prompt_ids", "chosen_ids", "rejected_ids"
"""Columns of tokens that DPOTrainer and RewardTrainer make; only DPOTrainer makes prompts."""


def refuse_cut_documents(trainer: Trainer, name: str, dataset: Any) -> None:
    """Refuse a dataset in which SFTTrainer has cut or dropped documents, or may do so.

    Args:
        trainer: the trainer, whose arguments say whether it prepares datasets.
        name: the name of the dataset in error messages.
        dataset: a dataset that the trainer was built with, or that was passed to evaluate().

    Raises:
        PackingError: documents have exactly max_length tokens, more if the collator cuts; or the dataset is a stream.
    """
    args, found = trainer.args, ""
    if sft_trainer_of(trainer) is None or (limit := args.max_length) is None:
        return
    in_collator = cuts_in_collator()
    if (args.dataset_kwargs or {}).get("skip_prepare_dataset") and not in_collator:
        return
    if isinstance(dataset, datasets.IterableDataset):
        found = f"{name} is a stream"
    elif isinstance(dataset, datasets.Dataset) and INPUT_IDS in dataset.data.column_names:
        lengths = _lengths(dataset, INPUT_IDS)
        is_cut = lengths[row_numbers(dataset)] > limit if in_collator else lengths == limit
        if cut := int(is_cut.sum()):
            how = "more than" if in_collator else "exactly"
            found = f"{cut} of {len(is_cut)} documents in {name} have {how} {limit} tokens"
    if found:
        raise PackingError(
            f"max_length: expected SFTConfig(max_length=None), got {limit}. SFTTrainer cuts longer documents before "
            f"attach can count what is lost, and {found}. To cut documents, pass max_length={limit} and "
            "overflow='truncate' to TokenBudget, which counts the tokens"
        )


def lost_pairs(trainer: Trainer, dataset: Any) -> tuple[int, int]:
    """Count the pairs that DPOTrainer and RewardTrainer drop because of max_length, and the tokens that are lost.

    Args:
        trainer: any trainer.
        dataset: its training dataset.

    Returns:
        The number of dropped pairs, and the number of tokens in them and in the cut-off ends of other pairs.
    """
    limit = getattr(trainer.args, "max_length", None)
    names = dataset.data.column_names if isinstance(dataset, datasets.Dataset) else ()
    if limit is None or _CHOSEN not in names:
        return 0, 0
    prompt = _lengths(dataset, _PROMPT) if _PROMPT in names else 0
    tokens = np.stack([prompt + _lengths(dataset, name) for name in (_CHOSEN, _REJECTED)])
    if _PROMPT not in names:
        dropped = (tokens > limit).any(0)
    else:
        dropped = (prompt >= limit) & (trainer.args.truncation_mode == "keep_start") & (not cuts_in_collator())
    kept = np.where(dropped, 0, np.minimum(tokens, limit))
    return int(dropped.sum()), int((tokens - kept).sum())


def _lengths(dataset: datasets.Dataset, name: str) -> IntArray:
    """Return the lengths of the lists in a column, int64 [rows], also of rows that a filter has dropped."""
    return TokenColumn(name, dataset.data.table.column(name)).length


def check_averages_gradients(trainer: Any) -> None:
    """Raise PackingError if each rank would train a model of its own, as after evaluate() before train()."""
    accelerator, model = trainer.accelerator, trainer.model_wrapped
    if not accelerator.distributed_type.value.startswith("MULTI_") or data_rank(accelerator).world_size == 1:
        return
    is_averaged = any(isinstance(each, DistributedDataParallel) for each in model.modules())
    if not is_averaged and has_local_weights(model):  # ranks that share weights share their gradients
        raise PackingError(
            "trainer: expected a model in DistributedDataParallel, which averages gradients over ranks; evaluate() or "
            "predict() before train() has left it out, as in transformers. Train first, or evaluate with another "
            "trainer"
        )
