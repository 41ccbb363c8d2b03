"""Run single steps of models, the loss and its gradients, without a trace, and compare two of them.

A step is not stepped: gradients are taken and put aside, and hooks of the optimizer on parameters do not run.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_packing.attention.kinds.split import block_of
from hf_packing.attention.model import configurations, has_local_weights
from hf_packing.attention.runs import Runner, with_rounding_errors
from hf_packing.attention.snapshot import (
    RANDOM_SETTINGS,
    ConstantDraws,
    ObjectSnapshot,
    TensorSnapshot,
    seed_all,
    temporarily,
)
from hf_packing.attention.token_axes import map_tensors, tensors_in
from hf_packing.upstream.torch import gradient_hooks


class Step(NamedTuple):
    """The loss of a step, and its gradients."""

    loss: float
    gradients: dict[str, Tensor]
    """By the name of the parameter, without those that have none; of a sharded model, this rank's part of each."""


class StepRunner:
    """Runs steps of a model.

    Args:
        model: the model that is trained, as a training loop calls it.
        others: other models that the loss is computed with, such as a teacher.
        ranks_per_row: number of ranks that run a row together, each of which has a part of the loss.
        holders: objects whose state a step may change, such as a trainer that collects metrics.
        without: objects that they hold, and that no step changes.
    """

    def __init__(
        self,
        model: nn.Module,
        others: Iterable[nn.Module] = (),
        ranks_per_row: int = 1,
        holders: Sequence[Any] = (),
        without: Sequence[Any] = (),
    ) -> None:
        self.model, self.ranks_per_row = model, ranks_per_row
        self.holders, self.without = holders, without
        self.runners = [Runner(each) for each in (model, *others)]
        self.parameters: dict[str, nn.Parameter] = {}
        """The parameters that are trained, within `undisturbed`."""
        self.dtype = self.runners[0].dtype
        """The least precise dtype that the model computes in, with the autocast that is on now."""
        self.without_router_losses = False
        """Whether models compute no losses of routers, which differ by design where documents share prefixes, or are on
        several ranks."""

    @contextmanager
    def undisturbed(self, training: bool) -> Iterator[None]:
        """Context manager: within the block, models run without dropout, and nothing of it is left after the block."""
        modules = [module for runner in self.runners for module in runner.called.modules()]
        is_compiled = any(runner.is_compiled for runner in self.runners)
        with ExitStack() as stack:
            for runner in self.runners:
                mode = training if runner is self.runners[0] else runner.model.training
                without = RANDOM_SETTINGS if runner.is_compiled else ("drop",)
                stack.enter_context(runner.undisturbed(mode, as_trained=True, without=without))
            self.parameters = {name: each for name, each in self.model.named_parameters() if each.requires_grad}
            kept: list[tuple[Tensor, Tensor | None]] = [(each, each.grad) for each in self.model.parameters()]
            # a wrapper that runs the backward pass itself, as DeepSpeed's, keeps gradients where no step can leave them
            stack.enter_context(torch.set_grad_enabled(training and not hasattr(self.model, "backward")))
            held = ObjectSnapshot(self.holders, (*self.without, *modules))
            stack.callback(held.restore)
            kept += [(each, each.grad) for each in held.tensors if each.is_leaf]
            tensors = TensorSnapshot(each.detach() for each in held.tensors if not each.is_inference())
            stack.callback(tensors.restore)
            for mode in () if is_compiled else (ConstantDraws(), tensors):  # under another mode, torch compiles anew
                stack.enter_context(mode)
            for config in configurations(self.runners[0].model) if self.without_router_losses else ():
                if getattr(config, "output_router_logits", False):
                    stack.enter_context(temporarily(config, output_router_logits=False))
            if isinstance(self.model, DistributedDataParallel):
                stack.enter_context(self.model.no_sync())
            for parameter in self.parameters.values() if has_local_weights(self.model) else ():
                for hooks in gradient_hooks(parameter):
                    stack.callback(hooks.update, dict(hooks))
                    hooks.clear()
            for each, gradient in kept:
                each.grad = None
                stack.callback(setattr, each, "grad", gradient)
            yield

    def run(self, compute: Callable[[], Tensor], unpatched: bool = False, noisy: bool = False) -> Step:
        """Run a step within `undisturbed`, on the models with or without their patches.

        Args:
            compute: returns the loss, a scalar.
            unpatched: whether models run as before they were patched.
            noisy: whether models round in other ways, as `_noisy` and another attention function make them do.
        """
        with ExitStack() as stack:
            for runner in self.runners if unpatched else ():
                stack.enter_context(runner.unpatched(runner.other_attention if noisy else None))
            if noisy:
                stack.enter_context(self._noisy())
            seed_all(0)
            loss = compute()
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
            loss = loss.detach()
            if self.ranks_per_row > 1 and not unpatched:
                self._sum_over_ranks(loss)
        found = {name: _local(each.grad) for name, each in self.parameters.items() if each.grad is not None}
        for parameter in self.parameters.values():
            parameter.grad = None
        return Step(float(loss), found)

    def _sum_over_ranks(self, loss: Tensor) -> None:
        """Sum a loss and its gradients over the ranks that run a row together. Gradients of a sharded model are means
        over all ranks already."""
        block = block_of(self.ranks_per_row)
        torch.distributed.all_reduce(loss, group=block)
        for parameter in self.parameters.values() if torch.is_grad_enabled() else ():
            if not has_local_weights(self.model):
                parameter.grad = None if parameter.grad is None else parameter.grad * self.ranks_per_row
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            torch.distributed.all_reduce(parameter.grad, group=block)

    @contextmanager
    def _noisy(self) -> Iterator[None]:
        """Context manager: within the block, the model computes with rounding errors in the outputs of its innermost
        modules and in their gradients, and on the rows of a batch in the opposite order, since sums round in another
        way then."""

        def add(_: nn.Module, __: Any, output: Any) -> Any:
            if not isinstance(output, Tensor) or not output.is_floating_point():
                return output
            output = with_rounding_errors(output, self.dtype)
            if output.requires_grad:
                output.register_hook(partial(with_rounding_errors, dtype=self.dtype))
            return output

        def turn(_: nn.Module, *given: Any) -> Any:
            *inputs, turned = given if len(given) > 2 else (given, given)
            rows = next(each.shape[:1] for each in tensors_in(inputs) if each.ndim)
            return map_tensors(turned, lambda _, leaf: leaf.flip(0) if leaf.shape[:1] == rows else leaf)

        with ExitStack() as stack:
            inner = self.runners[0].model
            stack.enter_context(inner.register_forward_pre_hook(turn, with_kwargs=True))
            stack.enter_context(inner.register_forward_hook(turn, with_kwargs=True))
            for each in inner.modules():
                if not [*each.children()]:
                    stack.enter_context(each.register_forward_hook(add))
            yield


