"""patch_model: keep packed documents apart in a model, prove it, or refuse; and undo it all."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_packing.attention.as_it_was import with_weights_everywhere
from hf_packing.attention.by_segment import BySegment
from hf_packing.attention.checkpointing import keep_rows_no_longer
from hf_packing.attention.feed import Signature
from hf_packing.attention.give_row import give_rows
from hf_packing.attention.isolation import Alone, Exam, inner_model, prove_isolation
from hf_packing.attention.probe import Probe
from hf_packing.attention.replaced import ReplacedForward
from hf_packing.attention.route import STATE, WAYS, Route, Way, key_of, known_routes, packed_share
from hf_packing.attention.row import Sharing
from hf_packing.attention.search import Search
from hf_packing.attention.varlen import NAME, NAME_WITH_SIGHT, Observed, observe, register
from hf_packing.errors import ModelNotSupportedError, PackingError

Model = TypeVar("Model", bound=nn.Module)

REFERENCE = "eager"
"""What a document's logits are compared with, beside the model's own attention: the one written out in its file.
Others have had gaps: transformers 5.17 lets "sdpa" ignore Gemma 2's soft cap."""

SHARING_CALLS = (9, 14, 9, 14)
"""Tokens of the documents of a second proof, some of which share a call where they may."""

LESS_SHARING: tuple[Sharing, ...] = ("equal", "none")
"""What is tried where the proof fails: which of several equal scores is the best may depend on what shares the call."""

ATTENTION = "_attn_implementation_internal"
"""Where a configuration keeps the name of its attention. Put back as it was found: `set_attn_implementation` refuses a
name whose package is gone, and the None of some inner configurations."""

PLAIN = ("eager", "sdpa", "flex_attention")


@dataclass
class Patch:
    """What keeps documents apart in a model, and what must be undone."""

    route: Route
    before: list[tuple[PreTrainedConfig, Any]]
    """Every configuration of the model, with the attention it named."""
    replaced: list[ReplacedForward]


class LostSightError(ModelNotSupportedError):
    """A window or chunk that only the attention mask knows."""


