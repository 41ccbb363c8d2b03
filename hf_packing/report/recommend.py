"""Recommend one of the compared strategies, and give the reason in a sentence."""

from collections.abc import Iterator, Sequence

import numpy as np

from hf_packing.report.figures import LengthSummary, PaddedRow, Recommendation, ReportRow
from hf_packing.strategies.greedy import BestFit
from hf_packing.strategies.optimal import Optimal

_FEW_CUT = 0.01
"""The largest share that counts as few: of all tokens, those in documents longer than a row; of all documents, those
that are cut."""
_FEW_EMPTY = 0.03
"""The largest share of empty slots in packs that counts as few; with more empty slots, longer rows are preferred."""
_WORTH_IT = 0.005
"""The share of packs that a strategy must save to be preferred over a simpler strategy."""
_WORTH_NAMING = 1.05
"""The smallest speed-up over padding that is stated as a number."""


def recommend(lengths: LengthSummary, padded: Sequence[PaddedRow], rows: Sequence[ReportRow]) -> Recommendation:
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
    reasons = [_gain(best), _cost(lengths, best), *_what_others_would_do(lengths, best, of_length)]
    return Recommendation(best.name, "; ".join(reasons), best.speed_up)


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


def _cost(lengths: LengthSummary, best: ReportRow) -> str:
    cut, longer = best.metrics.num_cut_documents, best.padded.cut_documents
    cuts = f"cuts {cut / lengths.documents:.2%} of the documents" if cut else "cuts no document"
    if longer:
        if cut == longer:
            those = "document that is" if longer == 1 else "documents that are"
            cuts = f"cuts only the {longer:,} {those} longer than a row"
        cuts += f" ({_longer_rows(lengths, best.max_length)})"
    reasons = f"it {cuts}, leaves {best.metrics.padding_ratio:.2%} of the slots empty"
    gap = best.compared.gap
    if gap == 0:
        reasons += ", and provably needs as few packs as possible"
    elif gap:
        share = f"at most {gap:.2%}" if gap >= 0.00005 else "less than 0.01%"  # not 0.00%, since it is above zero
        reasons += f", and needs {share} more packs than the best possible plan for the same pieces of documents"
    return reasons


def _longer_rows(lengths: LengthSummary, max_length: int) -> str:
    """Return a remark that names row lengths with which few documents, or none, would be cut."""
    longer = lengths.documents - np.cumsum(lengths.counts)
    few = np.argmax(longer <= _FEW_CUT * lengths.documents)
    said = f"rows of {lengths.longest:,} tokens would cut no document"
    return f"rows of {few:,} tokens would cut {_FEW_CUT:.0%} of the documents, {said}" if few > max_length else said


def _what_others_would_do(lengths: LengthSummary, best: ReportRow, others: Sequence[ReportRow]) -> Iterator[str]:
    """Yield remarks on the strategy that would cut the most documents, and on the one that would need the most packs.

    Strategies with buckets have small packs on purpose.
    """
    worst = max(others, key=lambda row: row.metrics.num_cut_documents)
    cut = worst.metrics.num_cut_documents
    if cut > 2 * best.metrics.num_cut_documents + 1:
        yield f"{worst.name} would cut {cut / lengths.documents:.1%} of the documents"
    single = [row for row in others if not row.compared.strategy.has_buckets]
    worst = max(single, key=lambda row: row.metrics.num_packs, default=best)
    packs = worst.metrics.num_packs
    if packs > best.metrics.num_packs * (1 + _WORTH_IT):
        yield f"{worst.name} would need {packs / best.metrics.num_packs - 1:.1%} more packs"
