"""Run a module segment by segment: the row that it is given is cut, and what it returns is joined again."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from hf_packing.attention.inspect_model import GATHERED, is_fsdp
from hf_packing.attention.packed_row import PackedRow, SharedCall, Sharing, current, working_on
from hf_packing.attention.snapshot import as_it_was
from hf_packing.attention.token_axes import Fill, Path, TokenAxes, apart, cut, joined, leaves, rebuild
from hf_packing.errors import PackingError


class ReplacedForward:
    """What stands in place of a module's forward. A class, so that a patched model can be copied and pickled."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        found: Any = vars(module).get("forward")
        while isinstance(found, type(self)):
            found = found.before
        self.before: Any = found
        """What stood in the place of the class's forward, such as a hook of accelerate."""
        self.installed = False

    def install(self) -> None:
        self.module.forward = self  # type: ignore[assignment]  # subclasses can be called
        self.installed = True

    def remove(self) -> None:
        """Where somebody has put something over it since, it stays and does nothing from now on."""
        self.installed = False
        if vars(self.module).get("forward") is self:
            del self.module.forward
            if self.before is not None:
                self.module.forward = self.before

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k")

LONGEST = ("max_length_q", "max_length_k")

one_at_a_time = threading.RLock()
"""Held where modules inside another return what they returned ahead, which no other thread may see."""


@dataclass(frozen=True)
class Ahead:
    """A module inside the one that runs by segment, which is segment-local and can run on the whole row before.

    Args:
        name: inside that module.
        source: where its input stands among the arguments of that module, or the name of another that runs ahead.
    """

    name: str
    source: Path | str


@dataclass
class Step:
    """What is known of a module that runs by segment: how it is called, and what of it can stay packed."""

    name: str
    kind: str
    given: TokenAxes
    returned: TokenAxes
    between: TokenAxes
    """Of what runs ahead."""
    sharing: Sharing = "none"
    remembers: bool = False
    """Whether the module changes itself when it is called, so that each segment has to find it as it was."""
    ahead: list[Ahead] = field(default_factory=list)
    after: tuple[str, Path] | None = None
    """A module inside, such as an output projection, that is segment-local and makes the output at that path: it runs
    on the whole row afterwards."""

    @classmethod
    def of(cls, name: str, module: nn.Module, row: int) -> "Step":
        where = f"{type(module).__name__} ({name})"
        return cls(name, type(module).__name__, TokenAxes(where, row), TokenAxes(where, row), TokenAxes(where, row))

    def learned(self) -> None:
        for axes in (self.given, self.returned, self.between):
            axes.row = None

    def packed_inside(self) -> list[str]:
        """Modules inside that run on the whole row."""
        return [inner.name for inner in self.ahead] + ([self.after[0]] if self.after else [])


def called_as_a_module(*_: Any) -> None:
    """Does nothing, but nn.TransformerEncoderLayer goes past the forwards inside it unless modules there have hooks."""


