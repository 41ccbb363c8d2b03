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

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_packing.attention.cases import Alone, Case, Run
from hf_packing.attention.kernels import fallbacks
from hf_packing.attention.model import has_local_weights, input_device
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


@dataclass
class _Change:
    """The changes in outputs when segments are replaced."""

    leak: Tensor
    """The differences where nothing may change; a single zero if there are none."""
    is_seen: bool
    """Whether unchanged tokens behind replaced ones have other outputs or, if there are none, the replaced ones."""


@dataclass
class Proof:
    """The runs of a case, and what is wrong with them."""

    case: Case
    packed: Run
    changes: list[_Change]
    repeated: Run | None = None
    """A second run on the same tokens, which is made if the others show a problem."""
    problem: str = ""
    """The reason why isolation is not proven; empty if it is proven."""

    @property
    def max_leak(self) -> float:
        """The largest change of an output that may not notice a replacement."""
        return max((float(each.leak.max()) for each in self.changes), default=0.0)

    @property
    def max_gradient_leak(self) -> float:
        return self.packed.reach

    def find_problem(self) -> str:
        """Return the first reason why the runs do not prove isolation, or an empty string if they prove it."""
        case, packed = self.case, self.packed
        if not torch.stack([comparable(each).any() for each in packed.outputs]).all():
            return f"{type(case.model).__name__} returns no finite logits for a document"
        unit = spread(torch.cat(packed.outputs))
        if self.max_leak > 0:
            explains = case.tolerance().explains
            # the outputs of an expert depend on the number of tokens that go to it, and quantized layers share scales
            is_exact = not (has_experts(case.model) or getattr(case.model, "is_quantized", False))
            if self.repeated is not None:
                again = apart(torch.cat(self.repeated.outputs), torch.cat(packed.outputs))
                if not explains(again):
                    return (
                        "the same tokens gave other logits the second time; the model is nondeterministic with dropout "
                        "off, or depends on earlier batches"
                    )
                is_exact = is_exact and not again.any()
            if is_exact or not all(explains(each.leak / unit) for each in self.changes):
                return f"{case.leaks} by up to {self.max_leak:.2g}"
        if packed.reach > LARGEST_GRADIENT_LEAK:
            return (
                "gradients of one document reach another document; the largest gradient at another document's tokens "
                f"is {packed.reach:.2g} times the largest gradient at the document's own tokens"
            )
        found = [self._difference(each, unit) for each in case.known]
        if found and "" not in found:
            return found[0]
        if not all(each.is_seen for each in self.changes):
            return (
                "isolation cannot be tested, since changing the first tokens of a document does not change the logits "
                "of the following tokens"
            )
        return ""

    def _difference(self, alone: Alone, unit: float) -> str:
        """Return how documents differ from the same documents alone; empty if rounding explains it."""
        case, packed = self.case, self.packed
        explains = case.tolerance(alone).explains
        for number, expected in alone.outputs.items():
            found = [("logits", apart(packed.of(case.paths[number]), expected, unit), 1)]
            if number in alone.gradients and number in packed.gradients:
                gradients = apart(packed.gradients[number], alone.gradients[number])
                found.append(("gradients", gradients, GRADIENT_LENIENCE))
            for what, each, lenience in found:
                if not explains(each / lenience):
                    return (
                        f"a document's {what} differ by {float(each.max()):.2g} standard deviations between "
                        f"{case.where} and the document alone"
                    )
        return ""


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
                reason = proof.problem or "isolation is not proven on another rank"
                if not (on_any_rank(case.model, bool(proof.problem)) and fall_back(reason)):
                    return proof


def _prove_on_one_kernel(case: Case) -> Proof:
    with case.undisturbed():
        packed = case.run(gradients=case.wants_gradients and case.training and not case.runner.is_compiled)
        if case.wants_gradients and not packed.gradients:
            graded = case.run(gradients=True)
            packed.gradients, packed.reach = graded.gradients, graded.reach
        proof = Proof(case, packed, [_change(case, packed, replaced) for replaced in case.replacements])
        case.known = case.known or [case.alone()]
        proof.problem = proof.find_problem()
        if on_any_rank(case.model, bool(proof.problem)):
            # some models are not deterministic, and some attention functions have had bugs
            proof.repeated = case.run()
            other = case.runner.other_attention
            if other is not None and len(case.known) == 1 and case.known[0].outputs:
                case.known.append(case.alone(other))
            proof.problem = proof.find_problem()
    return proof


def _change(case: Case, before: Run, replaced: list[int]) -> _Change:
    """Run a case with replaced segments, and return what changes."""
    after, noticing = case.run(replaced), case.may_notice(replaced)
    if not replaced:  # a call that only other ranks need
        return _Change(before.outputs[0].new_zeros(1), True)
    kept = [each for each in range(len(before.outputs)) if each not in set(noticing)]
    left, right = after.of(kept), before.of(kept)
    inside, least = differences(after.of(noticing), before.of(noticing)).amax(1), 0.0
    is_same = case.by_segment(case.with_replaced(replaced) == case.tokens)
    behind = torch.cat([is_same[each] for each in noticing]).to(inside.device)
    if behind.shape == inside.shape and behind.any():
        inside, least = inside[behind], LEAST_SEEN * spread(torch.cat(before.outputs))
    leak = left.new_zeros(1) if torch.equal(left, right) else differences(left, right)
    return _Change(leak, bool(inside.max() > least))


def on_any_rank(model: PreTrainedModel, found: bool) -> bool:
    """Return whether `found` is True on any of the ranks that shard a model, which make the same calls."""
    if has_local_weights(model) or not torch.distributed.is_initialized():
        return found
    flag = torch.tensor(found, dtype=torch.int32, device=input_device(model))
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
    return bool(flag)


def require(case: Case) -> Proof:
    """Prove a case.

    Raises:
        ModelNotSupportedError: isolation is not proven.
    """
    proof = prove(case)
    if proof.problem:
        raise ModelNotSupportedError(("in training mode, " if case.training else "") + proof.problem)
    return proof
