"""How documents are kept apart in a model: by borders in its attention, by running modules by segment, or both."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_packing.attention.by_segment import Step
from hf_packing.attention.feed import Feed
from hf_packing.attention.inner import configurations
from hf_packing.attention.varlen import NAME, NAME_WITH_SIGHT

STATE = "_hf_packing_patch"


@dataclass(frozen=True)
class Way:
    """One way to try.

    Args:
        attention: the attention function to set, or None to leave the model's own, run by segment.
        feed: what the model is given beside tokens.
    """

    attention: str | None
    feed: Feed


WAYS = (
    Way(NAME, Feed()),
    Way(NAME_WITH_SIGHT, Feed()),
    Way(NAME, Feed(borders=False)),
    Way(NAME_WITH_SIGHT, Feed(borders=False)),
    Way(NAME, Feed(borders=False, positions=False)),
    Way(None, Feed(borders=False, mask_of_ones=True)),
    Way(None, Feed(borders=False, mask_of_ones=True, positions=False)),
)
"""From the fastest to the most general. A model's own attention is given a mask that hides nothing: what it would make
of positions holds for the probe, but not for every length (an index of the 2048 best tokens has them all)."""


@dataclass(frozen=True)
class Route:
    """How a patched model keeps documents apart."""

    way: Way
    by_segment: tuple[Step, ...]
    packed_share: float
    """Share of the model's parameters that see a whole packed row at once."""
    tried: tuple[str, ...] = ()
    """Why faster ways were not taken."""
    refused_token: int | None = None
    """What the model alone takes for padding, wherever in a document it is; in a packed row it would not be."""
    sees_labels: bool = False
    """Whether the model sees the tokens that its labels ask for, as masked language models do."""
    unproven: str = ""
    """Why this was not proven in training mode, beside evaluation mode; nothing where it was."""

    @property
    def name(self) -> str:
        """`varlen`, `segments` or `varlen + segments`."""
        parts = ["varlen"] if self.way.attention else []
        return " + ".join(parts + (["segments"] if self.by_segment or not parts else []))

    @property
    def modules(self) -> dict[str, int]:
        """Classes of the modules that run by segment, and how many of each."""
        return dict(Counter(step.kind for step in self.by_segment))

    def lines(self) -> list[str]:
        """For people."""
        lines = [f"route: {self.name}, {self.packed_share:.0%} of the parameters stay packed"]
        lines += [f"by segment: {number} {kind}" for kind, number in self.modules.items()]
        return lines + ([f"training mode not proven: {self.unproven}"] if self.unproven else [])


def packed_share(model: nn.Module, steps: tuple[Step, ...]) -> float:
    """Share of a model's parameters that see a whole packed row at once."""
    by_segment: dict[int, int] = {}
    for step in steps:
        module = model.get_submodule(step.name)
        packed = {id(p) for inner in step.packed_inside() for p in module.get_submodule(inner).parameters()}
        by_segment |= {id(p): p.numel() for p in module.parameters() if id(p) not in packed}
    everything = {id(p): p.numel() for p in model.parameters()}
    return 1 - sum(by_segment.values()) / max(sum(everything.values()), 1)


known_routes: dict[Any, Route] = {}
"""Found in this process, by architecture and configuration."""


def key_of(model: PreTrainedModel) -> Any:
    """What a route depends on: two models with the same can take the same. A search looks further than the proof of a
    known route, so modules that somebody has exchanged count."""
    own = model.config._attn_implementation
    kinds = tuple((name, type(module)) for name, module in model.named_modules())
    settings = tuple(sorted(settings_of(config) for config in configurations(model)))
    return kinds, settings, own, model.dtype, model.device.type


def settings_of(config: PreTrainedConfig) -> str:
    settings = {name: value for name, value in config.to_dict().items() if not name.startswith("_")}
    return repr(sorted(settings.items(), key=str))


def route_of(model: PreTrainedModel) -> Route | None:
    """The route of a patched model."""
    patch = getattr(model, STATE, None)
    return patch.route if patch is not None else None
