"""The picture of the README: the same documents padded, concatenated and cut, and packed.

python docs/pictures/draw.py
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle

import hf_packing as hfp

LENGTHS = [13, 4, 9, 6, 16, 3, 11, 5, 7, 2, 12, 8]
ROW = 16
PICTURE = Path(__file__).with_name("packing.png")
HEIGHT = 0.8
PADDING = "#e3e6ea"
INK = "#1f2430"


def rows_of(plan: hfp.PackingPlan) -> list[list[tuple[int, int]]]:
    """For each pack its segments: document and tokens."""
    segments = list(zip(plan.segment_document.tolist(), plan.segment_length.tolist(), strict=True))
    return [segments[begin:end] for begin, end in zip(plan.pack_offsets[:-1], plan.pack_offsets[1:], strict=True)]


def draw_rows(axes, rows: list[list[tuple[int, int]]], title: str, cut: set[int]) -> None:
    colours = plt.get_cmap("tab20")(np.linspace(0, 1, len(LENGTHS)))
    for number, row in enumerate(rows):
        axes.add_patch(Rectangle((0, -number), ROW, HEIGHT, facecolor=PADDING, edgecolor="none"))
        begin = 0
        for document, tokens in row:
            hatch = "////" if document in cut else None
            axes.add_patch(
                Rectangle((begin, -number), tokens, HEIGHT, facecolor=colours[document], edgecolor="white", hatch=hatch)
            )
            if tokens > 1:
                axes.text(begin + tokens / 2, -number + HEIGHT / 2, str(document + 1), ha="center", va="center", size=9)
            begin += tokens
    axes.set(xlim=(-0.2, ROW + 0.2), ylim=(1.1 - len(LENGTHS), 1.1))
    axes.set_title(title, size=11, color=INK)
    axes.axis("off")


def draw_attention(axes, row: list[tuple[int, int]], apart: bool, title: str) -> None:
    """Which tokens of a row each token reads."""
    document = np.repeat(np.arange(len(row)), [tokens for _, tokens in row])
    reads = np.tril(np.ones((len(document), len(document)), dtype=bool))
    same = document[:, None] == document[None]
    shown = np.where(reads & same, 1.0, np.where(reads & (not apart), 2.0, 0.0))
    axes.imshow(shown, cmap=plt.matplotlib.colors.ListedColormap(["#f4f5f7", "#2b6ca3", "#c8552b"]), vmin=0, vmax=2)
    axes.set_title(title, size=11, color=INK)
    axes.set(xticks=[], yticks=[], xlabel="read these tokens", ylabel="tokens of one row")


def main(file: Path = PICTURE) -> None:
    best, fixed = (hfp.plan_packing(LENGTHS, strategy(ROW, seed=None)) for strategy in (hfp.BestFit, hfp.FixedLength))
    cut = set(np.flatnonzero(np.bincount(fixed.segment_document) > 1).tolist())
    figure, axes = plt.subplots(
        1, 5, figsize=(15, 4.3), layout="constrained", width_ratios=[1.15, 1.15, 1.15, 0.8, 0.8]
    )
    padded = [[(document, tokens)] for document, tokens in enumerate(LENGTHS)]
    real = sum(LENGTHS) / (len(LENGTHS) * ROW)
    draw_rows(axes[0], padded, f"Padding: {1 - real:.0%} of the slots are empty", set())
    draw_rows(axes[1], rows_of(fixed), f"Concatenate and cut: {len(cut)} of {len(LENGTHS)} documents cut", cut)
    draw_rows(axes[2], rows_of(best), f"Best fit: none cut, {best.metrics().padding_ratio:.0%} empty", set())
    fullest = max(rows_of(best), key=len)
    draw_attention(axes[3], fullest, apart=False, title="Most models: documents\nread each other")
    draw_attention(axes[4], fullest, apart=True, title="Patched: proven apart")
    figure.savefig(file, dpi=110, facecolor="white")
    plt.close(figure)


if __name__ == "__main__":
    main()
