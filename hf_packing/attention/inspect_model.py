"""Look into a transformers model: what wraps it, which arguments it takes, where its weights are."""

import inspect
from contextlib import suppress
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_packing.errors import ModelNotSupportedError, PackingError


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


WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
"""Where wrappers keep a module that they only call."""


def without_wrapping(module: nn.Module) -> nn.Module:
    while (inner := next((getattr(module, name) for name in WRAPPED if name in module._modules), None)) is not None:
        module = inner
    return module


class Signature:
    """The arguments that a module's forward takes."""

    def __init__(self, module: nn.Module) -> None:
        self.where = type(module).__name__
        parameters = parameters_of_forward(module)
        self.names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        has_a_table = any(name.endswith("token_type_ids") for name, _ in module.named_buffers())
        self.takes_types_from_a_table = has_a_table and self.takes("token_type_ids")
        """Of BERT's kind: token types that nobody gives are cut from a table as long as the longest document."""

    def takes(self, name: str) -> bool:
        return self.takes_any or name in self.names

    def by_name(self, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if len(args) > len(self.names):
            raise PackingError(
                f"forward: expected at most {len(self.names)} arguments without their names, {self.where} was given "
                f"{len(args)}"
            )
        return {**dict(zip(self.names, args, strict=False)), **kwargs}


def parameters_of_forward(module: nn.Module) -> list[inspect.Parameter]:
    """Of the forward; of the one it overrides, where it only passes on whatever it is given."""
    inherited = [vars(cls)["forward"] for cls in type(module).__mro__ if "forward" in vars(cls)]
    own = list(inspect.signature(module.forward).parameters.values())
    others = (list(inspect.signature(forward).parameters.values())[1:] for forward in inherited)
    return next((each for each in (own, *others) if not any(p.kind is p.VAR_POSITIONAL for p in each)), own)


def words_of(model: PreTrainedModel) -> Any:
    """The embedding of a model's tokens.

    Raises:
        ModelNotSupportedError: the model does not tell which module that is.
    """
    with suppress(NotImplementedError):
        if isinstance(getattr(words := model.get_input_embeddings(), "weight", None), Tensor):
            return words
    raise ModelNotSupportedError(
        f"model: expected a get_input_embeddings() that returns the module, with a weight, that input_ids go through; "
        f"{type(model).__name__} has none. Define it in your class, as the models of transformers do"
    )


def pad_token_of(model: PreTrainedModel) -> int | None:
    token = getattr(model.config.get_text_config(), "pad_token_id", None)
    return token if isinstance(token, int) and token >= 0 else None


def device_of_inputs(model: PreTrainedModel) -> torch.device:
    """Where tokens belong: where their embeddings are, or come to when accelerate has offloaded them."""
    embeddings = words_of(model)
    own: torch.device = embeddings.weight.device
    hook = getattr(embeddings, "_hf_hook", None)
    return own if own.type != "meta" or hook is None else torch.device(hook.execution_device)


GATHERED = "ds_id"
"""What DeepSpeed ZeRO-3 sets on a parameter that it gathers when a module is called."""


def where_weights_are(model: nn.Module) -> str | None:
    """ "on the meta device" or "sharded over processes"; None for weights in memory, and for offloaded ones, which
    accelerate brings back."""
    for module in model.modules():
        if is_fsdp(module):
            return "sharded over processes"
        for parameter in module.parameters(recurse=False):
            if is_sharded(parameter):
                return "sharded over processes"
            if parameter.is_meta and not hasattr(module, "_hf_hook"):
                return "on the meta device"
    return None


def is_fsdp(module: nn.Module) -> bool:
    return any(cls.__name__ in ("FSDPModule", "FullyShardedDataParallel") for cls in type(module).__mro__)


def is_sharded(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, GATHERED) or type(parameter).__name__ == "DTensor"
