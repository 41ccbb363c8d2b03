"""Show a report: as text, as HTML for notebooks, and as a page with a picture that loads nothing from elsewhere."""

import os
from itertools import zip_longest
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape

import hf_packing
from hf_packing.errors import PackingError
from hf_packing.files import writing_to
from hf_packing.report.figures import Figures
from hf_packing.report.plots import load_matplotlib, picture
from hf_packing.rows.changes import describe_counts
from hf_packing.strategies.compare import aligned, cells_of

COLUMNS = {
    "": "",
    "speed-up over padding": "time per token with padding to the same max_length / time per token with packs of "
    "similar cost in the same step; not comparable between lengths. Times are counted in operations, not measured, "
    "and empty slots of a pack cost nothing",
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
}
"""The columns of a report's table, and what they mean."""
_SUFFIXES = (".html", ".htm")
_TEMPLATES = Environment(loader=PackageLoader("hf_packing.report", ""), autoescape=select_autoescape())


def report_cells(report: Figures) -> list[tuple[str, ...]]:
    """Return the rows of a report's table as tuples of cells. For every row length, the row for padding comes first."""
    documents, tokens = report.lengths.documents, report.lengths.tokens
    cells: list[tuple[str, ...]] = []
    for padded in report.padded:
        work = padded.work
        cells.append(
            (
                f"padding, at most {padded.max_length}",
                "1.0",
                f"{padded.padding_ratio:.3%}",
                f"{padded.cut_documents / documents:.3%}",
                f"{padded.lost_tokens / tokens:.3%}",
                "1.00",
                f"{documents:,}",
                "",
                f"{work.steps:,}",
                f"{work.documents_per_step:,.0f}",
                f"{work.balance:.0%}",
            )
        )
        for row in report.rows:
            if row.padded is padded:
                work = row.work
                name, *metrics = cells_of(row.compared)
                cells.append(
                    (
                        name,
                        f"{row.speed_up:.1f}",
                        *metrics,
                        f"{work.steps:,}",
                        f"{work.documents_per_step:,.0f}",
                        f"{work.balance:.0%}, {row.leveled.balance:.0%}",
                    )
                )
    return cells


def as_text(report: Figures) -> str:
    """Return the whole report as text. The headings of the table have a line for each word."""
    headings = zip_longest(*(reversed(name.split()) for name in COLUMNS), fillvalue="")
    table = aligned(list(headings)[::-1] + report_cells(report))
    return fill_template("text.txt", report, table=table).rstrip()


def fill_template(template: str, report: Figures, **more: Any) -> str:
    """Return a template of this folder, filled with a report."""
    lengths, setup = report.lengths, report.setup
    empty = f", and {lengths.empty:,} empty documents" if lengths.empty else ""
    return _TEMPLATES.get_template(template).render(
        report=report,
        columns=COLUMNS,
        rows=report_cells(report),
        headline=f"{lengths.documents:,} documents, {lengths.tokens:,} tokens{empty}",
        lengths_line=(
            f"lengths: mean {lengths.mean:,.0f}, median {lengths.median:,.0f}, 90 % up to {lengths.p90:,.0f}, "
            f"99 % up to {lengths.p99:,.0f}, longest {lengths.longest:,}"
        ),
        setup_line=(
            f"in a step, each of {setup.ranks} ranks works on one pack, or on {setup.padded_rows} documents padded to "
            "the longest document"
        ),
        prefixes_line=report.shared.sentence() if report.shared else "",
        counts_lines=describe_counts(report.trained_tokens, lengths.tokens, report.skipped),
        **more,
    )


def check_page(path: Path, name: str) -> None:
    """Raise an error if `save_page` cannot write to a path. The check runs before any long work begins.

    Args:
        path: the path of the page.
        name: the argument with the path.

    Raises:
        PackingError: the path does not end in .html or .htm, it is a folder, or the folder that contains the path is
            not writable.
        MissingDependencyError: matplotlib is not installed.
    """
    load_matplotlib()
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir() or not above.is_dir() or not os.access(above, os.W_OK):
        raise PackingError(f"{name}: expected a file in a writable folder, such as report.html, got {str(path)!r}")
    if path.suffix.lower() not in _SUFFIXES:
        raise PackingError(
            f"{name}: expected a file that ends in {' or '.join(_SUFFIXES)}, got {str(path)!r}; a browser prints the "
            "page as PDF"
        )


def save_page(report: Figures, path: Path, name: str) -> None:
    """Write a report as an HTML page, which has its picture.

    Args:
        report: the report.
        path: the path of the page.
        name: the argument with the path.

    Raises:
        PackingError: `check_page` raises it, or the disk is full.
        MissingDependencyError: matplotlib is not installed.
    """
    check_page(path, name)
    page = fill_template("page.html", report, svg=picture(report), version=hf_packing.__version__)
    with writing_to(name, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8", errors="backslashreplace")
