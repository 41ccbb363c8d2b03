"""Run a module segment by segment: cut the module's inputs into segments, call the module on every segment, and join
the outputs."""

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
"""Lock that is held while inner modules return stored outputs, since other threads must not get these outputs."""


class ReplacedForward:
    """A callable object that replaces a module's forward. An object is used instead of a function so that a patched
    model can be copied and pickled."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        found: Any = vars(module).get("forward")
        while isinstance(found, type(self)):
            found = found.before
        self.before: Any = found
        """A forward that other code, such as a hook of accelerate, had set on the module earlier; usually None."""
        self.installed = False

    def install(self) -> None:
        self.module.forward = self  # type: ignore[assignment]  # subclasses can be called
        self.installed = True

    def remove(self) -> None:
        """Restore the forward that the module had before `install`.

        If other code has wrapped this object in the meantime, this object stays in place, but from now on only calls
        the module's own forward.
        """
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
    """A segment-local inner module that runs on the whole row, before the outer module runs by segment.

    Args:
        name: the inner module's name, relative to the outer module.
        source: the origin of the inner module's input: the path of an argument of the outer module, or the name of
            another inner module that runs before the outer module.
    """

    name: str
    source: Path | str


@dataclass(frozen=True)
class RunAfter:
    """A segment-local inner module that computes the outer module's output, such as an output projection. The inner
    module runs on the whole row, after the outer module has run by segment.

    Args:
        name: the inner module's name, relative to the outer module.
        output: path of the inner module's output among the outputs of the outer module.
    """

    name: str
    output: Path


@dataclass
class ModulePlan:
    """A plan for running one module by segment: token axes of the module's inputs and outputs, the rule for segments
    that share a call, and the inner modules that run on the whole row."""

    name: str
    """The module's name in the model."""
    kind: str
    """Name of the module's class."""
    inputs: TokenAxes
    outputs: TokenAxes
    between: TokenAxes
    """Token axes of the outputs of the inner modules in `ahead`."""
    sharing: Sharing = "none"
    is_stateful: bool = False
    """Whether a call changes the module's state, so that the state has to be restored after every call."""
    ahead: list[RunAhead] = field(default_factory=list)
    after: RunAfter | None = None

    @classmethod
    def record(cls, name: str, module: nn.Module, row_length: int) -> "ModulePlan":
        """Return a new plan that is ready to record the module's token axes on a row of `row_length` tokens."""
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
    """A replacement for a module's forward that runs the module segment by segment.

    Args:
        module: a module that is not segment-local, in a patched model, or in a model while a search runs.
        plan: the plan for running the module by segment.
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
                f"{plan.inputs.where} was called outside its model's forward, so the borders between segments are "
                "not known; call the model that was passed to patch_model"
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
        """Call the module on the segments of a row, and return the outputs before they are joined.

        Args:
            inputs: positional and keyword arguments of the module for the whole row.
            calls: the calls to make, each of which covers one or more segments.
            num_segments: number of segments in all calls together.
            fill: function that makes the padding for shorter segments in a call; None for zeros.

        Returns:
            The output of the last call, which shows how outputs are nested, and a list with a dictionary for every
            segment. The dictionary maps the path of each value in the nested output to the segment's value.
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
        """Join the outputs of the segments, and return the result. If `plan.after` names a module, that module runs on
        the joined outputs."""
        whole = join_outputs(output, self.plan.outputs, parts)
        if (after := self.plan.after) is None:
            return whole
        last = self.module.get_submodule(after.name)
        return map_leaves(whole, lambda path, leaf: last(leaf) if path == after.output else leaf)

    def run_restored(self, args: Any, kwargs: Any) -> Any:
        """Call the module's own forward, and return the output. A stateful module is restored after the call."""
        if not self.plan.is_stateful:
            return self.forward(*args, **kwargs)
        with restored(*self.module.modules()):
            return self.forward(*args, **kwargs)

    def _run_ahead(self, inputs: tuple[Any, Any]) -> dict[str, Tensor]:
        """Run the modules in `plan.ahead` on the whole row, and return a dictionary from module name to output."""
        made: dict[str, Tensor] = {}
        arguments = dict(leaves(inputs)) if self.plan.ahead else {}
        for inner in self.plan.ahead:
            source = made.get(inner.source) if isinstance(inner.source, str) else arguments.get(inner.source)
            if isinstance(source, Tensor):  # None if a caller passes embeddings, not tokens
                made[inner.name] = self.module.get_submodule(inner.name)(source)
        if self.plan.is_recording:
            self.plan.between.record(made)
        return made

    @contextmanager
    def _with_results(self, ahead: dict[str, Tensor]) -> Iterator[None]:
        """Context manager: within the block, the modules named in `ahead` return the outputs stored in `ahead`, and the
        module in `plan.after` returns its input unchanged.

        The module in `plan.after` runs after the block, once, on the joined outputs of all segments.
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
    """Do nothing. This function serves as an empty hook, since nn.TransformerEncoderLayer skips the forwards of its
    inner modules unless the layer or an inner module has a hook."""


def _with_borders(row: PackedRow, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments, with every border argument in `kwargs` replaced by the borders of `row`."""
    borders: dict[str, Any] = {
        name: row.cu_seq_lens.to(kwargs[name].device) for name in _CU_SEQ_LENS if kwargs.get(name) is not None
    }
    borders |= {name: row.longest for name in _MAX_LENGTHS if kwargs.get(name) is not None}
    return {**kwargs, **borders}


_GATHERED_AT_ONCE = "_z3_leaf"
"""Name of an attribute of modules. DeepSpeed ZeRO-3 sets the attribute on a module if DeepSpeed gathers all parameters
of the module, including the parameters of inner modules, at once."""


def refuse_uneven_gathers(model: nn.Module, plans: Sequence[ModulePlan]) -> None:
    """Raise PackingError if distributed processes would wait for each other forever.

    If a module runs by segment, the number of calls of its inner modules depends on the number of segments, which
    differs between processes. If the weights of an inner module are gathered at every call, however, all processes have
    to call the inner module equally often.
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
                    f"model: expected FSDP to wrap no module inside {plan.kind}, since {plan.kind} runs by segment; "
                    f"FSDP wraps {where}. Wrap {plan.kind} itself, or a module that contains {plan.kind}"
                )
            gathered = any(hasattr(parameter, GATHERED) for parameter in inner.parameters(recurse=False))
            if gathered and not _is_gathered_at_once(model, plan.name):
                raise PackingError(
                    f"model: expected DeepSpeed to gather all weights of {plan.kind} at once, since {plan.kind} runs "
                    f"by segment; DeepSpeed gathers the weights of {where} at every call. Call "
                    f"deepspeed.utils.set_z3_leaf_modules(model, [{plan.kind}])"
                )


def _is_gathered_at_once(model: nn.Module, name: str) -> bool:
    parts = name.split(".")
    outer = [".".join(parts[:end]) for end in range(len(parts) + 1)]
    return any(getattr(model.get_submodule(each), _GATHERED_AT_ONCE, False) for each in outer)
