"""Build tiny language models with random weights, for any model type of transformers.

Tests and the survey use them. The functions come first, and the tables of small settings follow.
"""

import dataclasses
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from tools.internals import SIZES, THRESHOLDS, VOCABULARY, randomize

__all__ = [
    "SETTINGS",
    "THRESHOLDS",
    "VOCABULARY",
    "architectures",
    "inner_configs",
    "small_config",
    "tiny_config",
    "tiny_model",
]

_MAX_PARAMETERS = 10_000_000
"""The largest number of parameters that a tiny model may have."""

_AUTO_CLASSES = {
    "causal": ("CAUSAL_LM", modeling_auto.AutoModelForCausalLM),
    "masked": ("MASKED_LM", modeling_auto.AutoModelForMaskedLM),
    "sequence classification": ("SEQUENCE_CLASSIFICATION", modeling_auto.AutoModelForSequenceClassification),
    "token classification": ("TOKEN_CLASSIFICATION", modeling_auto.AutoModelForTokenClassification),
    "question answering": ("QUESTION_ANSWERING", modeling_auto.AutoModelForQuestionAnswering),
    "multiple choice": ("MULTIPLE_CHOICE", modeling_auto.AutoModelForMultipleChoice),
    "pictures": ("IMAGE_TEXT_TO_TEXT", modeling_auto.AutoModelForImageTextToText),
}
"""Maps each kind of model to a part of the name of its table in transformers, and to its auto class."""


def architectures(kind: str) -> list[str]:
    """Return the names of all model types, such as "llama", for which transformers has this kind of model.

    Args:
        kind: "causal", "masked", "sequence classification", "token classification", "question answering", "multiple
            choice" or "pictures", for models that see pictures and return the logits of a text.
    """
    return sorted(getattr(modeling_auto, f"MODEL_FOR_{_AUTO_CLASSES[kind][0]}_MAPPING_NAMES"))


def tiny_model(model_type: str, kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """Build a tiny model with random weights, in evaluation mode.

    The weights are large enough for every part of the model to have a large effect on the outputs.

    Args:
        model_type: a model type of transformers, such as "llama".
        kind: kind of the model's head, as in `architectures`.
        dtype: dtype of the parameters.
        **changes: settings for the configuration, which take precedence over the small settings.

    Raises:
        ValueError: the model has more than 10,000,000 parameters even with small settings.
    """
    config = tiny_config(model_type, kind, **changes)
    auto_class = _AUTO_CLASSES[kind][1]
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in auto_class.from_config(config).parameters())
    if size > _MAX_PARAMETERS:
        raise ValueError(
            f"{model_type} has {size:,} parameters even with small settings, expected at most {_MAX_PARAMETERS:,}"
        )
    torch.manual_seed(0)
    model: PreTrainedModel = auto_class.from_config(config)
    randomize(model)
    return model.to(dtype).eval()


def tiny_config(model_type: str, kind: str, **changes: Any) -> PreTrainedConfig:
    """Build a configuration with small sizes and no dropout; see `tiny_model` for the arguments."""
    return small_config(CONFIG_MAPPING[model_type], kind, changes)


def small_config(cls: type[PreTrainedConfig], kind: str, changes: dict[str, Any]) -> PreTrainedConfig:
    """Build a configuration of a class with small sizes. Where the class rejects one, it has the default value."""
    fields = {field.name: field.default for field in dataclasses.fields(cls)}
    small = {name: value for name, value in (SETTINGS | THRESHOLDS).items() if name in fields}
    for name, default in fields.items():
        if ("drop" in name or name.endswith("pdrop")) and isinstance(default, (float, int)) and default is not False:
            small[name] = 0.0
    for name, inner in inner_configs(cls).items():
        small[name] = small_config(inner, "inner", {}).to_dict()
    fixed = _SETTINGS_OF_TYPE.get(cls.model_type, {}) | changes
    if kind == "causal" and "is_decoder" in fields:
        fixed = fixed | {"is_decoder": True}
    return _accepted(cls, small, fixed)


def inner_configs(cls: type[PreTrainedConfig]) -> dict[str, type[PreTrainedConfig]]:
    """Return a dictionary that maps the name of each configuration nested in `cls` to the class of that configuration.

    If `cls` allows any class for a nested configuration, the dictionary contains the class of the default value.
    """
    found = dict(cls.sub_configs)
    if AutoConfig in found.values():
        found |= {name: type(getattr(cls(), name, None)) for name, inner in found.items() if inner is AutoConfig}
    return {name: inner for name, inner in found.items() if issubclass(inner, PreTrainedConfig)}


def _accepted(cls: type[PreTrainedConfig], small: dict[str, Any], fixed: dict[str, Any]) -> PreTrainedConfig:
    """Build a configuration, without the small sizes that the configuration class rejects.

    If the class raises an error whose message contains the name of a small size, that size is dropped, and the
    configuration is built again.

    Args:
        cls: class of the configuration.
        small: small sizes, which may be dropped.
        fixed: settings that are never dropped.
    """
    try:
        return cls(**(small | fixed))
    except Exception as error:  # the type of the error depends on the configuration class
        rejected = next((name for name in small if name not in fixed and name in str(error)), None)
        if rejected is None:
            raise
    return _accepted(cls, {name: size for name, size in small.items() if name != rejected}, fixed)


