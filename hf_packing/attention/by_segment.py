"""Run a module separately on every segment (usually a document) of a packed row.

The module's inputs are cut into segments, the module is called on every segment, and the outputs are joined.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from hf_packing.attention.layout import Layout, SharedCall, Sharing, calls_of, current_layout, running, within
from hf_packing.attention.model import GATHERED, Arguments, failing_on, is_fsdp
from hf_packing.attention.snapshot import restored, temporarily
from hf_packing.attention.token_axes import (
    Fill,
    Path,
    TokenAxes,
    cut_inputs,
    join_outputs,
    leaves,
    map_tensors,
)
from hf_packing.columns import CU_SEQ_LENS, MAX_LENGTHS
from hf_packing.errors import PackingError

_GATHERED_AT_ONCE = "_z3_leaf"
"""Name of the attribute that DeepSpeed ZeRO-3 sets on a module if DeepSpeed gathers all parameters of the module,
including the parameters of inner modules, at once."""


Given = tuple[Any, Any]
"""The positional and the keyword arguments of a call."""


class ReplacedForward:
    """Base class of callable objects that replace a module's forward. Objects are used instead of functions, so that a
    patched model can be copied and pickled."""

    attribute = "forward"
    """The name of the method that is replaced."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        found: Any = vars(module).get(self.attribute)
        while isinstance(found, type(self)):
            found = found.before
        self.before: Any = found
        """The forward that other code, such as a hook of accelerate, had already set on the module object; None if the
        module only has the forward of its class."""
        self.installed = False

    __name__ = "forward"  # torch.export reads this and __code__

    @property
    def __func__(self) -> Any:  # SFTTrainer of TRL 1.5 to 1.15 reads its signature
        return getattr(self.before, "__func__", self.before) or type(self.module).forward

    @property
    def __code__(self) -> Any:
        return self.__func__.__code__

    def install(self) -> None:
        setattr(self.module, self.attribute, self)
        self.installed = True

    def remove(self) -> None:
        """Restore the forward that the module had before `install`.

        If other code has wrapped this object in the meantime, the object cannot be removed. From then on, the object
        only calls the module's original forward.
        """
        self.installed = False
        found = vars(self.module).get(self.attribute)
        if self in (found, getattr(found, "__func__", None)):  # accelerate makes a method of it
            delattr(self.module, self.attribute)
            if self.before is not None:
                setattr(self.module, self.attribute, self.before)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original forward, which this object replaces, and return the output."""
        if self.before is not None:
            return self.before(*args, **kwargs)
        return getattr(type(self.module), self.attribute)(self.module, *args, **kwargs)


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
    """The token axes of the module's arguments, and of what the inner modules in `ahead` return."""
    outputs: TokenAxes
    sharing: Sharing = "none"
    is_stateful: bool = False
    """True if a call changes the module's state. The state is then restored after every call."""
    ahead: dict[str, Path | str] = field(default_factory=dict)
    """The inner modules, such as input projections, that run once on the whole packed row, before the module runs
    segment by segment and uses their outputs. Their names, relative to the module, are mapped to where the input comes
    from: the path of an argument of the module, or the name of an earlier inner module, whose output is the input."""
    after: dict[Path, str] = field(default_factory=dict)
    """The last inner module, such as an output projection, if the module runs segment by segment without it, and it
    then runs once on the whole packed row: the path of its output in the nested output of the module, and its name."""

    def packed_modules(self) -> list[str]:
        """Return the names, relative to the module, of the inner modules that run once on the whole packed row."""
        return [*self.ahead, *self.after.values()]


