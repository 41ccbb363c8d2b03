"""`packing_report`: compare packing strategies on document lengths, and recommend one of the strategies."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hf_packing.checks import check_whole_number
from hf_packing.errors import PackingError
from hf_packing.report.figures import Figures, PaddedRow, ReportRow, summary_of_lengths
from hf_packing.report.recommend import recommend
from hf_packing.report.render import as_text, fill_template, save_page
from hf_packing.report.work import Setup, packed_work, padded_work
from hf_packing.sampling.fill import LINEAR_COST
from hf_packing.strategies.base import Strategy, read_lengths
from hf_packing.strategies.bucket import Bucket
from hf_packing.strategies.compare import compare_plans
from hf_packing.strategies.greedy import BestFit
from hf_packing.strategies.sequential import FirstCome, FixedLength
from hf_packing.trees.find import measure_shared_prefixes


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

    def save(self, path: str | Path) -> list[Path]:
        """Write an HTML page with pictures, and write the pictures as PNG files into a folder beside the page.

        Args:
            path: path of the .html file.

        Returns:
            The paths of all written files, with the page first.

        Raises:
            MissingDependencyError: matplotlib is not installed.
        """
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
    documents: Any = None,
) -> PackingReport:
    """Compare packing strategies on documents of the given lengths, and recommend one of the strategies.

    Args:
        lengths: the number of tokens in each document, a list or 1-d array of integers; or a Dataset of documents with
            `input_ids`, which is then also searched for shared prefixes.
        max_length: the most tokens that a row may have; one row length or several. If `strategies` are given, their row
            lengths are used instead.
        strategies: strategies to compare; None for FixedLength, FirstCome and BestFit with each max_length, and Bucket
            if there are several row lengths.
        ranks: number of processes, each of which works on one pack at a time.
        padded_rows: number of documents in a micro-batch without packing, padded to the longest of these documents.
        linear_cost: time that linear layers take for one token, in units of the time that attention takes for one pair
            of tokens; by default the value for a model of width 2048.
        source: path or name of the dataset, for the title of the report.
        documents: a Dataset with input_ids, or a list with the tokens of each of the first documents, in which to look
            for shared prefixes: the report then says how much smaller the data would become with share_prefixes=True.
            Only the first 8 million tokens are read. None to look for none.

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
    if documents is None and hasattr(lengths, "column_names"):
        documents = lengths
    lengths = read_lengths(lengths)
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
    report = PackingReport(summary, setup, padded, rows, recommend(summary, padded, rows), source)
    if documents is None:
        return report
    return replace(report, shared=measure_shared_prefixes(documents, report.taken.max_length, len(lengths)))


def _usual_strategies(max_length: Any) -> list[Strategy]:
    """Return FixedLength, FirstCome and BestFit for each row length, and Bucket if there are several row lengths."""
    given = max_length if isinstance(max_length, Sequence) and max_length else [max_length]
    row_lengths = sorted({check_whole_number("max_length", each) for each in given})
    strategies = [kind(length) for length in row_lengths for kind in (FixedLength, FirstCome, BestFit)]
    return strategies + ([Bucket(tuple(row_lengths))] if len(row_lengths) > 1 else [])
