"""The pictures of a report, light and dark: lengths, fill, documents per pack, cuts by length, ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_packing.errors import MissingDependencyError

if TYPE_CHECKING:
    from hf_packing.report.report import PackingReport, ReportRow

SIZE = (4.6, 3.4)
"""Inches; narrow, so that text stays readable on a phone."""
MOST_CURVES = 5
LENGTH_BINS = 48


@dataclass(frozen=True)
class Theme:
    """Colours of a picture."""

    name: str
    ink: str
    faint: str
    paper: str
    curves: tuple[str, ...]


LIGHT = Theme("light", "#1f2430", "#d5d9e0", "#ffffff", ("#2b6ca3", "#c8552b", "#3f8a4a", "#8558a8", "#8a8f98"))
DARK = Theme("dark", "#e4e7ec", "#3b4150", "#161a22", ("#6cb0ea", "#f08a5f", "#79c987", "#bd96e0", "#9aa1ad"))
THEMES = (LIGHT, DARK)


@dataclass(frozen=True)
class Plot:
    """One picture."""

    name: str
    title: str
    caption: str
    draw: Callable[[Any, PackingReport, Theme], None]
    """Onto matplotlib axes; what shows data gets a gid that ends in a number."""


def load_figure() -> Any:
    """matplotlib's Figure, which needs no screen and no global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError('pictures need matplotlib: pip install "hf-packing[plots]"') from error
    return Figure


def picture(report: PackingReport, plot: Plot, theme: Theme, kind: str) -> bytes:
    """The picture as a file.

    Args:
        report: whose picture it is.
        plot: which.
        theme: its colours.
        kind: "svg", with text as text, or "png".
    """
    figure_class = load_figure()
    import matplotlib

    settings = {
        "font.size": 9,
        "svg.fonttype": "none",
        "svg.hashsalt": f"{plot.name}-{theme.name}",
        "text.color": theme.ink,
        "axes.labelcolor": theme.ink,
        "axes.edgecolor": theme.faint,
        "xtick.color": theme.ink,
        "ytick.color": theme.ink,
        "axes.facecolor": "none",
        "grid.color": theme.faint,
        "legend.frameon": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with matplotlib.rc_context(settings):
        figure = figure_class(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        axes.grid(axis="y", linewidth=0.6)
        axes.set_axisbelow(True)
        plot.draw(axes, report, theme)
        for number, mark in enumerate([*axes.patches, *axes.lines]):
            mark.set_gid(f"{plot.name}-{theme.name}-mark-{number}")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
        file = BytesIO()
        paper = "none" if kind == "svg" else theme.paper
        figure.savefig(file, format=kind, dpi=160, facecolor=paper, metadata={"Date": None} if kind == "svg" else None)
    return file.getvalue()


def shown_rows(report: PackingReport) -> list[ReportRow]:
    """The strategies that share the recommended one's length of rows; as many as have colours."""
    taken = taken_row(report)
    others = [row for row in report.rows if row.max_length == taken.max_length and row is not taken]
    return [taken, *others][:MOST_CURVES]


def taken_row(report: PackingReport) -> ReportRow:
    return next(row for row in report.rows if row.name == report.recommendation.strategy)


def look_of(row: ReportRow, report: PackingReport) -> dict[str, float]:
    """The recommended strategy is drawn wide and first, so that what is the same can be seen on it."""
    return {"linewidth": 3.5, "zorder": 2} if row is taken_row(report) else {"linewidth": 1.4, "zorder": 3}


def in_tokens(axes: Any) -> None:
    """A logarithmic axis of lengths, with numbers as people write them."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1024:,.0f}k" if tokens >= 1024 else f"{tokens:g}")
    axes.set_xlabel("tokens of a document")


def draw_lengths(axes: Any, report: PackingReport, theme: Theme) -> None:
    counts = report.lengths.counts
    shortest = int(np.flatnonzero(counts)[0])
    edges = np.unique(np.geomspace(shortest, max(len(counts), shortest + 1), LENGTH_BINS).astype(int))
    documents, _ = np.histogram(np.arange(len(counts)), edges, weights=counts)
    axes.bar(edges[:-1], documents, np.diff(edges), align="edge", color=theme.curves[0])
    for number, padded in enumerate(report.padded):
        axes.axvline(
            padded.max_length,
            color=theme.curves[1],
            linewidth=1,
            linestyle="--",
            label=None if number else "max_length",
        )
    in_tokens(axes)
    axes.set_ylabel("documents")


def draw_fill(axes: Any, report: PackingReport, theme: Theme) -> None:
    for row, colour in zip(shown_rows(report), theme.curves, strict=False):
        fill = np.repeat(100 * row.sample.fill, 2 if len(row.sample.fill) == 1 else 1)
        axes.plot(np.linspace(0, 100, len(fill)), fill, color=colour, **look_of(row, report), label=row.name)
    axes.set(xlabel="packs, the emptiest first (%)", ylabel="filled (%)", ylim=(0, 104))


def draw_documents_per_pack(axes: Any, report: PackingReport, theme: Theme) -> None:
    for row, colour in zip(shown_rows(report), theme.curves, strict=False):
        packs = row.sample.documents_per_pack
        share = 100 * packs / max(packs.sum(), 1)
        shown = share[: int(np.searchsorted(np.cumsum(share), 99)) + 2]
        axes.step(np.arange(len(shown)), shown, where="mid", color=colour, linewidth=1.6, label=row.name)
    axes.set(xlabel="documents in a pack, up to 99 % of the packs", ylabel="packs (%)")


def draw_cuts(axes: Any, report: PackingReport, theme: Theme) -> None:
    for row, colour in zip(shown_rows(report), theme.curves, strict=False):
        axes.stairs(
            100 * row.sample.cut,
            row.sample.length_edges,
            baseline=None,
            color=colour,
            **look_of(row, report),
            label=row.name,
        )
    in_tokens(axes)
    axes.set(ylabel="documents cut (%)", ylim=(-3, 104))


def draw_ranks(axes: Any, report: PackingReport, theme: Theme) -> None:
    attention = taken_row(report).sample.attention
    relative = attention / max(attention.mean(), 1e-9)
    steps = np.arange(1, len(relative) + 1)
    largest, mean, smallest = relative.max(axis=1), relative.mean(axis=1), relative.min(axis=1)
    axes.vlines(steps, smallest, largest, color=theme.faint, linewidth=2)
    axes.plot(steps, largest, ".", color=theme.curves[1], markersize=5, label="largest rank")
    axes.plot(steps, mean, ".", color=theme.curves[0], markersize=5, label="mean")
    axes.set(xlabel="steps, packs as they come", ylabel="attention's work / mean", ylim=(0, None))


PLOTS = (
    Plot("lengths", "Lengths of documents", "How many documents have how many tokens.", draw_lengths),
    Plot("fill", "How full packs are", "The share of each pack that holds tokens.", draw_fill),
    Plot("documents", "Documents per pack", "How many documents share a pack.", draw_documents_per_pack),
    Plot("cuts", "Documents cut, by length", "The share of documents that are not whole in one pack.", draw_cuts),
    Plot(
        "ranks",
        "What ranks wait for",
        "Attention's work on the slowest rank at each step against the mean. Its excess is waiting; TokenBudget puts "
        "packs of similar cost together.",
        draw_ranks,
    ),
)
