"""Prove on a training batch that packed documents do not affect each other, and equal the same documents run alone.

The proof runs at the lengths, in the dtype and in the mode in which the model trains, and on the model's real weights,
also if they are sharded. It takes three calls of the model on at most one batch each:

1. on the batch as it is,
2. on the batch after replacing half of the documents. The outputs of the other documents must not change. All shapes
   stay the same, so a dense model has to return exactly the same bits, also in half precision,
3. on sampled documents alone, on the unpatched model. Their outputs must be equal up to rounding. The effect of
   rounding is measured in the same call, on copies of the documents whose embeddings have rounding errors.

In training mode, the gradients of the outputs with respect to the embedded tokens are compared in the same way. On an
error, `locate_leak` runs the model again to find the module in which the difference begins.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_packing.attention.batch_runs import AloneRun, BatchRuns, Run
from hf_packing.attention.inspect_model import has_local_weights, input_device
from hf_packing.attention.kernels import kernel_of
from hf_packing.attention.layout import has_trees
from hf_packing.attention.locate_leak import Compared, locate_leak
from hf_packing.attention.proof import STOCK_ATTENTIONS
from hf_packing.attention.route import route_of
from hf_packing.attention.tolerance import (
    ALWAYS_ALLOWED,
    LARGEST_GRADIENT_LEAK,
    comparable,
    has_experts,
    largest_difference,
    spread,
)
from hf_packing.attention.tree_batch_runs import TreeBatchRuns

_NOISE_FACTOR = 8
"""The outputs of a packed document and of the same document alone may differ by this number times the measured effect
of rounding. On short documents, they differ by up to twice the effect (see `tolerance.ROUNDING_FACTOR`); in a batch,
the largest of many more differences is compared."""

_HALF_NOISE_FACTOR = 2
"""The same number in half precision, in which rounding has almost as large an effect as some faults."""

_HALF_MAX, _HALF_RMS = 0.2, 0.05
"""Differences that are always allowed in half precision, in standard deviations of the outputs: for the largest
difference and for the root mean square. One of the two is enough."""

_REROUTED = 0.02
"""In models with experts, this share of the tokens may differ by more than rounding explains. Rounding may send a token
to another expert, whose output is unrelated."""

_GRADIENT_FACTOR = 10
"""Factor from the limits for outputs to the limits for gradients. Rounding also affects the backward pass."""


@dataclass(frozen=True)
class BatchProof:
    """The result of a proof on a training batch."""

    tokens: int
    documents: int
    """Number of documents; a piece of a document that was cut counts as a document."""
    longest: int
    """Number of tokens in the longest document."""
    training: bool
    dtype: torch.dtype
    alone: int
    """Number of documents that were compared with the same documents run alone."""
    gradients: bool
    """True if gradients were compared, too."""
    is_compiled: bool
    kernel: str
    """The kernel on which the attention of a patched model ran; empty if the model computes attention itself."""
    problem: str = ""
    """The reason why isolation is not proven; empty if it is proven."""
    max_leak: float = 0.0
    """The largest change of an output in documents that were not replaced."""
    max_gradient_leak: float = float("nan")
    """The largest gradient of a document's outputs at another document, divided by the largest gradient at the document
    itself; nan if gradients were not computed."""

    @property
    def where(self) -> str:
        mode = "training" if self.training else "evaluation"
        return (
            f"a batch of {self.tokens:,} tokens with {self.documents:,} documents of up to {self.longest:,} tokens, in "
            f"{mode} mode and {str(self.dtype).removeprefix('torch.')}"
        )

    def __str__(self) -> str:
        if self.problem:
            return f"not isolated on {self.where}: {self.problem}"
        compared = "logits or gradients" if self.gradients else "logits"
        kernel = f"; kernel: {self.kernel}" if self.kernel else ""
        return (
            f"{self.documents:,} documents of up to {self.longest:,} tokens, {self.tokens:,} in all, in "
            f"{str(self.dtype).removeprefix('torch.')}; no document changes the {compared} of another (largest change "
            f"{self.max_leak:.2g}); alone they are the same ({self.alone} compared){kernel}"
        )


@torch.inference_mode(False)  # gradients are compared
def prove_on_batch(model: nn.Module, batch: Mapping[str, Any], training: bool = True) -> BatchProof:
    """Run a model on a batch as described at the top of this file, and return what was proven.

    All ranks that shard a model have to call this function at the same time; all of them make the same calls.

    Args:
        model: a model as a training loop calls it, patched or not, with or without wrappers.
        batch: a packed batch, or one of trees, as PackingCollator makes it. Labels are ignored.
        training: whether to run the model in training mode.
    """
    runs = (TreeBatchRuns if has_trees(batch) else BatchRuns)(model, batch, training)
    with runs.undisturbed():
        results = _Results.of(runs)
    problem = _problem_in(results)
    if _on_any_rank(problem is not None, runs.inner):
        results, problem = _second_look(runs, results)
        if _on_any_rank(problem is not None, runs.inner):
            problem = _with_place(runs, problem)
    return BatchProof(
        tokens=runs.tokens,
        documents=len(runs.lengths),
        longest=max(runs.lengths),
        training=training,
        dtype=runs.dtype,
        alone=sum(len(group.documents) for group in results.alone),
        gradients=results.packed.gradients is not None,
        is_compiled=runs.is_compiled,
        kernel=_kernel_of(runs.inner),
        problem="" if problem is None else problem.text,
        max_leak=results.leak,
        max_gradient_leak=results.gradient_leak,
    )


def _kernel_of(model: PreTrainedModel) -> str:
    route = route_of(model)
    return kernel_of(model) if route is not None and route.method.attention else ""


@dataclass(frozen=True)
class _Problem:
    text: str
    compared: Compared = "replaced"
    """The comparison that shows the problem."""


@dataclass
class _Results:
    """The results of all runs."""

    runs: BatchRuns
    packed: Run
    replaced: Run
    alone: list[AloneRun]
    repeated: Run | None = None
    """The result of a second run on the same batch; None if there was no second run."""

    @classmethod
    def of(cls, runs: BatchRuns) -> "_Results":
        if runs.is_compiled and runs.training:
            packed, replaced = runs.packed(), runs.with_replaced()
            packed = replace(packed, gradients=runs.packed(gradients=True).gradients)
        else:
            packed, replaced = runs.packed(gradients=runs.training), runs.with_replaced()
        return cls(runs, packed, replaced, runs.alone())

    @property
    def has_experts(self) -> bool:
        return has_experts(self.runs.inner)

    @property
    def is_exact(self) -> bool:
        """True if the outputs for the kept documents have to be the same bits when other documents are replaced."""
        noisy = self.has_experts or getattr(self.runs.inner, "is_quantized", False)
        repeats = self.repeated is None or torch.equal(self.packed.outputs, self.repeated.outputs)
        return not noisy and repeats

    @property
    def leak(self) -> float:
        """The largest change of an output of a kept document when other documents are replaced."""
        return _largest(self.packed.outputs[self.runs.kept], self.replaced.outputs[self.runs.kept])

    @property
    def gradient_leak(self) -> float:
        if self.packed.gradients is None or len(self.runs.graded) == len(self.packed.gradients):
            return float("nan")
        others = torch.ones(len(self.packed.gradients), dtype=torch.bool, device=self.packed.gradients.device)
        others[self.runs.graded] = False
        own = float(self.packed.gradients[self.runs.graded].abs().max())
        leaked = float(self.packed.gradients[others].abs().max())
        return leaked / own if own else float("inf") if leaked else 0.0

    def limits(self, field: str) -> "_Limits":
        """Return the differences that rounding explains, measured on the documents run alone."""
        measured = [
            _apart(noisy, exact)
            for group in self.alone
            if group.documents and (exact := getattr(group.exact, field)) is not None
            for noisy in (getattr(group.noisy, field),)
        ]
        noise = torch.cat(measured) if measured else torch.zeros(1)
        lenience = _GRADIENT_FACTOR if field == "gradients" else 1
        return _Limits(self.runs.dtype, self.has_experts, noise, lenience)


@dataclass(frozen=True)
class _Limits:
    """The largest differences that rounding explains."""

    dtype: torch.dtype
    has_experts: bool
    noise: Tensor
    """Effect of rounding on each token that was run alone, in standard deviations of the outputs: float [tokens]."""
    lenience: float

    def explain(self, apart: Tensor) -> bool:
        """Return whether rounding explains the differences `apart`, float [tokens], in standard deviations."""
        largest = float(self.noise.max())
        if self.dtype in ALWAYS_ALLOWED:
            limit = max(ALWAYS_ALLOWED[self.dtype], _NOISE_FACTOR * largest) * self.lenience
        else:
            limit = max(_HALF_MAX, _HALF_NOISE_FACTOR * largest) * self.lenience
            rms = max(_HALF_RMS, _HALF_NOISE_FACTOR * _rms(self.noise)) * self.lenience
            if _rms(apart) <= rms:
                return True
        beyond = float((~(apart <= limit)).double().mean())
        return beyond <= (_REROUTED if self.has_experts else 0)


def _problem_in(results: _Results) -> _Problem | None:
    """Return the first reason why the results do not prove isolation, or None if they prove it."""
    runs, packed = results.runs, results.packed
    if not comparable(packed.outputs).any():
        return _Problem("the outputs of the model are not finite")
    limits = results.limits("outputs")
    if runs.replaced and results.leak > 0:
        kept = runs.kept
        apart = _apart(results.replaced.outputs[kept], packed.outputs[kept])
        if results.is_exact or not limits.explain(apart):
            return _Problem(f"replacing documents changed the outputs of other documents by up to {results.leak:.2g}")
    if results.gradient_leak > LARGEST_GRADIENT_LEAK:
        return _Problem(
            "gradients of a document reach another document; the largest gradient at another document's tokens is "
            f"{results.gradient_leak:.2g} times the largest gradient at the document's own tokens",
            "gradients",
        )
    for name in ("outputs", "gradients"):
        if (difference := _unexplained(results, name)) is not None:
            return _Problem(
                f"a document's {name} differ by {difference:.2g} standard deviations between the packed batch and the "
                "document alone",
                "alone",
            )
    return None


def _unexplained(results: _Results, field: str) -> float | None:
    """Return the largest difference between a packed document and the same document alone, in standard deviations.

    Return None if rounding explains all differences, or if there is nothing to compare.
    """
    packed, limits = getattr(results.packed, field), results.limits(field)
    for group in results.alone:
        alone = getattr(group.exact, field)
        if alone is None or packed is None:
            continue
        for number, own in zip(group.documents, torch.chunk(alone, max(len(group.documents), 1)), strict=False):
            if field == "gradients" and number not in results.runs.graded_documents:
                continue
            apart = _apart(packed[results.runs.tokens_of(number)], own)
            if not limits.explain(apart):
                return float(apart.max())
    return None


def _second_look(runs: BatchRuns, results: _Results) -> tuple[_Results, _Problem | None]:
    """Run the model again, and return the results and the problem if it remains.

    Two harmless reasons for differences are excluded. Some models are not deterministic, so their outputs differ from
    run to run. And some attention functions have had bugs, so documents are also run alone with eager attention.
    """
    with runs.undisturbed():
        repeated = runs.packed(gradients=runs.training and not runs.is_compiled)
    results = replace(results, repeated=repeated)
    problem = _problem_in(results)
    own = runs.own_attention
    if own in STOCK_ATTENTIONS and own != "eager" and runs.inner._can_set_attn_implementation():
        with runs.undisturbed():
            eager = replace(results, alone=runs.alone("eager"))
        if problem is not None and problem.compared == "alone" and _problem_in(eager) is None:
            return eager, None
    return results, problem


def _with_place(runs: BatchRuns, problem: _Problem | None) -> _Problem | None:
    """Return the problem with the name of the module in which the difference begins.

    If ranks share the model's weights, all of them make the same calls, also those without a problem.
    """
    together = torch.distributed.is_initialized() and not has_local_weights(runs.inner)
    place = ""
    for compared in get_args(Compared) if together else (problem.compared,) if problem else ():
        found = locate_leak(runs, compared)
        place = found if problem is not None and problem.compared == compared else place
    return replace(problem, text=f"{problem.text}; the difference begins in {place}") if problem and place else problem


def _on_any_rank(found: bool, model: PreTrainedModel) -> bool:
    """Return whether `found` is True on any of the ranks that share the model's weights."""
    if has_local_weights(model) or not torch.distributed.is_initialized():
        return found
    flag = torch.tensor(found, dtype=torch.int32, device=input_device(model))
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
    return bool(flag)


def _apart(left: Tensor, right: Tensor) -> Tensor:
    """Return the largest difference for each token, in standard deviations of `right`: float [tokens].

    The difference of a token is infinite if a value is finite in only one tensor.
    """
    both = comparable(left) & comparable(right)
    different = torch.where(both, (left.float() - right.float()).abs(), 0).amax(1) / spread(right.float())
    return torch.where((comparable(left) == comparable(right)).all(1), different, torch.inf)


def _largest(left: Tensor, right: Tensor) -> float:
    return 0.0 if torch.equal(left, right) else largest_difference(left.float(), right.float())


def _rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())
