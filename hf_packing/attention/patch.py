"""patch_model: route a model's attention through `packed_varlen`, prove that documents stay apart, or refuse."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from hf_packing.attention.borders import with_borders
from hf_packing.attention.isolation import Probe, check_model, prove_isolation, why_it_leaks
from hf_packing.attention.varlen import NAME, Observed, observe, register
from hf_packing.errors import ModelNotSupportedError, PackingError

Model = TypeVar("Model", bound=PreTrainedModel)

STATE = "_hf_packing_patch"

REFERENCE = "eager"
"""What a document's logits are compared with, beside the model's own attention: the one written out in its file.
Others have had gaps: transformers 5.17 lets "sdpa" ignore Gemma 2's soft cap."""

ROPE_OF_THE_ROW = ("dynamic", "longrope")
"""Rotary scalings that take their factor from the largest position of the whole row."""

ATTENTION = "_attn_implementation_internal"
"""Where a configuration keeps the name of its attention. Put back as it was found: `set_attn_implementation` refuses a
name whose package is gone, and the None of some inner configurations."""

PLAIN = ("eager", "sdpa", "flex_attention")


@dataclass(frozen=True)
class Patch:
    """What must be undone."""

    before: list[tuple[PreTrainedConfig, Any]]
    """Every configuration of the model, with the attention it named."""
    hooks: list[RemovableHandle]


@dataclass
class Given:
    """The borders a hook has last given, known by identity, so that the inner model's hook need not check again."""

    borders: Tensor | None = None


