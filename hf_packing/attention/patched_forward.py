"""The forward of a patched model, and how it is put in and taken out."""

import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_packing.attention.by_segment import BySegment, ReplacedForward, refuse_uneven_gathers
from hf_packing.attention.copied_labels import LabelsSeen, refuse_seen_labels
from hf_packing.attention.inspect_model import Signature, configurations, without_wrapping
from hf_packing.attention.packed_row import PackedRow, current, read_row, working_on
from hf_packing.attention.route import STATE, Route, in_rows
from hf_packing.attention.varlen import register
from hf_packing.errors import PackingError

running: ContextVar[tuple[int, ...]] = ContextVar("running", default=())
"""The patched models whose forward runs, by id."""


class GiveRow(ReplacedForward):
    """Makes a packed row current for as long as a model's forward runs.

    Args:
        module: the model, or one inside it that others call directly.
        model: patched.
        route: how.
        steps: what runs by segment in it.
    """

    def __init__(self, module: nn.Module, model: PreTrainedModel, route: Route, steps: list[BySegment]) -> None:
        super().__init__(module)
        self.model = model
        self.route = route
        self.steps = steps
        self.signature = Signature(module)
        # Trainer looks at it to see which columns a model takes
        self.__signature__ = inspect.signature(module.forward)

    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.installed or id(self.model) in running.get():
            return self.forward(*args, **kwargs)
        inputs, row = self.read(args, kwargs)
        folds = self.route.way.feed.one_row and not row.is_one_segment_each
        token = running.set((*running.get(), id(self.model)))
        try:
            with working_on(PackedRow(row.cu_seq_lens, row.lengths) if folds else row):
                output = self.forward(**inputs)
        finally:
            running.reset(token)
        return in_rows(output, row) if folds and row.rows > 1 else output

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def read(self, args: Any, kwargs: dict[str, Any]) -> tuple[dict[str, Any], PackedRow]:
        """What the forward is given, and the row that it works on."""
        self.refuse_what_has_changed()
        if self.module.training:
            keep_rows(self.model)
        inputs, row = read_row(self.signature.by_name(args, kwargs), self.module.training)
        refused, ids = self.route.refused_token, inputs.get("input_ids")
        if refused is not None and ids is not None and bool((ids == refused).any()):
            raise PackingError(
                f"input_ids: expected no pad token ({refused}) on this model, which takes it for padding wherever it is"
            )
        if self.module.training:
            refuse_seen_labels(self.model, ids, inputs.get("labels"), row.cu_seq_lens)
        return self.route.way.feed(self.signature, inputs, row), row

    def refuse_what_has_changed(self) -> None:
        expected, found = self.route.way.attention, self.model.config._attn_implementation
        if expected not in (None, found):
            raise PackingError(
                f"attention: expected {expected!r} on a patched model, somebody has set {found!r}; call unpatch_model "
                "before"
            )
        patch: Any = getattr(self.model, STATE)
        for config, attention in patch.named if expected else ():
            if (found := config._attn_implementation) != attention:
                raise PackingError(
                    f"attention: expected {attention!r} in the {type(config).__name__} of a patched model, somebody "
                    f"has set {found!r}; call unpatch_model before"
                )
        for wrapper in self.steps:
            found = without_wrapping(self.model.get_submodule(wrapper.step.name))
            if found is not wrapper.module:
                raise PackingError(
                    f"{wrapper.step.name}: expected the {wrapper.step.kind} that runs by segment, somebody has put "
                    f"another {type(found).__name__} there; call unpatch_model before, and patch_model after"
                )
        refuse_uneven_gathers(self.model, self.route.by_segment)

    def __setstate__(self, state: dict[str, Any]) -> None:
        register()  # in another process nobody may have
        self.__dict__.update(state)


