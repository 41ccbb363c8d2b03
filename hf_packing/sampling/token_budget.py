"""Micro-batches of at most so many tokens, packed anew in every epoch, with the cost levelled across ranks."""

from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray, check_whole_number, is_real
from hf_packing.planning.overflow import Overflow, check_overflow
from hf_packing.planning.shuffle import check_seed
from hf_packing.sampling.batching import Batching
from hf_packing.sampling.epoch_plan import EpochPlan, as_copies, plan_of, rows_of
from hf_packing.sampling.fill import fewest_micro_batches, fill, flat
from hf_packing.sampling.level import level
from hf_packing.sampling.pieces import Cut, cut_rows
from hf_packing.sampling.sizes import RowSizes

Balance = Literal["attention", "tokens"]

LINEAR_COST = 6 * 2048
"""Of a model 2048 wide: its linear layers work on a token as long as attention does on 6 * 2048 pairs of tokens."""


@dataclass(frozen=True)
class TokenBudget(Batching):
    """Micro-batches of at most max_tokens tokens, from packed rows or from plain documents.

    From documents this is packing while training: which documents share a micro-batch is new in every epoch. All ranks
    have equally many micro-batches, in every epoch, and none is empty. What does not divide evenly is made up by
    dividing micro-batches, and only where all of them have a single row, by copies with masked labels.

    Args:
        max_tokens: tokens of a micro-batch, a hard cap.
        balance: what is levelled among the micro-batches that run at the same time on different ranks: "attention", all
            work of a step, that is linear_cost * tokens + the sum of squared segment lengths; or "tokens".
        linear_cost: pairs of tokens that attention compares in the time in which everything else works on one token;
            None for that of the model, where one is known.
        match_documents_per_step: documents in a step of the optimiser, on average and over all ranks, to keep the
            schedule of training without packing; None for as many as fit.
        overflow: for a row with more than max_tokens: "error", "drop", and for documents also "split" or "truncate".
        seed: with the epoch it decides the order and which rows meet.

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
        if self.linear_cost is not None and (not is_real(self.linear_cost) or not 0 <= self.linear_cost < np.inf):
            raise PackingError(f"linear_cost: expected a number of at least 0, or None, got {self.linear_cost!r}")
        if self.match_documents_per_step is not None:
            check_whole_number("match_documents_per_step", self.match_documents_per_step)

    def cut(self, sizes: RowSizes) -> Cut:
        return cut_rows(sizes, self.max_tokens, self.overflow)

    def steps_per_epoch(self, cut: Cut, world_size: int, accumulation: int) -> int:
        fewest = -(-fewest_micro_batches(cut.sizes.tokens[cut.kept], self.max_tokens) // world_size)
        if self.match_documents_per_step is None:
            return fewest
        documents = int(cut.sizes.segments[cut.kept].sum())
        updates = max(1, round(documents / self.match_documents_per_step))
        step, wanted = f"{accumulation} x {world_size} micro-batches", self.match_documents_per_step
        if fewest > updates * accumulation:
            raise PackingError(
                f"match_documents_per_step: {wanted} do not fit into {step} of {self.max_tokens} tokens; "
                f"accumulate {-(-fewest // updates)} steps, raise max_tokens, or accept about "
                f"{documents * accumulation // fewest} documents"
            )
        if updates * accumulation * world_size > len(cut.kept):
            raise PackingError(
                f"match_documents_per_step: {wanted} are too few for {step} of at least one row each, with "
                f"{documents} documents in {len(cut.kept)} rows"
            )
        return updates * accumulation

    def plan_cut(self, cut: Cut, steps: int, epoch: int, world_size: int, accumulation: int) -> EpochPlan:
        wanted = steps * world_size
        seed = self.epoch_seed(epoch)
        tokens = cut.sizes.tokens[cut.kept]
        filled, offsets = flat(fill(tokens, self.max_tokens, min(wanted, len(tokens)), world_size, seed))
        rows = cut.kept[filled]
        if missing := wanted - (len(offsets) - 1):
            shortest = cut.kept[np.argsort(tokens, kind="stable")[:missing]]
            rows = np.concatenate([rows, as_copies(shortest)])
            offsets = np.concatenate([offsets, offsets[-1] + np.arange(1, missing + 1)])
        order = level(self.cost(cut, rows, offsets), world_size, accumulation, seed).ravel()
        return plan_of(rows, offsets, order, world_size, cut.left_out)

    def cost(self, cut: Cut, rows: IntArray, offsets: IntArray) -> IntArray:
        """float64 [micro-batches]: what each costs, in pairs of tokens that are compared."""
        tokens, squares = (
            np.add.reduceat(of_row[rows_of(rows)], offsets[:-1]) for of_row in (cut.sizes.tokens, cut.sizes.squares)
        )
        if self.balance == "tokens":
            return tokens.astype(np.float64)
        return (LINEAR_COST if self.linear_cost is None else self.linear_cost) * tokens + squares
