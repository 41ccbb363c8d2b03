"""Put a route into a model, and take it out again, completely."""

from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from hf_packing.attention.by_segment import BySegment
from hf_packing.attention.checkpointing import keep_rows_no_longer
from hf_packing.attention.give_row import give_rows
from hf_packing.attention.inner import configurations
from hf_packing.attention.replaced import ReplacedForward
from hf_packing.attention.route import STATE, Route
from hf_packing.attention.seen_labels import LabelsSeen
from hf_packing.attention.varlen import register

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
