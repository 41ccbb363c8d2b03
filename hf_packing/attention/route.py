"""The route of a patched model: which attention it uses, what its forward is given, which modules run by segment."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_packing.attention.by_segment import ModulePlan
from hf_packing.attention.inspect_model import Signature
from hf_packing.attention.packed_row import PackedRow
from hf_packing.attention.token_axes import map_leaves
from hf_packing.attention.varlen import NAME, NAME_WITH_LOCAL_MASKS
from hf_packing.columns import IGNORED_LABEL
from hf_packing.errors import PackingError

PATCH = "_hf_packing_patch"
"""The attribute of a patched model that holds its patch."""

BORDER_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")

READ_ARGUMENTS = (*BORDER_ARGUMENTS, "position_ids", "attention_mask", "use_cache")
"""Arguments that a patch reads itself. They are dropped if the model does not take them; other arguments never are."""


@dataclass(frozen=True)
class InputFormat:
    """What a model is given besides its tokens.

    Args:
        positions: position_ids that restart at every segment; otherwise the model computes positions itself.
        borders: cu_seq_lens_q/k, max_length_q/k and seq_idx.
        mask_of_ones: an attention_mask that hides nothing, so that the model does not look for packed documents itself.
        one_row: several packed rows are laid end to end, and caches are refused.
    """

    positions: bool = True
    borders: bool = True
    mask_of_ones: bool = False
    one_row: bool = False

    def build(self, signature: Signature, inputs: dict[str, Any], row: PackedRow) -> dict[str, Any]:
        """Return the keyword arguments for a forward.

        Args:
            signature: of the forward.
            inputs: what the caller has passed, without an attention_mask.
            row: what `read_row` has read from them.

        Raises:
            PackingError: positions, caches, labels or logits_to_keep that this format does not support.
        """
        inputs = {name: value for name, value in inputs.items() if name not in BORDER_ARGUMENTS}
        if self.one_row:
            _refuse_caches(inputs)
            inputs["use_cache"] = False
        else:
            inputs = {"use_cache": False, **inputs}
        given = inputs.pop("position_ids", None)
        if self.positions:
            inputs["position_ids"] = _positions_of_rows(given, row)
        elif given is not None and not torch.equal(_positions_of_rows(given, row), row.position_ids):
            raise PackingError(
                "position_ids: expected positions that restart at 0 in every segment, since this model computes its "
                f"positions itself, got {given.flatten().tolist()[:8]}..."
            )
        if signature.takes_types_from_buffer and inputs.get("token_type_ids") is None:
            inputs["token_type_ids"] = torch.zeros_like(row.position_ids)
        if self.mask_of_ones:
            inputs["attention_mask"] = torch.ones(row.rows, row.tokens, dtype=torch.long, device=row.cu_seq_lens.device)
        if self.borders:
            inputs |= {"cu_seq_lens_q": row.cu_seq_lens, "cu_seq_lens_k": row.cu_seq_lens}
            inputs |= {"max_length_q": row.longest, "max_length_k": row.longest, "seq_idx": row.seq_idx}
        if self.one_row and row.rows > 1 and not row.is_one_segment_per_row:
            if isinstance(keep := inputs.get("logits_to_keep"), Tensor) or keep:
                raise PackingError(f"logits_to_keep: expected none with several packed rows, got {keep}")
            inputs = {name: _lay_end_to_end(name, value, row) for name, value in inputs.items()}
        return {name: value for name, value in inputs.items() if name not in READ_ARGUMENTS or signature.takes(name)}


def _positions_of_rows(position_ids: Tensor | None, row: PackedRow) -> Tensor:
    """Return the given positions for every row, or those that follow from the borders if none are given."""
    if position_ids is None:
        return row.position_ids
    return position_ids.expand(row.rows, -1) if position_ids.ndim == 2 else position_ids


def _refuse_caches(inputs: dict[str, Any]) -> None:
    for name, value in inputs.items():
        if (name == "use_cache" and value) or not isinstance(value, (Tensor, int, float, str, type(None))):
            raise PackingError(
                f"{name}: expected none on a model that runs modules by segment, got "
                f"{value if isinstance(value, bool) else type(value).__name__}; to generate: "
                "with hf_packing.unpatch_model(model): model.generate(...)"
            )


def _lay_end_to_end(name: str, value: Any, row: PackedRow) -> Any:
    """Reshape [rows, tokens, ...] to [1, rows * tokens, ...].

    Raises:
        PackingError: labels that a causal model would predict from the end of the row before.
    """
    if not isinstance(value, Tensor) or value.shape[:2] != (row.rows, row.tokens):
        return value
    if name == "labels" and bool((value[1:, 0] != IGNORED_LABEL).any()):
        raise PackingError(
            f"labels: expected {IGNORED_LABEL} at the first token of every packed row, or a single row, on a model "
            "for which packed rows are laid end to end"
        )
    return value.reshape(1, row.rows * row.tokens, *value.shape[2:])


def fold_into_rows(value: Any, row: PackedRow) -> Any:
    """Reshape every tensor of [1, rows * tokens, ...] in a model's outputs to [rows, tokens, ...]."""

    def fold(_: Any, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.shape[:2] == (1, row.rows * row.tokens):
            return leaf.reshape(row.rows, row.tokens, *leaf.shape[2:])
        return leaf

    return map_leaves(value, fold)


@dataclass(frozen=True)
class Method:
    """An attention function, and the inputs that go with it.

    Args:
        attention: name of the attention function to set, or None to keep the model's own and run it by segment.
        inputs: what the model is given.
    """

    attention: str | None
    inputs: InputFormat


METHODS = (
    Method(NAME, InputFormat()),
    Method(NAME_WITH_LOCAL_MASKS, InputFormat()),
    Method(NAME, InputFormat(borders=False)),
    Method(NAME_WITH_LOCAL_MASKS, InputFormat(borders=False)),
    Method(NAME, InputFormat(borders=False, positions=False)),
    Method(None, InputFormat(borders=False, mask_of_ones=True)),
    Method(None, InputFormat(borders=False, mask_of_ones=True, positions=False)),
)
"""From the fastest to the most general. A model that keeps its own attention gets a mask of ones: without one it would
detect packed rows by their positions. That may work on short test documents and fail on long ones: an index that
selects the best 2048 tokens selects all tokens of a short document."""


@dataclass(frozen=True, repr=False)
class Route:
    """How a patched model keeps packed documents apart. `describe` says more than the one-line repr."""

    method: Method
    by_segment: tuple[ModulePlan, ...]
    """Modules that run segment by segment."""
    packed_share: float
    """Share of the model's parameters that see a whole packed row at once."""
    tried: tuple[str, ...] = ()
    """Why faster methods failed."""
    refused_token: int | None = None
    """A pad token that this model treats as padding wherever it is. A patched model raises if it is in a document."""
    sees_labels: bool = False
    """Whether the model sees the input token at each label's position, as masked language models do."""
    unproven: str = ""
    """Why this route was not proven in training mode too; empty if it was."""

    @property
    def name(self) -> str:
        """`varlen`, `segments` or `varlen + segments`."""
        parts = ["varlen"] if self.method.attention else []
        return " + ".join(parts + (["segments"] if self.by_segment or not parts else []))

    @property
    def modules(self) -> dict[str, int]:
        """Class names of the modules that run by segment, and how many there are of each."""
        return dict(Counter(plan.kind for plan in self.by_segment))

    def describe(self) -> str:
        """Return a few lines: the name, the share that stays packed, what runs by segment, what is not proven."""
        lines = [f"route: {self.name}, {self.packed_share:.0%} of the parameters stay packed"]
        lines += [f"by segment: {number} {kind}" for kind, number in self.modules.items()]
        return "\n".join(lines + ([f"training mode not proven: {self.unproven}"] if self.unproven else []))

    def __repr__(self) -> str:
        return f"Route({self.name!r}, modules={self.modules}, packed_share={self.packed_share:.2f})"


def packed_share(model: nn.Module, plans: tuple[ModulePlan, ...]) -> float:
    """Return the share of a model's parameters that see a whole packed row at once."""
    by_segment: dict[int, int] = {}
    for plan in plans:
        module = model.get_submodule(plan.name)
        packed = {id(p) for inner in plan.packed_modules() for p in module.get_submodule(inner).parameters()}
        by_segment |= {id(p): p.numel() for p in module.parameters() if id(p) not in packed}
    everything = {id(p): p.numel() for p in model.parameters()}
    return 1 - sum(by_segment.values()) / max(sum(everything.values()), 1)


def is_patched(model: PreTrainedModel) -> bool:
    """Return whether `patch_model` has patched this transformers model, which must not be inside a wrapper."""
    return hasattr(model, PATCH)


def route_of(model: PreTrainedModel) -> Route | None:
    """Return the route of a patched model, or None."""
    patch = getattr(model, PATCH, None)
    return patch.route if patch is not None else None