class SegmentedForward(ReplacedForward):
    """A replacement for a module's forward. The replacement runs the module segment by segment.

    Args:
        module: a module whose output for a whole packed row differs from its joined outputs for the segments.
        plan: the plan for running the module segment by segment.
    """

    def __init__(self, module: nn.Module, plan: ModulePlan) -> None:
        super().__init__(module)
        self.plan = plan

    def install(self) -> None:
        super().install()
        # without any hooks on itself or its inner modules, nn.TransformerEncoderLayer may skip their forwards
        self.hook = self.module.register_forward_pre_hook(_do_nothing)

    def remove(self) -> None:
        super().remove()
        self.hook.remove()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_by_segment(args, kwargs) if self.installed else self.forward(*args, **kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # segments have too many lengths to compile each
    def _run_by_segment(self, args: Any, kwargs: Arguments) -> Any:
        row, plan, inputs = current_layout.get(), self.plan, (args, kwargs)
        if row is None and not running.get():
            raise PackingError(
                f"{plan.kind} ({plan.name}) was called outside its model's forward, where the borders between packed "
                "documents are not known; call the whole model that was passed to patch_model, not this module alone"
            )
        if row is None or not plan.inputs.found_in(inputs):  # outside of the backbone of a padded batch
            return self.forward(*args, **kwargs)
        if not row.has_borders:
            return self.run_restored(args, kwargs)
        if plan.outputs.row_length is not None:
            plan.outputs.found_in(self.forward(*args, **kwargs))
        plan.inputs.check_row(inputs, row.tokens)
        with failing_on(f"each document alone, of {min(row.path_lengths)} to {max(row.path_lengths)} tokens"):
            return self.run_paths(inputs, row, plan.sharing)

    def run_paths(self, inputs: Given, row: Layout, sharing: Sharing) -> Any:
        """Call the module on the paths of a row, which are the segments of packed rows, and return the joined outputs.
        If `plan.after` is set, run that inner module on the joined output. If segments share prefixes, every token gets
        the output that it has on the first path."""
        given, row, own = row.gather_documents(self.with_ahead(inputs), self.plan.inputs)

        def finish(path: Path, leaf: Tensor) -> Any:
            if own is not None:
                for axis in self.plan.outputs.of(path, leaf):
                    leaf = leaf.index_select(axis, own)
            return self.module.get_submodule(self.plan.after[path])(leaf) if path in self.plan.after else leaf

        return map_tensors(self.run_calls(given, calls_of(row, sharing)), finish)

    def run_calls(self, given: Any, calls: list[SharedCall], fill: Fill = Tensor.new_zeros) -> Any:
        """Call the module on parts of a row, and return the joined outputs.

        Args:
            given: what `with_ahead` returns for the whole row.
            calls: the calls to make, each of which covers one or more parts.
            fill: function that makes the padding of shorter parts in a call.
        """
        outputs = []
        for call in calls:
            args, kwargs, results = cut_inputs(given, self.plan.inputs, call.places, fill)
            with within(current_layout, call.batch), self._with_results(results):
                output = self.run_restored(args, _with_borders(call.batch, kwargs))
            outputs.append((call.segments, call.lengths, output))
        return join_outputs(outputs, self.plan.outputs)

    def run_restored(self, args: Any, kwargs: Any) -> Any:
        """Call the module's original forward, and return the output. If the module is stateful, restore its state after
        the call."""
        with restored(*self.module.modules()) if self.plan.is_stateful else nullcontext():
            return self.forward(*args, **kwargs)

    def with_ahead(self, inputs: Given) -> tuple[Any, Any, dict[str, Tensor]]:
        """Run the inner modules in `plan.ahead` on the whole row, and return the arguments of the module with their
        outputs by module name."""
        known: dict[Path | str, Any] = dict(leaves(inputs))
        for name, source in self.plan.ahead.items():
            if isinstance(given := known.get(source), Tensor):  # none if the caller passed embeddings, not tokens
                known[name] = self.module.get_submodule(name)(given)
        return *inputs, {name: known[name] for name in self.plan.ahead if name in known}

    @contextmanager
    def _with_results(self, ahead: dict[str, Tensor]) -> Iterator[None]:
        """Context manager: within the block, the inner modules named in `ahead` do not run, and return the outputs that
        `ahead` contains. The inner module in `plan.after` does not run either, and returns its input.

        `run_paths` runs the module in `plan.after` later, once, on the joined outputs of all segments.
        """
        with ExitStack() as stack:
            for name, result in {**ahead, **dict.fromkeys(self.plan.after.values())}.items():
                inner = self.module.get_submodule(name)
                stack.enter_context(
                    temporarily(inner, forward=lambda value, known=result: value if known is None else known)
                )
            yield


def _do_nothing(*_: Any) -> None:
    """A hook that does nothing."""


def _with_borders(row: Layout, kwargs: Arguments) -> Arguments:
    """Return a module's keyword arguments, with cu_seq_lens_q/k and max_length_q/k replaced by the values for `row`.
    Arguments that are missing or None are not added."""
    own = dict.fromkeys(CU_SEQ_LENS, row.cu_seq_lens) | dict.fromkeys(MAX_LENGTHS, row.longest)
    return kwargs | {name: value for name, value in own.items() if kwargs.get(name) is not None}


def is_inside(name: str, outer: str) -> bool:
    """Return whether the module named `name` is the module named `outer`, or is inside that module."""
    return name == outer or name.startswith(f"{outer}.")


def refuse_uneven_gathers(model: nn.Module, plans: Sequence[ModulePlan]) -> None:
    """Raise PackingError if processes of a distributed training run would wait for each other forever.

    The inner modules of a module that runs segment by segment are called more often for some packed rows than for
    others, so the number of calls may differ between processes. But if FSDP or DeepSpeed gathers the weights of an
    inner module at every call, all processes have to make the same number of calls.

    Args:
        model: the patched model, sharded or not.
        plans: a `ModulePlan` for each module that runs segment by segment.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() < 2:
        return
    for plan in plans:
        outer = [module for name, module in model.named_modules() if not name or is_inside(plan.name, name)]
        if any(getattr(module, _GATHERED_AT_ONCE, False) for module in outer):
            continue
        for name, inner in model.get_submodule(plan.name).named_modules():
            is_by_segment = name and not any(is_inside(name, each) for each in plan.packed_modules())
            is_sharded = any(hasattr(parameter, GATHERED) for parameter in inner.parameters(recurse=False))
            if is_by_segment and (is_fsdp(inner) or is_sharded):
                raise PackingError(
                    f"model: expected all weights of {plan.kind} to be gathered at once, but those of "
                    f"{type(inner).__name__} ({plan.name}.{name}) are gathered at every call. {plan.kind} runs segment "
                    "by segment, so processes would make a different number of calls, and wait for each other forever. "
                    f"Let FSDP wrap {plan.kind} itself, or a module that contains it; with DeepSpeed, call "
                    f"deepspeed.utils.set_z3_leaf_modules(model, [{plan.kind}])"
                )