def give_rows(model: PreTrainedModel, route: Route, steps: list[BySegment]) -> list[ReplacedForward]:
    """On the model and on the inner ones, which PEFT and others call without the outer."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    modules = [model, model.base_model, *([decoder] if isinstance(decoder, nn.Module) else [])]
    return [GiveRow(module, model, route, steps) for module in {id(module): module for module in modules}.values()]


CHECKPOINTING = ("_gradient_checkpointing_func", "checkpoint_fn")
"""Where transformers keeps, in every module that can be checkpointed, the function that does it; and where torch does,
in the wrapper that FSDP puts around such a module."""


class KeepRow:
    """A checkpointing function, with the current row kept for the second run."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.checkpoint(OnRow(function, current.get()), *args, **kwargs)


class OnRow:
    def __init__(self, function: Callable[..., Any], row: PackedRow | None) -> None:
        self.function = function
        self.row = row

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with working_on(self.row):
            return self.function(*args, **kwargs)


def keep_rows(model: nn.Module) -> None:
    """Wrap the checkpointing functions of all modules that do not have theirs wrapped yet."""
    for module, name, checkpoint in checkpointing_functions(model):
        if not isinstance(checkpoint, KeepRow):
            setattr(module, name, KeepRow(checkpoint))


def keep_rows_no_longer(model: nn.Module) -> None:
    for module, name, checkpoint in checkpointing_functions(model):
        if isinstance(checkpoint, KeepRow):
            setattr(module, name, checkpoint.checkpoint)


def checkpointing_functions(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    for module in model.modules():
        for name in CHECKPOINTING:
            if (checkpoint := vars(module).get(name)) is not None:
                yield module, name, checkpoint


ATTENTION = "_attn_implementation_internal"
"""Where a configuration keeps the name of its attention. Put back as it was found: `set_attn_implementation` refuses a
name whose package is gone, and the None of some inner configurations."""


@dataclass
class Patch:
    """What keeps documents apart in a model, and what must be undone."""

    route: Route
    before: list[tuple[PreTrainedConfig, Any]]
    """Every configuration of the model, with the attention it named."""
    replaced: list[ReplacedForward]
    """The latest first."""
    named: list[tuple[PreTrainedConfig, Any]] = field(default_factory=list)
    """The same configurations, with the attention that they name while the patch is in."""
    labels: LabelsSeen = field(default_factory=LabelsSeen)

    def put_in(self, replaced: ReplacedForward) -> None:
        self.replaced.insert(0, replaced)
        replaced.install()


def is_patched(model: PreTrainedModel) -> bool:
    return hasattr(model, STATE)


def install(model: PreTrainedModel, route: Route, before: list[tuple[PreTrainedConfig, Any]]) -> None:
    """Set the attention, wrap what runs by segment, hook the model: all of it or, where something fails, nothing."""
    patch = Patch(route, before, [])
    setattr(model, STATE, patch)
    try:
        if route.way.attention:
            register()
            model.set_attn_implementation(route.way.attention)
            patch.named = attention_of(model)
        steps = [BySegment(model.get_submodule(step.name), step) for step in route.by_segment]
        for step in steps:
            patch.put_in(step)
        for around in give_rows(model, route, steps):  # after those: a step may be the inner model itself
            patch.put_in(around)
    except BaseException:
        take_out(model)
        raise


def attention_of(model: PreTrainedModel) -> list[tuple[PreTrainedConfig, Any]]:
    """Every configuration in a model, nested ones too, with the attention it names."""
    return [(config, getattr(config, ATTENTION, None)) for config in configurations(model)]


def put_back(before: list[tuple[PreTrainedConfig, Any]]) -> None:
    for config, attention in before:
        setattr(config, ATTENTION, attention)


def take_out(model: PreTrainedModel) -> Route:
    """The model is as it was before; the route that was in it."""
    patch: Patch = getattr(model, STATE)
    for replaced in patch.replaced:
        replaced.remove()
    keep_rows_no_longer(model)
    put_back(patch.before)
    delattr(model, STATE)
    return patch.route
