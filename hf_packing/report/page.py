"""A report as one HTML page with everything inside, readable on a phone, light or dark; and its pictures as PNG."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape

import hf_packing
from hf_packing.errors import PackingError
from hf_packing.report.plots import LIGHT, PLOTS, THEMES, Plot, Theme, load_figure, picture, shown_rows
from hf_packing.report.tables import COLUMNS, MEANING, cells_of, headline, html_table, lengths_line, setup_line

if TYPE_CHECKING:
    from hf_packing.report.report import PackingReport


NAMED_BY_NUMBER = re.compile(r' id="[A-Za-z0-9.]+_\d+"')
"""What matplotlib calls its parts, the same in every picture; nothing refers to them."""


def check_page(path: Path) -> None:
    """Refuse what no page can be written to, before anything long begins.

    Raises:
        PackingError: a folder, or within a file.
        MissingDependencyError: matplotlib is not installed.
    """
    load_figure()
    if path.is_dir():
        raise PackingError(f"--output: expected a file for the page, such as report.html, {str(path)!r} is a folder")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise PackingError(f"--output: expected a folder to write to, {str(above)!r} is none")


def save_page(report: PackingReport, path: Path) -> list[Path]:
    """Write the page, and the light pictures as PNG into a folder beside it; the files written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    page = page_of(report)
    folder = path.with_name(f"{path.stem}-pictures")
    folder.mkdir(exist_ok=True)
    files = [path]
    for plot in PLOTS:
        files.append(folder / f"{plot.name}.png")
        write(files[-1], picture(report, plot, LIGHT, "png"))
    write(path, page.encode("utf-8", errors="backslashreplace"))
    return files


def write(file: Path, content: bytes) -> None:
    """Under another name first, so that a full disk leaves no half of it; but not in place of a link or a device."""
    if file.is_symlink() or (file.exists() and not file.is_file()):
        file.write_bytes(content)
        return
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        fresh.write_bytes(content)
        fresh.replace(file)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def page_of(report: PackingReport) -> str:
    """The page; nothing in it is fetched from elsewhere."""
    template = Environment(loader=PackageLoader("hf_packing.report", ""), autoescape=True).get_template("page.html")
    lengths, setup = report.lengths, report.setup
    return template.render(
        title=report.source or headline(report),
        lengths_line=lengths_line(report),
        facts=[
            ("documents", f"{lengths.documents:,}"),
            ("tokens", f"{lengths.tokens:,}"),
            ("longest", f"{lengths.longest:,}"),
            ("empty", f"{lengths.empty:,}"),
        ],
        recommendation=report.recommendation,
        table=Markup(html_table(COLUMNS, cells_of(report), report.recommendation.strategy)),
        plots=[
            {
                "name": plot.name,
                "title": plot.title,
                "caption": plot.caption,
                "pictures": [(theme.name, inline_svg(report, plot, theme)) for theme in THEMES],
            }
            for plot in PLOTS
        ],
        shown=shown_strategies(report),
        meanings=MEANING,
        setup_line=setup_line(report),
        linear_cost=(
            f"In the speed-up, linear layers work on a token as long as attention on {setup.linear_cost:,.0f} pairs of "
            "tokens."
        ),
        version=hf_packing.__version__,
    )


def shown_strategies(report: PackingReport) -> str:
    """Which strategies the pictures show, and which they do not."""
    shown = {row.name for row in shown_rows(report)}
    left_out = [row.name for row in report.rows if row.name not in shown]
    text = f"Strategies with rows as long as those of {report.recommendation.strategy}"
    return f"{text}; not shown: {', '.join(left_out)}." if left_out else f"{text}."


def inline_svg(report: PackingReport, plot: Plot, theme: Theme) -> Markup:
    svg = picture(report, plot, theme, "svg").decode()
    named = svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{escape(plot.title)}"', 1)
    return Markup(NAMED_BY_NUMBER.sub("", named))
