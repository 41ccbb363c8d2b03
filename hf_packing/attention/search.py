"""Find the modules of a model that have to run segment by segment: run each on a packed row and on its segments.

A segment is one document, or a part of one document, in a packed row. A module is segment-local if its output for the
row equals the joined outputs for the row's segments. Linear layers, norms and experts are segment-local, and so are
rotary embeddings if the positions restart at 0 in every segment. A module that is not segment-local has to run segment
by segment. Some of these modules let documents affect each other, as attention, recurrent layers and convolutions do.
Others count tokens along the row.

The price is about five calls of each module. Of modules that are built alike, as in a stack of layers, only one pays.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
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
from hf_packing.attention.token_axes import Path, detached_copy

_CALLS: tuple[dict[str, bool], ...] = ({}, {"embedded": True}, {"output_hidden_states": True})
"""Options for forwards after the search. In the first one, all modules that run segment by segment do so from its begin
on. With the other options, modules get other arguments or return other outputs. The token axes of all of them have to
be recorded. Not every model supports all options."""


@dataclass
class _Call:
    """One call of a module, recorded during the model's forward."""

    name: str
    inputs: tuple[Any, Any]
    """args and kwargs of the call."""
    inputs_copy: tuple[Any, Any]
    """A copy of `inputs`, made before the call, since a module may change its arguments in place."""
    inner: list["_Call"] = field(default_factory=list)
    """Calls of inner modules that happened during this call, in order."""
    output: Any = None
    """The output for the row; the joined outputs for its segments, if the module has to run segment by segment."""


