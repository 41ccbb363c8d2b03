"""Count the work of an epoch in pairs of tokens: what padding costs, what packing costs, and how long ranks wait."""

from dataclasses import dataclass

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
    """Documents with tokens."""
    tokens: int
    """Tokens without padding."""
    slots: int
    """Tokens and padding."""
    steps: int
    """Of all ranks together."""
    time: float
    """Time of the slowest rank, summed over steps, in pairs of tokens; linear work is counted in pairs, too."""
    balance: float
    """Attention cost, mean / maximum over ranks, averaged over steps: 1 if no rank waits."""

    @property
    def documents_per_step(self) -> float:
        """Of all ranks together, on average."""
        return self.documents / self.steps if self.steps else 0.0

    @property
    def time_per_token(self) -> float:
        """In pairs of tokens."""
        return self.time / self.tokens if self.tokens else 0.0


def padded_work(lengths: IntArray, max_length: int, rows: int, ranks: int, linear_cost: float, seed: int) -> Work:
    """Count the work with padding: documents in random order, each padded to the longest of its micro-batch.

    Args:
        lengths: integers [documents], tokens; empty documents do not count, longer ones are cut.
        max_length: most tokens of a row.
        rows: documents of a micro-batch.
        ranks: that work at the same time.
        linear_cost: time that linear layers take for one token, in units of the time that attention takes for one pair
            of tokens.
        seed: of the order.
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
    """Count the work of packs: each is a micro-batch, and what it leaves free costs nothing.

    Args:
        plan: of documents.
        ranks: that work at the same time, each on one pack.
        linear_cost: as in `padded_work`.
        leveled: whether packs of similar cost run at the same time, as with TokenBudget, or in the order of the plan.
    """
    lengths = plan.segment_length.astype(np.float64)
    if not plan.num_packs:
        return Work(0, 0, 0, 0, 0.0, 1.0)
    tokens, squares = (np.add.reduceat(values, plan.pack_offsets[:-1]) for values in (lengths, lengths**2))
    if leveled and plan.num_packs >= ranks:
        whole = plan.num_packs // ranks * ranks
        order = group_by_cost(linear_cost * tokens[:whole] + squares[:whole], ranks, seed=0).ravel()
        order = np.concatenate([order, np.arange(whole, plan.num_packs)])
        tokens, squares = tokens[order], squares[order]
    documents = int(np.count_nonzero(np.bincount(plan.segment_document)))  # pieces of a document count once
    return _work_of(documents, int(tokens.sum()), tokens, squares, ranks, linear_cost)


def _work_of(
    documents: int,
    tokens: int,
    slots: npt.NDArray[np.generic],
    squares: _FloatArray,
    ranks: int,
    linear_cost: float,
) -> Work:
    """Count micro-batches in order, one on each rank at a time.

    An incomplete last step counts as a step, but its time is shared evenly by all ranks: how many of them are idle says
    nothing about padding or packing.
    """
    cost = linear_cost * slots.astype(np.float64) + squares
    steps = -(-len(cost) // ranks)
    whole = len(cost) // ranks * ranks
    time = float(values_of_ranks(cost[:whole], ranks).max(axis=1, initial=0).sum() + cost[whole:].sum() / ranks)
    attention = values_of_ranks(squares[:whole], ranks) if whole else values_of_ranks(squares, max(len(squares), 1))
    busy = attention.mean(axis=1) / np.maximum(attention.max(axis=1, initial=0), 1)
    return Work(documents, tokens, int(slots.sum()), steps, time, float(busy.mean()) if len(busy) else 1.0)


def values_of_ranks(values: _FloatArray, ranks: int) -> _FloatArray:
    """Return float64 [steps, ranks]; ranks without a micro-batch have zero."""
    filled = np.zeros(-(-len(values) // ranks) * ranks)
    filled[: len(values)] = values
    return filled.reshape(-1, ranks)
