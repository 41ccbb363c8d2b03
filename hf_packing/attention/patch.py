"""patch_model: keep packed documents apart in a model, prove it, or refuse; and undo it all."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_packing.attention.find_route import find_and_prove, key_of, known_routes
from hf_packing.attention.inspect_model import inner_model, where_weights_are
from hf_packing.attention.patched_forward import attention_of, install, is_patched, take_out
from hf_packing.attention.route import Route, route_of
from hf_packing.attention.small_copy import changes_beyond_the_probe, route_of_a_twin
from hf_packing.attention.varlen import NAME, NAME_WITH_SIGHT
from hf_packing.errors import ModelNotSupportedError, PackingError

Model = TypeVar("Model", bound=nn.Module)


def patch_model(model: Model, *, prove: bool = True) -> Model:
    """Make a model keep packed documents apart, proven on the model itself.

    Two routes, and what is proven decides between them. `varlen`: its attention goes through `packed_varlen`, which is
    flash-attn's or torch's variable-length kernel on CUDA and exact attention segment by segment elsewhere. `segments`:
    the modules that are not segment-local, found by experiment, run segment by segment; all others stay packed. Most
    models with a state or a convolution take both.

    Borders are read from cu_seq_lens_q, position_ids or seq_idx, whichever is given. The proof, on three random
    documents, then on four others, and on those in two rows: packed, one after the other is changed, and the patch
    stays only if no other document notices, in logits or gradients, and all have the logits and gradients that the
    unpatched model gives them alone, but for what rounding was measured to explain. All this in evaluation mode and,
    but for the two rows, in training mode with dropout, noise and layer dropping off; where the latter cannot be done,
    `check_isolation(model).route.unproven` says why. The price: some hundred forwards of at most 46 tokens, and a
    search where modules run by segment. What is proven is the kernel of this device and dtype: move the model there
    first.

    Args:
        model: a causal or masked language model of transformers, on any device, in any dtype; also as PEFT wraps it. It
            is changed in place.
        prove: False for a model on the meta device, or already sharded: the route is then proven on a small model of
            the same configuration instead, with as many layers, and a warning says so.

    Returns:
        The same model. Patching it again does nothing.

    Raises:
        ModelNotSupportedError: it cannot be shown to keep documents apart; the message says why, and the model is as
            it was before.
        PackingError: not a PreTrainedModel; or weights that are elsewhere, and prove is not False.

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
    refuse_the_configuration_of_another(inner)
    if not prove:
        install(inner, route_of_a_twin(inner), attention_of(inner))
        warnings.warn(
            f"patch_model proved isolation on a small {type(inner).__name__}, not on this one; run check_isolation on "
            "it once its weights are in memory",
            stacklevel=2,
        )
        return model
    if (where := where_weights_are(model)) is not None:
        raise PackingError(
            f"model: expected weights in memory, those of {type(inner).__name__} are {where}; call patch_model before "
            "they are sharded, or with prove=False"
        )
    with with_weights_everywhere(inner):
        find_and_prove_for_long_documents(inner)
    return model


def refuse_the_configuration_of_another(model: PreTrainedModel) -> None:
    """What is set in a configuration that models share is set in all of them, and undone in all."""
    if any(attention in (NAME, NAME_WITH_SIGHT) for _, attention in attention_of(model)):
        raise PackingError(
            f"model: expected one with a configuration of its own, that of {type(model).__name__} already has the "
            f"attention {NAME!r}, as that of a patched model. Build models that are patched from "
            "copy.deepcopy(config), before any of them is patched"
        )


def unpatch_model(model: Model) -> AbstractContextManager[Model]:
    """Undo `patch_model`: the model is as it was before.

    Args:
        model: a patched model.

    Returns:
        A context manager, for those who want the patch back at its end:
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
    return Unpatched(model, take_out(inner))


@contextmanager
def patched(model: Model) -> Iterator[Model]:
    """Patch a model for the length of a block; see `patch_model`.

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


class Unpatched(AbstractContextManager[Any]):
    """Puts a patch back at the end of a `with` block; the proof still stands, so it is not run again."""

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


def find_and_prove_for_long_documents(model: PreTrainedModel) -> None:
    """As `find_and_prove`, and where modules do something else from a length on that the probe does not have, such as
    to look at the 2048 best tokens only, their route is that of a small model in which this length is a short one.
    """
    key = key_of(model)
    is_known = key in known_routes
    find_and_prove(model)
    route = route_of(model)
    if is_known or route is None or not route.by_segment or not changes_beyond_the_probe(model.config):
        return
    try:
        other = route_of_a_twin(model)
    except ModelNotSupportedError:
        return
    take_out(model)
    known_routes[key] = other
    find_and_prove(model)


SMALL = 0.1
"""Standard deviation of gates and biases that are zero otherwise."""

SHARE_OF_KERNEL = 0.5
"""Noise in a kernel, as a share of its root mean square."""

LONGEST_KERNEL = 16
"""Tokens that a convolution in a language model sees at once; the last axis of its weight."""


@contextmanager
def with_weights_everywhere(model: nn.Module) -> Iterator[None]:
    """What may hide a leak before training is random for the length of the block: parameters that are all zero, as some
    projections and gates are, and kernels of convolutions, which some begin as the identity.
    """
    parameters = [p for p in model.parameters() if p.ndim and p.numel() and p.is_floating_point() and not p.is_meta]
    silent = [parameter for parameter in parameters if not parameter.any()]
    kernels = [(p, p.detach().clone()) for p in parameters if p.ndim == 3 and p.shape[-1] <= LONGEST_KERNEL and p.any()]
    generator = torch.Generator().manual_seed(0)

    def noise(parameter: nn.Parameter, scale: float) -> Tensor:
        return (torch.randn(parameter.shape, generator=generator) * scale).to(parameter)

    try:
        with torch.no_grad():
            for parameter in silent:
                parameter.copy_(noise(parameter, parameter[0].numel() ** -0.5 if parameter.ndim > 1 else SMALL))
            for parameter, _ in kernels:
                parameter.add_(noise(parameter, SHARE_OF_KERNEL * float(parameter.float().square().mean().sqrt())))
        yield
    finally:
        with torch.no_grad():
            for parameter in silent:
                parameter.zero_()
            for parameter, before in kernels:
                parameter.copy_(before)
