"""patch_model: isolate packed documents in a model and prove it, or raise; unpatch_model and patched: undo it."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel

from hf_packing.attention.find_route import find_and_prove, known_routes, route_key
from hf_packing.attention.inspect_model import WeightsLocation, has_local_weights, inner_model, weights_location
from hf_packing.attention.isolation import check_isolation
from hf_packing.attention.patched_forward import attention_of, install, remove
from hf_packing.attention.route import Route, is_patched, route_of
from hf_packing.attention.small_copy import (
    changes_with_length,
    find_and_prove_for_long_documents,
    find_and_prove_on_small_copy,
)
from hf_packing.attention.varlen import NAME, NAME_WITH_LOCAL_MASKS
from hf_packing.errors import ModelNotSupportedError, PackingError

Model = TypeVar("Model", bound=nn.Module)


def patch_model(model: Model, *, prove: bool = True) -> Model:
    """Make a model keep packed documents apart, and prove it on the model itself.

    There are two routes, and the proof decides between them:

    - `varlen`: attention goes through `packed_varlen`, which is flash-attn's or torch's variable-length kernel on CUDA,
      and exact attention segment by segment elsewhere.
    - `segments`: the modules that are not segment-local, found by experiment, run segment by segment; all others stay
      packed.

    Most models with recurrent layers or convolutions use both. Borders are read from cu_seq_lens_q, position_ids or
    seq_idx, whichever is given.

    The proof packs three random documents, then four others, then those four in two rows. It replaces one packed
    document at a time. The patch stays only if the other documents do not change, in logits or gradients, and if all
    documents have the same logits and gradients as alone on the unpatched model, up to the measured effect of rounding.
    The proof runs in evaluation mode and in training mode, with dropout, noise and layer dropping off. If training mode
    cannot be proven, `check_isolation(model).route.unproven` says why.

    The proof takes about a hundred forwards of at most 46 tokens, and more if modules run by segment. It covers only
    the kernel of the model's current device and dtype, so move the model to its training device and dtype first.

    Args:
        model: a causal or masked language model of transformers, on any device, in any dtype; also inside the wrapper
            of PEFT. It is changed in place.
        prove: False for a model that is on the meta device, or already sharded. The route is then proven on a small
            copy of the model, with as many layers, and a warning says so.

    Returns:
        The same model. Patching it again does nothing.

    Raises:
        ModelNotSupportedError: it cannot be proven that the model keeps documents apart. The message says why, and the
            model is as it was before.
        PackingError: not a PreTrainedModel; or weights that are not in memory, and prove is not False.

    Example:
        >>> import hf_packing as hfp, transformers
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=99, **sizes))
        >>> model = hfp.patch_model(model)
        >>> batch = hfp.PackingCollator()([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
        >>> model(**batch).logits.shape
        torch.Size([1, 5, 99])
    """
    inner = inner_model(model)
    if is_patched(inner):
        return model
    _refuse_shared_configuration(inner)
    if not prove:
        install(inner, find_and_prove_on_small_copy(inner), attention_of(inner))
        warnings.warn(
            f"patch_model proved isolation on a small copy of {type(inner).__name__}, not on the model itself; run "
            "check_isolation(model) once its weights are in memory",
            stacklevel=2,
        )
        return model
    if (location := weights_location(model)) is not WeightsLocation.MEMORY:
        raise PackingError(
            f"model: expected weights in memory, those of {type(inner).__name__} are {location.value}; call "
            "patch_model before they are sharded, or with prove=False"
        )
    with random_where_zero(inner):
        is_known = route_key(inner) in known_routes
        find_and_prove(inner)
        route = route_of(inner)
        if not is_known and route is not None and route.by_segment and changes_with_length(inner.config):
            find_and_prove_for_long_documents(inner)
    return model


def _refuse_shared_configuration(model: PreTrainedModel) -> None:
    """Raise PackingError if another patched model has the same configuration, since both would be changed."""
    if any(attention in (NAME, NAME_WITH_LOCAL_MASKS) for _, attention in attention_of(model)):
        raise PackingError(
            f"model: expected one with a configuration of its own, {type(model).__name__} shares one with a patched "
            f"model: its attention is already {NAME!r}. Build each model from copy.deepcopy(config), before any of "
            "them is patched"
        )


_SMALL = 0.1
"""Standard deviation of gates and biases that are otherwise zero."""

_SHARE_OF_KERNEL = 0.5
"""Noise in a kernel, as a share of its root mean square."""

_LONGEST_KERNEL = 16
"""Largest kernel size, in tokens, of a convolution in a language model: the last axis of its weight."""


@contextmanager
def random_where_zero(model: nn.Module) -> Iterator[None]:
    """Inside the block, randomize weights whose initial values may hide a leak: parameters that are all zero, such as
    some projections and gates, and kernels of convolutions, some of which are initialized to the identity."""
    parameters = [p for p in model.parameters() if p.ndim and p.numel() and p.is_floating_point() and not p.is_meta]
    zero = [parameter for parameter in parameters if not parameter.any()]
    kernels = [
        (p, p.detach().clone()) for p in parameters if p.ndim == 3 and p.shape[-1] <= _LONGEST_KERNEL and p.any()
    ]
    generator = torch.Generator().manual_seed(0)

    def noise(parameter: nn.Parameter, scale: float) -> torch.Tensor:
        return (torch.randn(parameter.shape, generator=generator) * scale).to(parameter)

    try:
        with torch.no_grad():
            for parameter in zero:
                parameter.copy_(noise(parameter, parameter[0].numel() ** -0.5 if parameter.ndim > 1 else _SMALL))
            for parameter, _ in kernels:
                parameter.add_(noise(parameter, _SHARE_OF_KERNEL * float(parameter.float().square().mean().sqrt())))
        yield
    finally:
        with torch.no_grad():
            for parameter in zero:
                parameter.zero_()
            for parameter, before in kernels:
                parameter.copy_(before)


def unpatch_model(model: Model) -> AbstractContextManager[Model]:
    """Undo `patch_model`, so that the model is as it was before.

    Args:
        model: a patched model.

    Returns:
        A context manager. In a `with` statement, it patches the model again at the end of the block:
        `with hfp.unpatch_model(model): model.generate(...)`.

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
        raise PackingError(f"model: expected one that patch_model has patched, {type(inner).__name__} is not")
    return _Unpatched(model, remove(inner))


@contextmanager
def patched(model: Model) -> Iterator[Model]:
    """Patch a model inside a block; see `patch_model`.

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
    """Installs a route again at the end of a block, without another proof, since the route is already proven."""

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
            install(inner, self.route, attention_of(inner))


def patch_in_precision(model: nn.Module, accelerator: Accelerator, prove: bool = True) -> None:
    """Patch a model; if it will run in mixed precision, check isolation in that precision, too.

    Args:
        model: as in `patch_model`.
        accelerator: the one that will run the model.
        prove: as in `patch_model`.

    Raises:
        ModelNotSupportedError: isolation cannot be verified; the model is as it was before.
    """
    with unpatched_on_error(model):
        patch_model(model, prove=prove)
        if accelerator.mixed_precision == "no" or not has_local_weights(model):
            return
        with accelerator.autocast():
            report = check_isolation(model)
        if not report.isolated:
            raise ModelNotSupportedError(f"in {accelerator.mixed_precision} mixed precision: {report.reason}")


@contextmanager
def unpatched_on_error(model: nn.Module) -> Iterator[None]:
    """Unpatch a model that was patched within the block if the block raises."""
    was_patched = is_patched(inner_model(model))
    try:
        yield
    except Exception:
        if not was_patched and is_patched(inner_model(model)):
            unpatch_model(model)
        raise


def check_patched(model: nn.Module) -> None:
    """Raise PackingError for a model that is not patched."""
    inner = inner_model(model)
    if not is_patched(inner):
        raise PackingError(
            f"model: expected one that was patched by patch_model, {type(inner).__name__} is not, so its documents may "
            "attend to each other; prepare_dataloader(..., model=model) patches it, too"
        )
