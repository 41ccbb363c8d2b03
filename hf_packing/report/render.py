"""Show a report: as text, as HTML for notebooks, and as a page with pictures that loads nothing from elsewhere."""

import os
import re
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape

import hf_packing
from hf_packing.errors import PackingError
from hf_packing.report.figures import Figures
from hf_packing.report.plots import COLORS, PLOTS, Plot, load_figure, picture, shown_rows
from hf_packing.report.work import Work
from hf_packing.strategies.compare import aligned, cells_of

COLUMNS = {
    "": "",
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
"""The columns of a report's table, and what they mean."""
_NAMED_BY_NUMBER = re.compile(r' id="[A-Za-z0-9.]+_\d+"')
"""The pattern of ids that matplotlib writes into every SVG. Several pictures have the same ids, which nothing uses."""
_TEMPLATES = Environment(loader=PackageLoader("hf_packing.report", ""), autoescape=True)


def report_cells(report: Figures) -> list[tuple[str, ...]]:
    """Return the rows of a report's table as tuples of cells. For every row length, the row for padding comes first."""
    lengths = report.lengths
    cells: list[tuple[str, ...]] = []
    for padded in report.padded:
        lost = (
            f"padding, at most {padded.max_length}",
            f"{padded.padding_ratio:.3%}",
            f"{padded.cut_documents / lengths.documents:.3%}",
            f"{padded.lost_tokens / lengths.tokens:.3%}",
        )
        cells.append(
            (*lost, "1.00", f"{lengths.documents:,}", "", *_steps(padded.work), f"{padded.work.balance:.0%}", "1.0")
        )
        for row in report.rows:
            if row.max_length == padded.max_length:
                balance = f"{row.work.balance:.0%}, {row.leveled.balance:.0%}"
                cells.append((*cells_of(row.compared), *_steps(row.work), balance, f"{row.speed_up:.1f}"))
    return cells


def _steps(work: Work) -> tuple[str, str]:
    return f"{work.steps:,}", f"{work.documents_per_step:,.0f}"


def _lines_of(report: Figures) -> dict[str, str]:
    """Return the lines of text around a report's table, by name."""
    lengths, setup = report.lengths, report.setup
    headline = f"{lengths.documents:,} documents, {lengths.tokens:,} tokens"
    return {
        "headline": headline + (f", and {lengths.empty:,} empty documents" if lengths.empty else ""),
        "lengths_line": (
            f"lengths: mean {lengths.mean:,.0f}, median {lengths.median:,.0f}, 90 % up to {lengths.p90:,.0f}, "
            f"99 % up to {lengths.p99:,.0f}, longest {lengths.longest:,}"
        ),
        "setup_line": (
            f"in a step, each of {setup.ranks} ranks works on one pack, or on {setup.padded_rows} documents padded to "
            "the longest document"
        ),
        "prefixes_line": report.shared.sentence() if report.shared else "",
    }


def as_text(report: Figures) -> str:
    """Return the whole report as text. The headings of the table have a line for each word."""
    lines = _lines_of(report)
    headings = zip_longest(*(reversed(name.split()) for name in COLUMNS), fillvalue="")
    source = f"{report.source}: " if report.source else ""
    shown = [
        source + lines["headline"],
        lines["lengths_line"],
        "",
        aligned([*reversed([*headings]), *report_cells(report)]),
        "",
        lines["setup_line"],
        f"take {report.recommendation}",
        lines["prefixes_line"],
    ]
    return "\n".join(shown).rstrip()


def fill_template(template: str, report: Figures, **more: Any) -> str:
    """Return a template of this folder, filled with a report."""
    facts = {"report": report, "columns": COLUMNS, "rows": report_cells(report), **_lines_of(report), **more}
    return _TEMPLATES.get_template(template).render(facts)


def check_page(path: Path) -> None:
    """Raise an error if `save_page` cannot write to a path. The check runs before any long work begins.

    Raises:
        PackingError: the path is a folder, or the folder that contains the path is not writable.
        MissingDependencyError: matplotlib is not installed.
    """
    load_figure()
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir() or not above.is_dir() or not os.access(above, os.W_OK):
        raise PackingError(f"--output: expected a file in a writable folder, such as report.html, got {str(path)!r}")


def save_page(report: Figures, path: Path) -> list[Path]:
    """Write a report as an HTML page, and its pictures in light colors as PNG files into a folder beside the page.

    Returns:
        The paths of all written files, with the page first.
    """
    shown = {row.name for row in shown_rows(report)}
    page = fill_template(
        "page.html",
        report,
        title=report.source or _lines_of(report)["headline"],
        plots=PLOTS,
        svg=partial(_inline_svg, report),
        not_shown=[row.name for row in report.rows if row.name not in shown],
        version=hf_packing.__version__,
    )
    folder = path.with_name(f"{path.stem}-pictures")
    folder.mkdir(parents=True, exist_ok=True)
    files = {path: page.encode("utf-8", errors="backslashreplace")}
    files |= {folder / f"{plot.name}.png": picture(report, plot, "png") for plot in PLOTS}
    for file, content in files.items():
        file.write_bytes(content)
    return [*files]


def _inline_svg(report: Figures, plot: Plot) -> Markup:
    """Return a picture for the page, in which the CSS variables of the page are the colors."""
    svg = picture(report, plot, "svg").decode()
    for color, variable in COLORS.items():
        svg = svg.replace(color, f"var({variable})")
    named = svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{escape(plot.title)}"', 1)
    return Markup(_NAMED_BY_NUMBER.sub("", named))
