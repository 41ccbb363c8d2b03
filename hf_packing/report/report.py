"""packing_report: what packing would do for documents of these lengths, strategy by strategy, and which to take."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray, check_whole_number
from hf_packing.planning.plan import PackingPlan
from hf_packing.report.recommend import Recommendation, recommend
from hf_packing.report.sample import PlanSample, sample_of
from hf_packing.report.summary_of_lengths import LengthSummary, summary_of_lengths
from hf_packing.report.tables import as_html, as_text
from hf_packing.report.work import Work, packed_work, padded_work
from hf_packing.sampling.balance import LINEAR_COST
from hf_packing.strategies.base import Strategy, check_strategy, read_lengths
from hf_packing.strategies.bucket import Bucket
from hf_packing.strategies.compare import ComparedStrategy, each_planned, with_best_bounds, workload_of
from hf_packing.strategies.greedy import BestFit
from hf_packing.strategies.sequential import FirstCome, FixedLength


@dataclass(frozen=True)
class Setup:
    """What an epoch is thought to run on."""

    ranks: int = 8
    """Each works on one pack at a time."""
    padded_rows: int = 16
    """Documents of a micro-batch without packing."""
    linear_cost: float = LINEAR_COST
    """Pairs of tokens that attention compares in the time of everything else for one token."""


@dataclass(frozen=True)
class ReportRow:
    """What one strategy makes of the documents."""

    compared: ComparedStrategy
    work: Work
    """Of an epoch whose packs come in the order of the plan."""
    levelled: Work
    """Of one that has packs of similar cost at the same time, as with TokenBudget."""
    speed_up: float
    """Time per real token with padding to the same length / with these packs, levelled; counted, not measured."""
    sample: PlanSample
    """For pictures."""

    @property
    def name(self) -> str:
        return self.compared.name

    @property
    def max_length(self) -> int:
        """Tokens of the largest pack."""
        return longest_row(self.compared.strategy)


@dataclass(frozen=True)
class PaddedRow:
    """What padding makes of them."""

    max_length: int
    work: Work
    cut_documents: int
    """Longer than max_length."""
    lost_tokens: int
    """Beyond max_length."""

    @property
    def padding_ratio(self) -> float:
        return 1 - self.work.tokens / self.work.slots if self.work.slots else 0.0


@dataclass(frozen=True, repr=False)
class PackingReport:
    """What packing would do for some documents; print it, or show it in a notebook.

    Example:
        >>> import hf_packing as hfp
        >>> report = hfp.packing_report([700, 300, 500, 1500, 900, 600], 2048)
        >>> [row.name for row in report.rows if row.compared.metrics.num_cut_documents]
        ['FixedLength(2048)']
    """

    lengths: LengthSummary
    setup: Setup
    padded: tuple[PaddedRow, ...]
    """One for each length of a row."""
    rows: tuple[ReportRow, ...]
    recommendation: Recommendation
    source: str = ""
    """Where the documents are from."""

    def __repr__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_html(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything in numbers and text, for JSON."""
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
                    **dataclasses.asdict(row.compared.metrics),
                    "above_bound": row.compared.gap,
                    "steps_per_epoch": row.work.steps,
                    "documents_per_step": row.work.documents_per_step,
                    "speed_up": row.speed_up,
                    "attention_balance": row.work.balance,
                    "attention_balance_levelled": row.levelled.balance,
                    "seconds": row.compared.seconds,
                    "note": row.compared.note,
                }
                for row in self.rows
            ],
            "recommendation": dataclasses.asdict(self.recommendation),
        }

    def save(self, path: str | Path) -> list[Path]:
        """Write one HTML page with pictures inside, and the pictures as PNG files in a folder beside it.

        Args:
            path: the .html file.

        Returns:
            The files that were written.

        Raises:
            MissingDependencyError: matplotlib is not installed.
        """
        from hf_packing.report.page import save_page

        return save_page(self, Path(path))


