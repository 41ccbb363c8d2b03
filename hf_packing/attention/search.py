"""Find the modules of a model that have to run segment by segment: run each on a packed row and on its segments.

A segment is one document, or a part of one document, in a packed row. A module is segment-local if its output for the
row equals the joined outputs for the row's segments. Linear layers, norms and experts are segment-local, and so are
rotary embeddings if the positions restart at 0 in every segment. A module that is not segment-local has to run segment
by segment. Some of these modules let documents affect each other, as attention, recurrent layers and convolutions do.
Others count tokens along the row.

The price is about five calls of each module. Of modules that are built alike, as in a stack of layers, only one pays.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from hf_packing.attention.by_segment import Given, ModulePlan, SegmentedForward, is_inside
from hf_packing.attention.layout import Layout, SharedCall, Sharing
from hf_packing.attention.snapshot import OF_EVERY_MODULE, restored
from hf_packing.attention.token_axes import (
    Path,
    Place,
    TokenAxes,
    detached_copy,
    leaves,
    map_tensors,
    tensors_in,
)
from hf_packing.attention.tolerance import comparable, differences
from hf_packing.errors import PackingError

_CALLS: tuple[dict[str, bool], ...] = ({}, {"embedded": True}, {"output_hidden_states": True})
"""Options for forwards after the search. In the first one, all modules that run segment by segment do so from its begin
on. With the other options, modules get other arguments or return other outputs. The token axes of all of them have to
be recorded. Not every model supports all options."""


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
                for name, module in [*self.model.named_modules()][1:]:  # without the model itself
                    # no other hook runs between these hooks and the forward, so they see its inputs and outputs
                    before = partial(self._before_call, name)
                    hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
                    hooks.enter_context(module.register_forward_hook(partial(self._after_call, name), prepend=True))
                forward()
            for options in _CALLS if self.found else ():
                with suppress(Exception):  # if the first one raises an error, the proof will, too
                    forward(**options)
        finally:
            for found in self.found.values():
                found.remove()
        plans = [self.found[name].plan for name in self._names if name in self.found]
        for plan in plans:
            plan.inputs.row_length = plan.outputs.row_length = None
        return plans

    def _before_call(self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not self._running:
            self._running = name if name in self.found else ""
            kind, given = type(module).__name__, (args, kwargs)
            plan = ModulePlan(name, kind, TokenAxes(kind, self.row.tokens), TokenAxes(kind, self.row.tokens))
            self._open_calls.append(_Call(SegmentedForward(module, plan), given, detached_copy(given), self.row))

    def _after_call(self, name: str, _: nn.Module, __: Any, output: Any) -> Any:
        if self._running not in ("", name):
            return None
        call = self._open_calls.pop()
        call.output = output
        if self._open_calls:
            self._open_calls[-1].inner.append(call)
        if not self._running and name in self._alike:
            self._running = name
            self._classify(call)
        self._running = ""
        return call.output

    def _classify(self, call: "_Call") -> None:
        """Decide from one call of a module whether the module has to run segment by segment.

        By default, it can run on the whole packed row, since it is segment-local, or since its input or its output has
        no token axis.
        """
        plan, inner = call.forward.plan, list(call.forward.module.modules())
        has_layers = any(isinstance(each, nn.ModuleList) for each in inner)  # which are classified themselves
        if has_layers and not self.thorough and 2 * len(inner) > len(self._names):
            return  # the proof itself tests nothing else than a stack of all layers
        if not plan.inputs.found_in(call.inputs) or not tensors_in(plan.outputs.found_in(call.output)):
            return
        try:
            plan.is_stateful = True  # a module may remember far positions
            depends_on_others = plan.is_stateful = call.depends_on_far_positions()
            with restored(*inner) as changed:
                output = call.one_by_one()
            if changed:
                plan.is_stateful = True
                output = call.one_by_one()
            refuse_row_outputs(call.output, output, plan.outputs, changed)
        except Exception as error:  # a module may raise anything when it gets a single segment
            self.unsliceable |= dict.fromkeys(self._alike[plan.name], f"{type(error).__name__}: {error}")
            return
        if (
            depends_on_others
            or call.differ(call.output, output)
            or (not has_layers and (call.depends_on_length() or self._counts_inside(call)))
        ):
            self._run_by_segment(call, output)

    def _counts_inside(self, call: "_Call") -> bool:
        """Return whether a module that runs by segment gets a count of tokens, such as positions, that another module
        around it makes in this call. The latter then runs by segment, since it may not count padding in a document."""
        own = {id(leaf) for leaf in tensors_in(call.given)}
        return any(
            path in inner.forward.plan.inputs.counting and id(leaf) not in own
            for inner in call.inner
            if inner.forward.plan.name in self.found
            for path, leaf, _ in inner.forward.plan.inputs.found_in(inner.given)
        )

    def _run_by_segment(self, call: "_Call", output: Any) -> None:
        """Let a module, and all that are built alike, run segment by segment from now on. `output` is what it then
        returns in this call. Inner modules that ran segment by segment get their original forwards back.

        The projections of a module, such as the query and key projections of an attention layer, still run once on the
        whole row if this does not change the module's output.
        """
        plan, agrees = call.forward.plan, False
        alike = self._alike[plan.name]
        for name in [name for name in self.found if any(is_inside(name, each) for each in alike)]:
            self.found.pop(name).remove()
        self._find_projections(call, plan)
        call.output = output
        with suppress(Exception):  # the module cannot use segments of the projections' outputs
            agrees = not call.differ(output, call.one_by_one())
        if not agrees:
            plan.ahead, plan.after = {}, {}
        plan.sharing = call.find_sharing()
        for name in alike:  # they share the token axes, so what is recorded for one of them holds for all
            self.found[name] = SegmentedForward(self.model.get_submodule(name), replace(plan, name=name))
            self.found[name].install()

    def _find_projections(self, call: "_Call", plan: ModulePlan) -> None:
        """Note in a module's plan the projections that may run once on the whole row: those that run before the module,
        on the module's input or on the output of another such projection; and the one that computes its output."""
        known: dict[int, Path | str] = {id(leaf): path for path, leaf, _ in plan.inputs.found_in(call.given)}
        returned = {id(leaf): path for path, leaf, _ in plan.outputs.found_in(call.output)}
        called = [inner.forward.module for inner in call.inner]
        for inner in call.inner:
            if called.count(inner.forward.module) > 1 or not self._is_projection(inner):
                continue
            name, source = inner.forward.plan.name.removeprefix(f"{plan.name}."), inner.given[0][0]
            if id(source) in known:
                plan.ahead[name] = known[id(source)]
                known[id(inner.output)] = name
            elif inner is call.inner[-1] and source.ndim == inner.output.ndim and id(inner.output) in returned:
                plan.after[returned[id(inner.output)]] = name

    def _is_projection(self, call: "_Call") -> bool:
        """Return whether the module that was called is a projection: a segment-local module that has weights, takes a
        single tensor, and returns a tensor with one token axis."""
        (args, kwargs), plan = call.given, call.forward.plan
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            return False
        is_local = not any(is_inside(each, plan.name) for each in (*self.found, *self.unsliceable))
        return len(plan.outputs.of((), call.output)) == 1 and is_local and bool([*call.forward.module.parameters()])


