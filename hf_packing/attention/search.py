"""Find the modules of a model that have to run segment by segment: run each on a packed row and on its segments.

A segment is one document, or a part of one document, in a packed row. A module is segment-local if its output for the
row equals the joined outputs for the row's segments. Linear layers, norms and experts are segment-local, and so are
rotary embeddings if the positions restart at 0 in every segment. A module that is not segment-local has to run segment
by segment. Some of these modules let documents affect each other, as attention, recurrent layers and convolutions do.
Others count tokens along the row.

The price is about five calls of each module. Of modules that are built alike, as in a stack of layers, only one pays.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_packing.attention.by_segment import ModulePlan, SegmentedForward, is_inside
from hf_packing.attention.layout import Layout
from hf_packing.attention.model import configurations
from hf_packing.attention.module_checks import (
    WatchFunctions,
    depends_on_far_positions,
    depends_on_length,
    find_sharing,
    outputs_differ,
    refuse_row_outputs,
    run_one_by_one,
)
from hf_packing.attention.snapshot import OF_EVERY_MODULE, restored
from hf_packing.attention.token_axes import Path, detached_copy, leaves

_CALLS: tuple[dict[str, bool], ...] = ({}, {"embedded": True}, {"output_hidden_states": True})
"""Options for forwards after the search. In the first one, all modules that run segment by segment do so from its begin
on. With the other options, modules get other arguments or return other outputs. The token axes of all of them have to
be recorded. Not every model supports all options."""


@dataclass
class _Call:
    """One call of a module, recorded during the model's forward, and what it has shown of the module. By default, the
    module can run on the whole packed row, since it is segment-local, or since its input or its output has no token
    axis."""

    name: str
    inputs: tuple[Any, Any]
    """args and kwargs of the call."""
    inputs_copy: tuple[Any, Any]
    """A copy of `inputs`, made before the call, since a module may change its arguments in place."""
    inner: list["_Call"] = field(default_factory=list)
    """Calls of inner modules that happened during this call, in order."""
    output: Any = None
    """The output for the row; the joined outputs for its segments, if the module has to run segment by segment."""
    forward: SegmentedForward | None = None
    """The forward that runs the module segment by segment, if it has to."""
    error: str = ""
    """The reason why the module cannot be called on single segments. It is then left unchanged, but a module that
    contains it may still run segment by segment."""


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
        thorough: whether to classify every single module.
    """

    def __init__(self, model: PreTrainedModel, row: Layout, thorough: bool = False) -> None:
        self.model, self.row = model, row
        self.found: dict[str, SegmentedForward] = {}
        """Maps the name of each module that runs segment by segment to the module's new forward."""
        self.unsliceable: dict[str, str] = {}
        """Maps the name of each module that could not be called on single segments to the error message."""
        self._kinds = {} if thorough else kinds_of_modules(model)
        self._first_of_kind: dict[int, _Call] = {}
        self._classified: set[str] = set()
        self._running = ""  # name of the module that is checked, or whose finding is assumed
        self._open_calls: list[_Call] = []

    def run(self, forward: Callable[..., Any]) -> list[ModulePlan]:
        """Run the search, and return a plan for every module that has to run segment by segment. `forward` runs the
        model on the packed row, with the options in `_CALLS`."""
        try:
            with self._watching():
                forward()
            for options in _CALLS if self.found else ():
                with suppress(Exception):  # if the first one raises an error, the proof will, too
                    forward(**options)
        finally:
            for found in self.found.values():
                found.remove()
        plans = [self.found[name].plan for name, _ in self.model.named_modules() if name in self.found]
        for plan in plans:
            plan.freeze()
        return plans

    @contextmanager
    def _watching(self) -> Iterator[None]:
        hooks = []
        for name, module in self.model.named_modules():
            if module is not self.model:
                # no other hook runs between these hooks and the forward, so they see the forward's inputs and outputs
                hooks.append(module.register_forward_pre_hook(self._before_call(name), with_kwargs=True))
                hooks.append(module.register_forward_hook(self._after_call(name), prepend=True))
        try:
            with WatchFunctions(self.row.tokens):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before_call(self, name: str) -> Callable[..., None]:
        def record(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if self._running:
                return
            inputs = args, kwargs
            if self._is_like_first_of_kind(name, inputs):
                self._running = name
            elif name in self.found and name not in self._classified:  # the plan for the first call does not fit
                self.found.pop(name).remove()
            self._open_calls.append(_Call(name, inputs, inputs if self._running else detached_copy(inputs)))

        return record

    def _is_like_first_of_kind(self, name: str, inputs: Any) -> bool:
        """Return whether the finding for the first call of a module of the same kind can be assumed for this call."""
        first = self._first_of_kind.get(self._kinds.get(name, -1))
        if first is None or (first.forward is not None) != (name in self.found):
            return False
        return _settings_in(first.inputs) == _settings_in(inputs)

    def _after_call(self, name: str) -> Callable[..., Any]:
        def classify_and_apply(module: nn.Module, _: Any, output: Any) -> Any:
            if self._running not in ("", name):
                return None
            call = self._open_calls.pop()
            call.output = output
            if self._open_calls:
                self._open_calls[-1].inner.append(call)
            if not self._running:  # otherwise, the finding for the first call of this kind is assumed
                self._running = name
                whole = output
                self._classify(call, module)
                self._apply(call, whole)
                self._classified.add(name)
            self._running = ""
            return call.output

        return classify_and_apply

    def _classify(self, call: _Call, module: nn.Module) -> None:
        """Decide from one call of a module whether the module has to run segment by segment, and note it in the call.

        The module is left unchanged.
        """
        inputs, row = call.inputs_copy, self.row
        has_layers = any(isinstance(inner, nn.ModuleList) for inner in module.modules())  # which are checked themselves
        if has_layers and 2 * len(list(module.modules())) > len(self._kinds) > 0:
            return  # the proof itself tests nothing else than a stack of all layers
        plan = ModulePlan.record(call.name, module, row.tokens)
        outputs = plan.outputs.found_in(call.output)
        if not plan.inputs.found_in(inputs) or not any(isinstance(leaf, Tensor) for _, leaf, _ in outputs):
            return
        forward = SegmentedForward(module, plan)
        try:
            depends_on_others = plan.is_stateful = depends_on_far_positions(forward, inputs, row)
            with restored(*module.modules()) as changed:
                output = run_one_by_one(forward, inputs, row)
            if changed and not plan.is_stateful:
                plan.is_stateful = True
                output = run_one_by_one(forward, inputs, row)
            refuse_row_outputs(call.output, output, plan.outputs, changed)
        except Exception as error:  # a module may raise anything when it gets a single segment
            call.error = f"{type(error).__name__}: {error}"
            return
        if (
            depends_on_others
            or outputs_differ(call.output, output, plan.outputs, row.slices)
            or (not has_layers and depends_on_length(forward, inputs, row, self.model.get_input_embeddings()))
        ):
            call.forward, call.output = forward, output

    def _apply(self, call: _Call, whole: Any) -> None:
        """Note what a call has shown of a module, whose output was `whole`, for all modules that are built alike. If
        they have to run segment by segment, they do so from now on. Inner modules that did get their original forwards
        back.

        The projections of a module, such as the query and key projections of an attention layer, still run once on the
        whole row if this does not change the module's output.
        """
        kind, alike = self._kinds.get(call.name, -1), [call.name]
        if self._kinds and kind not in self._first_of_kind:
            self._first_of_kind[kind] = call
            alike += [name for name, other in self._kinds.items() if other == kind and name != call.name]
        if call.error:
            self.unsliceable |= dict.fromkeys(alike, call.error)
        if (forward := call.forward) is None:
            return
        for name in [name for name in self.found if any(is_inside(name, each) for each in alike)]:
            self.found.pop(name).remove()
        plan = forward.plan
        self._find_projections(call, plan, whole)
        if plan.packed_modules() and not self._agrees(forward, call):
            plan.ahead, plan.after = {}, None
        plan.sharing = find_sharing(forward, call.inputs_copy, self.row)
        for name in alike:  # they share the token axes, so what is recorded for one of them holds for all
            module = self.model.get_submodule(name)
            self.found[name] = forward if name == call.name else SegmentedForward(module, replace(plan, name=name))
            self.found[name].install()

    def _agrees(self, forward: SegmentedForward, call: _Call) -> bool:
        """Return whether a module that runs segment by segment still returns the same if the projections in its plan
        run once, on the whole row."""
        try:
            output = run_one_by_one(forward, call.inputs_copy, self.row)
            return not outputs_differ(call.output, output, forward.plan.outputs, self.row.slices)
        except Exception:  # the module cannot use segments of the projections' outputs
            return False

    def _find_projections(self, call: _Call, plan: ModulePlan, whole: Any) -> None:
        """Note in a module's plan the projections that may run once on the whole row: those that run before the module,
        on the module's input or on the output of another such projection; and the one that computes its output."""
        known: dict[int, Path | str] = {
            id(leaf): path for path, leaf, _ in plan.inputs.found_in(call.inputs) if isinstance(leaf, Tensor)
        }
        times_called = Counter(inner.name for inner in call.inner)
        for inner in call.inner:
            if times_called[inner.name] > 1 or not self._is_projection(inner, call.name):
                continue
            name, source = inner.name.removeprefix(f"{call.name}."), inner.inputs[0][0]
            if id(source) in known:
                plan.ahead[name] = known[id(source)]
                known[id(inner.output)] = name
            elif inner is call.inner[-1] and source.ndim == inner.output.ndim:
                paths = [path for path, leaf, _ in plan.outputs.found_in(whole) if leaf is inner.output]
                plan.after = (name, paths[0]) if paths else None

    def _is_projection(self, call: _Call, outer: str) -> bool:
        """Return whether the module that was called in `call` is a projection inside the module named `outer`: a
        segment-local module that has weights, takes a single tensor, and returns a tensor with one token axis."""
        args, kwargs = call.inputs
        if not call.name.startswith(f"{outer}.") or len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            return False
        if any(is_inside(name, call.name) for name in (*self.found, *self.unsliceable)):
            return False
        module = self.model.get_submodule(call.name)
        has_tokens = isinstance(call.output, Tensor) and list(call.output.shape).count(self.row.tokens) == 1
        fits = args[0].is_floating_point() or isinstance(module, nn.Embedding)
        return has_tokens and fits and next(module.parameters(), None) is not None


_LAYER_NUMBERS = ("layer_idx", "layer_id", "layer_index", "layer_number", "layer_num", "block_id")
"""Names of attributes in which modules of transformers store the number of their layer."""


def kinds_of_modules(model: nn.Module) -> dict[str, int]:
    """Return a number for each module of a model, by name. Modules that are built alike have the same number.

    Two modules are built alike if their names differ only in the numbers of layers, and they have the same class, the
    same hooks, parameters and buffers of the same shapes, equal settings, and inner modules that are built alike. If
    they store the number of their layer, lists in configurations, such as `layer_types`, also have equal entries.
    """
    numbers: dict[Any, int] = {}
    found: dict[nn.Module, int] = {}
    settings = [value for config in configurations(model) for value in vars(config).values()]
    lists = [value for value in settings if isinstance(value, (list, tuple))]
    names = {module: name for name, module in model.named_modules()}
    for module, name in reversed(names.items()):  # inner modules first
        place = tuple("*" if part.isdigit() else part for part in name.split("."))
        own = {each: value for each, value in vars(module).items() if each not in OF_EVERY_MODULE}
        layers = [own.pop(each) for each in _LAYER_NUMBERS if isinstance(own.get(each), int)]
        of_layers = [repr(each[number]) for number in layers for each in lists if 0 <= number < len(each)]
        attributes = own | module._parameters | module._buffers
        described = [(each, _describe(value)) for each, value in attributes.items()]
        hooks = [id(hook) for each in (module._forward_pre_hooks, module._forward_hooks) for hook in each.values()]
        inner = [(each, found.get(child)) for each, child in module._modules.items()]
        key = place, type(module), module.training, tuple(of_layers), tuple(described), tuple(hooks), tuple(inner)
        found[module] = numbers.setdefault(key, len(numbers))
    return {name: found[module] for module, name in names.items()}


def _describe(value: Any) -> Any:
    """Return a description of an attribute of a module. Attributes with equal descriptions are alike."""
    if isinstance(value, Tensor):
        return type(value), value.shape, value.dtype, value.device, value.requires_grad
    if isinstance(value, (list, tuple, dict, bool, int, float, str, Enum, torch.dtype, torch.device)):
        return repr(value)
    return id(getattr(value, "__func__", value))  # of methods, the functions


def _settings_in(inputs: Any) -> dict[Path, Any]:
    """Return the settings among the arguments of a module, and the shapes of its tensors, in a dictionary by path."""
    return {
        path: (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf
        for path, leaf in leaves(inputs)
        if isinstance(leaf, (Tensor, bool, int, float, str, type(None)))
    }