SETTINGS: dict[str, Any] = (
    dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4)
    | dict.fromkeys(("decoder_layers", "num_decoder_layers", "moe_layer_end_index"), 3)
    | dict.fromkeys(("encoder_layers", "num_encoder_layers"), 2)
    | dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1)
    | {"num_kv_shared_layers": 0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 3}
    | {"mask_token_id": 4, "image_token_id": 5, "video_token_id": 6, "audio_token_id": 7}
    | dict.fromkeys(("decoder_start_token_id", "cls_token_id"), 1)
    | dict.fromkeys(("forced_eos_token_id", "final_logit_softcapping", "use_bidirectional_attention"))
    | dict.fromkeys(("moe_latent_size", "mtp_layers_block_type"))
    | {"loop_layer_index_start": 1, "loop_layer_index_end": 3, "n_layers_per_attn_res_block": 2}
    | SIZES
)
"""Maps the name of each setting in transformers' configurations to the value that tiny models use."""

_SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
_CONVOLUTION = {"layer_types": ["conv", "full_attention"] * 2}
_SLIDING_QWEN = {"use_sliding_window": True, "max_window_layers": 2}
_FOUR_HEADS = {"num_key_value_heads": 4}
_SHARED_ATTENTION = {
    "attention_hidden_size": 128,
    "attention_head_dim": 32,
    "num_key_value_heads": 4,
    "mamba_expand": 2,
}

_SETTINGS_OF_TYPE: dict[str, dict[str, Any]] = {
    "axk1": _FOUR_HEADS,
    "axk2": _FOUR_HEADS,
    "bailing_hybrid": _LINEAR | _FOUR_HEADS,
    "bamba": {"attn_layer_indices": [1, 3], "mamba_expand": 2},
    "cohere2": _SLIDING,
    "cohere_compass_text": _SLIDING,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": _FOUR_HEADS | {"topk_method": "greedy"},
    "deepseek_v3": _FOUR_HEADS,
    "deepseek_v32": _FOUR_HEADS,
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "distilbert": {"hidden_dim": 96},
    "dots1": {"max_window_layers": 2},
    "esm": {"token_dropout": False, "position_embedding_type": "rotary"},
    "exaone4": _SLIDING | {"sliding_window_pattern": 2},
    "falcon": {"alibi": False, "new_decoder_architecture": False, "multi_query": False, "num_kv_heads": 4},
    "falcon_h1": {"mamba_expand": 2},
    "falcon_mamba": {"num_hidden_layers": 2},
    "gemma2": _SLIDING | {"attn_logit_softcapping": 50.0},
    "gemma3_text": _SLIDING,
    "gemma3n_text": _SLIDING | {"activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": _SLIDING | {"num_global_key_value_heads": 2, "global_head_dim": 16},
    "glm4_moe_lite": _FOUR_HEADS,
    "glm_moe_dsa": _FOUR_HEADS,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gpt_oss": _SLIDING,
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "mamba_expand": 2},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
        "mamba_expand": 2,
    },
    "kimi_linear": _LINEAR | _FOUR_HEADS,
    "lfm2": _CONVOLUTION | {"block_multiple_of": 8},
    "lfm2_moe": _CONVOLUTION | {"num_dense_layers": 1},
    "llama4_text": {"layer_types": ["chunked_attention", "full_attention"] * 2, "no_rope_layers": [1, 0] * 2},
    "longcat_flash": _FOUR_HEADS | {"head_dim": 8, "num_layers": 2, "num_hidden_layers": 4, "qk_head_dim": None},
    "mamba": {"num_hidden_layers": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2, "num_hidden_layers": 2},
    "minicpm3": _FOUR_HEADS,
    "minimax": _LINEAR,
    "mobilebert": {"intra_bottleneck_size": 64},
    "modernbert": _SLIDING,
    "modernbert-decoder": _SLIDING,
    "moshi": _FOUR_HEADS,
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "moe", "mamba"], "expand": 2},
    "nystromformer": {"num_landmarks": 64, "segment_means_seq_len": 64},
    "olmo3": _SLIDING,
    "olmo_hybrid": _LINEAR,
    "phi3": {"original_max_position_embeddings": 256},
    "qwen2": _SLIDING_QWEN,
    "qwen2_moe": _SLIDING_QWEN,
    "qwen3": _SLIDING_QWEN,
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_5_text": _LINEAR,
    "qwen3_moe": {"use_sliding_window": True},
    "qwen3_next": _LINEAR,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {
        "axial_pos_shape": [16, 16],
        "axial_pos_embds_dim": [32, 32],
        "is_decoder": True,
        "lsh_attn_chunk_length": 8,
        "local_attn_chunk_length": 8,
    },
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "starcoder2": {"use_sliding_window": True},
    "xlstm": {"num_blocks": 2, "max_inference_chunksize": 256},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "youtu": _FOUR_HEADS,
    "zamba": _SHARED_ATTENTION
    | {"num_hidden_layers": 5, "layers_block_type": ["mamba", "hybrid"] * 2 + ["mamba"], "use_mamba_kernels": False},
    "zamba2": _SHARED_ATTENTION
    | {"layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 8, "mamba_headdim": 16}
    | {"use_shared_attention_adapter": False},
}
"""Maps a model type to settings that a tiny model of this type needs in addition to small sizes. Without these
settings, the model could not be built, or would lack some kinds of layers."""
