"""Run a module segment by segment: cut its inputs into segments, call it on each, and join the outputs."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from hf_packing.attention.inspect_model import GATHERED, is_fsdp
from hf_packing.attention.packed_row import PackedRow, SharedCall, Sharing, current_row, use_row
from hf_packing.attention.snapshot import restored
from hf_packing.attention.token_axes import (
    Fill,
    Path,
    TokenAxes,
    cut_inputs,
    join_outputs,
    leaves,
    map_leaves,
    split_outputs,
)
from hf_packing.errors import PackingError

_CU_SEQ_LENS = ("cu_seq_lens_q", "cu_seq_lens_k")
_MAX_LENGTHS = ("max_length_q", "max_length_k")

_results_lock = threading.RLock()
"""Held while inner modules return outputs already computed for the whole row, which other threads must not get."""


class ReplacedForward:
    """A callable object that replaces a module's forward. It is not a function, so that a patched model can be copied
    and pickled."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        found: Any = vars(module).get("forward")
        while isinstance(found, type(self)):
            found = found.before
        self.before: Any = found
        """What had replaced the forward of the class before, such as a hook of accelerate; usually None."""
        self.installed = False

    def install(self) -> None:
        self.module.forward = self  # type: ignore[assignment]  # subclasses can be called
        self.installed = True

    def remove(self) -> None:
        """Restore the forward. An object that other code has wrapped since stays in place, and only passes calls on."""
        self.installed = False
        if vars(self.module).get("forward") is self:
            del self.module.forward
            if self.before is not None:
                self.module.forward = self.before

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's own forward."""
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


@dataclass(frozen=True)
class RunAhead:
    """A segment-local inner module that runs on the whole row before the module around it runs by segment.

    Args:
        name: its name inside that module.
        source: its input: the path of an argument of that module, or the name of another module that runs ahead.
    """

    name: str
    source: Path | str


@dataclass(frozen=True)
class RunAfter:
    """A segment-local inner module that computes the output, such as an output projection. It runs on the whole row
    after the module around it has run by segment.

    Args:
        name: its name inside that module.
        output: path of its output among the outputs of that module.
    """

    name: str
    output: Path


@dataclass
class ModulePlan:
    """How to run a module by segment: its token axes, which segments share a call, which inner modules stay packed."""

    name: str
    """Name in the model."""
    kind: str
    """Name of its class."""
    inputs: TokenAxes
    outputs: TokenAxes
    between: TokenAxes
    """Token axes of the outputs of modules that run ahead."""
    sharing: Sharing = "none"
    is_stateful: bool = False
    """Whether a call changes the module, so that it has to be restored before every segment."""
    ahead: list[RunAhead] = field(default_factory=list)
    after: RunAfter | None = None

    @classmethod
    def record(cls, name: str, module: nn.Module, row_length: int) -> "ModulePlan":
        """Return a plan that records its token axes on a row of this length."""
        where = f"{type(module).__name__} ({name})"
        inputs, outputs, between = (TokenAxes(where, row_length) for _ in range(3))
        return cls(name, type(module).__name__, inputs, outputs, between)

    @property
    def is_recording(self) -> bool:
        return self.inputs.is_recording

    def freeze(self) -> None:
        """End the recording of token axes."""
        for axes in (self.inputs, self.outputs, self.between):
            axes.freeze()

    def packed_modules(self) -> list[str]:
        """Return the names of the inner modules that run on the whole row."""
        return [inner.name for inner in self.ahead] + ([self.after.name] if self.after else [])


