"""The hooks around a patched model's forward: they read the packed row, tell the model of it, and forget it again."""

from contextvars import Token
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from hf_packing.attention.borders import read_row
from hf_packing.attention.checkpointing import keep_rows
from hf_packing.attention.feed import Signature, in_rows
from hf_packing.attention.route import Way
from hf_packing.attention.row import PackedRow, current
from hf_packing.attention.varlen import register
from hf_packing.errors import PackingError


class GiveRow:
    """Makes a packed row current for as long as a model's forward runs. A class, so that patched models can be pickled.

    Args:
        model: patched.
        way: what it is given.
    """

    def __init__(self, model: PreTrainedModel, way: Way) -> None:
        self.model = model
        self.way = way
        self.signatures: dict[str, Signature] = {}
        self.running: list[tuple[PackedRow, Token[PackedRow | None]] | None] = []
        """One entry for each forward that has begun; None for those inside another, which know their row."""

    def install(self) -> list[RemovableHandle]:
        """On the model and on the inner ones, which PEFT and others call without the outer."""
        modules = {"model": self.model, "base_model": self.model.base_model}
        decoder = self.model.get_decoder() if hasattr(self.model, "get_decoder") else None
        if isinstance(decoder, nn.Module):
            modules["decoder"] = decoder
        hooks = []
        for name, module in {id(module): (name, module) for name, module in reversed(modules.items())}.values():
            self.signatures[name] = Signature(module)
            hooks.append(module.register_forward_pre_hook(Before(self, name), with_kwargs=True))
            hooks.append(module.register_forward_hook(self.after, always_call=True))
        return hooks

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before(self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self.running.append(None)
        if len(self.running) > 1:
            return args, kwargs
        attention = self.model.config._attn_implementation
        if self.way.attention not in (None, attention):
            raise PackingError(
                f"attention: expected {self.way.attention!r} on a patched model, somebody has set {attention!r}; call "
                "unpatch_model before"
            )
        if module.training:
            keep_rows(self.model)
        signature = self.signatures[name]
        inputs, row = read_row(signature.by_name(args, kwargs), module.training)
        inputs = self.way.feed(signature, inputs, row)
        as_one = row
        if self.way.feed.one_row and not row.is_one_segment_each:
            as_one = PackedRow(row.cu_seq_lens, row.lengths)
        self.running[-1] = row, current.set(as_one)
        return (), inputs

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after(self, _: nn.Module, __: Any, output: Any) -> Any:
        running = self.running.pop() if self.running else None
        if running is None:
            return None
        row, token = running
        current.reset(token)
        folds = self.way.feed.one_row and row.rows > 1 and not row.is_one_segment_each and output is not None
        return in_rows(output, row) if folds else None

    def __setstate__(self, state: dict[str, Any]) -> None:
        register()
        self.__dict__.update(state)


class Before:
    """The hook of one of the modules."""

    def __init__(self, give: GiveRow, name: str) -> None:
        self.give = give
        self.name = name

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return self.give.before(self.name, module, args, kwargs)
