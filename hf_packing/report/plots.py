"""Draw the pictures of a report, such as the distribution of document lengths."""

import re
from io import StringIO
from textwrap import fill
from typing import Any

import numpy as np

from hf_packing.errors import MissingDependencyError
from hf_packing.report.figures import Figures, ReportRow

_MOST_CURVES = 5
_LENGTH_BINS = 48
_LEGEND_WIDTH, _LEGEND_LINES = 23, 4
"""The most characters in a line of the legend, which has two columns, and the most lines of a name."""

_INK, _FAINT = "#1f2430", "#d5d9e0"
_CURVES = ("#2b6ca3", "#c8552b", "#3f8a4a", "#8558a8", "#8a8f98")
_VARIABLES = {color: f"var(--picture-{number})" for number, color in enumerate((_INK, _FAINT, *_CURVES))}
"""The colors of pictures on a light screen, and the CSS variables of page.html that stand for them on any screen."""
_LOOK = {
    "figure.figsize": (4.6, 4),  # narrow, so that text stays readable on a phone
    "figure.constrained_layout.use": True,
    "font.size": 11,
    "svg.fonttype": "none",  # text stays text
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _FAINT,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": f"cycler(color={_CURVES})",
    "grid.color": _FAINT,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "legend.handlelength": 1.2,
    "legend.columnspacing": 1,
    "legend.borderaxespad": 0.1,
}
"""Settings of matplotlib."""
_NAMED_BY_NUMBER = re.compile(r' id="[A-Za-z0-9.]+_\d+"')
"""The pattern of ids that matplotlib writes into every SVG. Several pictures have the same ids, which nothing uses."""


def load_matplotlib() -> Any:
    """Return matplotlib, with the Figure class, which needs neither a screen nor the global state of pyplot.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure
    except ImportError as error:
        raise MissingDependencyError('pictures need matplotlib: pip install "hf-packing[plots]"') from error
    return matplotlib


def picture(report: Figures, name: str) -> str:
    """Return a picture as SVG for page.html, which has the colors."""
    matplotlib = load_matplotlib()
    with matplotlib.rc_context({**_LOOK, "svg.hashsalt": name}):
        figure = matplotlib.figure.Figure()
        axes = figure.add_subplot()
        PICTURES[name](axes, report)
        for number, mark in enumerate([*axes.patches, *axes.lines]):
            mark.set_gid(f"{name}-mark-{number}")
        figure.legend(loc="outside upper left", ncols=2)  # outside the axes, the legend hides no data
        svg = StringIO()
        figure.savefig(svg, format="svg", facecolor="none", metadata={"Date": None})
    text = _NAMED_BY_NUMBER.sub("", svg.getvalue())
    for color, variable in _VARIABLES.items():
        text = text.replace(color, variable)
    return text[text.index("<svg") :]


def shown_rows(report: Figures) -> list[ReportRow]:
    """Return the results of the recommended strategy and of up to 4 other strategies with the same row length."""
    taken = report.taken
    others = [row for row in report.rows if row.max_length == taken.max_length and row is not taken]
    return [taken, *others][:_MOST_CURVES]


def _draw_lengths(axes: Any, report: Figures) -> None:
    counts = report.lengths.counts
    edges = np.unique(np.geomspace(np.argmax(counts > 0), len(counts), _LENGTH_BINS).astype(int))
    axes.hist(np.arange(len(counts)), edges, weights=counts)
    for padded in report.padded:
        axes.axvline(padded.max_length, color="C1", linewidth=1, linestyle="--")
    axes.lines[0].set_label("max_length")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1024:,.0f}k" if tokens >= 1024 else f"{tokens:g}")
    axes.set(xlabel="tokens of a document", ylabel="documents")


def _draw_fill(axes: Any, report: Figures) -> None:
    width = 3.5  # the recommended strategy comes first, as a wide line, so that an equal curve stays visible on top
    for row in shown_rows(report):
        name = fill(row.name, _LEGEND_WIDTH, max_lines=_LEGEND_LINES)
        axes.plot(np.linspace(0, 100, len(row.fill)), 100 * row.fill, linewidth=width, label=name)
        width = 1.4
    axes.set(xlabel="packs, emptiest first (%)", ylabel="filled (%)", ylim=(0, 104))


PICTURES = {"lengths": _draw_lengths, "fill": _draw_fill}
"""The functions that draw pictures onto matplotlib axes, by the names of the pictures in page.html."""
