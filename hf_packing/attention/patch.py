"""Patch a model so that packed documents do not affect each other, and remove the patch again.

The methods are tried in order, from the fastest to the most general. For each, a search finds the modules that have to
run segment by segment, and the route is proven on two rows, one of them in training mode.
"""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Literal, TypeVar

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.hub_kernels import is_kernel

from hf_packing.attention.cases import RowCase, examine_in_training, sees_labels
from hf_packing.attention.forward import install, refuse_weights, remove, unpatched_on_error
from hf_packing.attention.function import NAME
from hf_packing.attention.kernels import HUB_KERNEL, kernel_of, switched_off
from hf_packing.attention.kinds.padded import prove_unpadding, unpadding_of
from hf_packing.attention.kinds.trees import TREES, prove_trees
from hf_packing.attention.layout import within
from hf_packing.attention.model import (
    Signature,
    configurations,
    has_vocabulary,
    inner_model,
    pad_token_of,
    weights_location,
)
from hf_packing.attention.proof import prove, require
from hf_packing.attention.report import check_isolation
from hf_packing.attention.route import (
    PATCH,
    Facts,
    Method,
    Route,
    borders_left_out,
    is_patched,
    known_routes,
    methods_for,
    packed_share,
    route_key,
    route_of,
)
from hf_packing.attention.runs import NoLanguageModelError, NotCallableError, Runner
from hf_packing.attention.search import Search
from hf_packing.attention.small_copy import NoCopyError, has_thresholds, random_where_zero, small_copy_of
from hf_packing.attention.snapshot import attention_of
from hf_packing.checks import check_choice
from hf_packing.errors import ModelNotSupportedError, PackingError

Model = TypeVar("Model", bound=nn.Module)

Prove = Literal["model", "small"]
"""The model on which `patch_model` proves isolation."""

ProveInTraining = Literal["first batch", "model", "small"]
"""When, or on which model, a trainer or a training loop proves isolation."""


@torch.inference_mode(False)  # gradients are compared
def patch_model(model: Model, *, prove: Prove = "model", trees: bool = False, padded: bool = False) -> Model:
    """Patch a model so that documents packed in one row do not affect each other, and prove this by running the model.

    A route is a way of keeping packed documents apart. The patch installs the fastest route that passes the proof
    described below. A route uses one or both of two methods:

    - `varlen`: the function `packed_varlen` computes attention. On CUDA, the function calls a variable-length kernel of
      flash-attn, the Hugging Face hub or torch, or else FlexAttention. A kernel from the hub is only used if it was the
      model's own attention function. Where no kernel can be used, the function computes exact attention segment by
      segment. A segment is the part of a packed row that belongs to one document.
    - `segments`: some modules run segment by segment, and all other modules run on the whole packed row. A module runs
      by segment if its output for a whole row differs from its outputs for the separate segments. Such modules are
      found by experiment.

    Models that combine attention with recurrent layers or convolutions usually use both methods. The borders between
    documents are read from any of the arguments cu_seq_lens_q, position_ids, seq_idx and seq_lengths. With an
    attention_mask instead, every row is one document, and the backbone, which is the model without its head, runs
    without the padding. Models that return outputs for whole rows take only such batches. Calls with a cache run as
    without the patch.

    The proof packs three random documents in one row and, in training mode, two. It replaces one document at a time.
    Several packed rows run as one row, laid end to end. The patch is kept only if:

    - no replacement changes the logits of another document,
    - no gradient of a document's logits reaches another document, and
    - every document has the same logits and gradients, up to rounding errors, as in a row of its own on the unpatched
      model.

    Gradients are computed in training mode, with dropout, noise and layer dropping switched off. If the proof cannot be
    completed in training mode, for example because the model still draws random numbers, gradients are computed in
    evaluation mode, the model is patched, and `check_isolation(model).route.unproven` contains the reason.

    Padded batches are proven in the same way, with padding on each side: for a language model, with `padded`; for other
    models in any case, and those that take packed rows are patched without if it fails. Rows of trees, in which
    documents share their prefixes, are proven with `trees`: the outputs for a prefix must not depend on what follows;
    every document has to have the logits and gradients that it has alone; and replacing a segment must change nothing
    but the segment and what is below it. A batch of a kind that is not proven raises PackingError.

    The proof takes 20 to 60 forwards of at most 41 tokens, up to 80 with `padded` and `trees`, and more if it needs
    several searches. It covers only the kernel for the model's current device and dtype, so move the model there first.

    Args:
        model: a model of transformers with any head, on any device, in any dtype. The model may be wrapped by PEFT, and
            is changed in place.
        prove: "model" to run the proof on the model itself; "small" to run it on a small copy of the model with the
            same number of layers, and to issue a warning. Pass "small" if the weights are on the meta device or sharded
            over processes, and call `check_isolation(model, batch=...)` before training. `attach` does this itself.
        trees: whether to prove also that the model runs rows of trees, as `pack(..., share_prefixes=True)` makes them.
        padded: whether to prove also that the model runs padded batches, whose attention_mask has zeros.

    Returns:
        The same model. A model that is already patched is returned unchanged.

    Raises:
        ModelNotSupportedError: isolation cannot be proven, or trees or padded batches cannot. The message contains the
            reason, and the model is left unpatched if it was unpatched before.
        PackingError: `model` is not a PreTrainedModel, shares its configuration with a patched model, or is asked by
            its configuration for tuples or attention weights; `prove` is neither "model" nor "small"; `prove` is
            "model", and the weights are not in memory.

    Example:
        >>> import hf_packing as hfp, transformers
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=99, **sizes))
        >>> model = hfp.patch_model(model)
        >>> batch = hfp.PackingCollator()([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
        >>> model(**batch).logits.shape
        torch.Size([1, 5, 99])
    """
    check_choice("prove", prove, Prove)
    inner = inner_model(model)
    with unpatched_on_error(inner):
        if not is_patched(inner):
            _patch(model, prove)
        with random_where_zero(inner) if trees or padded else nullcontext():
            if trees and TREES not in getattr(inner, PATCH).facts.proven:
                prove_trees(inner)
            if padded and not unpadding_of(inner):
                prove_unpadding(inner)
    return model