_LAYER_NUMBERS = ("layer_idx", "layer_id", "layer_index", "layer_number", "layer_num", "block_id")
"""Names of attributes in which modules of transformers store the number of their layer."""

_OF_ONE_MODULE = {*OF_EVERY_MODULE, *_LAYER_NUMBERS}
"""Names of attributes that may differ in modules that are built alike."""


def modules_alike(model: nn.Module) -> list[list[str]]:
    """Return the names of all modules of a model, in groups of modules that are built alike.

    Two modules are built alike if their names differ only in the numbers of layers, and they are shown alike, with all
    inner modules, and their attributes are equal settings and tensors of the same shapes. The number of their layer may
    differ.
    """
    groups = defaultdict(list)
    for name, module in model.named_modules():
        own = {each: _describe(value) for each, value in vars(module).items() if each not in _OF_ONE_MODULE}
        place = ("*" if part.isdigit() else part for part in name.split("."))
        groups[*place, repr(module), *own.items()].append(name)
    return [*groups.values()]


def _describe(value: Any) -> Any:
    """Return a description of an attribute of a module. Attributes with equal descriptions are alike."""
    if isinstance(value, Tensor):
        return value.shape
    if isinstance(value, (list, tuple, dict, int, float, str)):
        return repr(value)
    return id(getattr(value, "__func__", value))  # of methods, the functions


