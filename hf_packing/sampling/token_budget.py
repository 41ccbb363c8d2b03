"""Micro-batches of at most so many tokens, packed anew in every epoch, with the cost levelled across ranks."""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray, Overflow, check_overflow, check_whole_number, is_real
from hf_packing.planning.permutation import check_seed
from hf_packing.sampling.batching import Batching
from hf_packing.sampling.epoch_plan import EpochPlan, as_copies, plan_of
from hf_packing.sampling.fill import fewest_micro_batches, fill, flat, sums
from hf_packing.sampling.level import LINEAR_COST, nearly, on_ranks, run_together
from hf_packing.sampling.pieces import Cut, cut_rows
from hf_packing.sampling.redeal import redeal
from hf_packing.sampling.schedule import Schedule
from hf_packing.sampling.sizes import RowSizes

Balance = Literal["attention", "tokens"]

MOST_LINEAR = 1e12
"""As good as no attention."""


@dataclass(frozen=True)
class TokenBudget(Batching):
    """Micro-batches of at most max_tokens tokens, from packed rows or from plain documents.

    From documents this is packing while training: which documents share a micro-batch is new in every epoch. All ranks
    have equally many micro-batches, in every epoch, and none is empty. What does not divide evenly is made up by
    dividing micro-batches, and only where all of them have a single row, by copies with masked labels.

    Where packed rows are as large as the budget, there is nothing to pack: the rows that run at the same time on
    different ranks are those of about equal cost, and as far as that leaves a choice, others in every epoch.

    Args:
        max_tokens: tokens of a micro-batch, a hard cap.
        balance: what is levelled among the micro-batches that run at the same time on different ranks: "attention", all
            work of a step, that is linear_cost * tokens + the sum of squared segment lengths; or "tokens".
        linear_cost: pairs of tokens that attention compares in the time in which everything else works on one token;
            None for that of the model, where one is known.
        match_documents_per_step: documents in a step of the optimiser, on average and over all ranks, to keep the
            schedule of training without packing; None for as many as fit.
        overflow: for a row with more than max_tokens: "error", "drop", and for documents also "split" or "truncate".
        seed: with the epoch it decides the order, and which rows meet.

    Raises:
        PackingError: a bad argument, which is named.

    Source:
        Balance by attention: arXiv 2503.07680 (hierarchical balance packing), here with micro-batches of one size.

    Example:
        >>> import numpy as np
        >>> from hf_packing.sampling.sizes import sizes_of_documents
        >>> plan = TokenBudget(8).plan_epoch(sizes_of_documents(np.array([5, 3, 2, 6, 4, 4])), world_size=2)
        >>> plan.num_steps, plan.num_copies, sorted(plan.rows.tolist())
        (2, 0, [0, 1, 2, 3, 4, 5])
    """

    max_tokens: int
    balance: Balance = field(default="attention", kw_only=True)
    linear_cost: float | None = field(default=None, kw_only=True)
    match_documents_per_step: int | None = field(default=None, kw_only=True)
    overflow: Overflow = field(default="error", kw_only=True)

    def __post_init__(self) -> None:
        check_overflow(self.overflow)
        self.settle(max_tokens=check_whole_number("max_tokens", self.max_tokens), seed=check_seed(self.seed))
        if self.balance not in get_args(Balance):
            raise PackingError(f"balance: expected one of {', '.join(get_args(Balance))}, got {self.balance!r}")
        if self.linear_cost is not None:
            if not is_real(self.linear_cost) or not 0 <= self.linear_cost <= MOST_LINEAR:
                raise PackingError(
                    f"linear_cost: expected a number from 0 to {MOST_LINEAR:g}, or None, got {self.linear_cost!r}"
                )
            self.settle(linear_cost=float(self.linear_cost))
        if self.match_documents_per_step is not None:
            matched = check_whole_number("match_documents_per_step", self.match_documents_per_step)
            self.settle(match_documents_per_step=matched)

    def cut(self, sizes: RowSizes) -> Cut:
        return cut_rows(sizes, self.max_tokens, self.overflow)

    def steps_per_epoch(self, cut: Cut, world_size: int, accumulation: int) -> int:
        tokens = cut.sizes.tokens[cut.kept]
        fewest = -(-fewest_micro_batches(tokens, self.max_tokens) // world_size)
        if self.match_documents_per_step is None:
            return fewest
        schedule = Schedule(
            documents=int(cut.sizes.segments[cut.kept].sum()),
            fewest=fewest,
            most=len(tokens) // world_size,
            world_size=world_size,
            max_tokens=self.max_tokens,
        )
        return schedule.steps(self.match_documents_per_step, accumulation)

    def plan_cut(self, cut: Cut, steps: int, epoch: int, world_size: int, accumulation: int) -> EpochPlan:
        wanted = steps * world_size
        seed = self.epoch_seed(epoch)
        tokens, squares = cut.sizes.tokens[cut.kept], cut.sizes.squares[cut.kept]
        groups = fill(tokens, self.max_tokens, min(wanted, len(tokens)), world_size, seed)
        missing = wanted - len(groups)
        groups = groups + np.argsort(tokens, kind="stable")[:missing, None].tolist()
        of_tokens, of_squares = sums(groups, tokens), sums(groups, squares)
        together = run_together(self.cost(of_tokens, nearly(of_squares, seed)), world_size, seed)
        cost = self.cost(tokens, squares)
        groups = redeal(groups, together, cost, tokens, self.max_tokens)
        order = on_ranks(sums(groups, cost), together, accumulation, seed).ravel()
        dealt, offsets = flat(groups)
        rows = cut.kept[dealt]
        if missing:  # every micro-batch has a single row
            rows[-missing:] = as_copies(rows[-missing:])
        return plan_of(rows, offsets, order, world_size, cut.left_out)

    def cost(self, tokens: IntArray, squares: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """float64: what rows or micro-batches cost, from integers and real numbers of the same shape."""
        if self.balance == "tokens":
            return tokens.astype(np.float64)
        linear = LINEAR_COST if self.linear_cost is None else self.linear_cost
        cost: npt.NDArray[np.float64] = linear * tokens + squares
        return cost
