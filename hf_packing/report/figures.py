"""The numbers of a report, which pages and tables show: lengths, and the results of padding and of each strategy."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hf_packing.planning.lengths import IntArray
from hf_packing.planning.plan import PackingPlan
from hf_packing.report.work import Work, packed_work, padded_work, values_of_ranks
from hf_packing.sampling.fill import LINEAR_COST
from hf_packing.strategies.base import Strategy
from hf_packing.strategies.compare import ComparedStrategy

_POINTS = 200
"""Points of a curve."""
_BINS = 24
"""Bins of document lengths, equally wide on a logarithmic scale, before each pack capacity adds an edge."""
_STEPS = 48
"""Steps whose ranks are shown."""


@dataclass(frozen=True)
class Setup:
    """Assumptions about the training run."""

    ranks: int = 8
    """Each works on one pack at a time."""
    padded_rows: int = 16
    """Documents of a micro-batch without packing."""
    linear_cost: float = LINEAR_COST
    """Pairs of tokens that attention compares in the time that linear layers take for one token."""


@dataclass(frozen=True, eq=False)
class LengthSummary:
    """Lengths of documents in tokens. Empty documents are counted, and left out of everything else."""

    documents: int
    """Documents with tokens."""
    empty: int
    tokens: int
    mean: float
    median: float
    p90: float
    p99: float
    longest: int
    counts: IntArray = field(repr=False)
    """int64 [longest + 1]: how many documents have each length."""

    def share_longer_than(self, tokens: int) -> float:
        """Return the share of all tokens that is in documents longer than `tokens`."""
        longer = np.arange(tokens + 1, len(self.counts)) @ self.counts[tokens + 1 :]
        return float(longer / self.tokens)

    def longer_than(self, tokens: int) -> int:
        """Return how many documents are longer than `tokens`."""
        return int(self.counts[tokens + 1 :].sum())

    def shortest_row_for(self, share: float) -> int:
        """Return the length of the shortest row that at most this share of the documents exceeds."""
        longer = self.documents - np.cumsum(self.counts)
        return int(np.argmax(longer <= share * self.documents))


def summary_of_lengths(lengths: IntArray) -> LengthSummary:
    """Summarize lengths.

    Args:
        lengths: integers [documents], at least one above zero.
    """
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
    """The result of padding the documents."""

    max_length: int
    work: Work
    cut_documents: int
    """Documents longer than max_length."""
    lost_tokens: int
    """Tokens beyond max_length."""

    @property
    def padding_ratio(self) -> float:
        """Padding slots / slots."""
        return 1 - self.work.tokens / self.work.slots if self.work.slots else 0.0


@dataclass(frozen=True)
class ReportRow:
    """The result of packing the documents with one strategy."""

    compared: ComparedStrategy
    work: Work
    """Work of an epoch whose packs come in the order of the plan."""
    leveled: Work
    """Work of an epoch with packs of similar cost at the same time, as with TokenBudget."""
    speed_up: float
    """Time per real token with padding to the same length / with these packs, leveled; counted, not measured."""
    sample: PlanSample
    """For pictures."""

    @property
    def name(self) -> str:
        """The strategy as written in code."""
        return self.compared.name

    @property
    def max_length(self) -> int:
        """Tokens of the largest pack."""
        return longest_row(self.compared.strategy)


@dataclass(frozen=True, eq=False)
class PlanSample:
    """The data of a plan that pictures show; small, however large the plan is."""

    fill: npt.NDArray[np.float64]
    """float64 [points]: the share of a pack that is filled, the emptiest first."""
    documents_per_pack: npt.NDArray[np.int64]
    """int64 [most + 1]: how many packs have 0, 1, 2, ... documents."""
    length_edges: npt.NDArray[np.float64]
    """float64 [bins + 1], tokens; lengths that just fit in a pack and lengths that do not are in different bins."""
    cut: npt.NDArray[np.float64]
    """float64 [bins]: the share of the documents in the bin that is cut; nan if the bin is empty."""
    attention: npt.NDArray[np.float64]
    """float64 [steps, ranks]: attention cost, in the order of the plan."""


@dataclass(frozen=True)
class Recommendation:
    """One of the strategies, and why."""

    strategy: str
    reason: str
    speed_up: float
    """Over padding to the same length, counted; as in the table."""

    def __str__(self) -> str:
        return f"{self.strategy}: {self.reason}"


@dataclass(frozen=True, repr=False)
class Figures:
    """Everything that a report shows."""

    lengths: LengthSummary
    setup: Setup
    padded: tuple[PaddedRow, ...]
    """One for each max_length."""
    rows: tuple[ReportRow, ...]
    recommendation: Recommendation
    source: str = ""
    """Where the documents come from."""

    @property
    def taken(self) -> ReportRow:
        """The recommended strategy."""
        return next(row for row in self.rows if row.name == self.recommendation.strategy)


def longest_row(strategy: Strategy) -> int:
    """Return the tokens of a strategy's largest pack."""
    longest: int = getattr(strategy, "max_length", None) or strategy.bucket_lengths[-1]  # type: ignore[attr-defined]
    return longest


