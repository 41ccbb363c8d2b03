"""Build a small copy of a model: the same class, as many layers of the same kinds, small sizes, and random weights.

A copy is used if the model's weights are not in memory, and if some modules of the model work differently on long
documents. It has about a million parameters, and is built in a second.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import product
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_packing.attention.snapshot import WeightSnapshot
from hf_packing.errors import ModelNotSupportedError
from hf_packing.upstream.transformers import attention_name, from_config

VOCABULARY = 128
"""Number of tokens that a small model knows."""

THRESHOLDS = {
    "sliding_window": 8,
    "attention_window": 8,
    "attention_window_size": 8,
    "attention_chunk_size": 8,
    "sliding_window_size": 8,
    "window_size": 8,
    "index_topk": 8,
    "local_attention": 16,
    "block_size": 2,
}
"""Small values for thresholds, such as windows: settings that affect only documents with more tokens than the setting's
value. Most test documents have more tokens than these values. `block_size` is smaller than the other settings, since
BigBird's block size affects only documents of more than eleven blocks."""

SIZES = {
    name: size
    for size, names in {
        64: (
            "hidden_size d_model n_embd emb_dim dim embedding_size input_embedding_size lru_width "
            "output_embedding_size attention_hidden_size embedding_dim prediction_head_size rel_extent "
            "max_source_positions max_2d_position_embeddings local_attention_window_len"
        ),
        96: (
            "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim hidden_dim dff dim_ff n_inner ffn_hidden_size "
            "feed_forward_size intermediate_size_mlp dense_intermediate_size d_inner prefix_dense_intermediate_size"
        ),
        256: "max_position_embeddings n_positions max_seq_len context_length n_ctx max_target_positions",
        VOCABULARY: "vocab_size vocab_size_per_layer_input mamba_d_ssm entity_vocab_size unpadded_vocab_size",
        32: (
            "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size num_buckets "
            "shared_experts_intermediate_size moe_shared_expert_intermediate_size expert_ffn_hidden_size "
            "pronunciation_vocab_size shape_vocab_size encoder_hash_byte_group_vocab"
        ),
        24: "q_lora_rank",
        16: (
            "head_dim kv_lora_rank v_head_dim qk_head_dim mamba_d_state mamba_d_head state_size mamba_head_dim "
            "ssm_state_size linear_key_head_dim linear_value_head_dim linear_head_dim index_head_dim swa_head_dim "
            "o_lora_rank kv_channels query_pre_attn_scalar dim_head attention_head_size d_head "
            "pronunciation_embed_dim shape_embed_dim attention_head_dim router_hidden_size ple_embed_dim "
            "embedding_rank"
        ),
        8: (
            "qk_rope_head_dim qk_nope_head_dim mamba_n_heads mamba_num_heads rotary_dim adapter_rank laurel_rank "
            "hidden_size_per_layer_input hc_lowrank mamba_chunk_size chunk_size d_rel num_landmarks num_latents"
        ),
        50: "ngram_vocab_size_base",
        4: (
            "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
            "num_decoder_attention_heads num_encoder_attention_heads attention_heads num_experts n_routed_experts "
            "num_local_experts moe_num_experts mamba_dt_rank time_step_rank linear_num_value_heads linear_num_heads "
            "swa_num_attention_heads prompt_length index_block_size gated_norm_rank"
        ),
        2: (
            "num_key_value_heads num_kv_heads num_experts_per_tok moe_k moe_topk linear_num_key_heads type_vocab_size "
            "num_experts_per_token "
            "index_n_heads swa_num_key_value_heads zero_expert_num n_mamba_heads hc_sinkhorn_iters o_groups "
            "index_topk_blocks expansion_ratio split_ngram_parts num_codebooks"
        ),
        1: (
            "n_group topk_group n_shared_experts num_shared_experts moe_num_shared_experts mamba_n_groups n_groups "
            "num_expert_group mamba_ngroups pretraining_tp"
        ),
        0: "num_nextn_predict_layers num_mtp_layers",
    }.items()
    for name in names.split()
}
"""Maps the name of a setting in transformers' configurations to the value that small models use. The numbers of layers
are not among them, so that a copy's modules have the same names as the model's modules."""

