"""Draw the picture of a report, the distribution of document lengths."""

from io import StringIO
from typing import Any

import numpy as np

from hf_packing.errors import MissingDependencyError
from hf_packing.report.figures import Figures

_LENGTH_BINS = 48

_INK, _FAINT = "#1f2430", "#d5d9e0"
_MARKS = ("#2b6ca3", "#c8552b")
_VARIABLES = {color: f"var(--picture-{number})" for number, color in enumerate((_INK, _FAINT, *_MARKS))}
"""The colors of the picture on a light screen, and the CSS variables of page.html that stand for them on any screen."""
_LOOK = {
    "figure.figsize": (4.6, 4),  # narrow, so that text stays readable on a phone
    "figure.constrained_layout.use": True,
    "font.size": 11,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "lengths",  # the same report has the same picture
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
    "axes.prop_cycle": f"cycler(color={_MARKS})",
    "grid.color": _FAINT,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "legend.handlelength": 1.2,
    "legend.borderaxespad": 0.1,
}
"""Settings of matplotlib."""


def load_matplotlib() -> Any:
    """Return matplotlib, with the Figure class, which needs neither a screen nor the global state of pyplot.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure
    except ImportError as error:
        raise MissingDependencyError('the picture needs matplotlib: pip install "hf-packing[plots]"') from error
    return matplotlib


def picture(report: Figures) -> str:
    """Return how many documents have which length, and which are longer than a row, as SVG for page.html."""
    matplotlib = load_matplotlib()
    counts = report.lengths.counts
    edges = np.unique(np.geomspace(np.argmax(counts > 0), len(counts), _LENGTH_BINS).astype(int))
    with matplotlib.rc_context(_LOOK):
        figure = matplotlib.figure.Figure()
        axes = figure.add_subplot()
        axes.hist(np.arange(len(counts)), edges, weights=counts)
        for padded in report.padded:
            axes.axvline(padded.max_length, color="C1", linewidth=1, linestyle="--")
        axes.lines[0].set_label("max_length")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1024:,.0f}k" if tokens >= 1024 else f"{tokens:g}")
        axes.set(xlabel="tokens of a document", ylabel="documents")
        for number, mark in enumerate([*axes.patches, *axes.lines]):
            mark.set_gid(f"mark-{number}")
        figure.legend(loc="outside upper left")  # outside the axes, the legend hides no data
        svg = StringIO()
        figure.savefig(svg, format="svg", facecolor="none", metadata={"Date": None})
    text = svg.getvalue()
    for color, variable in _VARIABLES.items():
        text = text.replace(color, variable)
    return text[text.index("<svg") :]