def row_of_padding(lengths: IntArray, max_length: int, setup: Setup) -> PaddedRow:
    """Count the result of padding documents to max_length."""
    work = padded_work(lengths, max_length, setup.padded_rows, setup.ranks, setup.linear_cost, seed=0)
    longer = lengths[lengths > max_length].astype(np.int64)
    return PaddedRow(max_length, work, len(longer), int((longer - max_length).sum()))


def row_of_strategy(
    compared: ComparedStrategy, plan: PackingPlan, setup: Setup, padded: dict[int, PaddedRow]
) -> ReportRow:
    """Count the result of packing documents with a strategy.

    Args:
        compared: the strategy.
        plan: its plan.
        setup: of the epoch.
        padded: the results of padding, by max_length.
    """
    work = packed_work(plan, setup.ranks, setup.linear_cost)
    leveled = packed_work(plan, setup.ranks, setup.linear_cost, leveled=True)
    before = padded[longest_row(compared.strategy)].work.time_per_token
    speed_up = before / leveled.time_per_token if leveled.tokens else 0.0
    return ReportRow(compared, work, leveled, speed_up, _sample_of(plan, setup.ranks))


def _sample_of(plan: PackingPlan, ranks: int) -> PlanSample:
    lengths = plan.segment_length.astype(np.float64)
    filled, squares = np.zeros(1), np.zeros(1)
    if plan.num_packs:
        filled, squares = (np.add.reduceat(values, plan.pack_offsets[:-1]) for values in (lengths, lengths**2))
        filled = filled / plan.pack_capacity
    place = np.linspace(0, len(filled) - 1, min(_POINTS, len(filled))).astype(np.int64)
    edges, cut = _cut_by_length(plan)
    return PlanSample(
        fill=np.sort(filled)[place],
        documents_per_pack=np.bincount(np.diff(plan.pack_offsets)),
        length_edges=edges,
        cut=cut,
        attention=values_of_ranks(squares[: _STEPS * ranks], ranks),
    )


def _cut_by_length(plan: PackingPlan) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return edges of bins of lengths, and the share of documents in each that are not whole in one pack."""
    length = plan.document_length
    whole = np.zeros(len(length), dtype=bool)
    complete = plan.segment_length == length[plan.segment_document]
    whole[plan.segment_document[complete]] = True
    beyond = max(int(length.max(initial=1)) + 1, 2)
    edges = np.geomspace(1, beyond, _BINS + 1)
    too_long = np.unique(plan.pack_capacity) + 1
    edges = np.union1d(edges, too_long[too_long < beyond])
    documents, _ = np.histogram(length, edges)
    cut, _ = np.histogram(length[~whole & (length > 0)], edges)
    with np.errstate(invalid="ignore", divide="ignore"):
        return edges, cut / documents