_KEPT_EQUAL = (
    ("num_key_value_heads", "num_attention_heads"),
    ("num_key_value_heads", "num_heads"),
    ("num_key_value_heads", "n_heads"),
    ("num_kv_heads", "num_attention_heads"),
    ("num_kv_heads", "n_head"),
    ("head_dim", "qk_rope_head_dim"),
    ("segment_means_seq_len", "num_landmarks"),
)
"""Pairs of settings. If the two settings are equal in the model, they also have to be equal in the copy."""

_LARGEST_TOKEN = 7

_MOST_PER_KIND = 8
"""Upper limit for integers in settings that are dictionaries, such as DeepSeek V4's compression rate for each kind of
layer."""

_EXPERTS = "eager"
"""The copy's `experts_implementation`. Other implementations use grouped kernels, which do not support float64."""

_OF_CUDA = ("flash", "flex")
"""Words in the names of attention functions that a copy, which is on the CPU, does not run."""

_KEPT_PARAMETERS = ("a_log", "dt_bias", "time_decay", "slope", "norm")
"""Words in the names of parameters. A parameter whose name contains one of these words keeps its initial values, since
the parameter's module relies on them."""


class NoCopyError(ModelNotSupportedError):
    """Raised if a model's class or its configuration rejects small sizes."""