class GiveBorders:
    """The hook that sees a model's inputs first; a class, so that a patched model can be pickled."""

    def __init__(self, forward: Callable[..., Any], given: Given) -> None:
        self.names = [name for name in inspect.signature(forward).parameters if name not in ("args", "kwargs")]
        self.given = given

    def __call__(self, module: PreTrainedModel, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if module.config._attn_implementation != NAME:
            raise PackingError(
                f"attention: expected {NAME!r} on a patched model, somebody has set "
                f"{module.config._attn_implementation!r}; call unpatch_model before"
            )
        if self.given.borders is not None and kwargs.get("cu_seq_lens_q") is self.given.borders:
            return args, kwargs
        inputs = with_borders({**dict(zip(self.names, args, strict=False)), **kwargs}, module.training)
        self.given.borders = inputs["cu_seq_lens_q"]
        return (), inputs

    def __setstate__(self, state: dict[str, Any]) -> None:
        register()
        self.__dict__.update(state)


def patch_model(model: Model) -> Model:
    """Make a model keep packed documents apart, proven on the model itself.

    Its attention goes through `packed_varlen`: flash-attn's or torch's variable-length kernel on CUDA, exact attention
    segment by segment elsewhere. Borders are read from cu_seq_lens_q, position_ids or seq_idx, whichever is given. Then
    three random documents are packed in a row, one after the other is changed, and the patch stays only if no other
    document notices and all have the logits that the unpatched model gives them alone. The price is about a
    dozen forwards of 41 tokens. What is proven is the kernel of this device and dtype: move the model there first.

    Args:
        model: a causal language model of transformers, on any device, in any dtype. It is changed in place.

    Returns:
        The same model. Patching it again does nothing.

    Raises:
        ModelNotSupportedError: it cannot be shown to keep documents apart; the message says why, and the model is as
            it was before.
        PackingError: not a PreTrainedModel.

    Example:
        >>> import hf_packing as hfp, transformers
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=99, **sizes))
        >>> model = hfp.patch_model(model)
        >>> batch = hfp.PackingCollator()([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
        >>> model(**batch).logits.shape
        torch.Size([1, 5, 99])
    """
    check_model(model)
    if is_patched(model):
        return model
    before = attention_of(model)
    try:
        refuse_what_is_known_to_fail(model)
        probe = Probe(model)
        references = logits_alone(model, probe)
        install(model, before)
        with probe.quiet():
            with observe() as observed:
                probe.packed(probe.documents)
            refuse_what_was_observed(model, observed)
            prove_isolation(model, references, probe)
    except Exception as error:
        if is_patched(model):
            unpatch_model(model)
        put_back(before)
        if isinstance(error, ModelNotSupportedError):
            raise
        if isinstance(error, PackingError):
            raise ModelNotSupportedError(f"{type(model).__name__}: {error}") from error
        raise ModelNotSupportedError(
            f"{type(model).__name__}: it cannot be called on a packed row without an attention mask: {error}"
        ) from error
    return model


def logits_alone(model: PreTrainedModel, probe: Probe) -> list[list[Tensor]]:
    """Logits of each document alone, under the model's own attention and, unless that is the user's, under eager."""
    own = model.config._attn_implementation
    references: list[list[Tensor]] = []
    for attention in dict.fromkeys([REFERENCE, own]) if own in PLAIN or "flash" in own else [own]:
        model.set_attn_implementation(attention)
        with probe.quiet(), suppress(*([RuntimeError, ImportError] if references else [])):
            references.append(probe.alone(use_cache=False))
    return references


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
    patch: Patch | None = getattr(model, STATE, None)
    if patch is None:
        raise PackingError(f"model: expected one that patch_model has patched, {type(model).__name__} is not")
    for hook in patch.hooks:
        hook.remove()
    put_back(patch.before)
    delattr(model, STATE)
    return Unpatched(model)


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
    if is_patched(model):
        yield model
        return
    patch_model(model)
    try:
        yield model
    finally:
        if is_patched(model):
            unpatch_model(model)


class Unpatched(AbstractContextManager[Any]):
    """Puts a patch back at the end of a `with` block; the proof still stands, so it is not run again."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __enter__(self) -> PreTrainedModel:
        return self.model

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not is_patched(self.model):
            install(self.model, attention_of(self.model))


def is_patched(model: PreTrainedModel) -> bool:
    return hasattr(model, STATE)


def install(model: PreTrainedModel, before: list[tuple[PreTrainedConfig, Any]]) -> None:
    """Set the attention; hook the model, and the inner one, which PEFT and others call without the outer."""
    register()
    model.set_attn_implementation(NAME)
    given = Given()
    modules = [model] if model.base_model is model else [model, model.base_model]
    hooks = [m.register_forward_pre_hook(GiveBorders(m.forward, given), with_kwargs=True) for m in modules]
    setattr(model, STATE, Patch(before, hooks))


def attention_of(model: PreTrainedModel) -> list[tuple[PreTrainedConfig, Any]]:
    """Every configuration in a model, nested ones too, with the attention it names."""
    found = [
        module.config for module in model.modules() if isinstance(getattr(module, "config", None), PreTrainedConfig)
    ]
    configs: dict[int, PreTrainedConfig] = {}
    while found:
        config = found.pop()
        if id(config) not in configs:
            configs[id(config)] = config
            inner = [getattr(config, name, None) for name in config.sub_configs]
            found += [each for each in inner if isinstance(each, PreTrainedConfig)]
    return [(config, getattr(config, ATTENTION, None)) for config in configs.values()]


def put_back(before: list[tuple[PreTrainedConfig, Any]]) -> None:
    for config, attention in before:
        setattr(config, ATTENTION, attention)


def refuse_what_is_known_to_fail(model: PreTrainedModel) -> None:
    name = type(model).__name__
    if not model._can_set_attn_implementation():
        raise ModelNotSupportedError(f"{name}: it does not call its attention through transformers' AttentionInterface")
    forwards = model.forward, model.base_model.forward
    if not all(any(p.kind is p.VAR_KEYWORD for p in inspect.signature(f).parameters.values()) for f in forwards):
        raise ModelNotSupportedError(
            f"{name}: its forward takes no cu_seq_lens_q, so borders cannot reach its attention"
        )
    if kinds := sorted(set(rope_types(model.config)) & set(ROPE_OF_THE_ROW)):
        raise ModelNotSupportedError(
            f"{name}: its rotary embedding ({', '.join(kinds)}) is scaled by the longest document of the row, "
            "so a document's logits depend on its neighbours"
        )


def rope_types(config: PreTrainedConfig) -> Iterator[str]:
    """The kinds of rotary scaling in a configuration; some have one for each kind of layer."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if "rope_type" in parameters:
            yield parameters["rope_type"]


def refuse_what_was_observed(model: PreTrainedModel, observed: Observed) -> None:
    name = type(model).__name__
    if not observed.calls:
        raise ModelNotSupportedError(
            f"{name}: it never called the attention function that was set; {why_it_leaks(model)}"
        )
    if False in observed.causal:
        raise ModelNotSupportedError(
            f"{name}: its attention is bidirectional; only causal language models are supported"
        )
    if lost := observed.mask_windows - observed.windows:
        raise ModelNotSupportedError(
            f"{name}: a window or chunk of {', '.join(map(str, sorted(lost)))} tokens is only in its attention mask, "
            "where a variable-length attention cannot see it"
        )
