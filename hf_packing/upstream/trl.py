"""What differs between versions of TRL, or is private in it."""

from dataclasses import fields


def cuts_in_collator() -> bool:
    """Return whether TRL's collators cut rows at max_length, as before TRL 1.8, and not the trainers in their datasets.

    Without it, documents that such a collator cuts would be trained on whole, and pairs counted as dropped.
    """
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    return "max_length" in {each.name for each in fields(DataCollatorForLanguageModeling)}
