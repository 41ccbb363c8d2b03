"""Format a report as a table: as text, and as HTML for notebooks and pages."""

from collections.abc import Sequence
from html import escape

from hf_packing.report.figures import Figures, PaddedRow, ReportRow
from hf_packing.strategies.compare import aligned

REPORT_COLUMNS = (
    "",
    "padding",
    "truncation",
    "dropped",
    "concatenation",
    "packs",
    "above bound",
    "steps",
    "documents per step",
    "attention balance",
    "speed-up over padding",
)
MEANING = {
    "padding": "share of the slots that hold no token",
    "truncation": "share of the documents that are not whole in one pack",
    "dropped": "share of the tokens that are in no pack",
    "concatenation": "documents per pack",
    "packs": "number of packs; for padding, number of documents",
    "above bound": "share of packs above the proven lower bound for the same pieces of documents",
    "steps": "steps of an epoch; in a step, every rank works on one pack or on one padded batch",
    "documents per step": "mean number of documents in a step, over all ranks; steps with padding and steps with packs "
    "differ in size",
    "attention balance": "attention work, mean / maximum over ranks: first with packs in the order of the plan, then "
    "with packs of similar cost in the same step, as with TokenBudget",
    "speed-up over padding": "time per token with padding to the same max_length / time per token with packs of "
    "similar cost in the same step; not comparable between lengths. Times are counted in operations, not measured, "
    "and empty slots of a pack cost nothing",
}


def report_cells(report: Figures) -> list[tuple[str, ...]]:
    """Return the rows of a report's table as tuples of cells. For every row length, the row for padding comes first."""
    rows = []
    for padded in report.padded:
        rows.append(_padded_cells(padded, report))
        rows.extend(_strategy_cells(row, report) for row in report.rows if row.max_length == padded.max_length)
    return rows


def _padded_cells(row: PaddedRow, report: Figures) -> tuple[str, ...]:
    return (
        f"padding, at most {row.max_length}",
        f"{row.padding_ratio:.2%}",
        f"{row.cut_documents / report.lengths.documents:.2%}",
        f"{row.lost_tokens / report.lengths.tokens:.2%}",
        "1.00",
        f"{report.lengths.documents:,}",
        "",
        f"{row.work.steps:,}",
        f"{row.work.documents_per_step:,.0f}",
        f"{row.work.balance:.0%}",
        "1.0",
    )


def _strategy_cells(row: ReportRow, report: Figures) -> tuple[str, ...]:
    metrics = row.compared.metrics
    return (
        row.name,
        f"{metrics.padding_ratio:.2%}",
        f"{metrics.num_cut_documents / report.lengths.documents:.2%}",
        f"{metrics.dropped_token_ratio:.2%}",
        f"{report.lengths.documents / max(metrics.num_packs, 1):.2f}",
        f"{metrics.num_packs:,}",
        "" if row.compared.gap is None else f"{row.compared.gap:.2%}",
        f"{row.work.steps:,}",
        f"{row.work.documents_per_step:,.0f}",
        f"{row.work.balance:.0%}, {row.leveled.balance:.0%}",
        f"{row.speed_up:.1f}",
    )


def setup_line(report: Figures) -> str:
    """Return a line of text with the report's assumptions about a training step."""
    setup = report.setup
    padded = f"{setup.padded_rows} documents padded to the longest document"
    return f"in a step, each of {setup.ranks} ranks works on one pack, or on {padded}"


def headline(report: Figures) -> str:
    """Return a line of text with the number of documents and the number of tokens."""
    lengths = report.lengths
    text = f"{lengths.documents:,} documents, {lengths.tokens:,} tokens"
    return text + (f", and {lengths.empty:,} empty documents" if lengths.empty else "")


def lengths_line(report: Figures) -> str:
    """Return a line of text with statistics of document lengths."""
    lengths = report.lengths
    return (
        f"lengths: mean {lengths.mean:,.0f}, median {lengths.median:,.0f}, 90 % up to {lengths.p90:,.0f}, "
        f"99 % up to {lengths.p99:,.0f}, longest {lengths.longest:,}"
    )


def prefixes_line(report: Figures) -> str:
    """Return a line of text that says how much documents would shrink if they shared prefixes; or an empty string."""
    return report.shared.sentence() if report.shared else ""


def as_text(report: Figures) -> str:
    """Return the whole report as text."""
    title = [f"{report.source}: {headline(report)}" if report.source else headline(report), lengths_line(report)]
    table = aligned([REPORT_COLUMNS, *report_cells(report)])
    lines = [*title, "", table, "", setup_line(report), f"take {report.recommendation}"]
    return "\n".join(lines + ([said] if (said := prefixes_line(report)) else []))


def as_html(report: Figures) -> str:
    """Return the whole report as HTML, for notebooks."""
    taken = report.recommendation
    return (
        f"<p>{escape(headline(report))}<br>{escape(lengths_line(report))}</p>"
        f"{html_table(REPORT_COLUMNS, report_cells(report), taken.strategy)}"
        f"<p>{escape(setup_line(report))}</p>"
        f"<p>Take <b>{escape(taken.strategy)}</b>: {escape(taken.reason)}.</p>"
        + (f"<p>{escape(said)}</p>" if (said := prefixes_line(report)) else "")
    )


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]], marked: str = "") -> str:
    """Return an HTML table. The first cell of a row is the row's name; the row with the name `marked` is in bold."""
    head = "".join(f'<th scope=col title="{escape(MEANING.get(name, ""))}">{escape(name)}</th>' for name in columns)
    body = "".join(_html_row(first, rest, first == marked) for first, *rest in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _html_row(name: str, cells: Sequence[str], marked: bool) -> str:
    """Return a row of an HTML table, in which a browser may break the row's name at the opening parenthesis."""
    look = " class=taken style=font-weight:bold" if marked else ""
    values = "".join(f"<td style=text-align:right>{escape(cell)}</td>" for cell in cells)
    return f"<tr{look}><th scope=row style=text-align:left>{escape(name).replace('(', '(<wbr>')}</th>{values}</tr>"
