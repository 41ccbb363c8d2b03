"""Find, by experiment, the modules of a model that are not segment-local, and run those segment by segment.

A module f is segment-local when f(row) = f(segment) for every segment of the row: linear layers, norms, experts, rotary
embeddings fed with restarting positions. What is not lets documents leak (attention without borders, states,
convolutions) or counts along the row (positions).
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from hf_packing.attention.by_segment import Ahead, BySegment, Step
from hf_packing.attention.module_checks import (
    RankingTokens,
    depends_on_far_positions,
    differ,
    differs_on_other_rows,
    one_by_one,
)
from hf_packing.attention.packed_row import PackedRow, SharedCall, Sharing
from hf_packing.attention.snapshot import as_it_was
from hf_packing.attention.token_axes import Fill, Path, TokenAxes, copied, leaves, tensors
from hf_packing.errors import PackingError


@dataclass
class Frame:
    """A module's call that has begun."""

    given: tuple[Any, Any]
    """Its arguments."""
    kept: tuple[Any, Any]
    """A copy of them, since modules may change them in place."""
    inner: list["Frame"] = field(default_factory=list)
    """Calls inside, in order."""
    name: str = ""
    output: Any = None


def noise(scale: float) -> Fill:
    """Padding that a module would notice if it looked at what follows a segment."""

    def fill(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        if not tensor.is_floating_point():  # tokens, or positions: some of those that are there
            return tensor.flatten()[torch.randint(tensor.numel(), shape, generator=generator).to(tensor.device)]
        return (torch.randn(shape, generator=generator) * scale).to(tensor)

    return fill


PADDINGS = (noise(1.0), noise(10.0))

OTHER_CALLS = ({"embedded": True}, {"output_hidden_states": True})
"""Other arguments and outputs of modules, of which it has to be known where tokens are."""


class Search:
    """Watches one forward of a model on a packed row. Every module is tried on slices as soon as it has returned, the
    inner ones first; one that differs runs by segment from then on, and the wrappers inside it are taken off.

    Args:
        model: of transformers.
        row: a packed row of a length that no axis of the model has.
    """

    def __init__(self, model: PreTrainedModel, row: PackedRow) -> None:
        self.model = model
        self.row = row
        self.words = model.get_input_embeddings()
        self.found: dict[str, BySegment] = {}
        self.uncuttable: dict[str, str] = {}
        """Modules that could not be called on slices, with the error."""
        self.trying = False
        self.frames: list[Frame] = []

    def run(self, forward: Callable[..., Any]) -> list[Step]:
        """What is known of the modules that have to run by segment. `forward` gives the packed row to the model,
        in the ways of OTHER_CALLS too."""
        try:
            with self.watching():
                forward()
            # once more, for the arguments of modules that were wrapped at their second call
            forward()
            for options in OTHER_CALLS if self.found else ():
                with suppress(Exception):  # what a model cannot be asked for need not be known
                    forward(**options)
        finally:
            for wrapper in self.found.values():
                wrapper.remove()
        steps = [wrapper.step for wrapper in self.found.values()]
        for step in steps:
            step.learned()
        return steps

    @contextmanager
    def watching(self) -> Iterator[None]:
        hooks = []
        for name, module in self.model.named_modules():
            if module is not self.model:
                # the innermost of all hooks: what the forward itself is given and returns
                hooks.append(module.register_forward_pre_hook(self.before, with_kwargs=True))
                hooks.append(module.register_forward_hook(self.after(name), prepend=True))
        try:
            with DropoutOfCopies():
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def before(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not self.trying:
            has_tokens = any(self.row.tokens in tensor.shape for tensor in tensors((args, kwargs)))
            self.frames.append(Frame((args, kwargs), copied((args, kwargs)) if has_tokens else (args, kwargs)))

    def after(self, name: str) -> Callable[..., Any]:
        def try_on_slices(module: nn.Module, _: Any, output: Any) -> Any:
            if self.trying:
                return None
            frame = self.frames.pop()
            frame.name, frame.output = name, output
            if self.frames:
                self.frames[-1].inner.append(frame)
            self.trying = True
            try:
                replacement = self.replacement(frame, module)
            finally:
                self.trying = False
            if replacement is not None:
                frame.output = replacement
            return replacement

        return try_on_slices

    def replacement(self, frame: Frame, module: nn.Module) -> Any:
        """What the module should have returned, where that is something else; it runs by segment from now on."""
        name, given, output = frame.name, frame.kept, frame.output
        step = Step.of(name, module, self.row.tokens)
        wrapper = BySegment(module, step)
        if not step.given.anywhere_in(given) or not step.returned.most_in_one(output):
            return None
        has_far_effects = step.remembers = depends_on_far_positions(wrapper, given, self.row)
        try:
            with as_it_was(*module.modules()) as changed:
                before = numbers_left_in(module)
                local = one_by_one(wrapper, given, self.row)
                refuse_numbers_that_are_left(before, numbers_left_in(module), step)
            if changed and not step.remembers:
                step.remembers = True
                local = one_by_one(wrapper, given, self.row)
            refuse_what_is_made_of_the_row(output, local, step.returned)
        except Exception as error:  # whatever a module raises that was not made for slices: its parent is tried
            self.uncuttable[name] = f"{type(error).__name__}: {error}"
            return None
        is_local = not differ(output, local, step.returned, self.row.slices)
        if is_local and not has_far_effects and not differs_on_other_rows(wrapper, given, self.row, self.words):
            return None
        for inner in [inner for inner in self.found if inner.startswith(f"{name}.") or inner == name]:
            self.found.pop(inner).remove()
        self.keep_packed_inside(wrapper, frame, local)
        step.sharing = self.sharing(wrapper, given)
        wrapper.install()
        self.found[name] = wrapper
        return local

    def keep_packed_inside(self, wrapper: BySegment, frame: Frame, local: Any) -> None:
        """Let projections of the module's input, and the one that makes its output, run on the whole row."""
        step = wrapper.step
        made: dict[int, Path | str] = {
            id(leaf): path
            for path, leaf in leaves(frame.given)
            if isinstance(leaf, Tensor) and step.given.of(path, leaf)
        }
        calls = Counter(inner.name for inner in frame.inner)
        for inner in frame.inner:
            (args, kwargs), output = inner.given, inner.output
            if not self.is_projection(inner, frame.name) or calls[inner.name] > 1:
                continue
            if id(args[0]) in made and not kwargs:
                name = inner.name.removeprefix(f"{frame.name}.")
                step.ahead.append(Ahead(name, made[id(args[0])]))
                made[id(output)] = name
                step.between.of((name,), output)
        last = frame.inner[-1] if frame.inner else None
        if last is not None and self.is_projection(last, frame.name) and calls[last.name] == 1:
            path = next((path for path, leaf in leaves(frame.output) if leaf is last.output), None)
            source = last.given[0][0]
            same = source.ndim == last.output.ndim and id(last.output) not in made
            if path is not None and same and step.returned.of(path, last.output):
                step.after = last.name.removeprefix(f"{frame.name}."), path
        try:
            agree = not differ(local, one_by_one(wrapper, frame.kept, self.row), step.returned, self.row.slices)
        except Exception:  # what it does with them in between is not segment by segment
            agree = False
        if not agree:
            step.ahead, step.after = [], None

    def is_projection(self, frame: Frame, outer: str) -> bool:
        """Whether a call inside a module has weights, one tensor of tokens for input, and is segment-local."""
        args, kwargs = frame.given
        if not frame.name.startswith(f"{outer}.") or len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            return False
        if any(name == frame.name or name.startswith(f"{frame.name}.") for name in (*self.found, *self.uncuttable)):
            return False
        module = self.model.get_submodule(frame.name)
        has_tokens = isinstance(frame.output, Tensor) and list(frame.output.shape).count(self.row.tokens) == 1
        takes_it = args[0].is_floating_point() or isinstance(module, nn.Embedding)
        return has_tokens and takes_it and next(module.parameters(), None) is not None

    def sharing(self, wrapper: BySegment, given: Any) -> Sharing:
        """In which calls segments may go through together: tried on parts of the probe."""
        step, shortest = wrapper.step, min(self.row.lengths)
        with RankingTokens(self.row.tokens) as ranking:
            wrapper.forward(*copied(given)[0], **copied(given)[1])
        ragged = (
            not ranking.seen
            and step.given.most_in_one(given) < 2
            and not step.given.counts_in(given)
            and not step.remembers
        )
        trials: dict[Sharing, list[tuple[int, int]]] = {"ragged": self.row.slices} if ragged else {}
        trials["equal"] = [(start, start + shortest) for start, _ in self.row.slices]
        for sharing, slices in trials.items():
            together = SharedCall.of(list(range(len(slices))), slices, self.row.cu_seq_lens.device)
            fills = [None, *PADDINGS] if sharing == "ragged" else [None]
            try:
                _, alone = wrapper.parts(copied(given), self.row.calls_for("none", slices), len(slices))
                shared = [wrapper.parts(copied(given), [together], len(slices), fill)[1] for fill in fills]
            except Exception:  # it was not made for batches of slices
                continue
            if not any(differ(one, other) for each in shared for one, other in zip(alone, each, strict=True)):
                return sharing
        return "none"


class DropoutOfCopies(TorchFunctionMode):
    """Dropout that is off returns what it was given; here a copy, so that everything returned is new."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result.clone() if function is F.dropout else result


def numbers_left_in(module: nn.Module) -> dict[str, Tensor]:
    """Attributes that are a single number, by name."""
    return {
        f"{name}.{attribute}".lstrip("."): value
        for name, inner in module.named_modules()
        for attribute, value in vars(inner).items()
        if isinstance(value, Tensor) and value.is_floating_point() and not value.ndim
    }


def refuse_numbers_that_are_left(before: dict[str, Tensor], after: dict[str, Tensor], step: Step) -> None:
    for name, number in after.items():
        if number is not before.get(name):
            raise PackingError(
                f"{step.given.where}: it leaves a number made of all tokens of a row in its {name}, such as the loss "
                "of a router"
            )


def refuse_what_is_made_of_the_row(output: Any, local: Any, axes: TokenAxes) -> None:
    """Raise PackingError for what a module makes of all tokens of a row, so that parts of it cannot be joined: tensors
    of other sizes, and means such as the loss of a router. States, which have an axis for rows, are for the next call.
    """
    for (path, whole), (_, joined) in zip(leaves(output), leaves(local), strict=True):
        if not isinstance(whole, Tensor) or axes.of(path, whole):
            continue
        is_state = 1 in whole.shape
        if whole.shape != joined.shape or (not is_state and differ(whole, joined)):
            raise PackingError(
                f"{axes.where}: it returns a tensor of shape {list(whole.shape)}, made of all tokens of a row, which "
                "has no axis of tokens"
            )
