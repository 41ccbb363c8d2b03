"""Around a patched model's forward: the packed row is read, the model is told of it, and it is forgotten again."""

import inspect
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_packing.attention.borders import read_row
from hf_packing.attention.by_segment import BySegment
from hf_packing.attention.checkpointing import keep_rows
from hf_packing.attention.feed import Signature, in_rows
from hf_packing.attention.replaced import ReplacedForward
from hf_packing.attention.route import STATE, Route
from hf_packing.attention.row import PackedRow, working_on
from hf_packing.attention.seen_labels import refuse_seen_labels
from hf_packing.attention.sharded import refuse_uneven_gathers
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


WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
"""Where wrappers keep a module that they only call."""


def without_wrapping(module: nn.Module) -> nn.Module:
    while (inner := next((getattr(module, name) for name in WRAPPED if name in module._modules), None)) is not None:
        module = inner
    return module


def give_rows(model: PreTrainedModel, route: Route, steps: list[BySegment]) -> list[ReplacedForward]:
    """On the model and on the inner ones, which PEFT and others call without the outer."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    modules = [model, model.base_model, *([decoder] if isinstance(decoder, nn.Module) else [])]
    return [GiveRow(module, model, route, steps) for module in {id(module): module for module in modules}.values()]