def _patch(model: nn.Module, prove: ProveInTraining) -> None:
    """Find a route, prove it on the model or on a small copy, and install it.

    If `prove` is "first batch", the route of a large model is found on a small copy. If the copy has none, it is found
    on the model, unless the weights of the model are not in memory.
    """
    inner = inner_model(model)
    _check_configuration(inner)
    _use_hub_kernels_of(inner)
    if prove == "small":
        install(inner, find_on_small_copy(inner))
        warnings.warn(
            f"patch_model proved isolation on a small copy of {type(inner).__name__}, not on the model itself; call "
            "check_isolation(model, batch=batch) after the weights of the model are loaded into memory",
            stacklevel=4,  # beyond inference_mode
        )
        return
    is_local = (location := weights_location(model)) == "in memory"
    is_small = is_local and sum(each.numel() for each in inner.parameters()) <= _FEW_PARAMETERS
    if prove == "first batch" and not is_small:
        with suppress(ModelNotSupportedError) if is_local else nullcontext():
            install(inner, find_on_small_copy(inner))
            return
    if not is_local:
        raise PackingError(
            f"model: expected weights in memory, but the weights of {type(inner).__name__} are {location}; call "
            "patch_model while the weights are in memory, or pass prove='small'"
        )
    key, only, unknown = route_key(inner), None, ""
    with random_where_zero(inner):
        if key not in known_routes and has_thresholds(inner.config):
            # some modules work differently on documents longer than a window, or than the 2048 tokens that they select;
            # those of a proof are shorter, so the route is one that works on a copy with small thresholds
            try:
                only = find_on_small_copy(inner)
            except NoCopyError as error:
                unknown = str(error)
        find_and_prove(inner, only)
    if unknown:
        known_routes.pop(key, None)  # whoever patches another model has to know it, too
        warnings.warn(f"patch_model proved isolation on short documents only: {unknown}", stacklevel=4)


def _check_configuration(model: PreTrainedModel) -> None:
    """Raise PackingError if the model shares its configuration with a patched model, returns tuples, or is asked for
    attention weights.

    A patch changes the attention setting in the configuration, and therefore changes all models that share the
    configuration."""
    refuse_weights((model.config, model.config.get_text_config()))
    if any(getattr(config, "return_dict", True) is False for config in configurations(model)):
        raise PackingError(
            f"return_dict: expected True in the configuration of {type(model).__name__}, got False; outputs have to "
            "have names. Set model.config.return_dict = True, and call the model with return_dict=False for a tuple"
        )
    if any(attention == NAME for _, attention in attention_of(model)):
        raise PackingError(
            "model: expected a model with a configuration of its own, but the attention in the configuration of "
            f"{type(model).__name__} is already set by patch_model; this configuration is shared with, or copied from, "
            "a patched model. Build each model from its own copy.deepcopy(config), before any model is patched"
        )


