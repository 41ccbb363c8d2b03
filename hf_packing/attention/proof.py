"""Prove that the documents of a batch do not affect each other, and equal the same documents run alone.

`prove` is the only prover. It runs a case (see `cases`) on its batch, with segments replaced, and compares:

1. The outputs of segments that may not notice a replacement stay the same. All shapes stay the same, so a dense model
   has to return exactly the same bits, also in half precision.
2. In training mode, the model is not restored between runs, so what it remembers of earlier batches shows as well.
3. A leak would have been seen: tokens behind replaced ones change.
4. Gradients of a document reach only its own tokens.
5. Every document has the outputs and gradients that it has alone on the model without its patch, up to measured
   rounding. They are compared with the model's own attention function and, if it disagrees, with eager attention.

A proof of a few short documents takes about ten forwards, that of a training batch six.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_packing.attention.cases import Alone, Case, Run
from hf_packing.attention.kernels import fallbacks, kernel_of
from hf_packing.attention.route import route_of
from hf_packing.attention.tolerance import (
    GRADIENT_LENIENCE,
    LARGEST_GRADIENT_LEAK,
    LEAST_SEEN,
    apart,
    comparable,
    differences,
    has_experts,
    spread,
)
from hf_packing.errors import ModelNotSupportedError


@dataclass(frozen=True)
class Proof:
    """The result of a proof, on the documents of a batch."""

    problem: str
    """The reason why isolation is not proven; empty if it is proven."""
    max_leak: float
    """The largest change of an output that may not notice a replacement."""
    max_gradient_leak: float
    """The largest gradient of a document's outputs at another document, divided by the largest gradient at the document
    itself; nan if gradients were not computed."""
    mode: str
    """The mode of the model: "training" or "evaluation"."""
    where: str
    """The sizes of the batch, the mode and the dtype."""
    tokens: int
    documents: int
    """Number of documents; a piece of a document that was cut counts as a document."""
    alone: tuple[int, ...]
    """Lengths of the documents that were compared with the same documents run alone, ascending."""
    longest: int
    """Number of tokens of the longest document."""
    gradients: bool
    """True if gradients were compared, too."""
    kernel: str
    """The kernel on which the attention of a patched model ran; empty if the model computes attention itself."""

    def __str__(self) -> str:
        if self.problem:
            return f"not isolated on {self.where}: {self.problem}"
        alone = ""
        if self.alone:
            longer = ", longer ones did not run alone" if self.alone[-1] < self.longest else ""
            alone = f"; documents of {', '.join(map('{:,}'.format, self.alone))} tokens are the same alone{longer}"
        kernel = f"; kernel: {self.kernel}" if self.kernel else ""
        return (
            f"{self.where}; no document changes the logits{' or gradients' if self.gradients else ''} of another "
            f"(largest change {self.max_leak:.2g}){alone}{kernel}"
        )


def prove(case: Case) -> Proof:
    """Run a case, and return the measurements, with the first problem. All ranks make the same calls.

    A kernel with which the proof fails is passed over, and the proof runs again on the next one.
    """
    with fallbacks(case.model) as fall_back:
        while True:
            try:
                proof = _prove_on_one_kernel(case)
            except torch.OutOfMemoryError:  # says nothing about a kernel
                raise
            except Exception as error:  # a kernel may raise anything
                if not fall_back(str(error)):
                    raise
            else:
                is_wrong = case.on_any_rank(bool(proof.problem))
                if not (is_wrong and fall_back(proof.problem or "isolation is not proven on another rank")):
                    return proof


def _prove_on_one_kernel(case: Case) -> Proof:
    with case.undisturbed():
        packed = case.run(gradients=case.wants_gradients and case.training and not case.runner.is_compiled)
        if case.wants_gradients and not packed.gradients:
            packed = replace(case.run(gradients=True), outputs=packed.outputs)
        changes = [_change(case, packed, replaced) for replaced in case.replacements]
        case.known = case.known or [case.alone()]
        problem = _problem(case, packed, changes)
        if case.on_any_rank(bool(problem)):
            # some models are not deterministic, and some attention functions have had bugs
            repeated, other = case.run(), case.runner.other_attention
            if other is not None and len(case.known) == 1 and case.sample:
                case.known.append(case.alone(other))
            problem = _problem(case, packed, changes, repeated)
    route, lengths = route_of(case.model), case.lengths
    mode, dtype = "training" if case.training else "evaluation", str(case.runner.dtype).removeprefix("torch.")
    return Proof(
        problem=problem,
        max_leak=_largest_leak(changes),
        max_gradient_leak=packed.reach,
        mode=mode,
        where=(
            f"{len(lengths):,} documents of up to {max(lengths):,} tokens, {case.num_tokens:,} in all, in {mode} mode "
            f"and {dtype}"
        ),
        tokens=case.num_tokens,
        documents=len(lengths),
        alone=tuple(sorted({lengths[each] for each in case.known[0].runs})),
        longest=max(lengths),
        gradients=bool(packed.gradients),
        kernel=kernel_of(case.model) if route is not None and route.method.attention else "",
    )


_Change = tuple[Tensor, bool]
"""The differences where nothing may change when segments are replaced, or a single zero if there are none; and whether
unchanged tokens behind replaced ones have other outputs or, if there are none, the replaced ones, if there are any."""


def _change(case: Case, before: Run, replaced: list[int]) -> _Change:
    """Run a case with replaced segments, and return what changes."""
    after, noticing = case.run(replaced), case.may_notice(replaced)
    kept = sorted({*range(len(before.outputs))}.difference(noticing))
    left, right = after.of(kept), before.of(kept)
    inside, least = differences(after.of(noticing), before.of(noticing)).amax(1), 0.0
    behind = (case.with_replaced(replaced) == case.tokens)[case.has_tokens(noticing)]
    if behind.shape == inside.shape and behind.any():
        inside, least = inside[behind], LEAST_SEEN * spread(torch.cat(before.outputs))
    same = torch.equal(left, right)
    return left.new_zeros(1) if same else differences(left, right), not noticing or bool(inside.max() > least)


def _largest_leak(changes: list[_Change]) -> float:
    return max((float(leak.max()) for leak, _ in changes), default=0.0)


def _problem(case: Case, packed: Run, changes: list[_Change], repeated: Run | None = None) -> str:
    """Return the first reason why the runs of a case do not prove isolation, or an empty string if they prove it.

    Args:
        case: the case.
        packed: the run of its batch.
        changes: what changed when segments were replaced.
        repeated: a second run on the same tokens, which is made if the others show a problem.
    """
    if not all(comparable(each).any() for each in packed.outputs):
        return f"{type(case.model).__name__} returns no finite logits for a document"
    unit = spread(torch.cat(packed.outputs))
    if (largest := _largest_leak(changes)) > 0:
        explains = case.tolerance().explains
        # the outputs of an expert depend on the number of tokens that go to it, and quantized layers share scales
        is_exact = not (has_experts(case.model) or getattr(case.model, "is_quantized", False))
        if repeated is not None:
            again = apart(torch.cat(repeated.outputs), torch.cat(packed.outputs))
            if not explains(again):
                return (
                    "the same tokens gave other logits the second time; the model is nondeterministic with dropout "
                    "off, or depends on earlier batches"
                )
            is_exact = is_exact and not again.any()
        if is_exact or not all(explains(leak / unit) for leak, _ in changes):
            return f"{case.leaks} by up to {largest:.2g}"
    if packed.reach > LARGEST_GRADIENT_LEAK:
        return (
            "gradients of one document reach another document; the largest gradient at another document's tokens "
            f"is {packed.reach:.2g} times the largest gradient at the document's own tokens"
        )
    alone = case.known[0].runs.values()
    if packed.failure and not packed.gradients and alone and all(run.gradients for run in alone):
        return f"the backward pass fails on the {case.where}, but not on documents alone: {packed.failure}"
    found = [_difference(case, packed, each, unit) for each in case.known]
    if found and "" not in found:
        return found[0]
    if not all(is_seen for _, is_seen in changes):
        return (
            "isolation cannot be tested, since changing the first tokens of a document does not change the logits "
            "of the following tokens"
        )
    return ""


def _difference(case: Case, packed: Run, alone: Alone, unit: float) -> str:
    """Return how documents differ from the same documents alone; empty if rounding explains it."""
    explains = case.tolerance(alone).explains
    for number, run in alone.runs.items():
        found = [("logits", apart(packed.of(case.paths[number]), run.outputs[0], unit), 1)]
        if number in run.gradients and number in packed.gradients:
            gradients = apart(packed.gradients[number], run.gradients[number])
            found.append(("gradients", gradients, GRADIENT_LENIENCE))
        for what, each, lenience in found:
            if not explains(each / lenience):
                return (
                    f"a document's {what} differ by {float(each.max()):.2g} standard deviations between "
                    f"the {case.where} and the document alone"
                )
    return ""


def require(*cases: Case) -> None:
    """Prove all cases of which something is known.

    Raises:
        ModelNotSupportedError: isolation is not proven, or the model cannot be called.
    """
    for case in cases:
        if not case.known:
            continue
        try:
            problem = prove(case).problem
        except ModelNotSupportedError:
            raise
        except Exception as error:  # custom model code may raise anything
            raise ModelNotSupportedError(f"the model cannot be called on a {case.where}: {error}") from error
        if problem:
            raise ModelNotSupportedError(("in training mode, " if case.training else "") + problem)
