"""Draw the pictures of a report, such as the distribution of document lengths."""

from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np

from hf_packing.errors import MissingDependencyError
from hf_packing.report.figures import Figures, ReportRow

_SIZE = (4.6, 4)
"""Width and height of a picture in inches; narrow, so that text stays readable on a phone."""
_MOST_CURVES = 5
_LENGTH_BINS = 48


_INK, _FAINT = "#1f2430", "#d5d9e0"
_CURVES = ("#2b6ca3", "#c8552b", "#3f8a4a", "#8558a8", "#8a8f98")
COLORS = {color: f"--picture-{number}" for number, color in enumerate((_INK, _FAINT, *_CURVES))}
"""The colors of pictures on a light screen, and the CSS variables of page.html that stand for them on any screen."""


@dataclass(frozen=True)
class Plot:
    """The name, title, caption and drawing function of one picture."""

    name: str
    title: str
    caption: str
    draw: Callable[[Any, Figures], None]
    """A function that draws the picture onto matplotlib axes."""


def load_figure() -> Any:
    """Return matplotlib's Figure class, which needs neither a screen nor the global state of pyplot.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError('pictures need matplotlib: pip install "hf-packing[plots]"') from error
    return Figure


def picture(report: Figures, plot: Plot, kind: str) -> bytes:
    """Return a picture as the bytes of an image file.

    Args:
        report: the report to show.
        plot: the picture to draw.
        kind: "png", or "svg" for an SVG file with text as text, not as outlines.
    """
    figure_class = load_figure()
    import matplotlib

    settings = {
        "font.size": 11,
        "svg.fonttype": "none",
        "svg.hashsalt": plot.name,
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "axes.edgecolor": _FAINT,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "axes.facecolor": "none",
        "grid.color": _FAINT,
        "legend.frameon": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with matplotlib.rc_context(settings):
        figure = figure_class(figsize=_SIZE, layout="constrained")
        axes = figure.add_subplot()
        axes.set_prop_cycle(color=_CURVES)
        axes.grid(axis="y", linewidth=0.6)
        axes.set_axisbelow(True)
        plot.draw(axes, report)
        for number, mark in enumerate([*axes.patches, *axes.lines]):
            mark.set_gid(f"{plot.name}-mark-{number}")
        look = {"handlelength": 1.2, "columnspacing": 1, "borderaxespad": 0.1}
        figure.legend(loc="outside upper left", ncols=2, **look)  # outside the axes, the legend hides no data
        file = BytesIO()
        options = {"facecolor": "none", "metadata": {"Date": None}} if kind == "svg" else {"facecolor": "white"}
        figure.savefig(file, format=kind, dpi=160, **options)
    return file.getvalue()


def shown_rows(report: Figures) -> list[ReportRow]:
    """Return the results of the recommended strategy and of up to 4 other strategies with the same row length."""
    taken = report.taken
    others = [row for row in report.rows if row.max_length == taken.max_length and row is not taken]
    return [taken, *others][:_MOST_CURVES]


def _draw_lengths(axes: Any, report: Figures) -> None:
    counts = report.lengths.counts
    shortest = int(np.flatnonzero(counts)[0])
    edges = np.unique(np.geomspace(shortest, max(len(counts), shortest + 1), _LENGTH_BINS).astype(int))
    documents, _ = np.histogram(np.arange(len(counts)), edges, weights=counts)
    axes.bar(edges[:-1], documents, np.diff(edges), align="edge", color=_CURVES[0])
    for padded in report.padded:
        axes.axvline(padded.max_length, color=_CURVES[1], linewidth=1, linestyle="--")
    axes.lines[0].set_label("max_length")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1024:,.0f}k" if tokens >= 1024 else f"{tokens:g}")
    axes.set(xlabel="tokens of a document", ylabel="documents")


def _draw_fill(axes: Any, report: Figures) -> None:
    width = 3.5  # the recommended strategy comes first, as a wide line, so that an equal curve stays visible on top
    for row in shown_rows(report):
        axes.plot(np.linspace(0, 100, len(row.fill)), 100 * row.fill, linewidth=width, label=row.name)
        width = 1.4
    axes.set(xlabel="packs, emptiest first (%)", ylabel="filled (%)", ylim=(0, 104))


def _draw_ranks(axes: Any, report: Figures) -> None:
    attention = report.taken.attention
    relative = attention / attention.mean() if attention.size else attention
    steps = np.arange(1, len(relative) + 1)
    largest, mean, smallest = relative.max(axis=1), relative.mean(axis=1), relative.min(axis=1)
    axes.vlines(steps, smallest, largest, color=_FAINT, linewidth=2)
    axes.plot(steps, largest, ".", color=_CURVES[1], markersize=5, label="largest rank")
    axes.plot(steps, mean, ".", color=_CURVES[0], markersize=5, label="mean")
    axes.set(xlabel="steps, with packs in the order of the plan", ylabel="attention work / mean", ylim=(0, None))


PLOTS = (
    Plot(
        "lengths",
        "Lengths of documents",
        "The number of documents of each length. Documents right of a dashed line are longer than a row.",
        _draw_lengths,
    ),
    Plot("fill", "How full packs are", "The share of each pack that holds tokens.", _draw_fill),
    Plot(
        "ranks",
        "How long ranks wait",
        "Attention work in each step, on the slowest rank and on average. The difference is time that ranks wait; "
        "TokenBudget runs packs of similar cost at the same time.",
        _draw_ranks,
    ),
)