def _use_hub_kernels_of(model: PreTrainedModel) -> None:
    """Let the layers of a model run on the kernels from the Hugging Face hub with which the model was loaded."""
    kernels = {id(config): attention for config, attention in attention_of(model) if is_kernel(attention)}
    for module in model.modules():
        vars(module).pop(HUB_KERNEL, None)
        if id(getattr(module, "config", None)) in kernels:
            setattr(module, HUB_KERNEL, kernels[id(module.config)])


_FEW_PARAMETERS = 5_000_000
"""A model with at most this number of parameters is as fast as its small copy, so the route is found on the model."""


@torch.inference_mode(False)  # gradients are compared
def patch_for_training(model: nn.Module, accelerator: Accelerator, prove: ProveInTraining, ranks_per_row: int) -> None:
    """Patch a model that a trainer or a training loop will train.

    Args:
        model: the model to patch, as described in `patch_model`.
        accelerator: the Accelerator that will run the model.
        prove: "first batch" to find the route on a small copy of a large model. The caller then has to prove isolation
            on the first batch, with `prove_on_batch`. Otherwise, as described in `patch_model`. If `prove` is "model",
            isolation is also proven in the accelerator's mixed precision.
        ranks_per_row: number of ranks that run a row together. If it is not 1, the model gets no borders.

    Raises:
        ModelNotSupportedError: isolation cannot be verified. If the model was not patched before the call, it is left
            unpatched.
        PackingError: see `patch_model`.
    """
    check_choice("prove", prove, ProveInTraining)
    inner = inner_model(model)
    with unpatched_on_error(model), within(borders_left_out, ranks_per_row > 1):
        if is_patched(inner) and ranks_per_row > 1 and getattr(inner, PATCH).route.method.borders:
            remove(inner)
        if not is_patched(inner):
            _patch(model, prove)
        if prove != "model" or accelerator.mixed_precision == "no":
            return
        with accelerator.autocast():
            report = check_isolation(model)
        if not report.isolated:
            raise ModelNotSupportedError(
                f"isolation cannot be verified in {accelerator.mixed_precision} mixed precision: {report.reason}"
            )


def check_patched(model: nn.Module) -> Route:
    """Return the route of a patched model; raise PackingError if it is not patched by `patch_model`."""
    inner = inner_model(model)
    if (route := route_of(inner)) is None:
        raise PackingError(
            f"model: expected a model patched by patch_model, but {type(inner).__name__} is not patched, so packed "
            "documents may attend to each other; call patch_model(model), or pass model=model to prepare_dataloader"
        )
    return route


def unpatch_model(model: Model) -> AbstractContextManager[Model]:
    """Remove the patch that `patch_model` has installed, and restore the model to its state before the patch.

    Args:
        model: a patched model.

    Returns:
        A context manager, which may be ignored. If it is used in a `with` statement, the model is patched again at the
        end of the block.

    Raises:
        PackingError: the model is not patched.

    Example:
        >>> import hf_packing as hfp, torch, transformers
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=99, **sizes))
        >>> model = hfp.patch_model(model)
        >>> with hfp.unpatch_model(model):
        ...     model.generate(torch.tensor([[5, 6, 7]]), min_new_tokens=2, max_new_tokens=2).shape
        torch.Size([1, 5])
    """
    check_patched(model)
    return _patched_again(model, remove(inner_model(model)))


@contextmanager
def _patched_again(model: Model, route: Route) -> Iterator[Model]:
    """Context manager: at the end of the block, a route is installed in the model. It is not proven again."""
    try:
        yield model
    finally:
        inner = inner_model(model)
        if not is_patched(inner):
            install(inner, route)


@contextmanager
def patched(model: Model) -> Iterator[Model]:
    """Context manager: within the block, the model is patched by `patch_model`. After the block, the patch is removed,
    unless the model was already patched before the block.

    Example:
        >>> import hf_packing as hfp, transformers
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=99, **sizes))
        >>> with hfp.patched(model):
        ...     hfp.check_isolation(model).isolated
        True
    """
    with unpatched_on_error(model, always=True):
        yield patch_model(model)


_LENGTHS_WITH_PADS, _PLACES_OF_PADS = (18, 9, 9), [2, 17, 20, 26, 29, 35]
"""Lengths of documents with pad tokens, and where these stand: in the third and in the last place of each."""

