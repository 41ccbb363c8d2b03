"""Count the work of an epoch, with padding or with packing, including the time in which ranks wait for each other.

The unit of work is one pair of tokens that attention compares. The work of linear layers is converted to this unit.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_packing.planning.lengths import IntArray, sums_of
from hf_packing.planning.permutation import random_order
from hf_packing.planning.plan import PackingPlan
from hf_packing.sampling.fill import group_by_cost


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

    @property
    def time_per_token(self) -> float:
        """Time for one token, in units of the time that attention takes for one pair of tokens."""
        return self.time / self.tokens


def padded_work(lengths: IntArray, max_length: int, rows: int, ranks: int, linear_cost: float) -> Work:
    """Return the work of an epoch with padding, for documents in random order that are cut to `max_length` tokens.

    Args:
        lengths: integers [documents]: the number of tokens in each document. Empty documents are left out.
        max_length: the most tokens that a row may have.
        rows: number of documents in a micro-batch, which are padded to the longest of them.
        ranks: number of ranks, which work at the same time.
        linear_cost: time that linear layers take for one token, in units of the time that attention takes for one pair
            of tokens.
    """
    kept = np.minimum(lengths[lengths > 0], max_length)
    batches = in_rows(kept[random_order(len(kept), 0, "padded")], rows)
    longest = batches.max(axis=1)
    slots = longest * np.count_nonzero(batches, axis=1)
    return _work_of(len(kept), int(batches.sum()), slots, slots * longest, ranks, linear_cost)


def packed_work(plan: PackingPlan, ranks: int, linear_cost: float, leveled: bool = False) -> Work:
    """Return the work of an epoch with packing, in which every pack is a micro-batch. Unused capacity costs nothing.

    If `leveled`, packs of similar cost run at the same time, as with TokenBudget; else in the order of the plan.
    """
    tokens, squares = sums_of_packs(plan)
    whole = plan.num_packs // ranks * ranks
    if leveled and whole:
        order = np.arange(plan.num_packs)
        order[:whole] = group_by_cost(linear_cost * tokens[:whole] + squares[:whole], ranks, seed=0).ravel()
        tokens, squares = tokens[order], squares[order]
    documents = int(np.count_nonzero(np.bincount(plan.segment_document)))  # a document in several pieces counts once
    return _work_of(documents, int(tokens.sum()), tokens, squares, ranks, linear_cost)


def sums_of_packs(plan: PackingPlan) -> tuple[IntArray, IntArray]:
    """Return the tokens of each pack, and its attention cost, int64 [packs] both."""
    lengths = plan.segment_length.astype(np.int64)
    return sums_of(lengths, plan.pack_offsets), sums_of(lengths**2, plan.pack_offsets)


def _work_of(
    documents: int, tokens: int, slots: npt.NDArray[Any], squares: npt.NDArray[Any], ranks: int, linear_cost: float
) -> Work:
    """Return the work of an epoch whose micro-batches run in the given order, one on each rank in every step.

    If the last step has fewer micro-batches than ranks, its time is its total cost divided by the number of ranks, as
    if no rank were idle: neither padding nor packing is the reason why ranks are idle in the last step.
    """
    cost = linear_cost * slots + squares
    whole = len(cost) // ranks * ranks
    time = float(in_rows(cost[:whole], ranks).max(axis=1).sum() + cost[whole:].sum() / ranks)
    attention = in_rows(squares[:whole], ranks) if whole else in_rows(squares, max(len(squares), 1))
    balance = float((attention.mean(axis=1) / attention.max(axis=1)).mean()) if len(cost) else 1.0
    return Work(documents, tokens, int(slots.sum()), -(-len(cost) // ranks), time, balance)


def in_rows(values: npt.NDArray[Any], width: int) -> npt.NDArray[np.float64]:
    """Return values as an array, float64 [rows, width], of which the last row ends with zeros."""
    filled = np.zeros(-(-len(values) // width) * width)
    filled[: len(values)] = values
    return filled.reshape(-1, width)
