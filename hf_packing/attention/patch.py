"""Patch a model so that packed documents do not affect each other, and remove the patch again."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.hub_kernels import is_kernel

from hf_packing.attention.find_route import find_and_prove, find_for_long_documents, find_on_small_copy
from hf_packing.attention.forward import install, refuse_weights, remove, unpatched_on_error
from hf_packing.attention.function import NAME
from hf_packing.attention.kernels import HUB_KERNEL
from hf_packing.attention.model import (
    configurations,
    has_local_weights,
    inner_model,
    weights_location,
)
from hf_packing.attention.report import check_isolation
from hf_packing.attention.route import Route, is_patched, known_routes, route_key, route_of
from hf_packing.attention.small_copy import has_thresholds, random_where_zero
from hf_packing.attention.snapshot import attention_of
from hf_packing.attention.tree_proof import prove_trees
from hf_packing.attention.unpadding_proof import prove_unpadding
from hf_packing.checks import check_choice
from hf_packing.errors import ModelNotSupportedError, PackingError

Model = TypeVar("Model", bound=nn.Module)


Prove = Literal["model", "small"]
"""The model on which `patch_model` proves isolation."""


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
    documents are read from any of the arguments cu_seq_lens_q, position_ids and seq_idx. With an attention_mask
    instead, every row is one document, and the backbone, which is the model without its head, runs without the padding.
    Models that return outputs for whole rows take only such batches. Calls with a cache run as without the patch.

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
    models, always. Rows of trees, in which documents share their prefixes, are proven with `trees`: the outputs for a
    prefix must not depend on what follows; every document has to have the logits and gradients that it has alone; and
    replacing a segment must change nothing but the segment and what is below it. A batch of a kind that is not proven
    raises PackingError.

    The proof takes about thirty forwards of few tokens, and more if a model needs several searches. It covers only the
    kernel for the model's current device and dtype, so move the model there first.

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
        route = route_of(inner)
        if trees and not (route and route.facts.takes_trees):
            with random_where_zero(inner):
                prove_trees(inner)
        if padded and not (route and route.facts.unpadding):
            with random_where_zero(inner):
                prove_unpadding(inner)
    return model


def _patch(model: nn.Module, prove: Prove) -> None:
    """Find a route, prove it on the model or on a small copy, and install it."""
    inner = inner_model(model)
    _check_configuration(inner)
    _use_hub_kernels_of(inner)
    if prove == "small":
        install(inner, find_on_small_copy(inner))
        warnings.warn(
            f"patch_model proved isolation on a small copy of {type(inner).__name__}, not on the model itself; call "
            "check_isolation(model, batch=batch) after the weights of the model are loaded into memory",
            stacklevel=3,
        )
        return
    if (location := weights_location(model)) != "in memory":
        raise PackingError(
            f"model: expected weights in memory, but the weights of {type(inner).__name__} are {location}; call "
            "patch_model while the weights are in memory, or pass prove='small'"
        )
    with random_where_zero(inner):
        is_known = route_key(inner) in known_routes
        find_and_prove(inner)
        route = route_of(inner)
        if not is_known and route is not None and route.by_segment and has_thresholds(inner.config):
            find_for_long_documents(inner)


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


ProveInTraining = Literal["first batch", "model", "small"]
"""When, or on which model, a trainer or a training loop proves isolation."""

_FEW_PARAMETERS = 5_000_000
"""A model with at most this number of parameters is as fast as its small copy, so the route is found on the model."""


@torch.inference_mode(False)  # gradients are compared
def patch_for_training(model: nn.Module, accelerator: Accelerator, prove: ProveInTraining) -> None:
    """Patch a model that a trainer or a training loop will train.

    Args:
        model: the model to patch, as described in `patch_model`.
        accelerator: the Accelerator that will run the model.
        prove: "first batch" to find the route on a small copy of a large model. The caller then has to prove isolation
            on the first batch, with `prove_on_batch`. Otherwise, as described in `patch_model`. If `prove` is "model",
            isolation is also proven in the accelerator's mixed precision.

    Raises:
        ModelNotSupportedError: isolation cannot be verified. If the model was not patched before the call, it is left
            unpatched.
        PackingError: see `patch_model`.
    """
    check_choice("prove", prove, ProveInTraining)
    inner = inner_model(model)
    with unpatched_on_error(model):
        if prove == "first batch" and not is_patched(inner) and not _is_small(inner):
            _patch_as_small_copy(inner)
        patch_model(model, prove="small" if prove == "small" else "model")
        if prove != "model" or accelerator.mixed_precision == "no":
            return
        with accelerator.autocast():
            report = check_isolation(model)
        if not report.isolated:
            raise ModelNotSupportedError(
                f"isolation cannot be verified in {accelerator.mixed_precision} mixed precision: {report.reason}"
            )


def _is_small(model: nn.Module) -> bool:
    return has_local_weights(model) and sum(each.numel() for each in model.parameters()) <= _FEW_PARAMETERS


def _patch_as_small_copy(model: PreTrainedModel) -> None:
    """Install the route that was found on a small copy of a model. If none is found, the model is left unpatched,
    unless its weights are not in memory.

    Raises:
        ModelNotSupportedError: the weights are not in memory, and no route is found on a small copy.
    """
    _check_configuration(model)
    _use_hub_kernels_of(model)
    try:
        install(model, find_on_small_copy(model))
    except ModelNotSupportedError:
        if not has_local_weights(model):
            raise


def check_patched(model: nn.Module) -> None:
    """Raise PackingError if a model is not patched by `patch_model`."""
    inner = inner_model(model)
    if not is_patched(inner):
        raise PackingError(
            f"model: expected a model patched by patch_model, but {type(inner).__name__} is not patched, so packed "
            "documents may attend to each other; call patch_model(model), or pass model=model to prepare_dataloader"
        )


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
    inner = inner_model(model)
    if not is_patched(inner):
        raise PackingError(f"model: expected a model patched by patch_model, but {type(inner).__name__} is not patched")
    return _Unpatched(model, remove(inner))


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
    inner = inner_model(model)
    if is_patched(inner):
        yield model
        return
    patch_model(model)
    try:
        yield model
    finally:
        if is_patched(inner):
            unpatch_model(model)


class _Unpatched(AbstractContextManager[Any]):
    """The context manager that `unpatch_model` returns. At the end of the block, the model is patched with the same
    route as before. The route is not proven again."""

    def __init__(self, model: nn.Module, route: Route) -> None:
        self.model = model
        self.route = route

    def __enter__(self) -> nn.Module:
        return self.model

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        inner = inner_model(self.model)
        if not is_patched(inner):
            install(inner, self.route)
