"""Run a module separately on every segment (usually a document) of a packed row.

The module's inputs are cut into segments, the module is called on every segment, and the outputs are joined.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from hf_packing.attention.inspect_model import unwrapped
from hf_packing.attention.layout import Layout, SharedCall, Sharing, current_layout, use_layout
from hf_packing.attention.padded import current_rows
from hf_packing.attention.projections import RunAfter, RunAhead
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
"""Lock that a thread holds while inner modules of a model return stored outputs instead of running. Other threads that
run the same model must not get these outputs."""


class ReplacedForward:
    """Base class of callable objects that replace a module's forward. Objects are used instead of functions, so that a
    patched model can be copied and pickled."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        found: Any = vars(module).get("forward")
        while isinstance(found, type(self)):
            found = found.before
        self.before: Any = found
        """The forward that other code, such as a hook of accelerate, had already set on the module object; None if the
        module only has the forward of its class."""
        self.installed = False

    __name__ = "forward"  # torch.export reads this and __code__

    @property
    def __code__(self) -> CodeType:
        code: CodeType = (self.before or type(self.module).forward).__code__
        return code

    def install(self) -> None:
        self.module.forward = self  # type: ignore[assignment]  # subclasses are callable
        self.installed = True

    def remove(self) -> None:
        """Restore the forward that the module had before `install`.

        If other code has wrapped this object in the meantime, the object cannot be removed. From then on, the object
        only calls the module's original forward.
        """
        self.installed = False
        found = vars(self.module).get("forward")
        if self in (found, getattr(found, "__func__", None)):  # accelerate makes a method of it
            del self.module.forward
            if self.before is not None:
                self.module.forward = self.before

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original forward, which this object replaces, and return the output."""
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


@contextmanager
def switched_off(forwards: Sequence[ReplacedForward]) -> Iterator[None]:
    """Context manager: within the block, the modules run the forwards that they had before they were replaced."""
    installed = [forward for forward in forwards if forward.installed]
    try:
        for forward in installed:
            forward.installed = False
        yield
    finally:
        for forward in installed:
            forward.installed = True


@dataclass
class ModulePlan:
    """A plan for running one module segment by segment. The plan stores which axes of the module's inputs and outputs
    are axes of tokens, which segments may share a call, and which inner modules run once on the whole packed row."""

    name: str
    """The module's name in the model."""
    kind: str
    """The name of the module's class."""
    inputs: TokenAxes
    outputs: TokenAxes
    between: TokenAxes
    """The token axes of the outputs that the inner modules in `ahead` return."""
    sharing: Sharing = "none"
    is_stateful: bool = False
    """True if a call changes the module's state. The state is then restored after every call."""
    ahead: list[RunAhead] = field(default_factory=list)
    after: RunAfter | None = None

    @classmethod
    def record(cls, name: str, module: nn.Module, row_length: int) -> "ModulePlan":
        """Return a new ModulePlan, which records a module's token axes until `freeze` is called.

        Args:
            name: name of the module in the model.
            module: the module. While it is called on a row of `row_length` tokens, its token axes are recorded.
            row_length: number of tokens in the row.
        """
        where = f"{type(module).__name__} ({name})"
        inputs, outputs, between = (TokenAxes(where, row_length) for _ in range(3))
        return cls(name, type(module).__name__, inputs, outputs, between)

    @property
    def is_recording(self) -> bool:
        return self.inputs.is_recording

    def freeze(self) -> None:
        """Stop recording token axes. From then on, the plan uses the recorded axes for rows of any length."""
        for axes in (self.inputs, self.outputs, self.between):
            axes.freeze()

    def packed_modules(self) -> list[str]:
        """Return the names, relative to the module, of the inner modules that run once on the whole packed row."""
        return [inner.name for inner in self.ahead] + ([self.after.name] if self.after else [])


