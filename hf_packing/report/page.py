"""Write a report as a self-contained HTML page, for light and dark screens and for phones, and as PNG pictures."""

import os
import re
from pathlib import Path

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape

import hf_packing
from hf_packing.errors import PackingError
from hf_packing.report.figures import Figures
from hf_packing.report.plots import LIGHT, PLOTS, THEMES, Plot, Theme, load_figure, picture, shown_rows
from hf_packing.report.tables import (
    MEANING,
    REPORT_COLUMNS,
    headline,
    html_table,
    lengths_line,
    prefixes_line,
    report_cells,
    setup_line,
)

_NAMED_BY_NUMBER = re.compile(r' id="[A-Za-z0-9.]+_\d+"')
"""The pattern of ids that matplotlib writes into every SVG. Several pictures have the same ids, which nothing uses."""


def check_page(path: Path) -> None:
    """Raise an error if `save_page` cannot write to a path. The check runs before any long work begins.

    Raises:
        PackingError: the path is a folder, or the folder that contains the path is not writable.
        MissingDependencyError: matplotlib is not installed.
    """
    load_figure()
    if path.is_dir():
        raise PackingError(
            f"--output: expected a file for the page, such as report.html, but {str(path)!r} is a folder"
        )
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise PackingError(f"--output: expected a path in a writable folder, but cannot write to {str(above)!r}")


def save_page(report: Figures, path: Path) -> list[Path]:
    """Write a report as an HTML page, and its pictures in light colors as PNG files into a folder beside the page.

    Returns:
        The paths of all written files, with the page first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    page = _page_of(report)
    folder = path.with_name(f"{path.stem}-pictures")
    folder.mkdir(exist_ok=True)
    files = [path]
    for plot in PLOTS:
        files.append(folder / f"{plot.name}.png")
        _write(files[-1], picture(report, plot, LIGHT, "png"))
    _write(path, page.encode("utf-8", errors="backslashreplace"))
    return files


def _write(file: Path, content: bytes) -> None:
    """Write a file under a temporary name and then rename the file, so that a full disk leaves no half-written file.

    If `file` is a link or a device, write to it directly, since renaming would replace the link or the device.
    """
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


def _page_of(report: Figures) -> str:
    """Return the HTML of a report's page, which loads nothing from other files or from the network."""
    template = Environment(loader=PackageLoader("hf_packing.report", ""), autoescape=True).get_template("page.html")
    lengths, setup = report.lengths, report.setup
    return template.render(
        title=_name_of(report.source) or headline(report),
        source=report.source,
        lengths_line=lengths_line(report),
        facts=[
            ("documents", f"{lengths.documents:,}"),
            ("tokens", f"{lengths.tokens:,}"),
            ("longest", f"{lengths.longest:,}"),
            ("empty", f"{lengths.empty:,}"),
        ],
        recommendation=report.recommendation,
        table=Markup(html_table(REPORT_COLUMNS, report_cells(report), report.recommendation.strategy)),
        plots=[
            {
                "name": plot.name,
                "title": plot.title,
                "caption": plot.caption,
                "pictures": [(theme.name, _inline_svg(report, plot, theme)) for theme in THEMES],
            }
            for plot in PLOTS
        ],
        shown=_shown_strategies(report),
        meanings=MEANING,
        setup_line=setup_line(report),
        prefixes_line=prefixes_line(report),
        linear_cost=(
            "The speed-up assumes that linear layers take as long for one token as attention takes for "
            f"{setup.linear_cost:,.0f} pairs of tokens."
        ),
        version=hf_packing.__version__,
    )


def _name_of(source: str) -> str:
    """Return the last part of `source` if it is a local path, else all of it, such as a dataset name on the Hub."""
    path = Path(source)
    return path.resolve().name if source and (path.is_absolute() or path.exists()) else source


def _shown_strategies(report: Figures) -> str:
    """Return a sentence that says which strategies the pictures show, and names the strategies that are not shown."""
    shown = {row.name for row in shown_rows(report)}
    left_out = [row.name for row in report.rows if row.name not in shown]
    text = f"The pictures show strategies with the same row length as {report.recommendation.strategy}"
    return f"{text}; not shown: {', '.join(left_out)}." if left_out else f"{text}."


def _inline_svg(report: Figures, plot: Plot, theme: Theme) -> Markup:
    svg = picture(report, plot, theme, "svg").decode()
    named = svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{escape(plot.title)}"', 1)
    return Markup(_NAMED_BY_NUMBER.sub("", named))
