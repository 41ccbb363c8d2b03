"""The route of a patched model, which is the way in which the model keeps packed documents apart.

A route consists of an attention function, a format for the model's inputs, and the modules that run segment by segment.
"""

from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_packing.attention.by_segment import ModulePlan
from hf_packing.attention.function import NAME
from hf_packing.attention.layout import Layout
from hf_packing.attention.model import Arguments, Signature
from hf_packing.columns import CU_SEQ_LENS, MAX_LENGTHS, SEQ_IDX, SEQ_LENGTHS, TREE_BORDERS, TREE_COLUMNS
from hf_packing.errors import PackingError
from hf_packing.upstream.torch import mark_changing
from hf_packing.upstream.transformers import attention_name, can_set_attention

PATCH = "_hf_packing_patch"
"""The attribute of a patched model that holds its patch."""

BORDER_ARGUMENTS = (*CU_SEQ_LENS, *MAX_LENGTHS, SEQ_IDX, SEQ_LENGTHS, *TREE_BORDERS)

READ_ARGUMENTS = (*BORDER_ARGUMENTS, "position_ids", "attention_mask", "use_cache")
"""Arguments that a patch reads itself. If a model does not take one of these arguments, the patch drops the argument.
Other arguments are never dropped."""


_ONLY_READ = (*READ_ARGUMENTS, *TREE_COLUMNS)
"""Arguments that the model's own forward does not get as the caller passes them."""


@dataclass(frozen=True)
class Method:
    """An attention function, and a format of the model's inputs: what the model's own forward gets besides the tokens.

    Args:
        attention: name of the attention function that the patch sets in the model. If None, the model keeps its own
            attention function, and attention modules run segment by segment.
        positions: whether the model gets position_ids that restart at every segment; otherwise, the model computes
            positions itself.
        borders: whether the model gets cu_seq_lens_q/k, max_length_q/k and seq_idx.
        mask_of_ones: whether the model gets an attention_mask that hides nothing, so that the model does not look for
            packed documents itself.
    """

    attention: str | None = NAME
    positions: bool = True
    borders: bool = True
    mask_of_ones: bool = False

    def build(self, signature: Signature, inputs: Arguments, row: Layout) -> Arguments:
        """Return the keyword arguments for a patched model's own forward.

        Args:
            signature: signature of the forward.
            inputs: arguments that the caller has passed.
            row: where the segments of a single row are. If they see others, the model gets no borders, since segments
                are not documents.

        Raises:
            PackingError: the method does not support the caller's position_ids.
        """
        given = inputs.get("position_ids")
        inputs = {name: value for name, value in inputs.items() if name not in _ONLY_READ} | {"use_cache": False}
        if self.positions:
            inputs["position_ids"] = row.position_ids if given is None else given
        elif given is not None and not torch.equal(given, row.position_ids):
            raise PackingError(
                "position_ids: expected positions that restart at 0 in every segment, got positions that begin with "
                f"{given.flatten().tolist()[:8]}; this model computes its own positions, and cannot use other "
                "position_ids"
            )
        if signature.takes_types_from_buffer and inputs.get("token_type_ids") is None:
            inputs["token_type_ids"] = torch.zeros_like(row.position_ids)
        if self.mask_of_ones:
            inputs["attention_mask"] = torch.ones_like(row.position_ids)
        if self.borders and not row.sees_others:
            inputs |= dict.fromkeys(CU_SEQ_LENS, row.cu_seq_lens) | dict.fromkeys(MAX_LENGTHS, row.max_length)
            inputs[SEQ_IDX] = row.seq_idx
        return signature.without_unknown(inputs, READ_ARGUMENTS)


def mark_changing_sizes(inputs: Arguments, tokens: int) -> None:
    """Tell torch.compile that the numbers of tokens and segments change from batch to batch. Otherwise it would compile
    the model for the first batch alone, and once more for the second one."""
    for name, value in inputs.items():
        if isinstance(value, Tensor) and tokens > 1:  # a size of 1 is always compiled by itself
            changing = [axis for axis, size in enumerate(value.shape) if size == tokens or name in CU_SEQ_LENS]
            mark_changing(value, changing)


borders_left_out: ContextVar[bool] = ContextVar("borders_left_out", default=False)
"""Whether routes are searched in which the model gets no borders, as in rows on several ranks: a kernel that takes
borders would begin anew where the part of a rank begins."""


def methods_for(model: PreTrainedModel, module: nn.Module) -> list[Method]:
    """Return the methods that can be tried on this model, from the fastest to the most general.

    A model that keeps its own attention function gets a mask of ones, since without a mask the model would detect
    packed rows by their positions. Such detection may work on short test documents and fail on long documents. An
    example is a model that attends only to the best 2048 tokens, and therefore to all tokens of a short document. A
    model that takes no position_ids cannot detect packed rows by itself, so it may need no mask of ones.

    Args:
        model: the model.
        module: the model itself or its backbone, which gets the packed rows.
    """
    borders = not borders_left_out.get() and Signature(module).takes("cu_seq_lens_q")
    positions = any("position_ids" in Signature(each).names for each in (module, model.base_model))
    varlen = [Method(NAME, positions, borders), Method(NAME, positions, False), Method(NAME, False, False)]
    own = [Method(None, positions, False, mask_of_ones=positions), Method(None, False, False, mask_of_ones=True)]
    return list(dict.fromkeys([*varlen, *own] if can_set_attention(model) else own))


