"""What is private in transformers, or differs between its versions: attention of models, and columns of trainers."""

import copy
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel, Trainer, TrainingArguments

ATTENTION = "_attn_implementation_internal"
"""The attribute in which a configuration stores the name of its attention function. A patch restores this attribute:
`set_attn_implementation` would reject None, which some inner configurations have, and functions that are not installed.
"""

CHECKPOINTING = ("_gradient_checkpointing_func", "checkpoint_fn")
"""Attributes in which modules store an activation-checkpointing function: of transformers, and of FSDP's wrapper.
Without them, backward passes would run layers again without the borders of their documents."""

TRAIN_SAMPLER = "_get_train_sampler"
"""The method of a Trainer that makes its sampler. Without it, samplers of users would be ignored."""


def attention_name(config: PreTrainedConfig) -> str | None:
    """Return the name of a configuration's attention function. Without it, a change after the patch is not seen."""
    name: str | None = config._attn_implementation
    return name


def can_set_attention(model: PreTrainedModel) -> bool:
    """Return whether a model can get another attention function. Without it, models with their own would be refused."""
    return bool(model._can_set_attn_implementation())


def from_config(kind: Any, config: PreTrainedConfig, **options: Any) -> Any:
    """Return a new model of any class, also of one that is no Auto class. Without it, no small copies."""
    return kind._from_config(config, **options)


def takes_configuration(auto_class: Any, config: PreTrainedConfig) -> bool:
    """Return whether an Auto class has a model for a configuration."""
    return type(config) in auto_class._model_mapping


def columns_taken(trainer: Trainer) -> Any:
    """Return the columns that a trainer keeps, as `remove_unused_columns` decides. Without it, all are kept."""
    asked = copy.copy(trainer)  # which keeps the columns
    asked._set_signature_columns_if_needed()
    return asked._signature_columns


def worker_context(args: TrainingArguments) -> Any:
    """Return how workers of loaders are started; None if transformers has no such argument, as 5.10."""
    return getattr(args, "dataloader_multiprocessing_context", None)
