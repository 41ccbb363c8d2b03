"""Refuse datasets of which trainers of TRL cut or drop rows because of their argument max_length.

SFTTrainer cuts documents when it is built, DPOTrainer cuts pairs in its collator, and RewardTrainer drops pairs, whose
tokens are still in the table of the dataset. `attach` could not count what is lost.
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


def refuse_cut_rows(trainer: Trainer, name: str, dataset: Any) -> None:
    """Refuse a dataset of which a trainer of TRL has cut or dropped rows, or will do so.

    Args:
        trainer: the trainer, whose arguments say whether it prepares datasets.
        name: the name of the dataset in error messages.
        dataset: a dataset that the trainer was built with.

    Raises:
        PackingError: documents have exactly max_length tokens, or pairs have more; or the dataset is a stream.
    """
    limit = getattr(trainer.args, "max_length", None)
    prepares = not (getattr(trainer.args, "dataset_kwargs", None) or {}).get("skip_prepare_dataset", False)
    if limit is None or not prepares:
        return
    is_sft = sft_trainer_of(trainer) is not None
    if is_sft and isinstance(dataset, datasets.IterableDataset):
        raise _error(limit, f"{name} is a stream")
    names = dataset.data.column_names if isinstance(dataset, datasets.Dataset) else ()
    if is_sft and INPUT_IDS in names:
        if cut := int((_lengths(dataset, INPUT_IDS) == limit).sum()):
            raise _error(limit, f"{cut} documents in {name} have exactly {limit} tokens")
    elif not is_sft and _CHOSEN in names:
        prompts = _lengths(dataset, _PROMPT) if _PROMPT in names else 0
        answers = np.maximum(_lengths(dataset, _CHOSEN), _lengths(dataset, _REJECTED))
        if cut := int((prompts + answers > limit).sum()):
            raise _error(limit, f"{cut} pairs in {name} have more than {limit} tokens")


def _error(limit: int, found: str) -> PackingError:
    return PackingError(
        f"max_length: expected None, got {limit}, with which TRL cuts or drops what attach cannot count, and {found}. "
        "Drop or cut long rows before the trainer is built; for SFTTrainer, TokenBudget(overflow='truncate') cuts "
        "documents, and counts the tokens"
    )


def _lengths(dataset: datasets.Dataset, name: str) -> IntArray:
    """Return the lengths of the lists in a column, int64 [rows], also of rows that a filter has dropped."""
    return TokenColumn(name, dataset.data.table.column(name)).length
