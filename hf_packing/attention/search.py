"""Find the modules of a model that have to run segment by segment: run each on a packed row and on its segments.

A segment is one document, or a part of one document, in a packed row. A module is segment-local if its output for the
row equals the joined outputs for the row's segments. Linear layers, norms and experts are segment-local, and so are
rotary embeddings if the positions restart at 0 in every segment. A module that is not segment-local has to run segment
by segment. Some of these modules let documents affect each other, as attention, recurrent layers and convolutions do.
Others count tokens along the row.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_packing.attention.by_segment import ModulePlan, SegmentedForward
from hf_packing.attention.inspect_model import inputs_are_alike, kinds_of_modules
from hf_packing.attention.layout import Layout
from hf_packing.attention.module_checks import (
    CopyingDropout,
    depends_on_far_positions,
    differs_on_other_rows,
    find_sharing,
    is_most_of,
    outputs_differ,
    refuse_changed_scalars,
    refuse_row_outputs,
    run_one_by_one,
    scalars_of,
)
from hf_packing.attention.projections import RunAfter, RunAhead
from hf_packing.attention.snapshot import restored
from hf_packing.attention.token_axes import Path, detached_copy, leaves, tensors_in

_OTHER_CALLS = ({"embedded": True, "output_hidden_states": True}, {"embedded": True}, {"output_hidden_states": True})
"""Options for further forwards. With these options, modules get other arguments or return other outputs, whose token
axes have to be recorded, too. If the first forward works, it is enough. Not every model supports all options."""


@dataclass
class _Call:
    """One call of a module, recorded during the model's forward."""

    name: str
    inputs: tuple[Any, Any]
    """args and kwargs of the call."""
    inputs_copy: tuple[Any, Any]
    """A copy of `inputs`, made before the call, since a module may change its arguments in place; `inputs` itself if no
    copy is needed."""
    inner: list["_Call"] = field(default_factory=list)
    """Calls of inner modules that happened during this call, in order."""
    output: Any = None


@dataclass(frozen=True)
class _Local:
    """The finding that a module can run on the whole packed row, since the module is segment-local, or since its input
    or its output has no token axis."""


@dataclass(frozen=True)
class _Unsliceable:
    """The finding that a module cannot be called on single segments. The module itself is left unchanged, but a module
    that contains it may still run segment by segment."""

    error: str


@dataclass(frozen=True)
class _BySegment:
    """The finding that a module has to run segment by segment."""

    forward: SegmentedForward
    output: Any
    """The joined outputs of the module for the segments of the row."""


_Finding = _Local | _Unsliceable | _BySegment


