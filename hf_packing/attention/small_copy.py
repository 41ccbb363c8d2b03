"""Build a small copy of a model: the same class, as many layers of the same kinds, small sizes, and random weights.

A copy is used if the model's weights are not in memory, and if some modules of the model work differently on long
documents. It has about a million parameters, and is built in a second.
"""

import warnings
from collections.abc import Collection
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_packing.attention.find_route import find_and_prove
from hf_packing.attention.forward import install, remove
from hf_packing.attention.inspect_model import pad_token_of
from hf_packing.attention.probe import Probe
from hf_packing.attention.proof import STOCK_ATTENTIONS
from hf_packing.attention.route import Route, known_routes, packed_share, route_key, route_of
from hf_packing.attention.search import Search
from hf_packing.attention.snapshot import attention_of
from hf_packing.attention.tolerance import NoLanguageModelError
from hf_packing.errors import ModelNotSupportedError

VOCABULARY = 128
"""Number of tokens that a small model knows."""

THRESHOLDS = dict.fromkeys(
    (
        *("sliding_window", "attention_window_size", "attention_chunk_size", "sliding_window_size", "window_size"),
        "index_topk",
    ),
    8,
) | {"block_size": 2}
"""Small values for thresholds, such as windows: settings that affect only documents with more tokens than the setting's
value. Most test documents have more tokens than these values. `block_size` is smaller than the other settings, since
BigBird's block size affects only documents of more than eleven blocks."""

