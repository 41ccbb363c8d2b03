"""The numbers that a report shows: document lengths, and the results of padding and of each packing strategy."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from hf_packing.planning.lengths import IntArray, total_of
from hf_packing.planning.metrics import PackingMetrics
from hf_packing.report.work import Setup, Work
from hf_packing.strategies.compare import ComparedStrategy
from hf_packing.trees.find import SharedPrefixes


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


def summary_of_lengths(lengths: IntArray, empty: int) -> LengthSummary:
    """Return statistics of the lengths of documents with tokens, integers [documents], beside so many empty ones."""
    tokens, counts = total_of(lengths), np.bincount(lengths)
    median, p90, p99 = np.percentile(lengths, [50, 90, 99]).tolist()
    return LengthSummary(
        len(lengths), empty, tokens, float(lengths.mean()), median, p90, p99, longest=len(counts) - 1, counts=counts
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
    padded: PaddedRow
    """The result of padding to the same max_length."""
    work: Work
    """Work of an epoch that runs packs in the order of the plan."""
    leveled: Work
    """Work of an epoch in which packs of similar cost run at the same time on all ranks, as with TokenBudget."""

    @property
    def name(self) -> str:
        """The strategy as Python code, such as BestFit(2048)."""
        return self.compared.name

    @property
    def max_length(self) -> int:
        """The largest number of tokens that a pack may hold."""
        return self.padded.max_length

    @property
    def metrics(self) -> PackingMetrics:
        """The metrics of the strategy's plan."""
        return self.compared.metrics

    @property
    def speed_up(self) -> float:
        """Time per token with padding / time per token of `leveled`; counted in operations."""
        if not self.leveled.tokens:
            return 0.0
        padded = self.padded.work
        return (padded.time / padded.tokens) / (self.leveled.time / self.leveled.tokens)


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
    trained_tokens: int | None = None
    """The number of tokens that are trained on; None if the documents are not known, or `pack` does not take them."""
    skipped: Sequence[str] = ()
    """The lines and rows that were left out of the documents, with the reasons."""

    @property
    def taken(self) -> ReportRow:
        """The result of the recommended strategy."""
        return next(row for row in self.rows if row.name == self.recommendation.strategy)

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers and texts of the report as a dict to write as JSON, without the data of the picture."""
        return {
            "source": self.source,
            "lengths": {name: value for name, value in vars(self.lengths).items() if name != "counts"},
            "setup": asdict(self.setup),
            "padding": [
                {
                    **asdict(row),
                    "padding_ratio": row.padding_ratio,
                    "steps_per_epoch": row.work.steps,
                    "documents_per_step": row.work.documents_per_step,
                }
                for row in self.padded
            ],
            "strategies": [
                {
                    "strategy": row.name,
                    "max_length": row.max_length,
                    **asdict(row.metrics),
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
            "recommendation": asdict(self.recommendation),
            "shared_prefixes": self.shared and asdict(self.shared),
            "trained_tokens": self.trained_tokens,
            "skipped": list(self.skipped),
        }