_LENGTHS_IN_TRAINING = (17, 17)
"""Lengths, in tokens, of the documents of the test batch in training mode. They are equal, since a route may run
documents of equal length in one call of a module, which may mix the rows of the call in training mode only."""

_COPY_DTYPES = (torch.float64, torch.float32)
"""Dtypes of a small copy, tried in this order. The copy has large random weights, with which rounding errors grow from
layer to layer. In float64, the errors stay small, but some kernels do not support float64."""


def find_and_prove(model: PreTrainedModel, only: Route | None = None) -> None:
    """Install the fastest route that is proven to keep documents apart.

    If `only` is given, no other route is tried. After an error or an interruption, the model is left unpatched.

    Raises:
        ModelNotSupportedError: no route passes the proof, the model cannot be called with input_ids alone, or the
            model's own loss compares labels of one document with outputs of another document. The message contains the
            reason.
    """
    try:
        _prove_on_packed_rows(model, model, only)
        return
    except ModelNotSupportedError as error:
        is_backbone = model.base_model is model and model.base_model_prefix and "labels" not in Signature(model).names
        if has_vocabulary(model) or not (isinstance(error, NotCallableError) or is_backbone):
            raise
    if model.base_model is not model:
        with suppress(ModelNotSupportedError):
            _prove_on_packed_rows(model, model.base_model, only)
            return
    with unpatched_on_error(model):
        method = Method(None, positions=False, borders=False)
        install(model, Route(method, (), 0.0, facts=Facts(takes_packed_rows=False)))
        prove_unpadding(model, by_length=True)


def _prove_on_packed_rows(model: PreTrainedModel, module: nn.Module, only: Route | None) -> None:
    """Install the fastest route on which `module`, the model or its backbone, takes packed rows, and prove it. If the
    model has no vocabulary, try to prove that it takes padded batches, too."""
    cases = _examined(Runner(model, module))
    with unpatched_on_error(model):
        facts = _install_proven_route(cases, only).facts
        facts.sees_labels = sees_labels(*cases)
        facts.refused_token = pad_token_of(model) if _treats_pad_as_padding(cases[0]) else None
        facts.takes_packed_rows = module is model
        if not has_vocabulary(model):
            with suppress(ModelNotSupportedError) if module is model else nullcontext():
                prove_unpadding(model)


def _examined(runner: Runner) -> list[RowCase]:
    """Return the cases of a proof: a row in evaluation mode, and one in training mode, with the outputs of documents
    alone. Gradients are computed in training mode or, if that is not possible, in evaluation mode."""
    case = RowCase(runner)
    middle = case.trees.tokens - case.lengths[-1] // 2
    case.others[middle] = case.tokens[middle]  # the logits of this token show that a leak would be noticed
    training = RowCase(runner, training=True, lengths=_LENGTHS_IN_TRAINING)
    examine_in_training(training, case)
    if not case.known:
        case.examine()
    return [case, training]


def _treats_pad_as_padding(like: RowCase) -> bool:
    """Return whether a patched model treats pad tokens in a document as padding. Documents that contain pad tokens then
    have different logits in packed rows and in a row of their own."""
    token = pad_token_of(like.model)
    if token is None:
        return False
    case = RowCase(like.runner, lengths=_LENGTHS_WITH_PADS, seed=1)
    case.tokens[_PLACES_OF_PADS] = token
    case.replacements = []
    try:
        case.examine()
        return bool(prove(case).problem)
    except Exception:  # the model refuses pad tokens itself
        return False


def _install_proven_route(cases: list[RowCase], only: Route | None) -> Route:
    """Install the fastest route that is proven to keep documents apart, and return it. The one that was found for a
    model that is built alike is tried first."""
    model, failures = cases[0].model, dict[str, None]()
    key = route_key(model)
    if (known := only or known_routes.get(key)) is not None:
        with nullcontext() if only else suppress(ModelNotSupportedError):
            known_routes[key] = _prove(known, cases)
            return known_routes[key]
    for method in methods_for(model, cases[0].runner.called):
        try:
            known_routes[key] = _search_and_prove(method, cases, tuple(failures))
            return known_routes[key]
        except ModelNotSupportedError as error:
            attention = "varlen attention" if method.attention else "the attention of the model"
            failures[f"with {attention}: {error}"] = None
    raise ModelNotSupportedError(
        f"{type(model).__name__}: patch_model cannot keep packed documents apart; " + "; ".join(failures)
    )