def packing_report(
    lengths: Any,
    max_length: int | Sequence[int] = (2048, 4096, 8192),
    *,
    strategies: Sequence[Strategy] | None = None,
    ranks: int = 8,
    padded_rows: int = 16,
    linear_cost: float = LINEAR_COST,
    source: str = "",
) -> PackingReport:
    """What packing would do for documents of these lengths, and which strategy to take.

    Args:
        lengths: 1-d integers [documents], tokens; a list or an array.
        max_length: tokens of a row, one or several.
        strategies: that are compared; the usual ones for each max_length where there are none.
        ranks: processes, each with one pack at a time.
        padded_rows: documents of a micro-batch without packing, padded to the longest of them.
        linear_cost: pairs of tokens that attention compares in the time of everything else for one token; six times the
            width of a common model.
        source: where the documents are from, for the title.

    Returns:
        PackingReport.

    Raises:
        PackingError: a bad argument, which is named; no documents with tokens.

    Example:
        >>> import hf_packing as hfp
        >>> report = hfp.packing_report([700, 300, 500, 1500, 900, 600], 2048)
        >>> report.recommendation.strategy
        'BestFit(2048)'
    """
    lengths = read_lengths(lengths)
    if not lengths.any():
        raise PackingError(f"lengths: expected documents with tokens, got {len(lengths)} without")
    row_lengths = check_row_lengths(max_length)
    if strategies is not None and not strategies:
        raise PackingError("strategies: expected at least one, got none")
    setup = Setup(check_whole_number("ranks", ranks), check_whole_number("padded_rows", padded_rows), linear_cost)
    chosen = usual_strategies(row_lengths) if strategies is None else [check_strategy(each) for each in strategies]
    if strategies is not None:
        row_lengths = tuple(sorted({*map(longest_row, chosen)}))
    padded = {length: padded_row(lengths, length, setup) for length in row_lengths}
    summary = summary_of_lengths(lengths)
    lengths = lengths[lengths > 0]  # those without tokens are in no pack and in no share
    found = [
        (measured_row(measured, plan, setup, padded), workload_of(plan, measured.strategy))
        for measured, plan in each_planned(lengths, chosen)
    ]
    bounded = with_best_bounds([(row.compared, workload) for row, workload in found])
    rows = tuple(dataclasses.replace(row, compared=compared) for (row, _), compared in zip(found, bounded, strict=True))
    return PackingReport(
        lengths=summary,
        setup=setup,
        padded=tuple(padded.values()),
        rows=rows,
        recommendation=recommend(summary, rows),
        source=source,
    )


def check_row_lengths(max_length: Any) -> tuple[int, ...]:
    given = max_length if isinstance(max_length, Sequence) else [max_length]
    if not given:
        raise PackingError("max_length: expected at least one, got none")
    return tuple(sorted({check_whole_number("max_length", each) for each in given}))


def usual_strategies(row_lengths: Sequence[int]) -> list[Strategy]:
    """What one would think of; buckets where there are several lengths."""
    strategies: list[Strategy] = []
    for length in row_lengths:
        strategies += [FixedLength(length), FirstCome(length), BestFit(length)]
    return strategies + ([Bucket(tuple(row_lengths))] if len(row_lengths) > 1 else [])


def longest_row(strategy: Strategy) -> int:
    longest: int = getattr(strategy, "max_length", None) or strategy.bucket_lengths[-1]  # type: ignore[attr-defined]
    return longest


def padded_row(lengths: IntArray, max_length: int, setup: Setup) -> PaddedRow:
    work = padded_work(lengths, max_length, setup.padded_rows, setup.ranks, setup.linear_cost, seed=0)
    longer = lengths[lengths > max_length].astype(np.int64)
    return PaddedRow(max_length, work, len(longer), int((longer - max_length).sum()))


def measured_row(
    measured: ComparedStrategy, plan: PackingPlan, setup: Setup, padded: dict[int, PaddedRow]
) -> ReportRow:
    work = packed_work(plan, setup.ranks, setup.linear_cost)
    levelled = packed_work(plan, setup.ranks, setup.linear_cost, levelled=True)
    before = padded[longest_row(measured.strategy)].work.time_per_token
    speed_up = before / levelled.time_per_token if levelled.tokens else 0.0
    return ReportRow(measured, work, levelled, speed_up, sample_of(plan, setup.ranks))