@dataclass
class Facts:
    """Facts that are learnt about a patched model. Each is set when it is known, and none is taken back."""

    takes_packed_rows: bool = True
    """False if only the backbone takes packed rows. The model itself, such as a classifier of documents, then takes
    padded batches only."""
    sees_labels: bool = False
    """True if the model sees the input token at each label's position, as masked language models do."""
    refused_token: int | None = None
    """The id of a pad token that the model treats as padding even inside a document, or None. The patched model raises
    an error if a document contains this token."""
    unproven: str = ""
    """The reason why the route was not fully proven in training mode; an empty string if it was."""
    proven: dict[str, Any] = field(default_factory=dict)
    """The kinds of batches, besides packed rows, that it is proven that the model runs, and how it runs them."""


@dataclass(frozen=True, repr=False)
class Route:
    """The way in which a patched model keeps packed documents apart. The method `describe` returns the details."""

    method: Method
    by_segment: tuple[ModulePlan, ...]
    """Modules that run segment by segment."""
    packed_share: float
    """The share of the model's parameters, from 0 to 1, in modules that run on a whole packed row at once."""
    tried: tuple[str, ...] = ()
    """The reasons why faster methods failed."""
    facts: Facts = field(default_factory=Facts, compare=False)
    """What is known about the model in which this route is installed."""

    @property
    def name(self) -> str:
        """The name of the route: `varlen`, `segments` or `varlen + segments`."""
        if not self.method.attention:
            return "segments"
        return "varlen + segments" if self.by_segment else "varlen"

    @property
    def modules(self) -> dict[str, int]:
        """A dictionary from class names of modules that run by segment to the number of such modules."""
        return dict(Counter(plan.kind for plan in self.by_segment))

    @property
    def unproven(self) -> str:
        """The reason why this route was not fully proven in training mode; an empty string if the route was proven."""
        return self.facts.unproven

    def describe(self) -> str:
        """Return a description of the route in a few lines.

        The description contains the name of the route, the share of the parameters in modules that run on a whole
        packed row, the modules that run by segment, and which other kinds of batches are proven, and how they run. If
        the proof was not completed in training mode, the description also contains the reason.
        """
        facts = self.facts
        lines = [f"route: {self.name}, {self.packed_share:.0%} of the parameters stay packed"]
        lines += [f"by segment: {number} {kind}" for kind, number in self.modules.items()]
        lines += [f"{kind}: {how}" for kind, how in facts.proven.items() if how]
        if facts.unproven:
            lines.append(f"training mode not proven: {facts.unproven}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Route({self.name!r}, modules={self.modules}, packed_share={self.packed_share:.2f})"


def packed_share(model: nn.Module, plans: tuple[ModulePlan, ...]) -> float:
    """Return the share of a model's parameters, from 0 to 1, in modules that run on a whole packed row at once.

    Args:
        model: the model.
        plans: plans of the modules that run segment by segment.
    """
    by_segment: set[nn.Parameter] = set()
    for plan in plans:
        module = model.get_submodule(plan.name)
        packed = [module.get_submodule(inner).parameters() for inner in plan.packed_modules()]
        by_segment |= set(module.parameters()).difference(*packed)
    return 1 - sum(p.numel() for p in by_segment) / sum(p.numel() for p in model.parameters())


def is_patched(model: PreTrainedModel) -> bool:
    """Return whether a model is patched by `patch_model`. The model must be passed without wrappers, such as PEFT's."""
    return hasattr(model, PATCH)


def route_of(model: PreTrainedModel) -> Route | None:
    """Return the route of a patched model, or None for a model that is not patched."""
    patch = getattr(model, PATCH, None)
    return patch.route if patch is not None else None


known_routes: dict[Any, Route] = {}
"""The routes that were found in this process, by what `route_key` returns."""


def route_key(model: PreTrainedModel) -> Any:
    """Return a key of everything that a route depends on. The proof does not repeat all checks of the search, so the
    names and classes of all modules are in the key."""
    classes = tuple((name, type(module)) for name, module in model.named_modules())
    facts = attention_name(model.config), model.dtype, model.device.type, borders_left_out.get()
    return classes, model.config.to_json_string(), *facts


def sees_labels(model: PreTrainedModel) -> bool:
    """Return whether a patched model sees the input token at each label's position, as masked language models do.

    Return False for a model that is not patched.
    """
    route = route_of(model)
    return route is not None and route.facts.sees_labels