def _local(gradient: Tensor) -> Tensor:
    """Return the part of a gradient that is on this rank, as a plain tensor."""
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local.to_dense() if local.is_sparse else local


class _Limits(NamedTuple):
    """Differences that are allowed: always of the loss and of a gradient, as shares of themselves, and of a gradient as
    a share of the largest one of all parameters; and beyond them, a multiple of the measured effect of rounding."""

    loss: float
    own: float
    largest: float
    rounding: float


_ALLOWED = {torch.float64: _Limits(1e-6, 1e-5, 1e-7, 8), torch.float32: _Limits(1e-5, 1e-4, 1e-6, 8)}
"""By dtype. Losses compute in float32 also in models in float64."""

_IN_HALF = _Limits(3e-2, 5e-2, 2e-3, 2.5)
"""In bfloat16, a step with a position that is off by one in a document exceeds the first three by 2.7 times the effect
of rounding; steps of Phimoe and MarkupLM without a fault do so by 2.1 times."""


@dataclass
class StepDifference:
    """Differences between two steps."""

    loss: float
    """The difference of the losses, as a share of the loss."""
    loss_differs: bool
    largest: float = 0.0
    """The largest difference of a gradient, as a share of its own size, or of a share of the largest gradient."""
    differ: list[str] = field(default_factory=list)
    """The parameters whose gradients differ by more than rounding explains, in the order of the model."""

    @property
    def found(self) -> bool:
        return self.loss_differs or bool(self.differ)


def compare(step: Step, right: Step, dtype: torch.dtype, noisy: Step | None = None) -> StepDifference:
    """Compare the loss and the gradients of a step with those that are right.

    Args:
        step: the step.
        right: the step that it should be.
        dtype: the dtype that the model computes in.
        noisy: the right step with rounding errors; None if it was not measured.
    """
    limits, noisy = _ALLOWED.get(dtype, _IN_HALF), noisy or right
    names = dict.fromkeys((*right.gradients, *step.gradients))
    sizes = {name: _size(right.gradients.get(name)) for name in names}
    floor = limits.largest * max(sizes.values(), default=0.0)
    loss, noise = abs(step.loss - right.loss), limits.rounding * abs(noisy.loss - right.loss)
    usual = limits.loss * max(abs(right.loss), *sizes.values(), 0.0)  # the terms of a loss may cancel, as advantages do
    found = StepDifference(
        loss / max(abs(right.loss), torch.finfo(torch.float32).tiny),
        not (loss <= usual + noise or (math.isnan(step.loss) and math.isnan(right.loss))),
    )
    for name, size in sizes.items():
        own, expected, rounded = (each.gradients.get(name) for each in (step, right, noisy))
        apart, noise = _distance(own, expected), limits.rounding * _distance(rounded, expected)
        found.largest = max(found.largest, apart / max(size, floor / limits.own, torch.finfo(torch.float32).tiny))
        if not apart <= limits.own * size + floor + noise:
            found.differ.append(name)
    return found


def _size(gradient: Tensor | None) -> float:
    """Return the norm of a gradient; 0 for none."""
    if gradient is None:
        return 0.0
    return float(torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32)))


def _distance(one: Tensor | None, other: Tensor | None) -> float:
    """Return the norm of the difference of two gradients, of which None stands for zeros."""
    if one is None or other is None:
        return _size(other if one is None else one)
    return _size(one - other)
