"""How long steps take, counted in pairs of tokens: what padding costs, what packing costs, and what ranks wait for."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hf_packing.planning.lengths import IntArray
from hf_packing.planning.permutation import random_order
from hf_packing.planning.plan import PackingPlan
from hf_packing.sampling.balance import group_by_cost

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Work:
    """Of one epoch on several ranks."""

    documents: int
    """With tokens."""
    tokens: int
    """Real ones."""
    slots: int
    """With padding."""
    steps: int
    """Of all ranks together."""
    time: float
    """Of the slowest rank at each step, summed, in pairs of tokens; linear work is counted in pairs, too."""
    balance: float
    """Mean over largest of what attention costs on the ranks, averaged over steps: 1 where none waits."""

    @property
    def documents_per_step(self) -> float:
        """On all ranks together."""
        return self.documents / self.steps if self.steps else 0.0

    @property
    def time_per_token(self) -> float:
        return self.time / self.tokens if self.tokens else 0.0


def padded_work(lengths: IntArray, max_length: int, rows: int, ranks: int, linear_cost: float, seed: int) -> Work:
    """Documents in random order, so many rows to a micro-batch, each as long as the longest among them.

    Args:
        lengths: integers [documents], tokens; empty ones do not count, longer ones are cut.
        max_length: tokens a row may have.
        rows: of a micro-batch.
        ranks: that work at the same time.
        linear_cost: pairs of tokens that attention compares in the time of everything else for one token.
        seed: of the order.
    """
    kept = np.minimum(lengths[lengths > 0], max_length).astype(np.int64)
    kept = kept[random_order(len(kept), seed, "padded")]
    filled = np.zeros(-(-len(kept) // rows) * rows, dtype=np.int64)
    filled[: len(kept)] = kept
    batches = filled.reshape(-1, rows)
    longest = batches.max(axis=1, initial=0)
    slots = longest * np.count_nonzero(batches, axis=1)
    return work_of(len(kept), int(kept.sum()), slots, (slots * longest).astype(np.float64), ranks, linear_cost)


def packed_work(plan: PackingPlan, ranks: int, linear_cost: float, levelled: bool = False) -> Work:
    """Packs as micro-batches without padding, in the order of the plan, or with those of similar cost together.

    Args:
        plan: of documents.
        ranks: that work at the same time, each on one pack.
        linear_cost: as in `padded_work`.
        levelled: whether packs of similar cost run at the same time, as with TokenBudget.
    """
    lengths = plan.segment_length.astype(np.float64)
    if not plan.num_packs:
        return Work(0, 0, 0, 0, 0.0, 1.0)
    tokens, squares = (np.add.reduceat(values, plan.pack_offsets[:-1]) for values in (lengths, lengths**2))
    if levelled and plan.num_packs >= ranks:
        whole = plan.num_packs // ranks * ranks
        order = group_by_cost(linear_cost * tokens[:whole] + squares[:whole], ranks, seed=0).ravel()
        order = np.concatenate([order, np.arange(whole, plan.num_packs)])
        tokens, squares = tokens[order], squares[order]
    documents = int(np.count_nonzero(np.bincount(plan.segment_document)))  # pieces of one are one
    return work_of(documents, int(tokens.sum()), tokens, squares, ranks, linear_cost)


def work_of(
    documents: int,
    tokens: int,
    slots: npt.NDArray[np.generic],
    squares: FloatArray,
    ranks: int,
    linear_cost: float,
) -> Work:
    """Micro-batches in order, so many at the same time. A last step that is incomplete counts as one, but its time as
    if it were shared evenly: how many ranks stand idle there says nothing of padding or packing."""
    cost = linear_cost * slots.astype(np.float64) + squares
    steps = -(-len(cost) // ranks)
    whole = len(cost) // ranks * ranks
    time = float(on_ranks(cost[:whole], ranks).max(axis=1, initial=0).sum() + cost[whole:].sum() / ranks)
    attention = on_ranks(squares[:whole], ranks) if whole else on_ranks(squares, max(len(squares), 1))
    busy = attention.mean(axis=1) / np.maximum(attention.max(axis=1, initial=0), 1)
    return Work(documents, tokens, int(slots.sum()), steps, time, float(busy.mean()) if len(busy) else 1.0)


def on_ranks(values: FloatArray, ranks: int) -> FloatArray:
    """float64 [steps, ranks]; ranks without a micro-batch have zero."""
    filled = np.zeros(-(-len(values) // ranks) * ranks)
    filled[: len(values)] = values
    return filled.reshape(-1, ranks)
