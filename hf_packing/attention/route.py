"""How documents are kept apart in a model: by borders in its attention, by running modules by segment, or both."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_packing.arrow.loss_masks import IGNORED_LABEL
from hf_packing.attention.by_segment import Step
from hf_packing.attention.inspect_model import Signature
from hf_packing.attention.packed_row import PackedRow
from hf_packing.attention.token_axes import rebuild
from hf_packing.attention.varlen import NAME, NAME_WITH_SIGHT
from hf_packing.errors import PackingError

BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")

UNDERSTOOD = (*BORDERS, "position_ids", "attention_mask", "use_cache")
"""What has been read, so that a model that does not take it need not."""


@dataclass(frozen=True)
class Feed:
    """What a model is given beside the tokens.

    Args:
        positions: position_ids that restart at every segment; without them the model counts by itself.
        borders: cu_seq_lens_q/k, max_length_q/k and seq_idx.
        mask_of_ones: an attention_mask that hides nothing, so that no model looks for packed documents by itself.
        one_row: several packed rows are laid end to end, and caches are refused.
    """

    positions: bool = True
    borders: bool = True
    mask_of_ones: bool = False
    one_row: bool = False

    def __call__(self, forward: "Signature", inputs: dict[str, Any], row: PackedRow) -> dict[str, Any]:
        """The keyword arguments for a forward, from those that its caller gave."""
        inputs = {name: value for name, value in inputs.items() if name not in BORDERS}
        if self.one_row:
            refuse_caches(inputs)
            inputs["use_cache"] = False
        else:
            inputs = {"use_cache": False, **inputs}
        given = inputs.pop("position_ids", None)
        if self.positions:
            inputs["position_ids"] = in_every_row(given, row)
        elif given is not None and not torch.equal(in_every_row(given, row), row.position_ids):
            raise PackingError(
                "position_ids: expected positions that restart at 0 in every segment, since this model is given none, "
                f"got {given.flatten().tolist()[:8]}..."
            )
        if forward.takes_types_from_a_table and inputs.get("token_type_ids") is None:
            inputs["token_type_ids"] = torch.zeros_like(row.position_ids)
        if self.mask_of_ones:
            inputs["attention_mask"] = torch.ones(row.rows, row.tokens, dtype=torch.long, device=row.cu_seq_lens.device)
        if self.borders:
            inputs |= {"cu_seq_lens_q": row.cu_seq_lens, "cu_seq_lens_k": row.cu_seq_lens}
            inputs |= {"max_length_q": row.longest, "max_length_k": row.longest, "seq_idx": row.seq_idx}
        if self.one_row and row.rows > 1 and not row.is_one_segment_each:
            if isinstance(keep := inputs.get("logits_to_keep"), Tensor) or keep:
                raise PackingError(f"logits_to_keep: expected none with several packed rows, got {keep}")
            inputs = {name: end_to_end(name, value, row) for name, value in inputs.items()}
        return {name: value for name, value in inputs.items() if name not in UNDERSTOOD or forward.takes(name)}


def in_every_row(position_ids: Tensor | None, row: PackedRow) -> Tensor:
    """The positions that were given, for every row; those of the borders where none were."""
    if position_ids is None:
        return row.position_ids
    return position_ids.expand(row.rows, -1) if position_ids.ndim == 2 else position_ids


def refuse_caches(inputs: dict[str, Any]) -> None:
    for name, value in inputs.items():
        if (name == "use_cache" and value) or not isinstance(value, (Tensor, int, float, str, type(None))):
            raise PackingError(
                f"{name}: expected none on a model that is given packed rows end to end, got "
                f"{value if isinstance(value, bool) else type(value).__name__}; to generate: "
                "with hf_packing.unpatch_model(model): model.generate(...)"
            )


def end_to_end(name: str, value: Any, row: PackedRow) -> Any:
    """[rows, tokens, ...] -> [1, rows * tokens, ...].

    Raises:
        PackingError: labels that a causal model would predict from the end of the row before.
    """
    if not isinstance(value, Tensor) or value.shape[:2] != (row.rows, row.tokens):
        return value
    if name == "labels" and bool((value[1:, 0] != IGNORED_LABEL).any()):
        raise PackingError(
            f"labels: expected {IGNORED_LABEL} at the first token of every packed row, or a single row, on a model "
            "that is given packed rows end to end"
        )
    return value.reshape(1, row.rows * row.tokens, *value.shape[2:])


def in_rows(value: Any, row: PackedRow) -> Any:
    """[1, rows * tokens, ...] -> [rows, tokens, ...], for every such tensor in what a model has returned."""

    def fold(_: Any, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.shape[:2] == (1, row.rows * row.tokens):
            return leaf.reshape(row.rows, row.tokens, *leaf.shape[2:])
        return leaf

    return rebuild(value, fold)


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


def route_of(model: PreTrainedModel) -> Route | None:
    """The route of a patched model."""
    patch = getattr(model, STATE, None)
    return patch.route if patch is not None else None
