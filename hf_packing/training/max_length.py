"""What the trainers of TRL cut or drop because of their argument max_length: it is refused or counted.

SFTTrainer cuts documents when it is built, and `attach` does not see what is lost. DPOTrainer cuts pairs in its
collator, and DPOTrainer and RewardTrainer drop pairs, all of whose tokens are still in the table of the dataset.
"""

from typing import Any

import datasets
import numpy as np
from transformers import Trainer

from hf_packing.columns import INPUT_IDS
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray
from hf_packing.rows.token_columns import TokenColumn
from hf_packing.training.trainer_loss import sft_trainer_of

_PROMPT, _CHOSEN, _REJECTED = "prompt_ids", "chosen_ids", "rejected_ids"
"""Columns of tokens that DPOTrainer and RewardTrainer make; only DPOTrainer makes prompts."""


def refuse_cut_documents(trainer: Trainer, name: str, dataset: Any) -> None:
    """Refuse a dataset in which SFTTrainer has cut or dropped documents, or may do so.

    Args:
        trainer: the trainer, whose arguments say whether it prepares datasets.
        name: the name of the dataset in error messages.
        dataset: a dataset that the trainer was built with, or that was passed to evaluate().

    Raises:
        PackingError: documents have exactly max_length tokens, or the dataset is a stream.
    """
    limit = getattr(trainer.args, "max_length", None)
    prepares = not (getattr(trainer.args, "dataset_kwargs", None) or {}).get("skip_prepare_dataset", False)
    if sft_trainer_of(trainer) is None or limit is None or not prepares:
        return
    found = ""
    if isinstance(dataset, datasets.IterableDataset):
        found = f"{name} is a stream"
    elif isinstance(dataset, datasets.Dataset) and INPUT_IDS in dataset.data.column_names:
        lengths = _lengths(dataset, INPUT_IDS)
        if cut := int((lengths == limit).sum()):
            found = f"{cut} of {len(lengths)} documents in {name} have exactly {limit} tokens"
    if found:
        raise PackingError(
            f"max_length: expected SFTConfig(max_length=None), got {limit}. SFTTrainer cuts longer documents before "
            f"attach can count what is lost, and {found}. To cut documents, pass overflow='truncate' to TokenBudget, "
            "which counts the tokens"
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
    if limit is None or not isinstance(dataset, datasets.Dataset):
        return 0, 0
    names = dataset.data.column_names
    if _CHOSEN not in names:
        return 0, 0
    prompt = _lengths(dataset, _PROMPT) if _PROMPT in names else 0
    tokens = np.stack([prompt + _lengths(dataset, name) for name in (_CHOSEN, _REJECTED)])
    if _PROMPT not in names:
        dropped = (tokens > limit).any(0)
    else:
        dropped = (prompt >= limit) & (trainer.args.truncation_mode == "keep_start")
    kept = np.where(dropped, 0, np.minimum(tokens, limit))
    return int(dropped.sum()), int((tokens - kept).sum())


def _lengths(dataset: datasets.Dataset, name: str) -> IntArray:
    """Return the lengths of the lists in a column, int64 [rows], also of rows that a filter has dropped."""
    return TokenColumn(name, dataset.data.table.column(name)).length
