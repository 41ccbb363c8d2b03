"""Find and prove the route of a model on a small copy, which has the same class and the same kinds of layers.

A small copy is used if the model's weights are not in memory, or if the model works differently on long documents.
"""

from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_packing.attention.find_route import find_and_prove, known_routes, route_key
from hf_packing.attention.patched_forward import remove
from hf_packing.attention.proof import STOCK_ATTENTIONS
from hf_packing.attention.route import Route, packed_share, route_of
from hf_packing.attention.tiny_model import SETTINGS, THRESHOLDS, randomize
from hf_packing.attention.tolerance import NoLanguageModelError
from hf_packing.errors import ModelNotSupportedError

_DEPTHS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"),
    *("encoder_layers", "num_encoder_layers", "moe_layer_start_index", "moe_layer_end_index"),
    *("first_k_dense_replace", "num_dense_layers", "num_kv_shared_layers"),
)
"""Settings that stay the same, so that the modules of the copy have the same names as the modules of the model."""

_KEPT_EQUAL = (
    *(("num_key_value_heads", heads) for heads in ("num_attention_heads", "num_heads", "n_heads")),
    *(("num_kv_heads", heads) for heads in ("num_attention_heads", "n_head")),
    ("head_dim", "qk_rope_head_dim"),
)
"""Pairs of settings that are equal in the copy if they are equal in the model."""

_STATE_HEADS = (("num_heads", "head_dim", "expand"), ("mamba_n_heads", "mamba_d_head", "mamba_expand"))
"""Names of settings (heads, head size, expansion) for which heads = hidden size * expansion / head size."""

_LARGEST_TOKEN = 7

_MOST_PER_KIND = 8
"""Largest integer in the copy's settings that map kinds of layers to integers, such as windows."""

_COPY_DTYPES = (torch.float64, torch.float32)
"""Dtypes of the copy, tried in this order. With large random weights, rounding errors grow from layer to layer, which
float64 avoids; but some kernels do not support float64."""

_EXPERTS = "eager"
"""Implementation of the experts in a copy, since grouped kernels do not support float64."""


def find_and_prove_on_small_copy(model: PreTrainedModel) -> Route:
    """Return a route for a model. The route is found and proven on a small copy of the model.

    Raises:
        ModelNotSupportedError: no copy can be built, no route of the copy can be proven, or a module that runs by
            segment in the copy has another class in the model.
    """
    failures: list[str] = []
    for dtype in _COPY_DTYPES:
        try:
            copy = small_copy_of(model, dtype)
        except Exception as error:  # a configuration may be rejected for many reasons
            raise ModelNotSupportedError(
                f"{type(model).__name__}: with prove=False, the route is found on a small copy of the model, but no "
                f"copy can be built: {error}. Load the model on a machine where the model fits in memory, and patch "
                "the model before it is sharded"
            ) from error
        try:
            find_and_prove(copy)
            return _for_model(model, copy)
        except NoLanguageModelError:
            raise
        except ModelNotSupportedError as error:
            failures.append(f"on a small copy of the model in {dtype}: {error}")
    raise ModelNotSupportedError("; ".join(failures))


def find_and_prove_for_long_documents(model: PreTrainedModel) -> None:
    """Replace the route of a model whose modules work differently on documents that are longer than the test documents.

    An example is a module that selects the best 2048 tokens, and so selects all tokens of a short document. The new
    route is found on a small copy, in which such thresholds are small, and then proven on the model. If no route can be
    found on a small copy, the model keeps its route.

    Args:
        model: a patched model.
    """
    try:
        route = find_and_prove_on_small_copy(model)
    except ModelNotSupportedError:
        return
    remove(model)
    known_routes[route_key(model)] = route
    find_and_prove(model)


def changes_with_length(config: PreTrainedConfig) -> bool:
    """Return whether a configuration has a threshold, such as a window, that is larger than in a small copy."""
    settings = vars(config.get_text_config())
    return any(isinstance(settings.get(name), int) and settings[name] > short for name, short in THRESHOLDS.items())


def _for_model(model: PreTrainedModel, copy: PreTrainedModel) -> Route:
    """Return the copy's route as the route of the model.

    Raises:
        ModelNotSupportedError: a module that runs by segment in the copy is of another class in the model.
    """
    route = route_of(copy)
    assert route is not None
    classes = {name: type(module).__name__ for name, module in copy.named_modules()}
    own = {name: [cls.__name__ for cls in type(module).__mro__] for name, module in model.named_modules()}
    for plan in route.by_segment:
        if classes[plan.name] not in own.get(plan.name, ()):
            raise ModelNotSupportedError(
                f"{type(model).__name__}: the route was found on a small copy, in which {plan.name} is a {plan.kind}; "
                f"in the model itself it is {own.get(plan.name, ['missing'])[0]}, so the route does not apply"
            )
    return replace(route, packed_share=packed_share(model, route.by_segment))


def small_copy_of(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a small copy of a model on the CPU, with random weights.

    The copy has the same class as the model, and as many layers of the same kinds.

    Raises:
        Exception: the class rejects the small configuration; the type of the error depends on the class.
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
    """Return the settings of a configuration, with sizes replaced by small sizes."""
    settings: dict[str, Any] = config.to_dict()
    before = dict(settings)
    for name, value in before.items():
        small = (SETTINGS | THRESHOLDS).get(name)
        if isinstance(value, dict) and value and all(type(each) is int for each in value.values()):
            settings[name] = {kind: min(each, _MOST_PER_KIND) for kind, each in value.items()}
        if isinstance(value, bool) or not isinstance(value, int):
            continue
        if name.endswith("_token_id"):
            settings[name] = min(value, _LARGEST_TOKEN)
        elif isinstance(small, int) and value > small and name not in _DEPTHS:
            settings[name] = small
    for name, other in _KEPT_EQUAL:
        if other in before and before.get(name) == before[other]:
            settings[name] = settings[other]
    for heads, size, expansion in _STATE_HEADS:
        if all(isinstance(settings.get(name), int) for name in (heads, size, expansion, "hidden_size")):
            settings[heads] = settings["hidden_size"] * settings[expansion] // settings[size]
    inner = {name: getattr(config, name, None) for name in config.sub_configs}
    return settings | {name: _shrink(each) for name, each in inner.items() if isinstance(each, PreTrainedConfig)}
