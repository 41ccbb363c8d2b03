"""RankBatchSampler, the sampler of one rank, and InOrder, a batching for evaluation.

A DataLoader takes RankBatchSampler as its batch_sampler. RankBatchSampler is not a subclass of torch's BatchSampler and
has no batch_size. Otherwise accelerate would assume that all batches have the same number of rows, and would lose rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar

import numpy as np

from hf_packing.checks import check_whole_number
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray
from hf_packing.rows.label_counts import LabelCounts
from hf_packing.sampling.epoch_plan import (
    Batching,
    Epoch,
    EpochPlan,
    FittedRows,
    RowSizes,
    SampledRow,
    Trained,
    check_batching,
    check_sizes,
    keep_rows,
)
from hf_packing.sampling.epoch_summary import EpochSummary
from hf_packing.sampling.steps_of_epochs import StepsOfEpochs
from hf_packing.sampling.token_budget import TokenBudget

_PLANS_VERSION = 3
"""Version of the plans. Increase this number with every code change that gives different micro-batches for the same
arguments. Training then refuses to resume from older checkpoints."""

SLOTS = "ranks x gradient_accumulation_steps"
"""Name of the number of micro-batches in an optimizer step, over all ranks, in checkpoints and messages."""

STEPS = "steps"
"""Name of the optimizer steps of the run's epochs, in checkpoints of a trainer; see `StepsOfEpochs.to_saved`."""