_TOLERANCE = 1e-4
"""Largest difference that rounding may cause in a module's float32 or float64 output, as a share of the largest value
in the output."""

_HALF_TOLERANCE = 0.05
"""Largest difference that rounding may cause in half precision. For the outputs of a whole row, the limit is a share of
the root mean square of a token's output. For other outputs, the limit is a share of the largest value.

In a mixture of experts, rounding may also route a few tokens to other experts. Two outputs of a whole row therefore
count as different only if the difference exceeds the limit at more than half of the tokens directly before borders, or
at more than half of the tokens directly after borders.
"""

_FAR = 2**20
"""A position far beyond the lengths on which models are usually trained. At such a position, scaled rotary embeddings
use another scale than at short lengths."""


class WatchFunctions(TorchFunctionMode):
    """Context manager: within the block, watch the torch functions that modules call on a row.

    - `F.dropout` always returns a new tensor. If dropout is off, it normally returns its input itself, but the search
      tells tensors apart by object identity, so every module has to return a new tensor.
    - `ranks` becomes True if code ranks the tokens of the row, as torch.topk does. If several tokens have equal scores,
      padding may change which of these tokens ranks first.
    - `offset` is added to every result of torch.arange that has one number for each token of the row.
    """

    _RANKING = ("topk", "sort", "argsort", "argmax", "argmin", "kthvalue")

    def __init__(self, tokens: int, offset: int = 0) -> None:
        super().__init__()
        self.tokens, self.offset, self.ranks = tokens, offset, False

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in self._RANKING:
            self.ranks |= any(self.tokens in tensor.shape[-1:] for tensor in args[:1])
        result = function(*args, **(kwargs or {}))
        if function is F.dropout:
            return result.clone()
        is_count = self.offset and function is torch.arange and result.shape == (self.tokens,)
        return result + self.offset if is_count else result


def outputs_differ(
    left: Any, right: Any, axes: TokenAxes | None = None, slices: Sequence[tuple[int, int]] = ()
) -> bool:
    """Return whether two outputs of a module differ by more than rounding explains.

    Args:
        left: tensors in nested tuples, lists or dictionaries.
        right: tensors that are nested in the same way as in `left`.
        axes: token axes of the outputs for a whole row. If given, tensors without a token axis are ignored, and
            half-precision tensors are compared only at the tokens next to borders.
        slices: token indices (start, end) of each segment in the row; used only together with `axes`.
    """
    for (path, one), (_, other) in zip(leaves(left), leaves(right), strict=True):
        along = axes.of(path, one) if axes is not None else (0,)
        if isinstance(one, Tensor) and along and not _agree(one, other, along[0], slices):
            return True
    return False


def _agree(one: Tensor, other: Tensor, axis: int, slices: Sequence[tuple[int, int]]) -> bool:
    if one.shape != other.shape or not one.is_floating_point() or not one.numel():
        return torch.equal(one, other)
    limit = _TOLERANCE if one.dtype in (torch.float32, torch.float64) else _HALF_TOLERANCE
    one, other = one.double(), other.double()
    if not slices or limit == _TOLERANCE:
        return bool(differences(one, other).max() <= limit * torch.where(comparable(one), one, 0).abs().max())
    one, other = one.movedim(axis, 0).flatten(1), other.movedim(axis, 0).flatten(1)
    agrees = (one - other).norm(dim=1) <= limit * one.norm(dim=1)
    begins = torch.tensor([start for start, _ in slices[1:]])
    return all(agrees[beside].double().mean() >= 0.5 for beside in (begins, begins - 1))


