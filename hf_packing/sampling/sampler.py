"""RankBatchSampler, the sampler of one rank, and EpochSummary, the counts of an epoch.

A DataLoader takes RankBatchSampler as its batch_sampler. RankBatchSampler is not a subclass of torch's BatchSampler and
has no batch_size. Otherwise accelerate would assume that all batches have the same number of rows, and would lose rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from hf_packing.checks import check_whole_number
from hf_packing.errors import PackingError
from hf_packing.planning.length_schedule import LengthSchedule
from hf_packing.planning.lengths import total_of
from hf_packing.planning.permutation import shuffles_of_numpy
from hf_packing.planning.rank_layout import LayoutCounts
from hf_packing.rows.changes import LabelCounts
from hf_packing.sampling.batching import Batching, Epoch, EpochPlan, SampledRow
from hf_packing.sampling.sizes import RowSizes, TreeCounts
from hf_packing.sampling.token_budget import TokenBudget

_PLANS_VERSION = 5
"""Version of the plans. Increase this number with every code change that gives different micro-batches for the same
arguments. Training then refuses to resume from older checkpoints."""

SLOTS = "ranks x gradient_accumulation_steps"
"""Name of the number of micro-batches in an optimizer step, over all ranks, in checkpoints and messages."""


@dataclass(frozen=True)
class EpochSummary:
    """Counts of one epoch over all ranks, which `print` shows as text."""

    optimizer_steps: int
    num_micro_batches: int
    """Number of micro-batches of each rank."""
    world_size: int
    documents: int
    """Number of documents; every segment of a packed row and every piece of a split document counts as a document."""
    tokens: int
    """Number of tokens in all rows; in rows of trees, shared tokens are counted once."""
    documents_per_step: float
    """Mean number of documents in an optimizer step."""
    tokens_per_step: float
    """Mean number of tokens in an optimizer step."""
    largest_micro_batch: int
    """Number of tokens in the largest micro-batch."""
    token_utilization: float
    """Mean number of tokens over ranks / maximum over ranks, averaged over micro-batches; 1 if no rank waits."""
    attention_utilization: float
    """The same ratio as token_utilization, but of attention cost, which is the sum of squared segment lengths."""
    copies: int
    """Number of copies of rows with masked labels, which are added if rows are too few for all micro-batches."""
    left_out: int
    """Number of rows that are empty, or too long and dropped."""
    lost_tokens: int
    """Number of tokens in dropped rows and in the cut-off ends of truncated documents."""
    labels: LabelCounts | None = None
    """Number of labels other than -100 that are left, and of those in the dataset; the first token of a document has no
    label if the model predicts the next token. None if not known, as where a collator draws the labels."""
    unpacked_documents_per_step: int | None = None
    """Number of documents in an optimizer step without packing; None if match_documents_per_step is set already, or
    cannot be set to this number."""
    split: int = 0
    """Number of documents that are split into pieces, since they are longer than a micro-batch may be."""
    packed_rows: int | None = None
    """Number of packed rows that hold the documents; None if documents are packed while training, or are in trees."""
    trees: TreeCounts | None = None
    """Counts of the documents that share prefixes; None if rows are not trees."""
    length_schedule: LengthSchedule | None = None
    """The schedule that cuts documents in training; the counts above are without its borders."""
    filled: int | None = None
    """Number of tokens that only fill up documents and micro-batches to multiples, those of copies included; None
    without align_tokens."""
    layout: LayoutCounts | None = None
    """Counts of the documents on several ranks; None without max_ranks_per_document."""
    isolation: object = field(default=None, compare=False, repr=False)
    """An object whose text says what was proven about isolation so far; None if this is not known."""

    def __str__(self) -> str:
        lines = [
            f"{self.optimizer_steps:,} optimizer steps per epoch, each with {self.documents_per_step:,.1f} documents, "
            f"{self.tokens_per_step:,.0f} tokens on average",
            f"{self.world_size} x {self.num_micro_batches:,} micro-batches (ranks x micro-batches per rank), the "
            f"largest with {self.largest_micro_batch:,} tokens",
        ]
        if self.world_size > 1:
            lines.append(
                f"utilization of the ranks: {self.token_utilization:.1%} by tokens, {self.attention_utilization:.1%} "
                "by attention"
            )
        lines.append(
            f"{self.copies:,} masked copies, {self.left_out:,} rows left out, {self.lost_tokens:,} tokens lost"
            f"{'' if self.labels is None else f'; {self.labels}'}"
        )
        if self.filled is not None:
            lines.append(
                f"{self.filled:,} masked tokens fill up micro-batches to multiples, "
                f"{self.filled / self.tokens:.1%} of the documents' tokens"
            )
        if self.unpacked_documents_per_step is not None:
            lines.append(
                f"without packing: {self.unpacked_documents_per_step:,} documents per optimizer step "
                f"({-(-self.documents // self.unpacked_documents_per_step):,} steps); "
                f"match_documents_per_step={self.unpacked_documents_per_step} keeps that schedule"
            )
        if self.trees is None:
            rows = ", packed while training" if self.packed_rows is None else f" in {self.packed_rows:,} packed rows"
            split = f"; {self.split:,} longer ones are split, and each piece counts" if self.split else ""
            lines.insert(0, f"{self.documents:,} documents{rows}{split}")
        else:
            lines.append(str(self.trees))
        if self.layout is not None:
            lines.append(str(self.layout))
        if self.length_schedule is not None:
            lines.append(f"length of segments: {self.length_schedule}")
        return "\n".join(lines if self.isolation is None else [*lines, str(self.isolation)])


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
        PackingError: fewer rows than ranks, or a row longer than a micro-batch.

    Example:
        >>> import numpy as np
        >>> from hf_packing.sampling.sizes import sizes_of_documents
        >>> from hf_packing.sampling.token_budget import TokenBudget
        >>> sampler = RankBatchSampler(TokenBudget(8), sizes_of_documents(np.array([5, 3, 2, 6])), 2, 0)
        >>> len(sampler), len(list(sampler))
        (1, 1)
    """

    def __init__(
        self, batching: Batching, sizes: RowSizes, world_size: int = 1, rank: int = 0, accumulation: int = 1
    ) -> None:
        self.batching = batching
        self.epoch = Epoch(0, world_size, accumulation)
        """The epoch whose micro-batches the next iteration yields."""
        self.rank = rank
        self.rows = batching.fit_enough(sizes, world_size)
        """The rows that micro-batches are made of; rows that were too long are cut or left out."""
        self.sizes = sizes
        self.more_inputs: dict[str, str] = {}
        """What else decides the rows, such as how tokens are masked; part of `plan_inputs`."""
        self.first_micro_batch = 0
        """Number of the first micro-batch that the next iteration yields. The rows of earlier ones are not read."""
        self._plan: EpochPlan | None = None
        self.on_ranks: Any = None
        """The `RowsOnRanks` that lays rows out on several ranks; None if each is on one."""

    def __len__(self) -> int:
        return self.plan.num_micro_batches

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps in an epoch."""
        return -(-len(self) // self.epoch.accumulation)

    def set_epoch(self, number: int) -> None:
        """Make the next iteration yield the micro-batches of epoch `number`, counted from 0."""
        number = check_whole_number("epoch", number, minimum=0)
        if number != self.epoch.number:
            self.epoch, self._plan = replace(self.epoch, number=number), None

    @property
    def plan(self) -> EpochPlan:
        """The plan of the current epoch, for all ranks."""
        if self._plan is None:
            self._plan = self.batching.plan_fitted(self.rows, self.epoch)
        return self._plan

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
        plan, fitted, steps = self.plan, self.rows, self.optimizer_steps
        trees = self.sizes.trees or TreeCounts(0, 0, 0)
        tokens = total_of(fitted.sizes.tokens[fitted.kept])
        documents = total_of(fitted.sizes.segments[fitted.kept])
        held, sizes, layout = (
            (plan, fitted.sizes, None) if self.on_ranks is None else self.on_ranks.parts(plan, fitted.sizes)
        )
        multiple = self.batching.align_tokens
        in_batches = -(-held.per_micro_batch(sizes.tokens) // multiple) * multiple
        return EpochSummary(
            optimizer_steps=steps,
            num_micro_batches=plan.num_micro_batches,
            world_size=held.world_size,
            documents=documents,
            tokens=tokens,
            documents_per_step=documents / steps,
            tokens_per_step=tokens / steps,
            copies=plan.num_copies,
            left_out=len(plan.left_out) + trees.left_out,
            lost_tokens=fitted.lost_tokens + trees.lost_tokens,
            labels=labels,
            unpacked_documents_per_step=unpacked if unpacked is not None and self._can_match(unpacked) else None,
            split=0 if fitted.pieces is None else int((np.bincount(fitted.pieces.document) > 1).sum()),
            packed_rows=len(fitted.kept) if fitted.sizes.packed and self.sizes.trees is None else None,
            trees=self.sizes.trees,
            length_schedule=getattr(self.batching, "length_schedule", None),
            isolation=isolation,
            largest_micro_batch=int(in_batches.max()),
            token_utilization=held.utilization(sizes.tokens),
            attention_utilization=held.utilization(sizes.squared_lengths),
            filled=int(in_batches.sum() - sizes.tokens[plan.rows].sum()) if multiple > 1 else None,
            layout=layout,
        )

    def _can_match(self, documents: int) -> bool:
        """Return whether match_documents_per_step can be set to `documents`, a number of documents per optimizer step.

        The result is False if match_documents_per_step is set already, or if the batching is not a TokenBudget.
        """
        if not isinstance(self.batching, TokenBudget) or self.batching.match_documents_per_step is not None:
            return False
        try:
            replace(self.batching, match_documents_per_step=documents).num_filled(self.rows, self.epoch)
        except PackingError:
            return False
        return True

    def plan_inputs(self) -> dict[str, str | int]:
        """Return all values that determine the optimizer steps, except the epoch. Checkpoints store these values."""
        return {
            "plans": _PLANS_VERSION,
            "shuffles_of_numpy": shuffles_of_numpy(),
            "batching": type(self.batching).__name__,
            **{each.name: repr(getattr(self.batching, each.name)) for each in fields(self.batching)},
            "dataset": f"{self.sizes} with the digest {self.sizes.fingerprint}",
            SLOTS: self.epoch.slots,
            **self.more_inputs,
        }

    def check_can_resume(self, saved: dict[str, Any]) -> None:
        """Raise PackingError if a checkpoint was saved with different optimizer steps; the message says what differs.

        Args:
            saved: the values that `plan_inputs` returned when the checkpoint was saved.
        """
        for name, value in self.plan_inputs().items():
            if saved.get(name) != value:
                raise PackingError(
                    f"{name}: expected {saved.get(name)}, as when the checkpoint was saved, got {value}; resuming "
                    "would go on with other batches, with some rows twice and others not at all"
                )