class Search:
    """A search for the modules of a model that have to run segment by segment.

    The search watches one forward of the model on a packed row. Every module is classified as soon as its call returns,
    so inner modules are classified before outer modules. A module that has to run segment by segment does so from then
    on. In the watched forward, its output is replaced by the joined outputs for the segments, so that later modules get
    the right input. If an outer module has to run segment by segment, too, the inner module gets its original forward
    back.

    Of modules that are built alike, as in a stack of equal layers, the first one is classified, and the finding is
    assumed for all of them. A proof of the route has to show whether this was right.

    Args:
        model: a model of transformers.
        row: a packed row. Its number of tokens must differ from every size in the model, since the search recognizes
            token axes by this number.
        thorough: whether to classify every single module.
    """

    def __init__(self, model: PreTrainedModel, row: Layout, thorough: bool = False) -> None:
        self.model, self.row, self.thorough = model, row, thorough
        self.found: dict[str, SegmentedForward] = {}
        """Maps the name of each module that runs segment by segment to the module's new forward."""
        self.unsliceable: dict[str, str] = {}
        """Maps the name of each module that could not be called on single segments to the error message. Such a module
        is left unchanged, but a module that contains it may still run segment by segment."""
        self._names = [name for name, _ in model.named_modules()]
        alike = [[name] for name in self._names] if thorough else modules_alike(model)
        self._alike = {names[0]: names for names in alike}
        """Maps the name of each module that is classified to the names of all modules that are built like it."""
        self._running = ""  # name of the module that is classified, or that runs segment by segment
        self._open_calls: list[_Call] = []

    def run(self, forward: Callable[..., Any]) -> list[ModulePlan]:
        """Run the search, and return a plan for every module that has to run segment by segment. `forward` runs the
        model on the packed row, with the options in `_CALLS`."""
        try:
            with WatchFunctions(self.row.tokens), ExitStack() as hooks:
                for name in self._names[1:]:  # without the model itself
                    # no other hook runs between these hooks and the forward, so they see its inputs and outputs
                    module, before, after = self.model.get_submodule(name), self._before_call, self._after_call
                    hooks.enter_context(module.register_forward_pre_hook(partial(before, name), with_kwargs=True))
                    hooks.enter_context(module.register_forward_hook(partial(after, name), prepend=True))
                forward()
            for options in _CALLS if self.found else ():
                with suppress(Exception):  # if the first one raises an error, the proof will, too
                    forward(**options)
        finally:
            for found in self.found.values():
                found.remove()
        plans = [self.found[name].plan for name in self._names if name in self.found]
        for plan in plans:
            plan.freeze()
        return plans

    def _before_call(self, name: str, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not self._running:
            self._running = name if name in self.found else ""
            self._open_calls.append(_Call(name, (args, kwargs), detached_copy((args, kwargs))))

    def _after_call(self, name: str, module: nn.Module, _: Any, output: Any) -> Any:
        if self._running not in ("", name):
            return None
        call = self._open_calls.pop()
        call.output = output
        if self._open_calls:
            self._open_calls[-1].inner.append(call)
        if not self._running and name in self._alike:
            self._running = name
            self._classify(call, module)
        self._running = ""
        return call.output

    def _classify(self, call: _Call, module: nn.Module) -> None:
        """Decide from one call of a module whether the module has to run segment by segment.

        By default, it can run on the whole packed row, since it is segment-local, or since its input or its output has
        no token axis.
        """
        inputs, row = call.inputs_copy, self.row
        inner = list(module.modules())
        has_layers = any(isinstance(each, nn.ModuleList) for each in inner)  # which are classified themselves
        if has_layers and not self.thorough and 2 * len(inner) > len(self._names):
            return  # the proof itself tests nothing else than a stack of all layers
        plan = ModulePlan.record(call.name, module, row.tokens)
        outputs = plan.outputs.found_in(call.output)
        if not plan.inputs.found_in(inputs) or not any(isinstance(leaf, Tensor) for _, leaf, _ in outputs):
            return
        forward = SegmentedForward(module, plan)
        try:
            depends_on_others = plan.is_stateful = depends_on_far_positions(forward, inputs, row)
            with restored(*inner) as changed:
                output = run_one_by_one(forward, inputs, row)
            if changed:
                plan.is_stateful = True
                output = run_one_by_one(forward, inputs, row)
            refuse_row_outputs(call.output, output, plan.outputs, changed)
        except Exception as error:  # a module may raise anything when it gets a single segment
            self.unsliceable |= dict.fromkeys(self._alike[call.name], f"{type(error).__name__}: {error}")
            return
        if (
            depends_on_others
            or outputs_differ(call.output, output, plan.outputs, row.slices)
            or (not has_layers and depends_on_length(forward, inputs, row, self.model.get_input_embeddings()))
        ):
            self._run_by_segment(call, forward, output)

    def _run_by_segment(self, call: _Call, forward: SegmentedForward, output: Any) -> None:
        """Let a module, and all that are built alike, run segment by segment from now on. `output` is what it then
        returns in this call. Inner modules that ran segment by segment get their original forwards back.

        The projections of a module, such as the query and key projections of an attention layer, still run once on the
        whole row if this does not change the module's output.
        """
        plan, alike, agrees = forward.plan, self._alike[call.name], False
        for name in [name for name in self.found if any(is_inside(name, each) for each in alike)]:
            self.found.pop(name).remove()
        self._find_projections(call, plan)
        call.output = output
        with suppress(Exception):  # the module cannot use segments of the projections' outputs
            again = run_one_by_one(forward, call.inputs_copy, self.row)
            agrees = not outputs_differ(output, again, plan.outputs, self.row.slices)
        if not agrees:
            plan.ahead, plan.after = {}, None
        plan.sharing = find_sharing(forward, call.inputs_copy, self.row)
        for name in alike:  # they share the token axes, so what is recorded for one of them holds for all
            self.found[name] = SegmentedForward(self.model.get_submodule(name), replace(plan, name=name))
            self.found[name].install()

    def _find_projections(self, call: _Call, plan: ModulePlan) -> None:
        """Note in a module's plan the projections that may run once on the whole row: those that run before the module,
        on the module's input or on the output of another such projection; and the one that computes its output."""
        known: dict[int, Path | str] = {id(leaf): path for path, leaf, _ in plan.inputs.found_in(call.inputs)}
        returned = {id(leaf): path for path, leaf, _ in plan.outputs.found_in(call.output)}
        times_called = Counter(inner.name for inner in call.inner)
        for inner in call.inner:
            if times_called[inner.name] > 1 or not self._is_projection(inner, call.name):
                continue
            name, source = inner.name.removeprefix(f"{call.name}."), inner.inputs[0][0]
            if id(source) in known:
                plan.ahead[name] = known[id(source)]
                known[id(inner.output)] = name
            elif inner is call.inner[-1] and source.ndim == inner.output.ndim and id(inner.output) in returned:
                plan.after = name, returned[id(inner.output)]

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


def modules_alike(model: nn.Module) -> list[list[str]]:
    """Return the names of all modules of a model, in groups of modules that are built alike.

    Two modules are built alike if their names differ only in the numbers of layers, and they have the same class, the
    same hooks, parameters and buffers of the same shapes, equal settings, and inner modules that are built alike. If
    they store the number of their layer, lists in configurations, such as `layer_types`, also have equal entries.
    """
    groups: dict[Any, list[str]] = {}
    kinds: dict[nn.Module, int] = {}
    settings = [value for config in configurations(model) for value in vars(config).values()]
    lists = [value for value in settings if isinstance(value, (list, tuple))]
    for name, module in reversed(list(model.named_modules())):  # inner modules first
        own = {each: value for each, value in vars(module).items() if each not in OF_EVERY_MODULE}
        layers = [own.pop(each) for each in _LAYER_NUMBERS if isinstance(own.get(each), int)]
        of_layers = [each[number] for number in layers for each in lists if 0 <= number < len(each)]
        attributes = own | module._parameters | module._buffers | module._modules
        hooks = *module._forward_pre_hooks.values(), *module._forward_hooks.values()
        place = tuple("*" if part.isdigit() else part for part in name.split("."))
        described = tuple(_describe(each, kinds) for each in (*attributes.values(), *hooks, of_layers))
        group = groups.setdefault((place, type(module), module.training, *attributes, described), [])
        group.insert(0, name)
        kinds[module] = id(group)
    return [*groups.values()]


def _describe(value: Any, kinds: dict[nn.Module, int]) -> Any:
    """Return a description of an attribute of a module. Attributes with equal descriptions are alike."""
    if isinstance(value, Tensor):
        return type(value), value.shape, value.dtype, value.device, value.requires_grad
    if isinstance(value, nn.Module):
        return kinds.get(value)
    if isinstance(value, (list, tuple, dict, bool, int, float, str, Enum, torch.dtype, torch.device)):
        return repr(value)
    return id(getattr(value, "__func__", value))  # of methods, the functions
