"""Which of the strategies of a report to take, in a sentence, with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_packing.report.summary_of_lengths import LengthSummary

if TYPE_CHECKING:
    from hf_packing.report.report import ReportRow

FEW_CUT = 0.01
"""Share of the tokens that may be of documents too long for a row."""
FEW_EMPTY = 0.03
"""Share of slots that may be empty before longer rows are worth it."""
WORTH_IT = 0.005
"""Share of packs that is worth another strategy."""
WORTH_NAMING = 1.05
"""Times as fast as padding."""


@dataclass(frozen=True)
class Recommendation:
    """One of the strategies."""

    strategy: str
    reason: str
    speed_up: float
    """Over padding to the same length, counted; as in the table."""

    def __str__(self) -> str:
        return f"{self.strategy}: {self.reason}"


def recommend(lengths: LengthSummary, rows: Sequence[ReportRow]) -> Recommendation:
    """The strategy to take: nothing dropped, as few documents cut as possible, then as few packs.

    Rows are as long as documents need, not longer: longer ones cost memory, and their attention is no cheaper.
    """
    wanted = row_length(lengths, rows)
    of_length = [row for row in rows if row.max_length == wanted]
    kept = [row for row in of_length if not row.compared.metrics.num_dropped_tokens] or of_length
    fewest_cut = min(row.compared.metrics.num_cut_documents for row in kept)
    careful = [
        row for row in kept if row.compared.metrics.num_cut_documents <= fewest_cut + FEW_CUT * lengths.documents
    ]
    single = [row for row in careful if not row.compared.strategy.has_buckets] or careful
    fewest = min(row.compared.metrics.num_packs for row in single)
    best = next(
        row for row in sorted(single, key=simplicity) if row.compared.metrics.num_packs <= fewest * (1 + WORTH_IT)
    )
    return Recommendation(best.name, f"{gain(best)}; {reason(lengths, best, of_length)}", best.speed_up)


def row_length(lengths: LengthSummary, rows: Sequence[ReportRow]) -> int:
    """The shortest that is too short for few tokens, and that leaves few slots empty; else the least."""
    given = sorted({row.max_length for row in rows})
    empty = {length: careful_padding([row for row in rows if row.max_length == length]) for length in given}
    fitting = [length for length in given if lengths.share_longer_than(length) <= FEW_CUT] or given[-1:]
    least = min(empty[length] for length in fitting)
    return next(length for length in fitting if empty[length] <= max(FEW_EMPTY, least))


def careful_padding(rows: Sequence[ReportRow]) -> float:
    """What the strategies leave empty that cut the fewest documents."""
    fewest = min(row.compared.metrics.num_cut_documents for row in rows)
    careful = [row.compared.metrics for row in rows if row.compared.metrics.num_cut_documents == fewest]
    return min(metrics.padding_ratio for metrics in careful)


def simplicity(row: ReportRow) -> int:
    """Best fit before others: it is as fast as any, and next to the best where lengths vary."""
    names = ["BestFit", "Optimal"]
    kind = type(row.compared.strategy).__name__
    return names.index(kind) if kind in names else len(names)


def gain(best: ReportRow) -> str:
    """What it is recommended for."""
    padding = f"padding to at most {best.max_length:,} tokens"
    if best.speed_up < WORTH_NAMING:
        return f"it is about as fast as {padding}, since there is little to save (counted, not measured)"
    return f"it is about {best.speed_up:.1f} times as fast as {padding} (counted, not measured)"


def reason(lengths: LengthSummary, best: ReportRow, others: Sequence[ReportRow]) -> str:
    metrics, longer = best.compared.metrics, lengths.longer_than(best.max_length)
    parts = []
    if metrics.num_cut_documents == longer:
        those = "those" if longer > 1 else "the one"
        cuts = f"it cuts {longer:,} document{'s' * (longer > 1)}, {those} longer than a row, and no other"
        parts.append(cuts if longer else "it cuts none")
    else:
        parts.append(f"it cuts {metrics.num_cut_documents / lengths.documents:.2%} of the documents")
    parts.append(f"leaves {metrics.padding_ratio:.2%} of the slots empty")
    if best.compared.gap is not None:
        parts.append(f"and needs at most {best.compared.gap:.2%} more packs than any plan that cuts no others")
    text = ", ".join(parts)
    most = max(others, key=lambda row: row.compared.metrics.num_cut_documents)
    if most.compared.metrics.num_cut_documents > 2 * metrics.num_cut_documents + 1:
        text += f"; {most.name} would cut {most.compared.metrics.num_cut_documents / lengths.documents:.1%}"
    more = [
        row
        for row in others
        if row.compared.metrics.num_packs > metrics.num_packs * (1 + WORTH_IT) and not row.compared.strategy.has_buckets
    ]  # buckets have small packs on purpose
    if more:
        worst = max(more, key=lambda row: row.compared.metrics.num_packs)
        text += f"; {worst.name} would need {worst.compared.metrics.num_packs / metrics.num_packs - 1:.1%} more packs"
    return text
