"""`packing_report`: compare packing strategies on document lengths, and recommend one of the strategies."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from hf_packing.checks import check_whole_number
from hf_packing.errors import PackingError
from hf_packing.planning.rank_layout import LINEAR_COST
from hf_packing.report.figures import Figures, LengthSummary, PaddedRow, Recommendation, ReportRow, summary_of_lengths
from hf_packing.report.render import as_text, fill_template, save_page
from hf_packing.report.work import Setup, packed_work, padded_work
from hf_packing.rows.changes import count_trained
from hf_packing.strategies.base import Strategy, read_lengths
from hf_packing.strategies.bucket import Bucket
from hf_packing.strategies.compare import compare_plans
from hf_packing.strategies.greedy import BestFit
from hf_packing.strategies.optimal import Optimal
from hf_packing.strategies.sequential import FirstCome, FixedLength
from hf_packing.trees.find import measure_shared_prefixes

_FEW_CUT = 0.01
"""The largest share that counts as few: of all tokens, those in documents longer than a row; of all documents, those
that are cut."""
_FEW_EMPTY = 0.03
"""The largest share of empty slots in packs that counts as few; with more empty slots, longer rows are preferred."""
_WORTH_IT = 0.005
"""The share of packs that a strategy must save to be preferred over a simpler strategy."""
_WORTH_NAMING = 1.05
"""The smallest speed-up over padding that is stated as a number."""


@dataclass(frozen=True, repr=False)
class PackingReport(Figures):
    """A comparison of packing strategies on your documents, with a recommendation; print it or show it in a notebook.

    Example:
        >>> import hf_packing as hfp
        >>> report = hfp.packing_report([700, 300, 500, 1500, 900, 600], 2048)
        >>> [row.name for row in report.rows if row.metrics.num_cut_documents]
        ['FixedLength(2048)']
    """

    def __repr__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return fill_template("notebook.html", self)

    def save(self, path: str | Path) -> None:
        """Write an HTML page with a picture.

        Args:
            path: path of the .html or .htm file.

        Raises:
            PackingError: the path has another suffix, or cannot be written to.
            MissingDependencyError: matplotlib is not installed.
        """
        save_page(self, Path(path), "path")


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
    """Compare packing strategies on documents of the given lengths, and recommend one of the strategies.

    Args:
        lengths: the number of tokens in each document, a list or 1-d array of integers; or a Dataset of documents with
            `input_ids`, which is then also searched for shared prefixes, and whose labels are counted.
        max_length: the most tokens that a row may have; one row length or several. If `strategies` are given, their row
            lengths are used instead.
        strategies: strategies to compare; None for FixedLength, FirstCome and BestFit with each max_length, and Bucket
            if there are several row lengths.
        ranks: number of processes, each of which works on one pack at a time.
        padded_rows: number of documents in a micro-batch without packing, padded to the longest of these documents.
        linear_cost: time that linear layers take for one token, in units of the time that attention takes for one pair
            of tokens; by default the value for a model of width 2048.
        source: path or name of the dataset, for the title of the report.

    Returns:
        PackingReport: the compared strategies, the recommendation, and a method to save an HTML page.

    Raises:
        PackingError: an argument is invalid, or no document has a token. The message names the argument.

    Example:
        >>> import hf_packing as hfp
        >>> report = hfp.packing_report([700, 300, 500, 1500, 900, 600], 2048)
        >>> report.recommendation.strategy
        'BestFit(2048)'
    """
    given, lengths = lengths, read_lengths(lengths)
    filled = lengths[lengths > 0]  # empty documents are left out of all shares
    if not len(filled):
        raise PackingError(f"lengths: expected documents with tokens, but all {len(lengths)} documents are empty")
    setup = Setup(check_whole_number("ranks", ranks), check_whole_number("padded_rows", padded_rows), linear_cost)
    if strategies is None:
        strategies = _usual_strategies(max_length)
    summary = summary_of_lengths(filled, len(lengths) - len(filled))
    found = compare_plans(filled, strategies, lambda plan: packed_work(plan, setup))
    by_length = {}
    for length in sorted({row.strategy.largest_capacity for row, _ in found}):
        work = padded_work(filled, length, setup)
        cut = int(np.count_nonzero(filled > length))
        by_length[length] = PaddedRow(length, work, cut, summary.tokens - work.tokens)
    padded = tuple(by_length.values())
    rows = tuple(ReportRow(row, by_length[row.strategy.largest_capacity], *packed) for row, packed in found)
    report = PackingReport(summary, setup, padded, rows, _recommend(summary, padded, rows), source)
    if not isinstance(given, datasets.Dataset):
        return report
    shared = measure_shared_prefixes(given, report.taken.max_length)
    return replace(report, shared=shared, trained_tokens=count_trained(given))


def _usual_strategies(max_length: Any) -> list[Strategy]:
    """Return FixedLength, FirstCome and BestFit for each row length, and Bucket if there are several row lengths."""
    given = max_length if isinstance(max_length, Sequence) and max_length else [max_length]
    row_lengths = sorted({check_whole_number("max_length", each) for each in given})
    strategies = [kind(length) for length in row_lengths for kind in (FixedLength, FirstCome, BestFit)]
    return strategies + ([Bucket(tuple(row_lengths))] if len(row_lengths) > 1 else [])


def _recommend(lengths: LengthSummary, padded: Sequence[PaddedRow], rows: Sequence[ReportRow]) -> Recommendation:
    """Recommend a strategy that, as far as possible, drops nothing, cuts few documents and needs few packs.

    The recommended rows are only as long as the documents need. Longer rows would take more memory, without making
    attention cheaper.
    """
    length = _row_length(lengths, padded, rows)
    of_length = [row for row in rows if row.padded is length]
    kept = [row for row in of_length if not row.metrics.num_dropped_tokens] or of_length
    few = min(row.metrics.num_cut_documents for row in kept) + _FEW_CUT * lengths.documents
    careful = [row for row in kept if row.metrics.num_cut_documents <= few]
    single = [row for row in careful if not row.compared.strategy.has_buckets] or careful
    enough = min(row.metrics.num_packs for row in single) * (1 + _WORTH_IT)
    best = min((row for row in single if row.metrics.num_packs <= enough), key=_simplicity)
    return Recommendation(best.name, f"{_gain(best)}; {_cost(lengths, best, rows)}", best.speed_up)


def _row_length(lengths: LengthSummary, padded: Sequence[PaddedRow], rows: Sequence[ReportRow]) -> PaddedRow:
    """Return padding to the shortest row length with few empty slots, or else to the one with the fewest.

    Only those row lengths count with which documents that are longer than a row hold a small share of all tokens, or
    else the longest row length. Empty slots are those of the strategy that cuts the fewest documents.
    """
    few = _FEW_CUT * lengths.tokens
    fitting = [each for each in padded if each.lost_tokens + each.cut_documents * each.max_length <= few] or padded[-1:]
    empty = []
    for each in fitting:
        found = [row.metrics for row in rows if row.padded is each]
        empty.append(min((metrics.num_cut_documents, metrics.padding_ratio) for metrics in found)[1])
    little = max(_FEW_EMPTY, min(empty))
    return next(each for each, share in zip(fitting, empty, strict=True) if share <= little)


def _simplicity(row: ReportRow) -> int:
    """Return 0 for BestFit, which makes plans fastest, and needs hardly more packs than the best if lengths vary."""
    return {BestFit: 0, Optimal: 1}.get(type(row.compared.strategy), 2)


def _gain(best: ReportRow) -> str:
    padding = f"padding to at most {best.max_length:,} tokens"
    if best.speed_up < _WORTH_NAMING:
        return f"it is about as fast as {padding}, since there is little to save (counted in operations, not measured)"
    return f"it is about {best.speed_up:.1f} times as fast as {padding} (counted in operations, not measured)"


def _cost(lengths: LengthSummary, best: ReportRow, rows: Sequence[ReportRow]) -> str:
    cut, padded = best.metrics.num_cut_documents, best.padded
    cuts = f"cuts {cut / lengths.documents:.2%} of the documents" if cut else "cuts no document"
    if cut and len(rows) > 1 and cut == min(row.metrics.num_cut_documents for row in rows):
        cuts += ", the fewest of all strategies"
    if cut and cut == padded.cut_documents:
        held = (padded.lost_tokens + cut * padded.max_length) / lengths.tokens
        cuts += f", those longer than a row, which hold {held:.2%} of the tokens"
        if held > _FEW_CUT:
            cuts += " (longer rows would keep more of them whole)"
    reasons = f"it {cuts}, leaves {best.metrics.padding_ratio:.2%} of the slots empty"
    gap = best.compared.gap
    if gap == 0:
        reasons += ", and provably needs as few packs as possible"
    elif gap:
        share = f"at most {gap:.2%}" if gap >= 0.00005 else "less than 0.01%"  # not 0.00%, since it is above zero
        reasons += f", and needs {share} more packs than the best possible plan for the same pieces of documents"
    return reasons