SIZES: dict[str, int] = {
    name: size
    for size, names in {
        64: (
            *("hidden_size", "d_model", "n_embd", "emb_dim", "dim", "embedding_size", "input_embedding_size"),
            *("lru_width", "output_embedding_size", "attention_hidden_size", "embedding_dim"),
            *("prediction_head_size", "rel_extent", "max_source_positions", "max_2d_position_embeddings"),
            *("local_attention_window_len",),
        ),
        96: (
            *("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "hidden_dim", "dff", "dim_ff"),
            *("n_inner", "ffn_hidden_size", "feed_forward_size", "intermediate_size_mlp"),
            *("dense_intermediate_size", "d_inner", "prefix_dense_intermediate_size"),
        ),
        256: (
            *("max_position_embeddings", "n_positions", "max_seq_len", "context_length", "n_ctx"),
            *("max_target_positions",),
        ),
        VOCABULARY: (
            *("vocab_size", "vocab_size_per_layer_input", "mamba_d_ssm", "entity_vocab_size"),
            *("unpadded_vocab_size",),
        ),
        32: (
            *("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"),
            *("num_buckets", "shared_experts_intermediate_size", "moe_shared_expert_intermediate_size"),
            *("expert_ffn_hidden_size", "pronunciation_vocab_size", "shape_vocab_size"),
            *("encoder_hash_byte_group_vocab",),
        ),
        24: ("q_lora_rank",),
        16: (
            *("head_dim", "kv_lora_rank", "v_head_dim", "qk_head_dim", "mamba_d_state", "mamba_d_head"),
            *("state_size", "mamba_head_dim", "ssm_state_size", "linear_key_head_dim", "linear_value_head_dim"),
            *("linear_head_dim", "index_head_dim", "swa_head_dim", "o_lora_rank", "kv_channels"),
            *("query_pre_attn_scalar", "dim_head", "attention_head_size", "d_head", "pronunciation_embed_dim"),
            *("shape_embed_dim", "attention_head_dim", "router_hidden_size", "ple_embed_dim", "embedding_rank"),
            *("local_attention",),
        ),
        8: (
            *("qk_rope_head_dim", "qk_nope_head_dim", "mamba_n_heads", "mamba_num_heads", "rotary_dim"),
            *("adapter_rank", "laurel_rank", "hidden_size_per_layer_input", "hc_lowrank", "mamba_chunk_size"),
            *("chunk_size", "d_rel", "num_landmarks", "num_latents"),
        ),
        50: ("ngram_vocab_size_base",),
        4: (
            *("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"),
            *("encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads"),
            *("attention_heads", "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
            *("mamba_dt_rank", "time_step_rank", "linear_num_value_heads", "linear_num_heads"),
            *("swa_num_attention_heads", "prompt_length", "index_block_size", "gated_norm_rank"),
        ),
        3: ("loop_layer_index_end",),
        2: (
            *("num_key_value_heads", "num_kv_heads", "num_experts_per_tok", "moe_k", "moe_topk"),
            *("linear_num_key_heads", "type_vocab_size", "index_n_heads", "swa_num_key_value_heads"),
            *("zero_expert_num", "n_mamba_heads", "hc_sinkhorn_iters", "o_groups", "index_topk_blocks"),
            *("expansion_ratio", "n_layers_per_attn_res_block", "split_ngram_parts", "num_codebooks"),
        ),
        1: (
            *("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
            *("mamba_n_groups", "n_groups", "mamba_ngroups", "pretraining_tp", "loop_layer_index_start"),
        ),
        0: (*("num_nextn_predict_layers", "num_mtp_layers"),),
    }.items()
    for name in names
}
"""Maps the name of a setting in transformers' configurations to the value that small models use. The numbers of layers
are not among them, so that a copy's modules have the same names as the model's modules."""

_KEPT_EQUAL = (
    *(("num_key_value_heads", heads) for heads in ("num_attention_heads", "num_heads", "n_heads")),
    *(("num_kv_heads", heads) for heads in ("num_attention_heads", "n_head")),
    ("head_dim", "qk_rope_head_dim"),
)
"""Pairs of settings. If the two settings are equal in the model, they also have to be equal in the copy."""

_STATE_HEADS = (("num_heads", "head_dim", "expand"), ("mamba_n_heads", "mamba_d_head", "mamba_expand"))
"""Names of settings of Mamba layers: number of heads, head size, expansion. The number of heads has to be hidden size *
expansion / head size."""

_LARGEST_TOKEN = 7

_MOST_PER_KIND = 8
"""Upper limit for integers in settings that are dictionaries, such as DeepSeek V4's compression rate for each kind of
layer."""

_EXPERTS = "eager"
"""The copy's `experts_implementation`. Other implementations use grouped kernels, which do not support float64."""

_KEPT_PARAMETERS = ("a_log", "dt_bias", "time_decay", "slope", "norm")
"""Words in the names of parameters. A parameter whose name contains one of these words keeps its initial values, since
the parameter's module relies on them."""


def small_copy_of(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a small copy of a model on the CPU, with random weights.

    The copy has the same class as the model, and the same numbers and kinds of layers, but small sizes. It is in
    evaluation mode.

    Raises:
        Exception: the model's class, or its configuration class, rejects the small sizes. The type of the error depends
            on the class.
    """
    small = type(model.config).from_dict(_shrink(model.config))
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        copy = type(model)._from_config(small, dtype=dtype, experts_implementation=_EXPERTS).eval()
    randomize(copy)
    own = model.config._attn_implementation
    if own not in STOCK_ATTENTIONS and "flash" not in own and own is not None:
        copy.set_attn_implementation(own)
    return copy


def _shrink(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the settings of a configuration as a dictionary, in which large sizes are replaced by small sizes."""
    settings: dict[str, Any] = config.to_dict()
    before = dict(settings)
    for name, value in before.items():
        small = (SIZES | THRESHOLDS).get(name)
        if isinstance(value, dict) and value and all(type(each) is int for each in value.values()):
            settings[name] = {kind: min(each, _MOST_PER_KIND) for kind, each in value.items()}
        if isinstance(value, bool) or not isinstance(value, int):
            continue
        if name.endswith("_token_id"):
            settings[name] = min(value, _LARGEST_TOKEN)
        elif isinstance(small, int) and value > small:
            settings[name] = small
    for name, other in _KEPT_EQUAL:
        if other in before and before.get(name) == before[other]:
            settings[name] = settings[other]
    for heads, size, expansion in _STATE_HEADS:
        if all(isinstance(settings.get(name), int) for name in (heads, size, expansion, "hidden_size")):
            settings[heads] = settings["hidden_size"] * settings[expansion] // settings[size]
    inner = {name: getattr(config, name, None) for name in config.sub_configs}
    return settings | {name: _shrink(each) for name, each in inner.items() if isinstance(each, PreTrainedConfig)}


def changes_with_length(config: PreTrainedConfig) -> bool:
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
            if not parameter.is_floating_point() or name.endswith(".d"):
                continue
            if any(part in name for part in _KEPT_PARAMETERS):
                continue
            if "sink" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            elif parameter.dim() >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * _scale_of(name, parameter))


def _scale_of(name: str, parameter: nn.Parameter) -> float:
    """Return the standard deviation with which `randomize` draws the entries of a parameter.

    Args:
        name: name of the parameter, in lower case.
        parameter: a parameter with two or more dimensions.
    """
    if any(part in name for part in ("embed", "wte", "wpe")):
        return 0.7
    if "conv1d" in name and parameter.dim() == 3:
        return 0.5
    if parameter.dim() == 2:
        inputs = parameter.shape[-1]
    elif "experts" in name:
        inputs = parameter.shape[-2]
    else:
        inputs = parameter[0].numel()
    return float(1.2 / max(inputs, 1) ** 0.5)


_COPY_DTYPES = (torch.float64, torch.float32)
"""Dtypes of the copy, tried in this order. The copy has large random weights, with which rounding errors grow from
layer to layer. In float64, the errors stay small, but some kernels do not support float64."""


class _NoCopyError(ModelNotSupportedError):
    """Raised if a model's class or its configuration rejects the small sizes."""


class FoundOnCopy(NamedTuple):
    """A route that was found and proven on a small copy of a model."""

    route: Route
    only_in_model: list[str]
    """Names of the modules that the model itself has, but not the copy, such as modules of PEFT and modules that the
    user has replaced. Inner modules of such modules are left out."""


def find_and_prove_on_small_copy(model: PreTrainedModel) -> FoundOnCopy:
    """Find and prove a route on a small copy of a model, and return it as a route for the model itself.

    A route is a way to keep packed documents apart. The model itself is not run.

    Raises:
        ModelNotSupportedError: no copy can be built; or no route can be proven on the copy; or a module that runs
            segment by segment in the copy has another class in the model, or is missing there.
    """
    failures: list[str] = []
    for dtype in _COPY_DTYPES:
        try:
            copy = small_copy_of(model, dtype)
        except Exception as error:  # a configuration may be rejected for many reasons
            raise _NoCopyError(
                f"{type(model).__name__}: isolation has to be tested on a small copy of the model, but no copy can be "
                f"built: {error}. Load the weights on a machine with enough memory, and call patch_model with "
                "prove='model' before the model is sharded"
            ) from error
        try:
            find_and_prove(copy)
            return FoundOnCopy(_for_model(model, copy), _only_in_model(model, copy))
        except NoLanguageModelError:
            raise
        except ModelNotSupportedError as error:
            failures.append(f"on a small copy of the model in {dtype}: {error}")
    raise ModelNotSupportedError("; ".join(failures))


def find_and_prove_for_long_documents(model: PreTrainedModel) -> None:
    """Replace the route of a patched model by a route that also works for long documents.

    A route is the way in which a model keeps packed documents apart. Some modules work differently on documents that
    are longer than a threshold. For example, a module that selects the best 2048 tokens selects all tokens of a shorter
    document. The documents that a route is tested with are shorter than such thresholds, so this function looks for a
    route on a small copy of the model, in which the thresholds are small. The new route is then proven on the model
    itself. If no copy can be built, the model keeps its route, with a warning.

    Args:
        model: a patched model.

    Raises:
        ModelNotSupportedError: no route is proven on the copy, or the route of the copy is not proven on the model,
            which is left unpatched.
    """
    short, before = remove(model), attention_of(model)
    known_routes.pop(route_key(model))  # which is the short one
    try:
        found = find_and_prove_on_small_copy(model)
    except _NoCopyError as error:
        install(model, short, before)
        warnings.warn(f"patch_model proved isolation on short documents only: {error}", stacklevel=3)
        return
    route = found.route
    if found.only_in_model:
        route = extend_route(model, route, found.only_in_model)
    try:
        find_and_prove(model, only=route)
    except ModelNotSupportedError as error:
        raise ModelNotSupportedError(
            f"{type(model).__name__}: the route that keeps long documents apart in a small copy of the model is not "
            f"proven on the model itself: {error}"
        ) from error


def extend_route(model: PreTrainedModel, route: Route, names: Collection[str]) -> Route:
    """Search some modules of a model, and return a route in which they run segment by segment if they have to.

    Args:
        model: an unpatched model.
        route: a route that was found on a model without these modules.
        names: names of the modules. Their inner modules are searched, too.

    Raises:
        ModelNotSupportedError: the model cannot be called on a packed row.
    """
    install(model, route, attention_of(model))
    try:
        probe = Probe(model)
        search = Search(model, probe.row, only=names)
        with probe.undisturbed():
            found = search.run(lambda **options: probe.packed(probe.documents, **options))
    except Exception as error:  # custom model code may raise anything
        raise ModelNotSupportedError(f"the model cannot be called on a packed row: {error}") from error
    finally:
        remove(model)
    if not found:
        return route
    outside = [plan for plan in route.by_segment if not any(_is_inside(plan.name, each.name) for each in found)]
    new = [plan for plan in found if not any(_is_inside(plan.name, each.name) for each in outside)]
    plans = (*outside, *new)
    method = replace(route.method, one_row=True)
    return replace(route, method=method, by_segment=plans, packed_share=packed_share(model, plans))


def _is_inside(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")


def _for_model(model: PreTrainedModel, copy: PreTrainedModel) -> Route:
    """Turn the route that was found on a small copy into a route for the model itself, and return it.

    Raises:
        ModelNotSupportedError: a module that runs segment by segment in the copy has another class in the model, or is
            missing there.
    """
    route = route_of(copy)
    assert route is not None
    classes = {name: type(module).__name__ for name, module in copy.named_modules()}
    own = {name: [cls.__name__ for cls in type(module).__mro__] for name, module in model.named_modules()}
    for plan in route.by_segment:
        if classes[plan.name] not in own.get(plan.name, ()):
            raise ModelNotSupportedError(
                f"{type(model).__name__}: patch_model found a route on a small copy of the model, but the route does "
                f"not fit the model itself; expected {plan.name} to be of class {plan.kind} as in the copy, got "
                f"{own.get(plan.name, ['no such module'])[0]}"
            )
    refused = None if route.facts.refused_token is None else pad_token_of(model)  # the copy has smaller token ids
    facts = replace(route.facts, refused_token=refused)
    return replace(route, packed_share=packed_share(model, route.by_segment), facts=facts)


def _only_in_model(model: PreTrainedModel, copy: PreTrainedModel) -> list[str]:
    """Return the outermost modules of a model that the copy lacks, or that have another class or forward there."""
    known = {name: type(module) for name, module in copy.named_modules()}
    found: list[str] = []
    for name, module in model.named_modules():
        changed = "forward" in vars(module) or bool(module._forward_pre_hooks) or bool(module._forward_hooks)
        inside = any(name.startswith(f"{outer}.") for outer in found[-1:])
        if name and not inside and (changed or not issubclass(type(module), known.get(name, ()))):
            found.append(name)
    return found
