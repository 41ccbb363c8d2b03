"""What the pictures have in common: colors, and rows of documents drawn as boxes."""

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

import hf_packing as hfp

matplotlib.rcParams |= {"hatch.linewidth": 1.2, "svg.hashsalt": "hf_packing"}

LENGTHS = [13, 4, 9, 6, 16, 3, 11, 5, 7, 2, 12, 8]
"""Tokens of the documents of most pictures."""
ROW = 16
"""Tokens of a row."""

COLORS = ["#7fb7e6", "#f7b267", "#8fcf8b", "#f28c8c", "#b9a0e0", "#e9cf5d"]
COLORS += ["#6cc9bd", "#ec9ec4", "#b5c26b", "#9fb0c9", "#e8a183", "#8ea2f0"]
"""Of documents; dark text can be read on all of them."""
EMPTY, INK, FAINT, EDGE = "#e4e7ec", "#1b2230", "#68707f", "#c3c9d3"
ATTENDS, LEAKS = "#3b78b5", "#d65f3c"
HEIGHT = 0.8

Segments = Sequence[tuple[int, int]]
"""Document and tokens, one pair after the other."""


def figure_of(columns: int, size: tuple[float, float], **options) -> tuple[Figure, list[Axes]]:
    """Panels side by side, on white: a card that can be read on light and dark pages."""
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False, **options)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    figure.patch.set(facecolor="white", edgecolor=EDGE, linewidth=2)
    for each in axes[0]:
        each.axis("off")
    return figure, list(axes[0])


def title(axes: Axes, text: str, color: str = INK) -> None:
    axes.set_title(text, size=13, color=color, loc="left", pad=8)


def packs_of(plan: hfp.PackingPlan) -> list[Segments]:
    segments = list(zip(plan.segment_document.tolist(), plan.segment_length.tolist(), strict=True))
    return [segments[begin:end] for begin, end in zip(plan.pack_offsets[:-1], plan.pack_offsets[1:], strict=True)]


def planned(strategy, lengths: Sequence[int] = tuple(LENGTHS)) -> tuple[list[Segments], list[int], set[int]]:
    """The packs, the tokens each may hold, and the documents that are cut."""
    plan = hfp.plan_packing(list(lengths), strategy)
    cut = np.flatnonzero(np.bincount(plan.segment_document, minlength=len(lengths)) > 1)
    return packs_of(plan), plan.pack_capacity.tolist(), set(cut.tolist())


def draw_segments(
    axes: Axes, segments: Segments, x: float, y: float, cut: set[int] = frozenset(), height: float = HEIGHT
) -> None:
    """One box for each segment, from x on, with the number of its document."""
    for document, tokens in segments:
        color, hatch = COLORS[document % len(COLORS)], "///" if document in cut else None
        draw_box(axes, x, y, tokens, color, str(document + 1) if tokens > 1 else "", height, hatch)
        x += tokens


def draw_box(
    axes: Axes,
    x: float,
    y: float,
    tokens: float,
    color: str,
    text: str,
    height: float = HEIGHT,
    hatch: str | None = None,
) -> None:
    """A slice of a row with text in its middle."""
    axes.add_patch(Rectangle((x, y), tokens, height, facecolor=color, edgecolor="white", linewidth=1.5, hatch=hatch))
    behind = {"facecolor": color, "edgecolor": "none", "pad": 1.2} if hatch else None
    axes.text(x + tokens / 2, y + height / 2, text, ha="center", va="center", color=INK, size=11, bbox=behind)


def draw_empty(axes: Axes, x: float, y: float, tokens: float) -> None:
    axes.add_patch(Rectangle((x, y), tokens, HEIGHT, facecolor=EMPTY, edgecolor="none"))


def draw_rows(
    axes: Axes, rows: Sequence[Segments], capacities: Sequence[int], *, cut: set[int] = frozenset(), space: int = 0
) -> None:
    """Rows from top to bottom, what is empty in gray; space: rows that the panel has room for."""
    for number, (segments, capacity) in enumerate(zip(rows, capacities, strict=True)):
        draw_empty(axes, 0, -number, capacity)
        draw_segments(axes, segments, 0, -number, cut)
    width = max(capacities)
    axes.set(xlim=(-0.2, width + 0.2), ylim=(0.95 - max(space, len(rows)), 0.95))


def arrow(axes: Axes, begin: tuple[float, float], end: tuple[float, float], **options) -> None:
    style = {"arrowstyle": "-|>", "mutation_scale": 16, "color": INK, "linewidth": 1.6, "clip_on": False} | options
    axes.add_patch(FancyArrowPatch(begin, end, **style))


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str = "", **options) -> None:
    """A rounded box with text in its middle."""
    style = {"facecolor": "#f3f5f8", "edgecolor": EDGE, "linewidth": 1.4} | options
    size, color, weight = style.pop("size", 11), style.pop("color", INK), style.pop("weight", "normal")
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.12", **style))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", size=size, color=color, weight=weight)


def save(figure: Figure, file) -> None:
    """Without the date and the version, so that the same picture has the same bytes."""
    metadata = {"Date": None} if str(file).endswith(".svg") else {"Software": None}
    figure.savefig(file, dpi=130, edgecolor=figure.get_edgecolor(), metadata=metadata)
