"""The numbers that a report shows: document lengths, and the results of padding and of each packing strategy."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_packing.planning.lengths import IntArray
from hf_packing.planning.metrics import PackingMetrics
from hf_packing.planning.plan import PackingPlan
from hf_packing.report.work import Work, in_rows, packed_work, padded_work, sums_of_packs
from hf_packing.strategies.compare import ComparedStrategy
from hf_packing.trees.measure import SharedPrefixes

_POINTS = 200
"""Number of points on the curve of how full packs are."""
_STEPS = 48
"""Number of training steps for which a picture shows the work of the ranks."""


@dataclass(frozen=True)
class Setup:
    """The settings of the training run that a report assumes."""

    ranks: int
    """Number of ranks; each rank works on one pack at a time."""
    padded_rows: int
    """Number of documents in a micro-batch without packing."""
    linear_cost: float
    """Time that linear layers take for one token, in units of the time that attention takes for one pair of tokens."""


@dataclass(frozen=True, eq=False)
class LengthSummary:
    """Statistics of document lengths, in tokens. Empty documents are counted in `empty`, and nowhere else."""

    documents: int
    """Number of documents with tokens."""
    empty: int
    tokens: int
    mean: float
    median: float
    p90: float
    p99: float
    longest: int
    counts: IntArray = field(repr=False)
    """int64 [longest + 1]: the number of documents of each length."""


def summary_of_lengths(lengths: IntArray) -> LengthSummary:
    """Return statistics of the lengths of documents, integers [documents], of which at least one is above zero."""
    real = lengths[lengths > 0]
    median, p90, p99 = np.percentile(real, [50, 90, 99]).tolist()
    return LengthSummary(
        documents=len(real),
        empty=len(lengths) - len(real),
        tokens=int(real.sum(dtype=np.int64)),
        mean=float(real.mean()),
        median=median,
        p90=p90,
        p99=p99,
        longest=int(real.max()),
        counts=np.bincount(real),
    )


@dataclass(frozen=True)
class PaddedRow:
    """The result of padding without packing, for documents that are cut to at most max_length tokens."""

    max_length: int
    work: Work
    cut_documents: int
    """Number of documents that are cut, since they are longer than max_length."""
    lost_tokens: int
    """Number of tokens that are cut off, because they are beyond max_length."""

    @property
    def padding_ratio(self) -> float:
        """The share of padding among all token positions of the padded batches."""
        return 1 - self.work.tokens / self.work.slots


@dataclass(frozen=True, eq=False)
class ReportRow:
    """The result of packing the documents with one strategy."""

    compared: ComparedStrategy
    work: Work
    """Work of an epoch that runs packs in the order of the plan."""
    leveled: Work
    """Work of an epoch in which packs of similar cost run at the same time on all ranks, as with TokenBudget."""
    speed_up: float
    """Time per token with padding to the same max_length / time per token of `leveled`; counted in operations."""
    fill: npt.NDArray[np.float64]
    """float64 [at most 200]: the filled share of packs, from the emptiest pack to the fullest."""
    attention: npt.NDArray[np.float64]
    """float64 [at most 48 steps, ranks]: attention cost of the pack that each rank runs, in the order of the plan."""

    @property
    def name(self) -> str:
        """The strategy as Python code, such as BestFit(2048)."""
        return self.compared.name

    @property
    def max_length(self) -> int:
        """The largest number of tokens that a pack may hold."""
        return self.compared.strategy.largest_capacity

    @property
    def metrics(self) -> PackingMetrics:
        """The metrics of the strategy's plan."""
        return self.compared.metrics


@dataclass(frozen=True)
class Recommendation:
    """The recommended strategy, and the reason."""

    strategy: str
    reason: str
    speed_up: float
    """Speed-up over padding to the same length, counted in operations, not measured."""

    def __str__(self) -> str:
        return f"{self.strategy}: {self.reason}"


@dataclass(frozen=True, repr=False)
class Figures:
    """All numbers and texts that a report shows."""

    lengths: LengthSummary
    setup: Setup
    padded: tuple[PaddedRow, ...]
    """The results of padding, one result for each max_length."""
    rows: tuple[ReportRow, ...]
    recommendation: Recommendation
    source: str = ""
    """Where the documents come from."""
    shared: SharedPrefixes | None = None
    """How much smaller the documents become if they share prefixes; None if the documents are not known."""

    @property
    def taken(self) -> ReportRow:
        """The result of the recommended strategy."""
        return next(row for row in self.rows if row.name == self.recommendation.strategy)

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers and texts of the report as a dict to write as JSON, without the data of the pictures."""
        return {
            "source": self.source,
            "lengths": {name: value for name, value in vars(self.lengths).items() if name != "counts"},
            "setup": dataclasses.asdict(self.setup),
            "padding": [
                {
                    "max_length": row.max_length,
                    "padding_ratio": row.padding_ratio,
                    "steps_per_epoch": row.work.steps,
                    "documents_per_step": row.work.documents_per_step,
                    **dataclasses.asdict(row),
                }
                for row in self.padded
            ],
            "strategies": [
                {
                    "strategy": row.name,
                    "max_length": row.max_length,
                    **dataclasses.asdict(row.metrics),
                    "above_bound": row.compared.gap,
                    "steps_per_epoch": row.work.steps,
                    "documents_per_step": row.work.documents_per_step,
                    "speed_up": row.speed_up,
                    "attention_balance": row.work.balance,
                    "attention_balance_leveled": row.leveled.balance,
                    "seconds": row.compared.seconds,
                    "note": row.compared.note,
                }
                for row in self.rows
            ],
            "recommendation": dataclasses.asdict(self.recommendation),
            "shared_prefixes": None if self.shared is None else dataclasses.asdict(self.shared),
        }


def row_of_padding(lengths: IntArray, max_length: int, setup: Setup) -> PaddedRow:
    """Return the result of padding without packing, for documents that are cut to at most max_length tokens."""
    longer = lengths[lengths > max_length].astype(np.int64)
    work = padded_work(lengths, max_length, setup.padded_rows, setup.ranks, setup.linear_cost)
    return PaddedRow(max_length, work, len(longer), int((longer - max_length).sum()))


def row_of_strategy(compared: ComparedStrategy, plan: PackingPlan, setup: Setup, padded: Work) -> ReportRow:
    """Return the result of packing documents with a strategy; `padded` is the work of padding to the same length."""
    leveled = packed_work(plan, setup.ranks, setup.linear_cost, leveled=True)
    tokens, squares = sums_of_packs(plan)
    fill = np.sort(tokens / plan.pack_capacity)
    return ReportRow(
        compared,
        packed_work(plan, setup.ranks, setup.linear_cost),
        leveled,
        padded.time_per_token / leveled.time_per_token if leveled.tokens else 0.0,
        fill[np.linspace(0, len(fill) - 1, _POINTS).astype(np.int64)] if len(fill) else fill,
        in_rows(squares[: _STEPS * setup.ranks], setup.ranks),
    )