class RankBatchSampler:
    """A batch sampler that yields the micro-batches of one rank in the current epoch.

    A micro-batch is a list of pairs (row number, True if the row is a copy). Copies have masked labels, and are added
    if rows are too few to fill all micro-batches.

    Args:
        batching: TokenBudget, BucketBatches or InOrder.
        sizes: the sizes of all rows of the dataset.
        world_size: number of ranks.
        rank: the rank that the micro-batches are for.
        accumulation: micro-batches of each rank in one optimizer step.

    Raises:
        PackingError: a bad argument, fewer rows than ranks, or a row longer than a micro-batch.

    Example:
        >>> import numpy as np
        >>> from hf_packing.sampling.row_sizes import sizes_of_documents
        >>> from hf_packing.sampling.token_budget import TokenBudget
        >>> sampler = RankBatchSampler(TokenBudget(8), sizes_of_documents(np.array([5, 3, 2, 6])), 2, 0)
        >>> len(sampler), len(list(sampler))
        (1, 1)
    """

    def __init__(
        self, batching: Batching, sizes: RowSizes, world_size: int = 1, rank: int = 0, accumulation: int = 1
    ) -> None:
        self.batching = check_batching(batching)
        self.sizes = check_sizes(sizes)
        first_epoch = Epoch(0, world_size, accumulation)
        self.world_size, self.accumulation = first_epoch.world_size, first_epoch.accumulation
        self.rank = check_whole_number("rank", rank, minimum=0, maximum=self.world_size - 1)
        self.rows: FittedRows = batching.fit(sizes)
        """The rows that micro-batches are made of; rows that were too long are cut or left out."""
        batching.check_enough_rows(self.rows, first_epoch)
        self.epoch = first_epoch
        """The epoch whose micro-batches the next iteration yields."""
        self.first_micro_batch = 0
        """Number of the first micro-batch that the next iteration yields. The rows of earlier ones are not read."""
        self._planned_rows = self.rows
        self._num_micro_batches = batching.num_micro_batches(self.rows, first_epoch)
        self._planned: tuple[Epoch, EpochPlan] | None = None
        self.steps = StepsOfEpochs(self.optimizer_steps, rest=self.optimizer_steps)
        """The optimizer steps of the epochs of the run."""
        self.goes_on = False
        """True after a call of `go_on`."""

    def __len__(self) -> int:
        return self.optimizer_steps * self.accumulation if self.goes_on else self._num_micro_batches

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps in the current epoch, or in its rest."""
        return -(-self._num_micro_batches // self.accumulation)

    def set_epoch(self, number: int) -> None:
        """Make the next iteration yield the micro-batches of epoch `number`, counted from 0."""
        if number != self.epoch.number:
            self.plan_rest(number, ())

    def plan_rest(self, number: int, trained: Trained) -> None:
        """Go to epoch `number`, and plan only the rows that earlier runs of this epoch have not trained on.

        Args:
            number: number of the epoch, from 0.
            trained: pairs of integers (slots, optimizer steps) of the earlier runs, as in `Epoch`.
        """
        self.first_micro_batch = 0
        epoch = Epoch(number, self.world_size, self.accumulation, trained)
        if epoch != self.epoch:
            self.epoch = epoch
            self._planned_rows = self.batching.left_in(self.rows, self.epoch)
            self._num_micro_batches = self.batching.num_micro_batches(self._planned_rows, self.epoch)

    def go_on(self, steps: StepsOfEpochs, step: int) -> None:
        """Go to the place of a run after so many optimizer steps.

        From then on, every optimizer step has `accumulation` micro-batches on each rank, since Trainer takes only whole
        steps if epochs have different lengths. At the end of an epoch, copies of a row fill the last step.

        Args:
            steps: the optimizer steps of the epochs of the run.
            step: number of optimizer steps that are done, those of earlier runs included.
        """
        epoch, done, _ = steps.place(step)
        self.plan_rest(epoch, steps.trained_in(epoch))
        self.first_micro_batch = done * self.accumulation
        self.steps, self.goes_on = steps, True

    @property
    def plan(self) -> EpochPlan:
        """The plan of the current epoch, for all ranks."""
        if self._planned is None or self._planned[0] != self.epoch:
            self._planned = self.epoch, self.batching.plan_fitted(self._planned_rows, self.epoch)
        return self._planned[1]

    def __iter__(self) -> Iterator[list[SampledRow]]:
        return chain(self.plan.micro_batches(self.rank, self.first_micro_batch), self._copies())

    def _copies(self) -> Iterator[list[SampledRow]]:
        """Yield micro-batches that fill the last optimizer step, each with a copy of a row; none before `go_on`."""
        for _ in range(len(self) - self._num_micro_batches):
            rows = [row for row, _ in self.plan.micro_batch(self._num_micro_batches - 1, self.rank)]
            yield [(min(rows, key=self.rows.sizes.tokens.__getitem__), True)]

    def summary(
        self, unpacked: int | None = None, isolation: object = None, labels: LabelCounts | None = None
    ) -> EpochSummary:
        """Return the summary of the current epoch.

        Args:
            unpacked: number of documents that an optimizer step has in training without packing; None if not known.
            isolation: an object whose text says what was proven about isolation so far.
            labels: the labels that are left.
        """
        plan, fitted, trees = self.plan, self.rows, self.sizes.trees
        steps = -(-plan.num_micro_batches // self.accumulation)
        tokens = int(fitted.sizes.tokens[fitted.kept].sum())
        documents = int(fitted.sizes.segments[fitted.kept].sum())
        return EpochSummary(
            optimizer_steps=steps,
            num_micro_batches=plan.num_micro_batches,
            world_size=self.world_size,
            documents=documents,
            tokens=tokens,
            documents_per_step=documents / steps,
            tokens_per_step=tokens / steps,
            largest_micro_batch=plan.largest_micro_batch(fitted.sizes),
            token_utilization=plan.utilization(fitted.sizes.tokens),
            attention_utilization=plan.utilization(fitted.sizes.squared_lengths),
            copies=plan.num_copies,
            left_out=len(plan.left_out) + (0 if trees is None else trees.left_out),
            lost_tokens=fitted.lost_tokens + (0 if trees is None else trees.lost_tokens),
            labels=labels,
            unpacked_documents_per_step=unpacked if unpacked is not None and self._can_match(unpacked) else None,
            split=0 if fitted.pieces is None else int((np.bincount(fitted.pieces.document) > 1).sum()),
            packed_rows=len(fitted.kept) if fitted.sizes.packed and trees is None else None,
            trees=trees,
            length_schedule=getattr(self.batching, "length_schedule", None),
            isolation=isolation,
        )

    def _can_match(self, documents: int) -> bool:
        """Return whether match_documents_per_step can be set to `documents`, a number of documents per optimizer step.

        The result is False if match_documents_per_step is set already, or if the batching is not a TokenBudget.
        """
        if not isinstance(self.batching, TokenBudget) or self.batching.match_documents_per_step is not None:
            return False
        try:
            matched = replace(self.batching, match_documents_per_step=documents)
            matched.num_micro_batches(self.rows, self.epoch)
        except PackingError:
            return False
        return True

    def plan_inputs(self) -> dict[str, str | int]:
        """Return all values that determine the optimizer steps, except the epoch. Checkpoints store these values."""
        return {
            "plans": _PLANS_VERSION,
            "batching": repr(self.batching),
            "dataset": self.sizes.fingerprint,
            SLOTS: self.epoch.slots,
        }

    def check_can_resume(self, saved: dict[str, Any], any_slots: bool = False) -> None:
        """Raise PackingError if a checkpoint was saved with different optimizer steps.

        Args:
            saved: the values that `plan_inputs` returned when the checkpoint was saved.
            any_slots: whether the checkpoint may have another number of micro-batches in an optimizer step.

        Raises:
            PackingError: a value has changed since the checkpoint was saved; the message names the value.
        """
        for name, value in self.plan_inputs().items():
            if saved.get(name) == value or (name == SLOTS and (any_slots or self.goes_on)):
                continue
            got, hint = repr(value), ""
            if name == SLOTS:
                got = f"{value} ({self.world_size} ranks, gradient_accumulation_steps={self.accumulation})"
                hint = _same_slots(saved.get(name), self.world_size)
            raise PackingError(
                f"{name}: expected {saved.get(name)!r}, as when the checkpoint was saved, got {got}; resuming would "
                f"train on some rows twice and on other rows not at all{hint}"
            )
        if STEPS in saved and not (any_slots or self.goes_on):
            before = StepsOfEpochs.from_saved(saved[STEPS])
            if before != self.steps:
                raise PackingError(
                    "resume_from_checkpoint: expected the checkpoint as an argument of the trainer's train(), which "
                    f"finds its place in the data before training begins. The steps before step {before.began} had "
                    "another size, so global_step alone does not give the place"
                )


def _same_slots(saved: Any, world_size: int) -> str:
    """Return a hint on how to make optimizer steps of as many micro-batches as when a checkpoint was saved."""
    if not isinstance(saved, int):
        return ""
    if saved % world_size:
        return f"; use a number of ranks that divides {saved}"
    return f"; use gradient_accumulation_steps={saved // world_size}"


@dataclass(frozen=True)
class InOrder(Batching):
    """A batching for evaluation: each micro-batch has rows_per_batch successive rows of the dataset.

    Ranks take micro-batches in turn. The last micro-batch may have fewer rows. If micro-batches are too few for all
    ranks, copies of the first row with masked labels are added.

    Args:
        rows_per_batch: number of rows in a micro-batch.

    Example:
        >>> import numpy as np
        >>> from hf_packing.sampling.row_sizes import sizes_of_documents
        >>> plan = InOrder(2).plan(sizes_of_documents(np.array([5, 3, 2])), Epoch(0, world_size=2))
        >>> plan.micro_batch(0, rank=1), plan.num_copies
        ([(2, False)], 0)
    """

    needs_row_per_rank: ClassVar[bool] = False  # one row is enough, since the other ranks get copies of this row

    rows_per_batch: int

    def __post_init__(self) -> None:
        self._set_checked(rows_per_batch=check_whole_number("rows_per_batch", self.rows_per_batch))

    def fit(self, sizes: RowSizes) -> FittedRows:
        return keep_rows(sizes, sizes.tokens > 0)

    def num_micro_batches(self, rows: FittedRows, epoch: Epoch) -> int:
        return -(-len(rows.kept) // (self.rows_per_batch * epoch.world_size))

    def plan_fitted(self, rows: FittedRows, epoch: Epoch) -> EpochPlan:
        return plan_in_order(rows, np.arange(0, len(rows.kept), self.rows_per_batch), epoch.world_size)


def plan_in_order(rows: FittedRows, begins: IntArray, world_size: int) -> EpochPlan:
    """Return the plan in which ranks take micro-batches of successive rows in turn, and copies of the first row.

    Args:
        rows: the rows.
        begins: integers [micro-batches]: the index of the first row of each micro-batch among the kept rows.
        world_size: number of ranks.
    """
    copies = -len(begins) % world_size
    return EpochPlan(
        world_size,
        rows=np.concatenate([rows.kept, np.repeat(rows.kept[:1], copies)]),
        is_copy=np.arange(len(rows.kept) + copies) >= len(rows.kept),
        offsets=np.concatenate([begins, len(rows.kept) + np.arange(copies + 1)]),
        left_out=rows.left_out,
    )