class Search:
    """A search for the modules of a model that have to run segment by segment.

    The search watches one forward of the model on a packed row. Every module is classified as soon as its call returns,
    so inner modules are classified before outer modules. A module that has to run segment by segment does so from then
    on. In the watched forward, its output is replaced by the joined outputs for the segments, so that later modules get
    the right input. If an outer module has to run segment by segment, too, the inner module gets its original forward
    back.

    Modules that are built alike, as in a stack of equal layers, are classified once, and the finding is assumed for all
    of them. A proof of the route has to show whether this was right.

    Args:
        model: a model of transformers.
        row: a packed row. Its number of tokens must differ from every size in the model, since the search recognizes
            token axes by this number.
        only: names of the modules to search, together with their inner modules; None for all modules.
        thorough: whether to classify every single module.
    """

    def __init__(
        self, model: PreTrainedModel, row: Layout, only: Collection[str] | None = None, thorough: bool = False
    ) -> None:
        self.model, self.row, self.only = model, row, only
        self.embedding = model.get_input_embeddings()
        self.found: dict[str, SegmentedForward] = {}
        """Maps the name of each module that runs segment by segment to the module's new forward."""
        self.unsliceable: dict[str, str] = {}
        """Maps the name of each module that could not be called on single segments to the error message."""
        self.has_assumed = False
        """True if a finding was assumed, and not made by running the module."""
        self._kinds = {} if thorough else kinds_of_modules(model)
        self._first_of_kind: dict[int, tuple[_Call, _Finding]] = {}
        self._called: dict[str, None] = {}
        self._found_late = False  # whether a module was found only at its second call
        self._ignored = ""  # name of the running module whose inner modules are not watched
        self._open_calls: list[_Call] = []

    def run(self, forward: Callable[..., Any], check: Callable[[], None] = lambda: None) -> list[ModulePlan]:
        """Run the search, and return a plan for every module that has to run segment by segment.

        Args:
            forward: function that runs the model on the packed row, without arguments or with those in `_OTHER_CALLS`.
            check: function that is called after the first forward, and may raise an error to end the search.
        """
        try:
            with self._watching():
                forward()
            check()
            if self._found_late:  # this forward also records the arguments of earlier calls
                forward()
            for options in _OTHER_CALLS if self.found else ():
                with suppress(Exception):
                    forward(**options)
                    if options is _OTHER_CALLS[0]:
                        break
        finally:
            for found in self.found.values():
                found.remove()
        plans = [self.found[name].plan for name in self._called if name in self.found]
        for plan in plans:
            plan.freeze()
        return plans

    @contextmanager
    def _watching(self) -> Iterator[None]:
        hooks = []
        for name, module in self.model.named_modules():
            is_searched = self.only is None or any(_is_in(name, outer) for outer in self.only)
            if module is not self.model and is_searched:
                # no other hook runs between these hooks and the forward, so they see the forward's inputs and outputs
                hooks.append(module.register_forward_pre_hook(self._before_call(name), with_kwargs=True))
                hooks.append(module.register_forward_hook(self._after_call(name), prepend=True))
        try:
            with CopyingDropout():
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before_call(self, name: str) -> Callable[..., None]:
        def record(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if self._ignored:
                return
            inputs = args, kwargs
            has_tokens = any(self.row.tokens in tensor.shape for tensor in tensors_in(inputs))
            if self._is_like_first_of_kind(name, inputs):
                self.has_assumed, self._ignored, has_tokens = True, name, False
            elif name in self.found and name not in self._called:  # the plan for the first call does not fit
                self.found.pop(name).remove()
            self._open_calls.append(_Call(name, inputs, detached_copy(inputs) if has_tokens else inputs))

        return record

    def _is_like_first_of_kind(self, name: str, inputs: Any) -> bool:
        """Return whether the finding for the first call of a module of the same kind can be assumed for this call."""
        if (first := self._first_of_kind.get(self._kinds.get(name, -1))) is None:
            return False
        call, finding = first
        by_segment = isinstance(finding, _BySegment)
        return by_segment == (name in self.found) and inputs_are_alike(call.inputs, inputs, self.row.tokens)

    def _after_call(self, name: str) -> Callable[..., Any]:
        def classify_and_apply(module: nn.Module, _: Any, output: Any) -> Any:
            if self._ignored not in ("", name):
                return None
            call = self._open_calls.pop()
            call.output = output
            if self._open_calls:
                self._open_calls[-1].inner.append(call)
            if self._ignored:  # the finding for the first call of this kind is assumed
                self._called |= {each: None for each in self.found if _is_in(each, name)}
            else:
                self._ignored = name
                finding = self._classify(call, module)
                self._apply(finding, call)
                call.output = finding.output if isinstance(finding, _BySegment) else output
            self._called[name] = None
            self._ignored = ""
            return call.output

        return classify_and_apply

    def _apply(self, finding: _Finding, call: _Call) -> None:
        """Note the finding for a module, and for all modules that are built alike."""
        kind, alike = self._kinds.get(call.name, -1), [call.name]
        if self._kinds and kind not in self._first_of_kind:
            self._first_of_kind[kind] = call, finding
            alike += [name for name, other in self._kinds.items() if other == kind and name != call.name]
        if isinstance(finding, _Unsliceable):
            self.unsliceable |= dict.fromkeys(alike, finding.error)
        if isinstance(finding, _BySegment):
            self._found_late |= call.name in self._called
            self._run_by_segment_from_now_on(call, finding, alike)

    def _classify(self, call: _Call, module: nn.Module) -> _Finding:
        """Decide from one call of a module whether the module has to run segment by segment, and return the finding.

        The module is left unchanged.
        """
        inputs, row = call.inputs_copy, self.row
        if self._kinds and is_most_of(self.model, module):  # the proof itself tests nothing else
            self.has_assumed = True
            return _Local()
        plan = ModulePlan.record(call.name, module, row.tokens)
        plan.inputs.record(inputs)
        plan.outputs.record(call.output)
        if not plan.inputs.any_in(inputs) or not plan.outputs.most_in_one_tensor(call.output):
            return _Local()
        forward = SegmentedForward(module, plan)
        depends_on_others = plan.is_stateful = depends_on_far_positions(forward, inputs, row)
        try:
            with restored(*module.modules()) as changed:
                before = scalars_of(module)
                output = run_one_by_one(forward, inputs, row)
                refuse_changed_scalars(before, scalars_of(module), plan.inputs.where)
            if changed and not plan.is_stateful:
                plan.is_stateful = True
                output = run_one_by_one(forward, inputs, row)
            refuse_row_outputs(call.output, output, plan.outputs)
        except Exception as error:  # a module may raise anything when it gets a single segment
            return _Unsliceable(f"{type(error).__name__}: {error}")
        if (
            depends_on_others
            or outputs_differ(call.output, output, plan.outputs, row.slices)
            or differs_on_other_rows(forward, inputs, row, self.embedding)
        ):
            return _BySegment(forward, output)
        return _Local()

    def _run_by_segment_from_now_on(self, call: _Call, finding: _BySegment, alike: list[str]) -> None:
        """Replace the module's forward by the forward in `finding`, which runs the module segment by segment.

        Inner modules that ran segment by segment get their original forwards back. The module's projections, such as
        the query and key projections of an attention layer, still run once on the whole row if this does not change the
        module's output. The modules in `alike` get the same forwards as the module.
        """
        for name in [name for name in self.found if any(_is_in(name, each) for each in alike)]:
            self.found.pop(name).remove()
        forward, plan = finding.forward, finding.forward.plan
        plan.ahead, plan.after = self._projections(call, plan)
        if not self._agrees(forward, call, finding.output):
            plan.ahead, plan.after = [], None
        plan.sharing = find_sharing(forward, call.inputs_copy, self.row)
        for name in alike:
            other = SegmentedForward(self.model.get_submodule(name), _renamed(plan, name))
            self.found[name] = forward if name == call.name else other
            self.found[name].install()

    def _agrees(self, forward: SegmentedForward, call: _Call, expected: Any) -> bool:
        """Return whether a module that runs segment by segment still returns `expected` if the projections in its plan
        run once, on the whole row."""
        try:
            output = run_one_by_one(forward, call.inputs_copy, self.row)
            return not outputs_differ(expected, output, forward.plan.outputs, self.row.slices)
        except Exception:  # the module cannot use segments of the projections' outputs
            return False

    def _projections(self, call: _Call, plan: ModulePlan) -> tuple[list[RunAhead], RunAfter | None]:
        """Find the projections that may run once on the whole row, inside a module that runs segment by segment.

        Args:
            call: a recorded call of the module.
            plan: the plan for running the module. This function records the token axes of the projections' outputs in
                `plan.between`.

        Returns:
            First, the projections that run before the module, on the module's input or on the output of another such
            projection. Second, the projection that computes the module's output, or None.
        """
        known: dict[int, Path | str] = {
            id(leaf): path
            for path, leaf in leaves(call.inputs)
            if isinstance(leaf, Tensor) and plan.inputs.of(path, leaf)
        }
        times_called = Counter(inner.name for inner in call.inner)
        ahead = []
        for inner in call.inner:
            if not self._is_projection(inner, call.name) or times_called[inner.name] > 1:
                continue
            source = inner.inputs[0][0]
            if id(source) in known:
                name = inner.name.removeprefix(f"{call.name}.")
                ahead.append(RunAhead(name, known[id(source)]))
                known[id(inner.output)] = name
                plan.between.record({name: inner.output})
        last = call.inner[-1] if call.inner else None
        if last is None or not self._is_projection(last, call.name) or times_called[last.name] > 1:
            return ahead, None
        path = next((path for path, leaf in leaves(call.output) if leaf is last.output), None)
        same_axes = last.inputs[0][0].ndim == last.output.ndim
        runs_ahead = id(last.output) in known
        if path is None or not same_axes or runs_ahead or not plan.outputs.of(path, last.output):
            return ahead, None
        return ahead, RunAfter(last.name.removeprefix(f"{call.name}."), path)

    def _is_projection(self, call: _Call, outer: str) -> bool:
        """Return whether the module that was called in `call` is a projection inside the module named `outer`.

        A projection is a segment-local module that has weights, takes a single tensor, and returns a tensor with one
        token axis.
        """
        args, kwargs = call.inputs
        if not call.name.startswith(f"{outer}.") or len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            return False
        if any(_is_in(name, call.name) for name in (*self.found, *self.unsliceable)):
            return False
        module = self.model.get_submodule(call.name)
        has_tokens = isinstance(call.output, Tensor) and list(call.output.shape).count(self.row.tokens) == 1
        fits = args[0].is_floating_point() or isinstance(module, nn.Embedding)
        return has_tokens and fits and next(module.parameters(), None) is not None


def _renamed(plan: ModulePlan, name: str) -> ModulePlan:
    """Return a copy of a plan for a module that is built alike. The copy has the same token axes, and does not record
    any: whatever is recorded for the plan also holds for the copy."""
    axes = [copy(each) for each in (plan.inputs, plan.outputs, plan.between)]
    for each in axes:
        each.where = f"{plan.kind} ({name})"
        each.freeze()
    return replace(plan, name=name, inputs=axes[0], outputs=axes[1], between=axes[2])


def _is_in(name: str, outer: str) -> bool:
    """Return whether the module named `name` is the module named `outer`, or is inside that module."""
    return name == outer or name.startswith(f"{outer}.")