@dataclass
class _Call:
    """One call of a module, recorded during the model's forward, which can be made again in several ways."""

    forward: SegmentedForward
    """The forward that would run the module segment by segment."""
    given: Given
    """args and kwargs of the call."""
    inputs: Given
    """A copy of `given`, made before the call, since a module may change its arguments in place."""
    row: Layout
    """The packed row on which the model runs."""
    inner: list["_Call"] = field(default_factory=list)
    """Calls of inner modules that happened during this call, in order."""
    output: Any = None
    """The output for the row; the joined outputs for its segments, if the module has to run segment by segment."""

    def whole(self) -> Any:
        """Call the module once on the whole packed row, and return the output."""
        return self.forward.run_restored(*detached_copy(self.inputs))

    def one_by_one(self) -> Any:
        """Call the module once for each segment of the packed row, and return the joined outputs."""
        return self.forward.run_paths(detached_copy(self.inputs), self.row, "none")

    def differ(self, left: Any, right: Any) -> bool:
        """Return whether two outputs for the whole row differ."""
        return outputs_differ(left, right, self.forward.plan.outputs, self.row.slices)

    def depends_on_length(self) -> bool:
        """Return whether the module works differently on long rows because it counts tokens with torch.arange, as an
        attention layer does whose temperature grows with the position after the first 8192 tokens."""
        with suppress(Exception):  # large counts may be no indices of a table
            near = self.whole()
            with WatchFunctions(self.row.tokens, offset=_FAR):
                far = self.whole()
            return self.differ(near, far)
        return False

    def depends_on_far_positions(self) -> bool:
        """Return whether a very large position in one segment changes the module's output for other segments.

        An example is a rotary embedding whose scale depends on the largest position in the row. The result is False for
        a module that has parameters, or does not get the row's positions as an input.
        """
        positions, moved = self.row.position_ids[0], []

        def move_last(_: Path, leaf: Tensor) -> Tensor:
            is_of_tokens = leaf.dtype in (torch.int32, torch.int64) and leaf.shape[-1:] == positions.shape
            if not is_of_tokens or (leaf.reshape(-1, len(positions))[-1] != positions).any():
                return leaf
            moved.append(leaf.clone())
            moved[-1][..., -1] = _FAR
            return moved[-1]

        far = replace(self, inputs=map_tensors(self.inputs, move_last))
        if not moved or [*self.forward.module.parameters()]:
            return False
        try:
            return self.differ(far.whole(), far.one_by_one())
        except Exception:  # the module does not accept far positions, so far positions do not occur
            return False

    def find_sharing(self) -> Sharing:
        """Return which segments of a row may go through the module in one call (see `Sharing`): those that have the
        same outputs together as in separate calls."""
        row = self.row
        with WatchFunctions(row.tokens) as watched:
            self.whole()

        def may_share(slices: Sequence[Place]) -> bool:
            numbers, device = [*range(len(slices))], row.cu_seq_lens.device
            one_by_one = [SharedCall.of([number], slices, device) for number in numbers]
            together = [SharedCall.of(numbers, slices, device)]
            with suppress(Exception):  # the module does not support batches of segments
                alone, shared = (
                    self.forward.run_calls(self.forward.with_ahead(detached_copy(self.inputs)), calls, _noise)
                    for calls in (one_by_one, together)
                )
                return not outputs_differ(alone, shared)
            return False

        if not watched.ranks and not self.forward.plan.is_stateful and may_share(row.slices):
            return "ragged"
        return "equal" if may_share([(start, start + min(row.lengths)) for start, _ in row.slices]) else "none"


def _noise(tensor: Tensor, shape: list[int]) -> Tensor:
    """Return random padding, which changes the output of any module that reads tokens after the end of a segment."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * _LARGE
    return noise.to(tensor) if tensor.is_floating_point() else tensor.new_zeros(shape)


_LARGE = 10.0
"""Standard deviation of random padding, several times as large as hidden states."""


def refuse_row_outputs(output: Any, by_segment: Any, axes: TokenAxes, changed: Mapping[str, Any]) -> None:
    """Raise PackingError if a module computes a tensor without a token axis from all tokens of a row, such as the loss
    of a router, and returns it or stores it in an attribute. It cannot be joined from the tensors of single segments.

    Args:
        output: the module's output for the whole row.
        by_segment: the joined outputs of the module for the segments.
        axes: token axes of the output.
        changed: the attributes that a call of the module has changed, with their new values.
    """
    of_row = f"{axes.where}: expected no number computed from all tokens of a row, such as the loss of a router, got"
    for name, stored in changed.items():
        if isinstance(stored, Tensor) and stored.is_floating_point() and not stored.ndim:
            raise PackingError(f"{of_row} one in the attribute {name}")
    for (path, whole), (_, joined) in zip(leaves(output), leaves(by_segment), strict=True):
        if not isinstance(whole, Tensor) or axes.of(path, whole):
            continue
        is_state = 1 in whole.shape  # for the next call, whose values may differ between the row and the segments
        if whole.shape != joined.shape or (not is_state and outputs_differ(whole, joined)):
            raise PackingError(f"{of_row} an output of shape {list(whole.shape)}")