class SegmentedForward(ReplacedForward):
    """The forward of a module that is not segment-local, run segment by segment.

    Args:
        module: a module of a patched model, or of a model that is being searched.
        plan: how to run it.
    """

    def __init__(self, module: nn.Module, plan: ModulePlan) -> None:
        super().__init__(module)
        self.plan = plan
        self.hook: Any = None

    def install(self) -> None:
        super().install()
        self.hook = self.module.register_forward_pre_hook(_do_nothing)

    def remove(self) -> None:
        super().remove()
        if self.hook is not None:
            self.hook.remove()

    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        row, plan = current_row.get(), self.plan
        if not self.installed:
            return self.forward(*args, **kwargs)
        if row is None:
            raise PackingError(
                f"{plan.inputs.where} was called outside its model's forward, so the borders of segments are not "
                "known; call the model that was passed to patch_model"
            )
        with _results_lock if plan.packed_modules() else nullcontext():
            return self._run(row, args, kwargs)

    def _run(self, row: PackedRow, args: Any, kwargs: dict[str, Any]) -> Any:
        plan = self.plan
        if plan.is_recording:
            plan.inputs.record((args, kwargs))
        plan.inputs.check((args, kwargs))
        if not plan.inputs.any_in((args, kwargs)):
            return self.forward(*args, **kwargs)
        if row.is_one_segment_per_row:
            return self.run_restored(args, kwargs)
        if plan.is_recording:
            plan.outputs.record(self.forward(*args, **kwargs))
        plan.inputs.check_row((args, kwargs), row.tokens)
        return self.join(*self.run_segments((args, kwargs), row.calls(plan.sharing), len(row.lengths)))

    def run_segments(
        self, inputs: tuple[Any, Any], calls: list[SharedCall], num_segments: int, fill: Fill | None = None
    ) -> tuple[Any, list[dict[Path, Any]]]:
        """Call the module on the segments of a row.

        Args:
            inputs: args and kwargs for the row.
            calls: which segments share a call.
            num_segments: number of segments in all calls.
            fill: makes the padding of shorter segments in a call.

        Returns:
            The output of the last call, which shows how outputs are nested; and for each segment, its leaves by path.
        """
        parts: list[dict[Path, Any]] = [{} for _ in range(num_segments)]
        output = None
        ahead = self._run_ahead(inputs)
        for call in calls:
            args, kwargs = cut_inputs(inputs, self.plan.inputs, call.slices, fill)
            with use_row(call.batch), self._with_results(cut_inputs(ahead, self.plan.between, call.slices, fill)):
                output = self.run_restored(args, _with_borders(call.batch, kwargs))
            if self.plan.is_recording:
                self.plan.outputs.record(output)
            for segment, part in zip(
                call.segments, split_outputs(output, self.plan.outputs, call.lengths), strict=True
            ):
                parts[segment] = part
        return output, parts

    def join(self, output: Any, parts: list[dict[Path, Any]]) -> Any:
        """Join the outputs of the segments, and run the module in `plan.after`, if any, on the whole row."""
        whole = join_outputs(output, self.plan.outputs, parts)
        if (after := self.plan.after) is None:
            return whole
        last = self.module.get_submodule(after.name)
        return map_leaves(whole, lambda path, leaf: last(leaf) if path == after.output else leaf)

    def run_restored(self, args: Any, kwargs: Any) -> Any:
        """Call the module's own forward. A stateful module is restored afterwards."""
        if not self.plan.is_stateful:
            return self.forward(*args, **kwargs)
        with restored(*self.module.modules()):
            return self.forward(*args, **kwargs)

    def _run_ahead(self, inputs: tuple[Any, Any]) -> dict[str, Tensor]:
        """Run the modules in `plan.ahead` on the whole row, and return their outputs by name."""
        made: dict[str, Tensor] = {}
        arguments = dict(leaves(inputs)) if self.plan.ahead else {}
        for inner in self.plan.ahead:
            source = made.get(inner.source) if isinstance(inner.source, str) else arguments.get(inner.source)
            if isinstance(source, Tensor):  # tokens may be missing: a caller can pass embeddings instead
                made[inner.name] = self.module.get_submodule(inner.name)(source)
        if self.plan.is_recording:
            self.plan.between.record(made)
        return made

    @contextmanager
    def _with_results(self, ahead: dict[str, Tensor]) -> Iterator[None]:
        """Inside the block, modules that ran ahead return their stored results, and `plan.after` returns its input.

        The module in `plan.after` then runs once, on the joined outputs of all segments.
        """
        replaced: list[tuple[nn.Module, Any]] = []

        def replace(name: str, forward: Any) -> None:
            module = self.module.get_submodule(name)
            replaced.append((module, vars(module).get("forward")))
            module.forward = forward

        try:
            for name, value in ahead.items():
                replace(name, lambda *_, value=value: value)
            if self.plan.after is not None:
                replace(self.plan.after.name, lambda value: value)
            yield
        finally:
            for module, forward in replaced:
                del module.forward
                if forward is not None:
                    module.forward = forward


def _do_nothing(*_: Any) -> None:
    """An empty hook: nn.TransformerEncoderLayer skips the forwards of its inner modules unless one of them has a
    hook."""


def _with_borders(row: PackedRow, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments, with this row's borders in place of any that were passed."""
    borders: dict[str, Any] = {
        name: row.cu_seq_lens.to(kwargs[name].device) for name in _CU_SEQ_LENS if kwargs.get(name) is not None
    }
    borders |= {name: row.longest for name in _MAX_LENGTHS if kwargs.get(name) is not None}
    return {**kwargs, **borders}


_GATHERED_AT_ONCE = "_z3_leaf"
"""Attribute that DeepSpeed ZeRO-3 sets on a module whose parameters, inner modules included, it gathers at once."""


def refuse_uneven_gathers(model: nn.Module, plans: Sequence[ModulePlan]) -> None:
    """Raise PackingError if processes would wait for each other forever.

    A module inside one that runs by segment is called once for each segment. If its weights are gathered at every call,
    all processes have to call it equally often, but they have different numbers of segments.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    if torch.distributed.get_world_size() < 2:
        return
    for plan in plans:
        module = model.get_submodule(plan.name)
        packed = plan.packed_modules()
        for name, inner in module.named_modules():
            if not name or any(name == each or name.startswith(f"{each}.") for each in packed):
                continue
            where = f"{type(inner).__name__} ({plan.name}.{name})"
            if is_fsdp(inner):
                raise PackingError(
                    f"model: expected FSDP to wrap {plan.kind}, which runs by segment, or a module around it; FSDP "
                    f"wraps {where} inside it"
                )
            gathered = any(hasattr(parameter, GATHERED) for parameter in inner.parameters(recurse=False))
            if gathered and not _is_gathered_at_once(model, plan.name):
                raise PackingError(
                    f"model: expected DeepSpeed to gather all of {plan.kind}, which runs by segment, at once; "
                    f"DeepSpeed gathers {where} at every call. Call deepspeed.utils.set_z3_leaf_modules(model, "
                    f"[{plan.kind}])"
                )


def _is_gathered_at_once(model: nn.Module, name: str) -> bool:
    parts = name.split(".")
    outer = [".".join(parts[:end]) for end in range(len(parts) + 1)]
    return any(getattr(model.get_submodule(each), _GATHERED_AT_ONCE, False) for each in outer)
