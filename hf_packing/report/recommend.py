"""Recommend one of the compared strategies, and give the reason in a sentence."""

from collections.abc import Sequence

from hf_packing.report.figures import LengthSummary, Recommendation, ReportRow

_FEW_CUT = 0.01
"""The largest share that counts as few: of all tokens, those in documents longer than a row; of all documents, those
that are cut."""
_FEW_EMPTY = 0.03
"""The largest share of empty slots in packs that counts as few; with more empty slots, longer rows are preferred."""
_WORTH_IT = 0.005
"""The share of packs that a strategy must save to be preferred over a simpler strategy."""
_WORTH_NAMING = 1.05
"""The smallest speed-up over padding that is stated as a number."""


def recommend(lengths: LengthSummary, rows: Sequence[ReportRow]) -> Recommendation:
    """Recommend a strategy that, as far as possible, drops nothing, cuts few documents and needs few packs.

    The recommended rows are only as long as the documents need. Longer rows would take more memory, without making
    attention cheaper.

    Args:
        lengths: statistics of document lengths.
        rows: the results of the compared strategies.
    """
    wanted = _row_length(lengths, rows)
    of_length = [row for row in rows if row.max_length == wanted]
    kept = [row for row in of_length if not row.metrics.num_dropped_tokens] or of_length
    fewest_cut = min(row.metrics.num_cut_documents for row in kept)
    careful = [row for row in kept if row.metrics.num_cut_documents <= fewest_cut + _FEW_CUT * lengths.documents]
    single = [row for row in careful if not row.compared.strategy.has_buckets] or careful
    fewest = min(row.metrics.num_packs for row in single)
    best = next(row for row in sorted(single, key=_simplicity) if row.metrics.num_packs <= fewest * (1 + _WORTH_IT))
    parts = [_gain(best), _cost(lengths, best), *_what_others_would_do(lengths, best, of_length)]
    return Recommendation(best.name, "; ".join(parts), best.speed_up)


def _row_length(lengths: LengthSummary, rows: Sequence[ReportRow]) -> int:
    """Return the recommended row length: as short as possible, with few documents longer than a row and little padding.

    A row length fits if documents longer than a row hold only a small share of all tokens. The result is the shortest
    fitting row length with little padding. If every fitting row length has much padding, the result is the one with the
    least padding. If no row length fits, the result is the longest row length.
    """
    given = sorted({row.max_length for row in rows})
    empty = {length: _careful_padding([row for row in rows if row.max_length == length]) for length in given}
    fitting = [length for length in given if lengths.share_longer_than(length) <= _FEW_CUT] or given[-1:]
    least = min(empty[length] for length in fitting)
    return next(length for length in fitting if empty[length] <= max(_FEW_EMPTY, least))


def _careful_padding(rows: Sequence[ReportRow]) -> float:
    """Return the smallest padding ratio among the strategies that cut the fewest documents."""
    fewest = min(row.metrics.num_cut_documents for row in rows)
    careful = [row.metrics for row in rows if row.metrics.num_cut_documents == fewest]
    return min(metrics.padding_ratio for metrics in careful)


def _simplicity(row: ReportRow) -> int:
    """Return a sort key that puts BestFit first, then Optimal, then all other strategies.

    No other strategy makes a plan faster than BestFit. If lengths vary, BestFit needs hardly more packs than the
    best plan.
    """
    names = ["BestFit", "Optimal"]
    kind = type(row.compared.strategy).__name__
    return names.index(kind) if kind in names else len(names)


def _gain(best: ReportRow) -> str:
    padding = f"padding to at most {best.max_length:,} tokens"
    if best.speed_up < _WORTH_NAMING:
        return f"it is about as fast as {padding}, since there is little to save (counted in operations, not measured)"
    return f"it is about {best.speed_up:.1f} times as fast as {padding} (counted in operations, not measured)"


def _cost(lengths: LengthSummary, best: ReportRow) -> str:
    metrics, longer = best.metrics, lengths.longer_than(best.max_length)
    if metrics.num_cut_documents == longer:
        those = "that are" if longer > 1 else "that is"
        cuts = f"cuts only the {longer:,} document{'s' * (longer > 1)} {those} longer than a row"
    else:
        cuts = f"cuts {metrics.num_cut_documents / lengths.documents:.2%} of the documents"
    parts = [f"it {cuts} {_longer_rows(lengths, best.max_length)}" if longer else "it cuts no document"]
    parts.append(f"leaves {metrics.padding_ratio:.2%} of the slots empty")
    if best.compared.gap is not None:
        parts.append(f"and {_packs_needed(best.compared.gap)}")
    return ", ".join(parts)


def _longer_rows(lengths: LengthSummary, max_length: int) -> str:
    """Return a remark, in parentheses, that names row lengths with which few documents, or none, would be cut."""
    few = lengths.shortest_row_for(_FEW_CUT)
    would = [f"rows of {few:,} tokens would cut {_FEW_CUT:.0%} of the documents"] if few > max_length else []
    return f"({', '.join([*would, f'rows of {lengths.longest:,} tokens would cut no document'])})"


def _packs_needed(gap: float) -> str:
    if not gap:
        return "provably needs as few packs as possible"
    share = f"at most {gap:.2%}" if gap >= 0.00005 else "less than 0.01%"  # not 0.00%, since the gap is above zero
    return f"needs {share} more packs than the best possible plan for the same pieces of documents"


def _what_others_would_do(lengths: LengthSummary, best: ReportRow, others: Sequence[ReportRow]) -> list[str]:
    metrics, parts = best.metrics, []
    most = max(others, key=lambda row: row.metrics.num_cut_documents)
    if most.metrics.num_cut_documents > 2 * metrics.num_cut_documents + 1:
        parts.append(f"{most.name} would cut {most.metrics.num_cut_documents / lengths.documents:.1%} of the documents")
    more = [
        row
        for row in others
        if row.metrics.num_packs > metrics.num_packs * (1 + _WORTH_IT)
        and not row.compared.strategy.has_buckets  # buckets have small packs on purpose
    ]
    if more:
        worst = max(more, key=lambda row: row.metrics.num_packs)
        packs = worst.metrics.num_packs / metrics.num_packs - 1
        parts.append(f"{worst.name} would need {packs:.1%} more packs")
    return parts
