"""The model of transformers inside what others have made of it."""

from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_packing.errors import PackingError


def inner_model(model: Any) -> PreTrainedModel:
    """The model of transformers inside what PEFT, DDP or torch.compile made of it."""
    inner = model
    while not isinstance(inner, PreTrainedModel):
        if hasattr(inner, "get_base_model"):
            refuse_what_works_on_whole_rows(inner)
            inner = inner.get_base_model()
        elif isinstance(wrapped := getattr(inner, "_orig_mod", getattr(inner, "module", None)), nn.Module):
            inner = wrapped
        else:
            raise PackingError(f"model: expected a transformers PreTrainedModel, got {type(model).__name__}")
    return inner


def refuse_what_works_on_whole_rows(peft_model: Any) -> None:
    """Raise PackingError for methods of PEFT that take a row for a single document, outside of the inner model."""
    config = peft_model.active_peft_config
    if getattr(config, "is_prompt_learning", False):
        raise PackingError(
            f"model: expected a PEFT method that adds no tokens, got {config.peft_type.value}: "
            "a packed row would get a single prompt"
        )
    for name, config in peft_model.peft_config.items():
        if invocation := getattr(config, "alora_invocation_tokens", None):
            raise PackingError(
                f"model: expected adapters without alora_invocation_tokens, {name!r} has {invocation}: in a packed row "
                "it would begin at the last of them and be off in all documents before"
            )


def configurations(model: nn.Module) -> list[PreTrainedConfig]:
    """All in a model, nested ones too, each once."""
    waiting = [
        config for module in model.modules() if isinstance(config := getattr(module, "config", None), PreTrainedConfig)
    ]
    found: dict[int, PreTrainedConfig] = {}
    while waiting:
        config = waiting.pop()
        if id(config) not in found:
            found[id(config)] = config
            inner = [getattr(config, name, None) for name in config.sub_configs]
            waiting += [each for each in inner if isinstance(each, PreTrainedConfig)]
    return list(found.values())
