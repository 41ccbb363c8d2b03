"""What differs between versions of TRL, or is private in it."""

from dataclasses import fields
from typing import Any

ROLLOUTS = "_buffered_inputs"
"""The attribute in which trainers that sample keep the micro-batches of a rollout. Without it, they are not leveled."""


def takes_unpaired_rows(trainer: Any) -> bool:
    """Return whether a trainer is a KTOTrainer, whose rows may change ranks, but not the micro-batch.

    Without it, they are not leveled.
    """
    return hasattr(trainer, "calculate_KL")


def cuts_in_collator() -> bool:
    """Return whether TRL's collators cut rows at max_length, as before TRL 1.8, and not the trainers in their datasets.

    Without it, documents that such a collator cuts would be trained on whole, and pairs counted as dropped.
    """
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    return "max_length" in {each.name for each in fields(DataCollatorForLanguageModeling)}


def hides_logits(args: Any) -> bool:
    """Return whether SFTTrainer gives its model a forward without logits, as for "chunked_nll" before TRL 1.16.

    Without it, attach would say of such a model that it is no language model.
    """
    from trl.trainer import sft_trainer

    return getattr(args, "loss_type", None) == "chunked_nll" and hasattr(sft_trainer, "_patch_chunked_ce_lm_head")