class BySegment(ReplacedForward):
    """The forward of a module that is not segment-local: one document's part of its output depends on the others.

    Segments share a call where that has been seen to change nothing.
    """

    def __init__(self, module: nn.Module, step: Step) -> None:
        super().__init__(module)
        self.step = step
        self.hook: Any = None

    def install(self) -> None:
        super().install()
        self.hook = self.module.register_forward_pre_hook(called_as_a_module)

    def remove(self) -> None:
        super().remove()
        if self.hook is not None:
            self.hook.remove()

    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        row, step = current.get(), self.step
        if not self.installed:
            return self.forward(*args, **kwargs)
        if row is None:
            raise PackingError(
                f"{step.given.where} was called outside its model's forward, so where segments end is not known; "
                "call the model that patch_model was given"
            )
        with one_at_a_time if step.packed_inside() else nullcontext():
            return self.on_row(row, args, kwargs)

    def on_row(self, row: PackedRow, args: Any, kwargs: dict[str, Any]) -> Any:
        step = self.step
        if not step.given.anywhere_in((args, kwargs)):
            return self.forward(*args, **kwargs)
        if row.is_one_segment_each:
            return self.fresh(args, kwargs)
        if step.returned.row is not None:
            step.returned.anywhere_in(self.forward(*args, **kwargs))
        step.given.check((args, kwargs), row.tokens)
        return self.joined(*self.parts((args, kwargs), row.calls(step.sharing), len(row.lengths)))

    def parts(
        self, given: tuple[Any, Any], calls: list[SharedCall], number: int, fill: Fill | None = None
    ) -> tuple[Any, list[dict[Path, Any]]]:
        """The output of some call, for its nest, and what each segment returned, by path."""
        parts: list[dict[Path, Any]] = [{} for _ in range(number)]
        output = None
        ahead = self.run_ahead(given)
        for call in calls:
            args, kwargs = cut(given, self.step.given, call.slices, fill)
            with working_on(call.batch), self.without(cut(ahead, self.step.between, call.slices, fill)):
                output = self.fresh(args, borders_of(call.batch, kwargs))
            for segment, part in zip(call.numbers, apart(output, self.step.returned, call.lengths), strict=True):
                parts[segment] = part
        return output, parts

    def joined(self, output: Any, parts: list[dict[Path, Any]]) -> Any:
        whole = joined(output, self.step.returned, parts)
        if self.step.after is None:
            return whole
        name, place = self.step.after
        last = self.module.get_submodule(name)
        return rebuild(whole, lambda path, leaf: last(leaf) if path == place else leaf)

    def run_ahead(self, given: tuple[Any, Any]) -> dict[str, Tensor]:
        """What modules inside return for the whole row."""
        made: dict[str, Tensor] = {}
        arguments = dict(leaves(given)) if self.step.ahead else {}
        for inner in self.step.ahead:
            source = made.get(inner.source) if isinstance(inner.source, str) else arguments.get(inner.source)
            if isinstance(source, Tensor):  # tokens are not given where embeddings are
                made[inner.name] = self.module.get_submodule(inner.name)(source)
        return made

    @contextmanager
    def without(self, ahead: dict[str, Tensor]) -> Iterator[None]:
        """Modules that run on the whole row return what they returned there, or wait for it."""
        replaced: list[tuple[nn.Module, Any]] = []

        def replace(name: str, forward: Any) -> None:
            module = self.module.get_submodule(name)
            replaced.append((module, vars(module).get("forward")))
            module.forward = forward

        try:
            for name, value in ahead.items():
                replace(name, lambda *_, value=value: value)
            if self.step.after is not None:
                replace(self.step.after[0], lambda value: value)
            yield
        finally:
            for module, forward in replaced:
                del module.forward
                if forward is not None:
                    module.forward = forward

    def fresh(self, args: Any, kwargs: Any) -> Any:
        if not self.step.remembers:
            return self.forward(*args, **kwargs)
        with as_it_was(*self.module.modules()):
            return self.forward(*args, **kwargs)


def borders_of(row: PackedRow, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments that tell of borders, where there are any, made to tell of this row's."""
    told: dict[str, Any] = {
        name: row.cu_seq_lens.to(kwargs[name].device) for name in BORDERS if kwargs.get(name) is not None
    }
    told |= {name: row.longest for name in LONGEST if kwargs.get(name) is not None}
    return {**kwargs, **told}


GATHERED_AT_ONCE = "_z3_leaf"
"""What it sets on a module whose parameters it gathers before all that is inside."""


def refuse_uneven_gathers(model: nn.Module, steps: Sequence[Step]) -> None:
    """Raise PackingError where processes would wait for each other for ever.

    A module inside one that runs by segment is called as often as the process has segments. Where its weights are
    gathered at every call, all processes have to call it equally often, and they have other segments each.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    if torch.distributed.get_world_size() < 2:
        return
    for step in steps:
        module = model.get_submodule(step.name)
        packed = step.packed_inside()
        for name, inner in module.named_modules():
            if not name or any(name == each or name.startswith(f"{each}.") for each in packed):
                continue
            where = f"{type(inner).__name__} ({step.name}.{name})"
            if is_fsdp(inner):
                raise PackingError(
                    f"model: expected FSDP around {step.kind}, which runs by segment, or further out; it is around "
                    f"{where} inside"
                )
            gathered = any(hasattr(parameter, GATHERED) for parameter in inner.parameters(recurse=False))
            if gathered and not is_gathered_at_once(model, step.name):
                raise PackingError(
                    f"model: expected DeepSpeed to gather {step.kind}, which runs by segment, at once; it gathers "
                    f"{where} at every call. Call deepspeed.utils.set_z3_leaf_modules(model, [{step.kind}])"
                )


def is_gathered_at_once(model: nn.Module, name: str) -> bool:
    parts = name.split(".")
    outer = [".".join(parts[:end]) for end in range(len(parts) + 1)]
    return any(getattr(model.get_submodule(each), GATHERED_AT_ONCE, False) for each in outer)
