"""Count the work of an epoch, with padding or with packing, including the time in which ranks wait for each other.

The unit of work is one pair of tokens that attention compares. The work of linear layers is converted to this unit.
"""

from dataclasses import dataclass

import numpy as np

from hf_packing.planning.lengths import FloatArray, IntArray, sums_of, total_of
from hf_packing.planning.permutation import random_order
from hf_packing.planning.plan import PackingPlan
from hf_packing.sampling.fill import group_by_cost, mean_over_max


@dataclass(frozen=True)
class Setup:
    """The settings of the training run that a report assumes."""

    ranks: int
    """Number of ranks; each rank works on one pack at a time."""
    padded_rows: int
    """Number of documents in a micro-batch without packing."""
    linear_cost: float
    """Time that linear layers take for one token, in units of the time that attention takes for one pair of tokens."""


@dataclass(frozen=True)
class Work:
    """The work of one epoch on several ranks."""

    documents: int
    """Number of documents with tokens."""
    tokens: int
    """Number of tokens, without padding."""
    slots: int
    """Number of tokens, including padding. Empty slots at the end of a pack do not count."""
    steps: int
    """Number of steps; in a step, every rank runs one micro-batch."""
    time: float
    """Time of the slowest rank, summed over steps, in units of the time that attention takes for one pair of tokens."""
    balance: float
    """Mean / maximum of attention cost over the ranks of a step, averaged over steps; 1 if no rank waits."""

    @property
    def documents_per_step(self) -> float:
        """Mean number of documents in a step, over all ranks."""
        return self.documents / self.steps if self.steps else 0.0


def padded_work(lengths: IntArray, max_length: int, setup: Setup) -> Work:
    """Return the work of an epoch with padding, for documents in random order that are cut to `max_length` tokens.

    All documents have tokens. Those of a micro-batch are padded to the longest of them.
    """
    kept = np.minimum(lengths, max_length)
    batches = in_rows(kept[random_order(len(kept), 0, "padded")], setup.padded_rows)
    longest = batches.max(axis=1)
    slots = longest * np.count_nonzero(batches, axis=1)
    return _work_of(len(kept), total_of(kept), slots, slots * longest, setup)


def packed_work(plan: PackingPlan, setup: Setup) -> tuple[Work, Work]:
    """Return the fields of ReportRow that a plan gives: work and leveled.

    Every pack is a micro-batch, and unused capacity costs nothing.
    """
    lengths = plan.segment_length.astype(np.int64)
    tokens, attention = sums_of(lengths, plan.pack_offsets), sums_of(lengths**2, plan.pack_offsets)
    documents = int(np.count_nonzero(np.bincount(plan.segment_document)))  # a document in several pieces counts once
    total = total_of(tokens)
    work = _work_of(documents, total, tokens, attention, setup)
    whole = plan.num_packs // setup.ranks * setup.ranks
    cost = setup.linear_cost * tokens + attention
    order = np.append(group_by_cost(cost[:whole], setup.ranks, seed=0), np.arange(whole, plan.num_packs))
    return work, _work_of(documents, total, tokens[order], attention[order], setup)


def _work_of(documents: int, tokens: int, slots: IntArray, attention: IntArray, setup: Setup) -> Work:
    """Return the work of an epoch whose micro-batches run in the given order, one on each rank in every step.

    If the last step has fewer micro-batches than ranks, its time is its total cost divided by the number of ranks, as
    if no rank were idle: neither padding nor packing is the reason why ranks are idle in the last step.
    """
    steps = in_rows(setup.linear_cost * slots + attention, setup.ranks)
    full = len(slots) // setup.ranks
    time = float(steps[:full].max(axis=1).sum() + steps[full:].sum() / setup.ranks)
    compared = in_rows(attention, setup.ranks)[:full] if full else attention[np.newaxis]
    balance = mean_over_max(compared, compared) if len(slots) else 1.0
    return Work(documents, tokens, total_of(slots), len(steps), time, balance)


def in_rows(values: IntArray, width: int) -> FloatArray:
    """Return values as an array, float64 [rows, width], of which the last row ends with zeros."""
    return np.pad(values.astype(np.float64), (0, -len(values) % width)).reshape(-1, width)
