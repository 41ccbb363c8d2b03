"""A small model of the same kind as one that cannot be run here, or not on rows that are long enough."""

from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_packing.attention.find_route import find_and_prove
from hf_packing.attention.proof import PLAIN
from hf_packing.attention.random_weights import randomise
from hf_packing.attention.route import Route, packed_share, route_of
from hf_packing.attention.sizes import SETTINGS, THRESHOLDS
from hf_packing.attention.tolerance import NoLanguageModelError
from hf_packing.errors import ModelNotSupportedError

DEPTHS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"),
    *("encoder_layers", "num_encoder_layers", "moe_layer_start_index", "moe_layer_end_index"),
    *("first_k_dense_replace", "num_dense_layers", "num_kv_shared_layers"),
)
"""What a small model keeps, so that its modules have the names of the large one's."""

EQUAL = (
    *(("num_key_value_heads", heads) for heads in ("num_attention_heads", "num_heads", "n_heads")),
    *(("num_kv_heads", heads) for heads in ("num_attention_heads", "n_head")),
    ("head_dim", "qk_rope_head_dim"),
)
"""Names of numbers that stay equal where they are."""

STATE_HEADS = (("num_heads", "head_dim", "expand"), ("mamba_n_heads", "mamba_d_head", "mamba_expand"))
"""Names of a number that has to be hidden size * expansion / head size."""

LARGEST_TOKEN = 7

LONGEST = 8
"""Tokens, of what a configuration says for each kind of layer."""

DTYPES = (torch.float64, torch.float32)
"""In many layers of large random weights roundings grow, which float64 is spared; some kernels do not take it."""

EXPERTS = "eager"
"""How a small model computes its experts: the grouped kernels do not take float64."""


def changes_beyond_the_probe(config: PreTrainedConfig) -> bool:
    settings = vars(config.get_text_config())
    return any(isinstance(settings.get(name), int) and settings[name] > short for name, short in THRESHOLDS.items())


def route_of_a_twin(model: PreTrainedModel) -> Route:
    """A route that is proven on a small model of the same class, with as many layers of the same kinds.

    Raises:
        ModelNotSupportedError: none can be built, or none of its routes can be proven.
    """
    failures: list[str] = []
    for dtype in DTYPES:
        try:
            twin = twin_of(model, dtype)
        except Exception as error:  # a configuration may be refused for a hundred reasons
            raise ModelNotSupportedError(
                f"{type(model).__name__}: with prove=False the route is looked for on a small model of the same kind, "
                f"and none can be built: {error}. Load the model where it fits in memory, and patch it there before it "
                "is sharded"
            ) from error
        try:
            find_and_prove(twin)
            return route_for(model, twin)
        except NoLanguageModelError:
            raise
        except ModelNotSupportedError as error:
            failures.append(f"a small model of the same kind in {dtype}: {error}")
    raise ModelNotSupportedError("; ".join(failures))


def route_for(model: PreTrainedModel, twin: PreTrainedModel) -> Route:
    """The twin's route, if its modules are this model's too."""
    route = route_of(twin)
    assert route is not None
    kinds = {inner: type(module).__name__ for inner, module in twin.named_modules()}
    own = {inner: [cls.__name__ for cls in type(module).__mro__] for inner, module in model.named_modules()}
    for step in route.by_segment:
        if kinds[step.name] not in own.get(step.name, ()):
            raise ModelNotSupportedError(
                f"{type(model).__name__}: a small model of the same kind runs {step.kind} ({step.name}) by segment, "
                f"and this one has {own.get(step.name, ['nothing'])[0]} there"
            )
    return replace(route, packed_share=packed_share(model, route.by_segment))


def twin_of(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A small model of the same class, with as many layers of the same kinds, on the CPU."""
    small = type(model.config).from_dict(shrunk(model.config))
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        twin = type(model)._from_config(small, dtype=dtype, experts_implementation=EXPERTS).eval()
    randomise(twin)
    own = model.config._attn_implementation
    if own not in PLAIN and "flash" not in own and own is not None:
        twin.set_attn_implementation(own)
    return twin


def shrunk(config: PreTrainedConfig) -> dict[str, Any]:
    """The settings of a configuration, with small sizes."""
    settings: dict[str, Any] = config.to_dict()
    before = dict(settings)
    for name, value in before.items():
        small = (SETTINGS | THRESHOLDS).get(name)
        if isinstance(value, dict) and value and all(type(each) is int for each in value.values()):
            settings[name] = {inner: min(each, LONGEST) for inner, each in value.items()}
        if isinstance(value, bool) or not isinstance(value, int):
            continue
        if name.endswith("_token_id"):
            settings[name] = min(value, LARGEST_TOKEN)
        elif isinstance(small, int) and value > small and name not in DEPTHS:
            settings[name] = small
    for name, other in EQUAL:
        if other in before and before.get(name) == before[other]:
            settings[name] = settings[other]
    for heads, size, expansion in STATE_HEADS:
        if all(isinstance(settings.get(name), int) for name in (heads, size, expansion, "hidden_size")):
            settings[heads] = settings["hidden_size"] * settings[expansion] // settings[size]
    inner = {name: getattr(config, name, None) for name in config.sub_configs}
    return settings | {name: shrunk(each) for name, each in inner.items() if isinstance(each, PreTrainedConfig)}
