"""patch_model: keep packed documents apart in a model, prove it, or refuse; and undo it all."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel

from hf_packing.attention.as_it_was import with_weights_everywhere
from hf_packing.attention.inner import inner_model
from hf_packing.attention.installed import attention_of, install, is_patched, take_out
from hf_packing.attention.route import Route
from hf_packing.attention.sharded import where_weights_are
from hf_packing.attention.twin import find_and_prove_for_long_documents, route_of_a_twin
from hf_packing.attention.varlen import NAME, NAME_WITH_SIGHT
from hf_packing.errors import PackingError

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
