"""A tiny random model of any architecture of transformers, from its configuration class alone."""

import dataclasses
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from hf_packing.attention.random_weights import randomise
from hf_packing.attention.sizes import SETTINGS, THRESHOLDS
from hf_packing.attention.survey.architectures import OF_A_TYPE

LARGEST = 10_000_000
"""Parameters of a model that still counts as tiny."""


def architectures(kind: str) -> list[str]:
    """Model types of the installed transformers that have a head of this kind, "causal" or "masked"."""
    mapping = {
        "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    }
    return sorted(mapping[kind])


def tiny_config(model_type: str, kind: str, **changes: Any) -> PreTrainedConfig:
    """A configuration of small sizes, without dropout; sizes that it rejects by name are left at its own."""
    return shrunk(CONFIG_MAPPING[model_type], kind, changes)


def shrunk(cls: type[PreTrainedConfig], kind: str, changes: dict[str, Any]) -> PreTrainedConfig:
    fields = {field.name: field.default for field in dataclasses.fields(cls)}
    small = {name: value for name, value in (SETTINGS | THRESHOLDS).items() if name in fields}
    for name, default in fields.items():
        if ("drop" in name or name.endswith("pdrop")) and isinstance(default, (float, int)) and default is not False:
            small[name] = 0.0
    for name, inner in inner_configs(cls).items():
        small[name] = shrunk(inner, "inner", {}).to_dict()
    fixed = OF_A_TYPE.get(cls.model_type, {}) | changes
    if kind == "causal" and "is_decoder" in fields:
        fixed = fixed | {"is_decoder": True}
    return accepted(cls, small, fixed)


def inner_configs(cls: type[PreTrainedConfig]) -> dict[str, type[PreTrainedConfig]]:
    """Classes of the configurations inside; where any would do, that of the default."""
    found = dict(cls.sub_configs)
    if AutoConfig in found.values():
        found |= {name: type(getattr(cls(), name, None)) for name, inner in found.items() if inner is AutoConfig}
    return {name: inner for name, inner in found.items() if issubclass(inner, PreTrainedConfig)}


def accepted(cls: type[PreTrainedConfig], small: dict[str, Any], fixed: dict[str, Any]) -> PreTrainedConfig:
    """A configuration without the small sizes that its class names when it refuses them."""
    try:
        return cls(**(small | fixed))
    except Exception as error:
        rejected = next((name for name in small if name not in fixed and name in str(error)), None)
        if rejected is None:
            raise
    return accepted(cls, {name: size for name, size in small.items() if name != rejected}, fixed)


def tiny_model(model_type: str, kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A tiny random model whose weights are large enough that everything in it matters.

    Raises:
        ValueError: it does not get tiny.
    """
    config = tiny_config(model_type, kind, **changes)
    heads = {"causal": modeling_auto.AutoModelForCausalLM, "masked": modeling_auto.AutoModelForMaskedLM}
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in heads[kind].from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{model_type} has {size:,} parameters even when its sizes are made small")
    torch.manual_seed(0)
    model: PreTrainedModel = heads[kind].from_config(config)
    randomise(model)
    return model.to(dtype).eval()
