"""Prove the step: packed documents give the loss and the gradients that the user's own trainer makes of them unpacked.

A few documents of the first batch make one step through the attached trainer, packed, and one step through the
trainer's own class and collator on the unpatched models, padded. Nothing is known of losses, adapters, other models or
hooks: whatever reads across a border, or lacks a patch, changes the loss or a gradient. Nothing is stepped, and models,
trainer and random states are as before.

1. The steps have a few short documents, so that both together cost less than a step of the training.
2. If they differ by more than is always allowed, the effect of rounding is measured.
3. If they still differ, unpacked steps of documents of equal length are made without and with padding. If they differ,
   padding is not neutral for the model or the loss, and the documents of equal length are compared instead.
4. The packed loss of as many documents as a batch has is computed in their order and in the opposite one, if the loss
   is the user's own: one that depends on the places of tokens in the row, such as `labels[:, 1024:] = -100`, may be
   right for a few short documents.

The file step_cases has the ways in which trainers and loops make such steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from hf_packing.attention import Step, StepRunner, compare, has_local_weights
from hf_packing.errors import PackingError
from hf_packing.training.ranks import on_all_ranks


@dataclass(frozen=True)
class StepReport:
    """Result of `check_step`: whether the packed step is the step that is made without packing.

    Example:
        >>> import datasets, hf_packing as hfp, tempfile, transformers
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> documents = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5], [6, 7, 8, 9]]})
        >>> trainer = transformers.Trainer(
        ...     transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=99, **sizes)),
        ...     transformers.TrainingArguments(tempfile.mkdtemp(), use_cpu=True, report_to="none"),
        ...     train_dataset=documents,
        ... )
        >>> summary = hfp.attach(trainer, hfp.TokenBudget(9))
        >>> hfp.check_step(trainer).same
        True
    """

    problem: str
    """The difference, and what to look for; empty if there is none."""
    loss: float
    """The loss of the packed step."""
    unpacked_loss: float
    """The loss of the same documents without packing and without patches."""
    documents: int
    tokens: int
    parameters: int
    """The number of parameters whose gradients were compared; 0 in evaluation."""
    difference: float
    """The largest difference of a parameter's gradient, as a share of its norm."""
    note: str = ""
    """What else is to be known of the comparison."""
    compared: bool = True
    """False if nothing could be compared, since rounding changes the loss, or padding, of which every batch has some.
    """

    @property
    def same(self) -> bool:
        """True if the steps were compared and do not differ."""
        return self.compared and not self.problem

    def __str__(self) -> str:
        where = f"{self.documents} documents of {self.tokens:,} tokens in all{self.note}"
        losses = f"loss {self.loss:.6g} packed, {self.unpacked_loss:.6g} unpacked"
        if self.problem:
            return f"not the step that is made unpacked: on {where}, {self.problem}"
        how = f"equal to {self.difference:.0e}"
        if self.difference > _CHAOS:
            how = f"different by rounding alone, by up to {self.difference:.0e} of their size"
        return f"{where}: {losses}{f'; gradients of {self.parameters} parameters {how}' if self.parameters else ''}"


class StepCase(ABC):
    """Two ways to compute the loss of a step."""

    runner: StepRunner
    hint = ""
    """What to look for if the steps differ."""

    @abstractmethod
    def choose(self, without_padding: bool) -> Any:
        """Return what the step is made of, such as documents, or only what needs no padding; None if there is none."""

    @abstractmethod
    def packed(self, of: Any) -> Tensor:
        """Return the loss of the packed step."""

    @abstractmethod
    def unpacked(self, of: Any, padding: int) -> Tensor:
        """Return the loss of the step without packing, with so many tokens of padding more in each row."""

    @abstractmethod
    def sizes(self, of: Any) -> tuple[int, int, int]:
        """Return the numbers of documents or rows, of their tokens, and of what the loss is a mean of."""

    def whole(self) -> Any:
        """Return the documents of a whole batch, in a list; None if their order is not tried."""
        return None


_CHAOS = 0.1
"""Steps are not compared if rounding changes both the loss and a gradient by more than this share."""

_MORE_PADDING = 5
"""Tokens of padding that are added to every row to find out whether padding is neutral."""


def is_due_again(step: int, latest: int) -> bool:
    """Return whether what was proven after `latest` optimizer steps is to be proven again after `step`: 1, 2, 4, 8, ...

    Terms of a loss may be 0 at first, as where a policy still is its reference.
    """
    return step >= max(1, 2 * latest)


def prove_step(case: StepCase, training: bool = True) -> StepReport:
    """Compare the packed step with the unpacked one; in evaluation, losses only. All ranks make the same calls."""
    note, compared = "", True
    with case.runner.undisturbed(training):
        steps = _Steps(case, case.choose(without_padding=False))
        if steps.differ:
            unpadded = case.choose(without_padding=True)
            # no rank compares what another one lacks, since all make the same calls
            choices = [steps.made_of] if on_any_rank(unpadded is None) else [steps.made_of, unpadded]
            if not all(_padding_is_neutral(case, each) for each in choices):
                if compared := len(choices) > 1:
                    note, steps = ", of equal length, since padding changes the loss", _Steps(case, unpadded)
                else:
                    note = ", whose loss changes with padding"
        if on_any_rank(steps.noise > _CHAOS):
            note, compared = f", whose loss changes by {steps.noise:.0%} with rounding", False
        problem = ""
        if compared:
            problem = steps.describe() if steps.differ else _effect_of_order(case)
    documents, tokens, _ = case.sizes(steps.made_of)
    return StepReport(
        problem=problem,
        loss=steps.packed.loss,
        unpacked_loss=steps.unpacked.loss,
        documents=documents,
        tokens=tokens,
        parameters=len(steps.unpacked.gradients) if compared else 0,
        difference=steps.difference.largest,
        note=note,
        compared=compared,
    )


