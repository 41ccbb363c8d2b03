"""Count the work of an epoch, with padding or with packing, including the time in which ranks wait for each other.

The unit of work is one pair of tokens that attention compares. The work of linear layers is converted to this unit.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_packing.planning.lengths import IntArray
from hf_packing.planning.permutation import random_order
from hf_packing.planning.plan import PackingPlan
from hf_packing.sampling.fill import group_by_cost

_FloatArray = npt.NDArray[np.float64]


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
        return self.time / self.tokens if self.tokens else 0.0


def padded_work(lengths: IntArray, max_length: int, rows: int, ranks: int, linear_cost: float, seed: int) -> Work:
    """Return the work of an epoch with padding.

    Documents come in random order, and are padded to the longest document of their micro-batch.

    Args:
        lengths: integers [documents]: the number of tokens in each document. Empty documents are left out, and
            documents longer than max_length are cut.
        max_length: the most tokens that a row may have.
        rows: number of documents in a micro-batch.
        ranks: number of ranks, which work at the same time.
        linear_cost: time that linear layers take for one token, in units of the time that attention takes for one pair
            of tokens.
        seed: seed of the random order.
    """
    kept = np.minimum(lengths[lengths > 0], max_length).astype(np.int64)
    kept = kept[random_order(len(kept), seed, "padded")]
    filled = np.zeros(-(-len(kept) // rows) * rows, dtype=np.int64)
    filled[: len(kept)] = kept
    batches = filled.reshape(-1, rows)
    longest = batches.max(axis=1, initial=0)
    slots = longest * np.count_nonzero(batches, axis=1)
    return _work_of(len(kept), int(kept.sum()), slots, (slots * longest).astype(np.float64), ranks, linear_cost)


def packed_work(plan: PackingPlan, ranks: int, linear_cost: float, leveled: bool = False) -> Work:
    """Return the work of an epoch with packing, in which every pack is a micro-batch. Unused capacity costs nothing.

    Args:
        plan: the plan whose packs are run.
        ranks: number of ranks, each of which works on one pack at a time.
        linear_cost: time that linear layers take for one token, as in `padded_work`.
        leveled: True to run packs of similar cost at the same time, as with TokenBudget; False to run packs in the
            order of the plan.
    """
    tokens, squares = sums_of_packs(plan)
    whole = plan.num_packs // ranks * ranks
    if leveled and whole:
        order = group_by_cost(linear_cost * tokens[:whole] + squares[:whole], ranks, seed=0).ravel()
        order = np.concatenate([order, np.arange(whole, plan.num_packs)])
        tokens, squares = tokens[order], squares[order]
    documents = int(np.count_nonzero(np.bincount(plan.segment_document)))  # a document in several pieces counts once
    return _work_of(documents, int(tokens.sum()), tokens, squares, ranks, linear_cost)


def sums_of_packs(plan: PackingPlan) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the tokens of each pack, and its attention cost, float64 [packs] both."""
    lengths = plan.segment_length.astype(np.float64)
    pack = np.repeat(np.arange(plan.num_packs), np.diff(plan.pack_offsets))
    return np.bincount(pack, lengths, plan.num_packs), np.bincount(pack, lengths**2, plan.num_packs)


def _work_of(
    documents: int,
    tokens: int,
    slots: npt.NDArray[np.generic],
    squares: _FloatArray,
    ranks: int,
    linear_cost: float,
) -> Work:
    """Return the work of an epoch whose micro-batches run in the given order, one on each rank in every step.

    If the last step has fewer micro-batches than ranks, its time is its total cost divided by the number of ranks, as
    if no rank were idle: neither padding nor packing is the reason why ranks are idle in the last step.

    Args:
        documents: number of documents with tokens.
        tokens: number of tokens, without padding.
        slots: numbers [micro-batches]: the tokens of each micro-batch, including padding.
        squares: float64 [micro-batches]: the attention cost of each micro-batch.
        ranks: number of ranks.
        linear_cost: time that linear layers take for one token, as in `padded_work`.
    """
    cost = linear_cost * slots.astype(np.float64) + squares
    steps = -(-len(cost) // ranks)
    whole = len(cost) // ranks * ranks
    time = float(values_of_ranks(cost[:whole], ranks).max(axis=1, initial=0).sum() + cost[whole:].sum() / ranks)
    attention = values_of_ranks(squares[:whole], ranks) if whole else values_of_ranks(squares, max(len(squares), 1))
    busy = attention.mean(axis=1) / np.maximum(attention.max(axis=1, initial=0), 1)
    return Work(documents, tokens, int(slots.sum()), steps, time, float(busy.mean()) if len(busy) else 1.0)


def values_of_ranks(values: _FloatArray, ranks: int) -> _FloatArray:
    """Return an array, float64 [steps, ranks], with the value of the micro-batch that each rank runs in each step.

    Ranks without a micro-batch in the last step have the value 0.

    Args:
        values: float64 [micro-batches], in the order in which the micro-batches run.
        ranks: number of ranks.
    """
    filled = np.zeros(-(-len(values) // ranks) * ranks)
    filled[: len(values)] = values
    return filled.reshape(-1, ranks)