def _search_and_prove(method: Method, cases: list[RowCase], tried: tuple[str, ...]) -> Route:
    """Find the modules that have to run segment by segment if the model is called with `method`. Install the resulting
    route, prove that it keeps documents apart, and return it.

    In the first search, modules that are built alike are searched once. If the proof of the resulting route fails, all
    modules are searched.

    Args:
        method: an attention function, and a format of the model's inputs.
        cases: the test batches of the proof.
        tried: the reasons why faster methods failed; stored in the route.

    Raises:
        ModelNotSupportedError: the model cannot be called on a packed row, or the proof of the route fails. The model
            is left unpatched.
    """
    model, case = cases[0].model, cases[0]
    route: Route | None = None
    for thorough in (False, True):
        search = Search(model, case.row, thorough)
        try:
            with unpatched_on_error(model):
                install(model, Route(method, (), 1.0))
                # attention is exact: a kernel that is wrong would look like a module that has to run by segment
                with case.undisturbed(), switched_off():
                    forward = partial(case.outputs, case.tokens)
                    forward()
                    if method.attention and not kernel_of(model):
                        raise ModelNotSupportedError(
                            "the model never called the attention function that patch_model had set"
                        )
                    plans = tuple(search.run(forward))
            remove(model)
            if route and route.by_segment == plans:
                break
            route = Route(method, plans, packed_share(model, plans), tried)
            return _prove(route, cases)
        except ModelNotSupportedError as error:  # also where a module that is built like another gets other inputs
            failure = error
        except Exception as error:  # custom model code may raise anything
            failure = ModelNotSupportedError(f"the model cannot be called on a packed row: {error}")
    reasons = [str(failure)]
    if route and route.by_segment:
        by_segment = ", ".join(f"{number} {kind}" for kind, number in route.modules.items())
        reasons.append(f"modules that ran by segment: {by_segment}")
    for name, reason in list(search.unsliceable.items())[:2]:
        kind = type(model.get_submodule(name)).__name__
        reasons.append(f"{kind} ({name}) cannot run on a single segment: {reason}")
    raise ModelNotSupportedError("; ".join(reasons)) from failure


def _prove(route: Route, cases: list[RowCase]) -> Route:
    """Install a route, prove that it keeps documents apart, and return it with the facts that the proof has found. If
    the proof fails, raise ModelNotSupportedError, and leave the model unpatched."""
    route = replace(route, facts=Facts(unproven="; ".join(case.unproven for case in cases if case.unproven)))
    with unpatched_on_error(cases[0].model):
        install(cases[0].model, route)
        require(*cases)
    return route


def find_on_small_copy(model: PreTrainedModel) -> Route:
    """Find and prove a route on a small copy of a model, and return it as a route for the model itself, which is not
    run.

    Raises:
        ModelNotSupportedError: no copy can be built; or no route can be proven on the copy; or a module that runs
            segment by segment in the copy has another class in the model, or is missing there.
    """
    return route_of_copy(patched_copy_of(model), model)


def patched_copy_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return a small copy of a model with the fastest route that is proven on it.

    Raises:
        ModelNotSupportedError: no copy can be built, or no route can be proven on it.
    """
    for dtype in _COPY_DTYPES:
        copy = small_copy_of(model, dtype)
        try:
            find_and_prove(copy)
            return copy
        except NoLanguageModelError:
            raise
        except ModelNotSupportedError as error:
            failure = error
    raise ModelNotSupportedError(f"on a small copy of the model: {failure}") from failure


def route_of_copy(copy: PreTrainedModel, model: PreTrainedModel) -> Route:
    """Return the route of a small copy as a route for the model that it is a copy of.

    Raises:
        ModelNotSupportedError: a module that runs segment by segment in the copy has another class in the model, or is
            missing there.
    """
    route: Route = getattr(copy, PATCH).route
    own = dict(model.named_modules())
    for plan in route.by_segment:
        found = type(own.get(plan.name))
        if plan.kind not in [each.__name__ for each in found.__mro__]:
            raise ModelNotSupportedError(
                f"{type(model).__name__}: patch_model found a route on a small copy of the model, but the route does "
                f"not fit the model itself; expected {plan.name} to be of class {plan.kind} as in the copy, got "
                f"{found.__name__}"
            )
    facts = replace(route.facts)
    if facts.refused_token is not None:
        facts.refused_token = pad_token_of(model)  # the copy has smaller token ids
    return replace(route, packed_share=packed_share(model, route.by_segment), facts=facts)