class SegmentedForward(ReplacedForward):
    """A replacement for a module's forward. The replacement runs the module segment by segment.

    Args:
        module: a module whose output for a whole packed row differs from its joined outputs for the segments.
        plan: the plan for running the module segment by segment.
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

    def check_module(self, model: nn.Module) -> None:
        """Raise PackingError if the model has another module by now under the name of the replaced one."""
        found = unwrapped(model.get_submodule(self.plan.name))
        if found is not self.module:
            raise PackingError(
                f"{self.plan.name}: expected the same {self.plan.kind} as when the model was patched, got another "
                f"module ({type(found).__name__}); call unpatch_model before you replace a module, and patch_model "
                "afterwards"
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_by_segment(args, kwargs) if self.installed else self.forward(*args, **kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # segments have too many lengths to compile each
    def _run_by_segment(self, args: Any, kwargs: dict[str, Any]) -> Any:
        row, plan = current_layout.get(), self.plan
        if row is None and current_rows.get() is not None:  # in a padded batch
            return self.forward(*args, **kwargs)
        if row is None:
            raise PackingError(
                f"{plan.inputs.where} was called outside its model's forward, where the borders between packed "
                "documents are not known; call the whole model that was passed to patch_model, not this module alone"
            )
        with _results_lock if plan.packed_modules() else nullcontext():
            return self._run(row, args, kwargs)

    def _run(self, row: Layout, args: Any, kwargs: dict[str, Any]) -> Any:
        plan = self.plan
        if plan.is_recording:
            plan.inputs.record((args, kwargs))
        plan.inputs.check((args, kwargs))
        if not plan.inputs.any_in((args, kwargs)):
            return self.forward(*args, **kwargs)
        if row.is_one_path_per_row:
            return self.run_restored(args, kwargs)
        if plan.is_recording:
            plan.outputs.record(self.forward(*args, **kwargs))
        plan.inputs.check_row((args, kwargs), row.tokens)
        return self.join(*self.run_segments((args, kwargs), row.calls(plan.sharing), row.num_paths), row)

    def run_segments(
        self, inputs: tuple[Any, Any], calls: list[SharedCall], num_segments: int, fill: Fill | None = None
    ) -> tuple[Any, list[dict[Path, Any]]]:
        """Call the module on the segments of a packed row, and return the outputs without joining them.

        Args:
            inputs: positional and keyword arguments of the module for the whole row.
            calls: the calls to make, each of which covers one or more segments.
            num_segments: number of segments in all calls together.
            fill: function that makes the padding of shorter segments in a call; None for zeros.

        Returns:
            The output of the last call, which shows how outputs are nested; and a list with one dictionary for each
            segment. The dictionary maps a path in the nested output to the segment's value at that path.
        """
        parts: list[dict[Path, Any]] = [{} for _ in range(num_segments)]
        output = None
        ahead = self._run_ahead(inputs)
        for call in calls:
            args, kwargs = cut_inputs(inputs, self.plan.inputs, call.places, fill)
            with use_layout(call.batch), self._with_results(cut_inputs(ahead, self.plan.between, call.places, fill)):
                output = self.run_restored(args, _with_borders(call.batch, kwargs))
            if self.plan.is_recording:
                self.plan.outputs.record(output)
            for segment, part in zip(
                call.segments, split_outputs(output, self.plan.outputs, call.lengths), strict=True
            ):
                parts[segment] = part
        return output, parts

    def join(self, output: Any, parts: list[dict[Path, Any]], row: Layout | None = None) -> Any:
        """Return the module's output for the whole row, joined from the results of `run_segments`. If `plan.after` is
        set, run that inner module on the joined output. If segments share prefixes, the parts are the paths of
        `row`, and every token gets the output that it has on the first path."""
        whole = join_outputs(output, self.plan.outputs, parts)
        if row is not None and row.has_branches:
            whole = self._at_first_places(whole, row)
        if (after := self.plan.after) is None:
            return whole
        last = self.module.get_submodule(after.name)
        return map_leaves(whole, lambda path, leaf: last(leaf) if path == after.output else leaf)

    def _at_first_places(self, whole: Any, row: Layout) -> Any:
        """Return an output for a row of trees, given the joined outputs for its paths."""

        def select(path: Path, leaf: Any) -> Any:
            for axis in self.plan.outputs.of(path, leaf) if isinstance(leaf, Tensor) else ():
                leaf = leaf.index_select(axis, row.first_places)
            return leaf

        return map_leaves(whole, select)

    def run_restored(self, args: Any, kwargs: Any) -> Any:
        """Call the module's original forward, and return the output. If the module is stateful, restore its state after
        the call."""
        if not self.plan.is_stateful:
            return self.forward(*args, **kwargs)
        with restored(*self.module.modules()):
            return self.forward(*args, **kwargs)

    def _run_ahead(self, inputs: tuple[Any, Any]) -> dict[str, Tensor]:
        """Run the inner modules in `plan.ahead` on the whole row, and return their outputs by module name."""
        made: dict[str, Tensor] = {}
        arguments = dict(leaves(inputs)) if self.plan.ahead else {}
        for inner in self.plan.ahead:
            source = made.get(inner.source) if isinstance(inner.source, str) else arguments.get(inner.source)
            if isinstance(source, Tensor):  # None if the caller passed embeddings, not tokens
                made[inner.name] = self.module.get_submodule(inner.name)(source)
        if self.plan.is_recording:
            self.plan.between.record(made)
        return made

    @contextmanager
    def _with_results(self, ahead: dict[str, Tensor]) -> Iterator[None]:
        """Context manager: within the block, the inner modules named in `ahead` do not run, and return the outputs that
        `ahead` contains. The inner module in `plan.after` does not run either, and returns its input.

        `join` runs the module in `plan.after` later, once, on the joined outputs of all segments.
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
    """Do nothing. This function is a hook of every module that runs segment by segment. Without any hooks on itself or
    its inner modules, nn.TransformerEncoderLayer may skip the forwards of its inner modules."""


def _with_borders(row: Layout, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a module's keyword arguments, with cu_seq_lens_q/k and max_length_q/k replaced by the values for `row`.
    Arguments that are missing or None are not added."""
    borders: dict[str, Any] = {
        name: row.cu_seq_lens.to(kwargs[name].device) for name in _CU_SEQ_LENS if kwargs.get(name) is not None
    }
    borders |= {name: row.longest for name in _MAX_LENGTHS if kwargs.get(name) is not None}
    return {**kwargs, **borders}