def _effect_of_order(case: StepCase) -> str:
    """Return how the packed loss of a whole batch depends on the order of its documents; an empty text if not. All
    ranks make the same calls."""
    whole = case.whole()
    if on_any_rank(whole is None):
        return ""
    with torch.no_grad():
        loss, turned = (_on_all_ranks(case, partial(case.packed, each)) for each in (whole, whole[::-1]))
        if not on_any_rank(compare(turned, loss, case.runner.dtype).loss_differs):
            return ""
        noisy = case.runner.run(partial(case.packed, whole), noisy=True)
    if not compare(turned, loss, case.runner.dtype, noisy).loss_differs:
        return ""
    documents, tokens, _ = case.sizes(whole)
    return (
        f"and in a batch of {documents} documents of {tokens:,} tokens, the packed loss is {loss.loss:.6g}, but "
        f"{turned.loss:.6g} with the documents in the opposite order, so it depends on places in the row: take places "
        "from position_ids, which begin anew in each document"
    )


class _Steps:
    """The same step, packed and unpacked.

    Args:
        case: the ways to make it.
        made_of: what it is made of.
    """

    def __init__(self, case: StepCase, made_of: Any) -> None:
        self.case, self.made_of = case, made_of
        self.packed = _on_all_ranks(case, partial(case.packed, made_of))
        unpacked = partial(case.unpacked, made_of, 0)
        self.unpacked = _on_all_ranks(case, unpacked, unpatched=True)
        self.noise = 0.0
        """The share by which rounding changes the unpacked loss, and a gradient; measured only after a difference."""
        if self._compare(None):
            noisy = case.runner.run(unpacked, unpatched=True, noisy=True)
            self._compare(noisy)
            by_noise = compare(noisy, self.unpacked, case.runner.dtype)
            self.noise = min(by_noise.loss, by_noise.largest)

    def _compare(self, noisy: Step | None) -> bool:
        """Compare the steps, and return whether they differ on any rank."""
        self.difference = compare(self.packed, self.unpacked, self.case.runner.dtype, noisy)
        self.differ = on_any_rank(self.difference.found and self.case.sizes(self.made_of)[-1] > 0)
        return self.differ

    def describe(self) -> str:
        """Return how the steps differ, and what to look for. All ranks make the same calls."""
        found, packed, unpacked, text = self.difference, self.packed.gradients, self.unpacked.gradients, []
        if found.loss_differs:
            text.append(f"the loss is {self.packed.loss:.6g}, but {self.unpacked.loss:.6g} unpacked")
        if only_one := [name for name in found.differ if (name in packed) is not (name in unpacked)]:
            text.append(
                f"{len(only_one)} parameters have a gradient only {'packed' if only_one[0] in packed else 'unpacked'}, "
                f"such as {only_one[0]}"
            )
        if found.differ:
            text.append(
                f"the gradients of {len(found.differ)} of {len(unpacked)} parameters differ, by up to "
                f"{found.largest:.2g} of their size, the first of them {found.differ[0]}"
            )
        if self.case.hint and text:
            text.append(self.case.hint)
        return "; ".join(text) or "the steps differ on another rank"


def _padding_is_neutral(case: StepCase, of: Any) -> bool:
    """Return whether the unpacked step is the same with more padding, but for little more than rounding: what is not
    neutral may be as small in these few tokens as a large effect of rounding."""
    step, more = (case.runner.run(partial(case.unpacked, of, each), unpatched=True) for each in (0, _MORE_PADDING))
    return not on_any_rank(compare(more, step, case.runner.dtype).found)


def _on_all_ranks(case: StepCase, compute: Callable[[], Tensor], unpatched: bool = False) -> Step:
    """Run a step on all ranks, or raise an error on all of them: the user's own code may raise anything."""

    def run(_: object = None) -> Step:
        try:
            return case.runner.run(compute, unpatched)
        except Exception as error:
            if not unpatched or isinstance(error, torch.OutOfMemoryError):
                raise
            raise PackingError(
                "trainer: expected a loss that can be computed without packing, too, of a padded batch with input_ids, "
                f"attention_mask and labels, but it raised {type(error).__name__}: {error}. If it is made for packed "
                "batches alone, pass prove='model': its step is then compared with nothing"
            ) from error

    # ranks that shard a model may wait for this one in it, so it has to end
    return on_all_ranks(run) if has_local_weights(case.runner.model) else run()


def on_any_rank(found: bool) -> bool:
    """Return whether `found` is True on any rank; all of them call this together."""
    return any(gather_object([found]))