def patch_model(model: Model) -> Model:
    """Make a model keep packed documents apart, proven on the model itself.

    Two routes, and what is proven decides between them. `varlen`: its attention goes through `packed_varlen`, which is
    flash-attn's or torch's variable-length kernel on CUDA and exact attention segment by segment elsewhere. `segments`:
    the modules that are not segment-local, found by experiment, run segment by segment; all others stay packed. Most
    models with a state or a convolution take both.

    Borders are read from cu_seq_lens_q, position_ids or seq_idx, whichever is given. The proof: three random documents
    are packed in a row, one after the other is changed, and the patch stays only if no other document notices, in
    logits or gradients, and all have the logits and gradients that the unpatched model gives them alone. The price is a
    few dozen forwards of about 41 tokens. What is proven is the kernel of this device and dtype: move the model there
    first.

    Args:
        model: a causal or masked language model of transformers, on any device, in any dtype; also as PEFT wraps it. It
            is changed in place.

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
    inner = inner_model(model)
    if is_patched(inner):
        return model
    with with_weights_everywhere(inner):
        find_and_prove(inner)
    return model


def find_and_prove(model: PreTrainedModel) -> None:
    """Install a route that is proven, one that is known of the same architecture before all others."""
    before, key = attention_of(model), key_of(model)
    exams = [documents_alone(model, Probe(model)), documents_alone(model, Probe(model, 1, SHARING_CALLS))]
    put_back(before)
    if (known := known_routes.get(key)) is not None:
        with suppress(ModelNotSupportedError, AttributeError):
            prove_route(model, known, before, exams)
            return
    failure: ModelNotSupportedError | None = None
    failures: list[str] = []
    for way in ways_for(model):
        if way.attention == NAME_WITH_SIGHT and not isinstance(failure, LostSightError):
            continue
        try:
            known_routes[key] = find_route(model, way, before, exams, tuple(dict.fromkeys(failures)))
            return
        except ModelNotSupportedError as error:
            failure = error
            failures.append(f"{'with borders in its attention' if way.attention else 'by segment'}: {error}")
    raise ModelNotSupportedError(f"{type(model).__name__}: " + "; ".join(dict.fromkeys(failures)))


def ways_for(model: PreTrainedModel) -> Iterator[Way]:
    """The ways that differ for this model, the fastest first."""
    signature = Signature(model)
    takes_borders = signature.takes("cu_seq_lens_q")
    takes_positions = any("position_ids" in Signature(each).names for each in (model, model.base_model))
    tried = set()
    for way in WAYS:
        if way.attention and not model._can_set_attn_implementation():
            continue
        borders, positions = way.feed.borders and takes_borders, way.feed.positions and takes_positions
        feeds = [replace(way.feed, borders=borders, positions=positions)]
        if way.feed.mask_of_ones and not takes_positions:
            feeds.insert(0, replace(feeds[0], mask_of_ones=False))  # without positions nobody looks for documents
        for feed in feeds:
            if (own := Way(way.attention, feed)) not in tried:
                tried.add(own)
                yield own


def find_route(
    model: PreTrainedModel,
    way: Way,
    before: list[tuple[PreTrainedConfig, Any]],
    exams: list[Exam],
    tried: tuple[str, ...],
) -> Route:
    """The route of one way, installed and proven; or ModelNotSupportedError, and the model as it was."""
    install(model, Route(way, (), 1.0), before)
    probe = exams[0].probe
    search = Search(model, probe.row)
    try:
        with probe.quiet():
            with observe() as observed:
                steps = tuple(search.run(lambda: probe.packed(probe.documents)))
            refuse_what_was_observed(way, observed)
    except ModelNotSupportedError:
        raise
    except Exception as error:
        raise ModelNotSupportedError(f"it cannot be called on a packed row: {error}") from error
    finally:
        unpatch_model(model)
    if steps:
        way = replace(way, feed=replace(way.feed, one_row=True))
    route = Route(way, steps, packed_share(model, steps), tried)
    failure = why_not(model, route, before, exams)
    for most in LESS_SHARING:
        if failure is not None and any(step.sharing not in (most, "none") for step in steps):
            route = replace(route, by_segment=tuple(step.sharing_at_most(most) for step in steps))
            failure = why_not(model, route, before, exams)
    if failure is None:
        return route
    reasons = [str(failure)]
    if steps:
        reasons.append(f"by segment ran {', '.join(f'{n} {kind}' for kind, n in route.modules.items())}")
    for name, reason in list(search.uncuttable.items())[:2]:
        kind = type(model.get_submodule(name)).__name__
        reasons.append(f"{kind} ({name}) cannot run on a segment alone, {reason}")
    raise ModelNotSupportedError("; ".join(reasons)) from failure


def why_not(
    model: PreTrainedModel, route: Route, before: list[tuple[PreTrainedConfig, Any]], exams: list[Exam]
) -> ModelNotSupportedError | None:
    """None where the route is proven and installed."""
    try:
        prove_route(model, route, before, exams)
    except ModelNotSupportedError as error:
        return error
    return None


def prove_route(
    model: PreTrainedModel, route: Route, before: list[tuple[PreTrainedConfig, Any]], exams: list[Exam]
) -> None:
    """Install a route, and leave it there only if it is proven."""
    install(model, route, before)
    try:
        for exam in exams:
            with exam.probe.quiet():
                prove_isolation(exam)
    except Exception as error:
        unpatch_model(model)
        if isinstance(error, ModelNotSupportedError):
            raise
        raise ModelNotSupportedError(f"it cannot be called on a packed row: {error}") from error


def documents_alone(model: PreTrainedModel, probe: Probe) -> Exam:
    """Each document alone, under the model's own attention and, unless that is the user's, under eager."""
    own = model.config._attn_implementation
    attentions = [own]
    if model._can_set_attn_implementation() and (own in PLAIN or "flash" in own):
        attentions = list(dict.fromkeys([REFERENCE, own]))
    found = [documents_alone_under(attention, model, probe) for attention in attentions]
    references = [alone for alone in found if isinstance(alone, Alone)]
    if not references:
        name, error = type(model).__name__, found[-1]
        raise ModelNotSupportedError(f"{name}: it cannot be called with input_ids alone: {error}")
    return Exam(probe, references)


def documents_alone_under(attention: str, model: PreTrainedModel, probe: Probe) -> Alone | Exception:
    try:
        if attention != model.config._attn_implementation:
            model.set_attn_implementation(attention)
        with probe.quiet():
            return Alone(probe.alone(use_cache=False), gradients_alone(probe))
    except Exception as error:  # whatever a stranger's model raises
        return error


def gradients_alone(probe: Probe) -> list[Tensor] | None:
    """None for a model that has no gradients outside training, whose patch is proven on logits alone."""
    try:
        return probe.gradients_alone(use_cache=False)
    except (RuntimeError, AssertionError):
        return None


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
    patch: Patch | None = getattr(inner, STATE, None)
    if patch is None:
        raise PackingError(f"model: expected one that patch_model has patched, {type(inner).__name__} is not")
    for replaced in patch.replaced:
        replaced.remove()
    keep_rows_no_longer(inner)
    put_back(patch.before)
    delattr(inner, STATE)
    return Unpatched(model, patch.route)


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


def is_patched(model: PreTrainedModel) -> bool:
    return hasattr(model, STATE)


def install(model: PreTrainedModel, route: Route, before: list[tuple[PreTrainedConfig, Any]]) -> None:
    """Set the attention, wrap what runs by segment, hook the model."""
    if route.way.attention:
        register()
        model.set_attn_implementation(route.way.attention)
    steps: list[ReplacedForward] = [BySegment(model.get_submodule(step.name), step) for step in route.by_segment]
    install_all(steps)
    around = give_rows(model, route)  # around those: a step may be the inner model itself
    install_all(around)
    setattr(model, STATE, Patch(route, before, around + steps))


def install_all(replaced: list[ReplacedForward]) -> None:
    for each in replaced:
        each.install()


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


def refuse_what_was_observed(way: Way, observed: Observed) -> None:
    if way.attention and not observed.calls:
        raise ModelNotSupportedError("it never called the attention function that was set")
    if way.attention == NAME and (lost := [sight for sight in observed.sights if sight.window not in observed.windows]):
        raise LostSightError(f"{' and '.join(sorted(map(str, lost)))} is only in its attention mask")
