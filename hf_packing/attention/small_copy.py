"""Build a small copy of a model, and use the copy to find the route of the model itself.

A route is a way to keep packed documents apart in a model. A small copy has the same class and the same kinds of layers
as the model. A copy is used if the model's weights are not in memory, or if some modules of the model work differently
on long documents.
"""

import warnings
from collections.abc import Collection
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_packing.attention.cases import STOCK_ATTENTIONS, RowCase
from hf_packing.attention.find_route import find_and_prove
from hf_packing.attention.inspect_model import pad_token_of
from hf_packing.attention.patched_forward import install, remove
from hf_packing.attention.route import Route, known_routes, packed_share, route_key, route_of
from hf_packing.attention.runs import NoLanguageModelError, Runner
from hf_packing.attention.search import Search
from hf_packing.attention.snapshot import attention_of
from hf_packing.attention.tiny_model import SETTINGS, THRESHOLDS, randomize
from hf_packing.errors import ModelNotSupportedError

_DEPTHS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"),
    *("encoder_layers", "num_encoder_layers", "moe_layer_start_index", "moe_layer_end_index"),
    *("first_k_dense_replace", "num_dense_layers", "num_kv_shared_layers"),
)
"""Names of settings that are not made smaller in the copy, so that the copy's modules have the same names as the
model's modules."""

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

_COPY_DTYPES = (torch.float64, torch.float32)
"""Dtypes of the copy, tried in this order. The copy has large random weights, with which rounding errors grow from
layer to layer. In float64, the errors stay small, but some kernels do not support float64."""

_EXPERTS = "eager"
"""The copy's `experts_implementation`. Other implementations use grouped kernels, which do not support float64."""


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
        case = RowCase(Runner(model))
        search = Search(model, case.row, only=names)
        with case.undisturbed():
            found = search.run(lambda **options: case.outputs(case.tokens, **options))
    except Exception as error:  # custom model code may raise anything
        raise ModelNotSupportedError(f"the model cannot be called on a packed row: {error}") from error
    finally:
        remove(model)
    if not found:
        return route
    outside = [plan for plan in route.by_segment if not any(_is_inside(plan.name, each.name) for each in found)]
    new = [plan for plan in found if not any(_is_inside(plan.name, each.name) for each in outside)]
    plans = (*outside, *new)
    inputs = replace(route.method.inputs, one_row=True)
    return replace(
        route,
        method=replace(route.method, inputs=inputs),
        by_segment=plans,
        packed_share=packed_share(model, plans),
    )


def _is_inside(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")


def changes_with_length(config: PreTrainedConfig) -> bool:
    """Return whether a configuration has a threshold, such as a sliding window, that is larger than in a small copy.

    Some modules work differently on documents that are longer than a threshold.
    """
    settings = vars(config.get_text_config())
    return any(isinstance(settings.get(name), int) and settings[name] > short for name, short in THRESHOLDS.items())


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
    refused = None if route.refused_token is None else pad_token_of(model)  # the copy has smaller token ids
    return replace(route, packed_share=packed_share(model, route.by_segment), refused_token=refused)


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
