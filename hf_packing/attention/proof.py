"""Prove that the documents of a batch do not affect each other, and equal the same documents run alone.

`prove` is the only prover. It runs a case (see `cases`) on its batch, with segments replaced, and compares:

1. The outputs of segments that may not notice a replacement stay the same. All shapes stay the same, so a dense model
   has to return exactly the same bits, also in half precision.
2. Nothing is remembered from one batch to the next.
3. A leak would have been seen: tokens behind replaced ones change.
4. Gradients of a document reach only its own tokens.
5. Every document has the outputs and gradients that it has alone on the model without its patch, up to measured
   rounding. They are compared with the model's own attention function and, if it disagrees, with eager attention.

A proof of a few short documents takes about ten forwards, that of a training batch five.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from hf_packing.attention.cases import Alone, Case, RowCase, Run
from hf_packing.attention.kernels import fallbacks
from hf_packing.attention.tolerance import LARGEST_GRADIENT_LEAK, LEAST_SEEN, apart, differences, spread
from hf_packing.errors import ModelNotSupportedError

Compared = Literal["model", "replaced", "memory", "gradients", "alone"]
"""What shows a problem: the model itself, which cannot be tested; the batch and the batch with replaced segments; a run
and a later one; the gradients of documents at their own tokens and at others; or documents in the batch and alone."""


@dataclass(frozen=True)
class Problem:
    """The reason why isolation is not proven."""

    text: str
    compared: Compared


@dataclass
class Proof:
    """The measurements of a case, and what is wrong with them."""

    packed: Run
    max_leak: float = 0.0
    """The largest change of an output that may not notice a replacement."""
    alone: list[Alone] = field(default_factory=list)
    problem: Problem | None = None
    unproven: str = ""
    """The reason why training mode is not fully proven, or an empty string."""

    @property
    def max_gradient_leak(self) -> float:
        return self.packed.reach


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
                reason = "isolation is not proven on another rank" if proof.problem is None else proof.problem.text
                if not (case.on_any_rank(proof.problem is not None) and fall_back(reason)):
                    return proof


def _prove_on_one_kernel(case: Case) -> Proof:
    with case.undisturbed():
        runs = _Runs(case)
        problem = runs.problem()
        if case.on_any_rank(problem is not None):
            # some models are not deterministic, and some attention functions have had bugs
            runs.repeated = case.run()
            if (other := case.other_attention) is not None and len(runs.alone) == 1:
                runs.alone.append(case.alone(other))
            problem = runs.problem()
    return Proof(runs.packed, max((each.leak for each in runs.changes), default=0.0), runs.alone, problem)


def require(case: Case) -> Proof:
    """Prove a case.

    Raises:
        ModelNotSupportedError: isolation is not proven.
    """
    proof = prove(case)
    if proof.problem is not None:
        raise ModelNotSupportedError(f"{case.mode}{proof.problem.text}")
    return proof


@dataclass
class _Change:
    """What changes when segments are replaced."""

    apart: Tensor
    """The differences where nothing may change, in standard deviations; empty if there are none."""
    leak: float
    """The largest of them, as they are."""
    is_noticed: bool
    """Whether the outputs of the replaced segments change."""
    behind: float
    """The largest difference, in standard deviations, at unchanged tokens behind replaced ones; nan if there are no
    such tokens."""


class _Runs:
    """The runs of a case, and what they show."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.packed = case.run(gradients=case.wants_gradients and case.training and not case.runner.is_compiled)
        if case.wants_gradients and not self.packed.gradients:
            graded = case.run(gradients=True)
            self.packed = replace(self.packed, gradients=graded.gradients, reach=graded.reach)
        self.memory: list[str] | None = None
        in_series = isinstance(case, RowCase) and case.training
        with case.runner.in_series() if in_series else nullcontext():
            self.changes = self._change_all()
        if isinstance(case, RowCase) and case.training and any(each.leak for each in self.changes):
            self.memory = case.memory(self.packed)
            self.changes = self._change_all()
        self.alone = case.references()
        self.repeated: Run | None = None

    def _change_all(self) -> list["_Change"]:
        return [self._change(replaced, self.case.run(replaced)) for replaced in self.case.replacements]

    def _change(self, replaced: list[int], after: Run) -> _Change:
        before, case = self.packed, self.case
        unit = case.unit or spread(before.outputs)
        noticing = before.are_in(case.may_notice(replaced))
        left, right = after.outputs[~noticing], before.outputs[~noticing]
        changes = torch.zeros(1) if torch.equal(left, right) else differences(left, right)
        inside = differences(after.outputs, before.outputs).amax(1)
        behind = torch.zeros(0)
        if len(inside) == len(case.tokens):
            behind = inside[noticing & (case.with_replaced(replaced) == case.tokens).to(noticing.device)]
        return _Change(
            changes / unit,
            float(changes.max()),
            bool((inside[noticing] > 0).any()),
            float(behind.max()) / unit if len(behind) else float("nan"),
        )

    def problem(self) -> Problem | None:
        """Return the first reason why the runs do not prove isolation, or None if they prove it."""
        case, name = self.case, type(self.case.model).__name__
        tolerance = case.tolerance()
        if not self.packed.are_finite:
            return Problem(
                f"model: expected finite logits, but {name} returns no finite logits for a document", "model"
            )
        if not all(each.is_noticed for each in self.changes):
            return Problem(
                f"model: expected logits that depend on input_ids, but {name} returns the same for other tokens",
                "model",
            )
        leak = max(self.changes, key=lambda each: each.leak, default=None)
        if leak is not None and leak.leak > 0:
            is_exact = not case.is_noisy
            if self.repeated is not None and not torch.equal(self.repeated.outputs, self.packed.outputs):
                is_exact = False
                if not case.is_in_series and not tolerance.explains(
                    apart(self.repeated.outputs, self.packed.outputs, case.unit)
                ):
                    return Problem(
                        f"model: expected the same logits for the same tokens, but {name} is nondeterministic with "
                        "dropout off",
                        "model",
                    )
            if is_exact or not all(tolerance.explains(each.apart) for each in self.changes):
                return Problem(f"{case.leaks} by up to {leak.leak:.2g}", "replaced")
        if self.memory is not None:
            through = f", through {', '.join(self.memory[:3])}" if self.memory else ""
            return Problem(f"a document's logits depend on earlier batches{through}", "memory")
        behind = [each.behind for each in self.changes if each.behind == each.behind]
        if behind and not case.training and max(behind) <= LEAST_SEEN:
            return Problem(
                "isolation cannot be tested, since changing the first tokens of a document does not change the logits "
                "of the following tokens",
                "replaced",
            )
        if self.packed.reach > LARGEST_GRADIENT_LEAK:
            return Problem(
                "gradients of one document reach another document; the largest gradient at another document's tokens "
                f"is {self.packed.reach:.2g} times the largest gradient at the document's own tokens",
                "gradients",
            )
        found = [self._difference(each) for each in self.alone]
        return None if None in found else next(iter(found), None)

    def _difference(self, alone: Alone) -> Problem | None:
        """Return how documents differ from the same documents alone, or None if rounding explains it."""
        case = self.case
        tolerance = case.tolerance(alone.noise)
        for number, expected in alone.outputs.items():
            found = apart(self.packed.of(case.paths[number]), expected, case.unit)
            if not tolerance.explains(found):
                return Problem(
                    f"a document's {case.what} differ by {float(found.max()):.2g} standard deviations between "
                    f"{case.where} and the document alone{tolerance.note()}",
                    "alone",
                )
        tolerance = case.tolerance(alone.noise, alone.gradient_noise).for_gradients
        for number, expected in alone.gradients.items():
            if number in self.packed.gradients:
                found = apart(self.packed.gradients[number], expected)
                if not tolerance.explains(found):
                    return Problem(
                        f"a document's gradients differ by {float(found.max()):.2g} standard deviations between "
                        f"{case.where} and the document alone",
                        "alone",
                    )
        return None
