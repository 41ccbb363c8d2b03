"""RankBatchSampler, the sampler of one rank, and InOrder, a batching for evaluation.

A DataLoader takes RankBatchSampler as its batch_sampler. RankBatchSampler is not a subclass of torch's BatchSampler and
has no batch_size. Otherwise accelerate would assume that all batches have the same number of rows, and would lose rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from hf_packing.checks import check_whole_number
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray
from hf_packing.rows.changes import LabelCounts
from hf_packing.sampling.epoch_plan import (
    Batching,
    Epoch,
    EpochPlan,
    FittedRows,
    RowSizes,
    SampledRow,
    check_batching,
    check_sizes,
    keep_rows,
)
from hf_packing.sampling.epoch_summary import EpochSummary
from hf_packing.sampling.token_budget import TokenBudget

_PLANS_VERSION = 4
"""Version of the plans. Increase this number with every code change that gives different micro-batches for the same
arguments. Training then refuses to resume from older checkpoints."""

SLOTS = "ranks x gradient_accumulation_steps"
"""Name of the number of micro-batches in an optimizer step, over all ranks, in checkpoints and messages."""


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
        self._num_micro_batches = batching.num_micro_batches(self.rows, first_epoch)
        self._planned: tuple[Epoch, EpochPlan] | None = None

    def __len__(self) -> int:
        return self._num_micro_batches

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps in an epoch."""
        return -(-self._num_micro_batches // self.accumulation)

    def set_epoch(self, number: int) -> None:
        """Make the next iteration yield the micro-batches of epoch `number`, counted from 0."""
        if number != self.epoch.number:
            self.first_micro_batch = 0
            self.epoch = Epoch(number, self.world_size, self.accumulation)

    @property
    def plan(self) -> EpochPlan:
        """The plan of the current epoch, for all ranks."""
        if self._planned is None or self._planned[0] != self.epoch:
            self._planned = self.epoch, self.batching.plan_fitted(self.rows, self.epoch)
        return self._planned[1]

    def __iter__(self) -> Iterator[list[SampledRow]]:
        return self.plan.micro_batches(self.rank, self.first_micro_batch)

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

    def check_can_resume(self, saved: dict[str, Any]) -> None:
        """Raise PackingError if a checkpoint was saved with different optimizer steps; the message says what differs.

        Args:
            saved: the values that `plan_inputs` returned when the checkpoint was saved.
        """
        for name, value in self.plan_inputs().items():
            if saved.get(name) == value:
                continue
            got, hint = repr(value), ""
            if name == SLOTS:
                got = f"{value} ({self.world_size} ranks, gradient_accumulation_steps={self.accumulation})"
                hint = _same_slots(saved.get(name), self.world_size)
            raise PackingError(
                f"{name}: expected {saved.get(name)!r}, as when the checkpoint was saved, got {got}; resuming would "
                f"train on some rows twice and on other rows not at all{hint}"
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