def small_copy_of(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a small copy of a model on the CPU, with random weights.

    The copy has the same class as the model, and the same numbers and kinds of layers, but small sizes. It is in
    evaluation mode.

    Raises:
        NoCopyError: the model's class, or its configuration class, rejects the small sizes.
    """
    try:
        small = type(model.config).from_dict(_shrink(model.config))
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(0)
            copy = from_config(type(model), small, dtype=dtype, experts_implementation=_EXPERTS).eval()
    except Exception as error:  # its type depends on the class
        raise NoCopyError(
            f"{type(model).__name__}: isolation has to be tested on a small copy of the model, but no copy can be "
            f"built: {error}. Load the weights on a machine with enough memory, and call patch_model with "
            "prove='model' before the model is sharded"
        ) from error
    randomize(copy)
    own = attention_name(model.config)
    if own != attention_name(copy.config) and not any(kind in str(own) for kind in _OF_CUDA):
        copy.set_attn_implementation(own)
    return copy


def _shrink(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the settings of a configuration as a dictionary, in which large sizes are replaced by small sizes."""
    before = config.to_dict()
    settings = dict(before)
    for name, value in before.items():
        if isinstance(value, dict) and all(type(each) is int for each in value.values()):
            settings[name] = {kind: min(each, _MOST_PER_KIND) for kind, each in value.items()}
        elif name in THRESHOLDS and isinstance(value, list):  # one for each layer
            settings[name] = [min(each, THRESHOLDS[name]) for each in value]
        elif type(value) is int:
            most = _LARGEST_TOKEN if name.endswith("_token_id") else (SIZES | THRESHOLDS).get(name, value)
            settings[name] = min(value, most)
    for name, other in _KEPT_EQUAL:
        if other in before and before.get(name) == before[other]:
            settings[name] = settings[other]
    if {"num_heads", "head_dim", "expand"} <= settings.keys():  # Mamba 2 refuses any other number of heads
        settings["num_heads"] = settings["hidden_size"] * settings["expand"] // settings["head_dim"]
    for name in _derived(config, before, settings):
        del settings[name]
    for name in config.sub_configs:
        if isinstance(inner := getattr(config, name, None), PreTrainedConfig):
            settings[name] = _shrink(inner)
    return settings


def _derived(config: PreTrainedConfig, settings: dict[str, Any], small: dict[str, Any]) -> set[str]:
    """Return the names of sizes that a configuration computes from others if they are left out, as Zamba's size of
    attention heads."""
    kind = type(config)

    def without(name: str, given: dict[str, Any]) -> Any:
        return getattr(kind.from_dict({each: value for each, value in given.items() if each != name}), name, None)

    doubled = {name: 2 * value if type(value) is int and name in SIZES else value for name, value in settings.items()}
    found = set()
    for name, other in product(settings, (small, doubled)):
        value = settings[name]
        with suppress(Exception):  # the configuration may need the setting, or the others as they are
            if type(value) is int and without(name, settings) == value != without(name, other):
                found.add(name)
    return found


def has_thresholds(config: PreTrainedConfig) -> bool:
    """Return whether a configuration has a threshold, such as a sliding window, that is larger than in a small copy.

    Some modules work differently on documents that are longer than a threshold.
    """
    settings = vars(config.get_text_config())
    return any(isinstance(settings.get(name), int) and settings[name] > short for name, short in THRESHOLDS.items())


def randomize(model: nn.Module) -> None:
    """Replace the weights of a model by random weights that are large enough for every part to affect the outputs.

    Initial weights are often too small for this purpose.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            name = name.lower()
            kept = name.endswith(".d") or any(part in name for part in _KEPT_PARAMETERS)
            if parameter.is_floating_point() and not kept and (parameter.dim() > 1 or "sink" in name):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * _scale_of(name, parameter))


def _scale_of(name: str, parameter: nn.Parameter) -> float:
    """Return the standard deviation with which `randomize` draws the entries of a parameter, whose name is in lower
    case."""
    if any(part in name for part in ("embed", "wte", "wpe")):
        return 0.7
    if "conv1d" in name and parameter.dim() == 3:  # whose rounding recurrent layers enlarge
        return 0.5
    of_experts = parameter.dim() > 2 and "experts" in name
    inputs = parameter.shape[-2] if of_experts else parameter.shape[1:].numel()
    return float(1.2 / max(inputs, 1) ** 0.5)


_SMALL = 0.1
"""Standard deviation of the noise that `random_where_zero` adds to gates and biases that consist of zeros."""

_SHARE_OF_KERNEL = 0.5
"""Standard deviation of the noise that `random_where_zero` adds to a convolution kernel, as a share of the root mean
square of the kernel."""

_LONGEST_KERNEL = 16
"""Largest kernel size, in tokens, of the convolutions to which `random_where_zero` adds noise. The kernel size is the
size of the last axis of the convolution's weight."""


@contextmanager
def random_where_zero(model: nn.Module) -> Iterator[None]:
    """Context manager: within the block, noise is added to weights that may hide a leak between documents.

    In an untrained model, two kinds of weights may hide a leak. A projection or gate of zeros passes on no information,
    and a convolution kernel that is the identity passes no information from one token to another. Noise is added to
    every parameter that consists of zeros, and to every short convolution kernel. After the block, the original weights
    are restored.
    """
    generator, weights = torch.Generator().manual_seed(0), WeightSnapshot(model)
    try:
        with torch.no_grad(), weights:
            for parameter in model.parameters():
                is_kept = type(parameter) is nn.Parameter and parameter.is_floating_point() and not parameter.is_meta
                if not (is_kept and parameter.ndim and parameter.numel()):  # subclasses are not restored
                    continue
                if not parameter.any():
                    scale = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else _SMALL
                elif parameter.ndim == 3 and parameter.shape[-1] <= _LONGEST_KERNEL:
                    scale = _SHARE_OF_KERNEL * float(parameter.float().square().mean().sqrt())
                else:
                    continue
                parameter.add_((torch.randn(parameter.shape, generator=generator) * scale).to(parameter))
        yield
    finally:
        weights.restore()
