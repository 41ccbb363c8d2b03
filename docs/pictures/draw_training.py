"""Pictures of packed rows, of keeping documents apart, of ranks, and of the house of subpackages."""

from itertools import cycle

import numpy as np
from canvas import (
    ATTENDS,
    COLORS,
    EDGE,
    EMPTY,
    FAINT,
    HEIGHT,
    INK,
    LEAKS,
    LENGTHS,
    ROW,
    arrow,
    box,
    draw_box,
    draw_empty,
    draw_rows,
    draw_segments,
    figure_of,
    packs_of,
    planned,
    title,
)
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

import hf_packing as hfp
from hf_packing.sampling.batching import Epoch
from hf_packing.sampling.sizes import sizes_of_documents


def note(axes: Axes, x: float, y: float, text: str, **options) -> None:
    axes.text(x, y, text, **{"size": 11.5, "color": FAINT, "va": "center", "in_layout": False} | options)


def draw_attention(
    axes: Axes,
    lengths: list[int],
    words: str,
    *,
    leaks: bool = False,
    causal: bool = True,
    names: list[str] | None = None,
    above: list[list[int]] | None = None,
) -> None:
    """Which tokens of a row each of its tokens attends to; above: the other segments that each segment attends to."""
    axes.axis("on")
    document = np.repeat(np.arange(len(lengths)), lengths)
    seen = np.tril(np.ones((len(document), len(document)), dtype=bool)) if causal else document >= 0
    attended = np.eye(len(lengths), dtype=bool)
    for segment, others in enumerate(above or []):
        attended[segment, others] = True
    same = attended[document[:, None], document[None]]
    shown = np.where(seen & same, 1, np.where(seen & leaks, 2, 0))
    axes.imshow(shown, cmap=ListedColormap(["#f1f3f6", ATTENDS, LEAKS]), vmin=0, vmax=2)
    for border in np.cumsum(lengths)[:-1]:
        axes.axhline(border - 0.5, color="white", linewidth=1.5)
        axes.axvline(border - 0.5, color="white", linewidth=1.5)
    middles = np.cumsum(lengths) - np.array(lengths) / 2 - 0.5
    names = names or [f"doc {number + 1}" for number in range(len(lengths))]
    axes.set_xticks(middles, names, size=10, color=FAINT)
    axes.set_yticks(middles, names, size=10, color=FAINT, rotation=90, va="center")
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_color(EDGE)
    axes.set_title(words, size=12, color=INK)


def packing() -> Figure:
    """The picture of the README."""
    figure, axes = figure_of(5, (13, 4.4), width_ratios=[1.1, 1.1, 1.1, 0.95, 0.95])
    padded = [[(document, tokens)] for document, tokens in enumerate(LENGTHS)]
    real = sum(LENGTHS) / (len(LENGTHS) * ROW)
    draw_rows(axes[0], padded, [ROW] * len(LENGTHS))
    title(axes[0], f"Padding\n{1 - real:.0%} of the slots empty")
    for each, strategy, words in (
        (axes[1], hfp.FixedLength(ROW, seed=None), "Concatenate and cut\n{cut} of {all} are cut"),
        (axes[2], hfp.BestFit(ROW, seed=None), "Best fit\nnone is cut, {empty:.0%} empty"),
    ):
        rows, capacities, cut = planned(strategy)
        draw_rows(each, rows, capacities, cut=cut, space=len(LENGTHS))
        empty = 1 - sum(LENGTHS) / sum(capacities)
        title(each, words.format(cut=len(cut), all=len(LENGTHS), empty=empty))
    draw_attention(axes[3], [8, 6, 2], "Packed, many models:\nthey see each other", leaks=True)
    draw_attention(axes[4], [8, 6, 2], "After patch_model:\nonly themselves")
    return figure


def isolation() -> Figure:
    figure, axes = figure_of(4, (13, 3.7))
    lengths = [8, 5, 7]
    draw_attention(axes[0], lengths, "Many stock models", leaks=True)
    draw_attention(axes[1], lengths, "Patched decoder")
    draw_attention(axes[2], lengths, "Patched encoder", causal=False)
    kinds = [Patch(color=ATTENDS, label="attends, same document"), Patch(color=LEAKS, label="leak: another document")]
    axes[3].legend(handles=kinds, loc="upper left", fontsize=12, frameon=False, bbox_to_anchor=(0, 0.95))
    words = "Each line of a square is a token\nof the row. Colored: the tokens\nthat it attends to."
    note(axes[3], 0.05, 0.6, words, va="top")
    return figure


def packed_row() -> Figure:
    figure, (axes,) = figure_of(1, (12, 3.7))
    documents = [[11, 12, 13, 14, 15], [21, 22, 23], [31, 32, 33, 34]]
    batch = hfp.PackingCollator()([{"input_ids": each} for each in documents])
    owner = batch["seq_idx"][0].tolist()
    for line, name in enumerate(("input_ids", "labels", "position_ids")):
        note(axes, -0.25, -line * 0.95 + HEIGHT / 2, name, ha="right", color=INK, family="monospace")
        for place, value in enumerate(batch[name][0].tolist()):
            masked = value == -100
            draw_box(axes, place, -line * 0.95, 1, EMPTY if masked else COLORS[owner[place]], str(value))
    for y, name, values in (
        (-2.85, "seq_lengths", [len(each) for each in documents]),
        (-3.7, "cu_seq_lens_q", batch["cu_seq_lens_q"].tolist()),
    ):
        note(axes, -0.25, y + HEIGHT / 2, name, ha="right", color=INK, family="monospace")
        borders = batch["cu_seq_lens_q"].tolist()
        for number, value in enumerate(values):
            middle = (borders[number] + borders[number + 1]) / 2 if name == "seq_lengths" else borders[number]
            axes.text(middle, y + HEIGHT / 2, str(value), ha="center", va="center", size=12, color=INK)
    for border in batch["cu_seq_lens_q"].tolist():
        axes.plot([border] * 2, [-3.0, 0.95], color=INK, linewidth=1.1, linestyle=(0, (2, 2)))
    axes.set(xlim=(-2.9, len(owner) + 0.3), ylim=(-3.75, 1.0))
    title(axes, "Three documents in one packed row, and where they end")
    return figure


def routes() -> Figure:
    figure, axes = figure_of(2, (12, 4.6))
    lengths = [6, 4, 6]
    layers = {
        "varlen: attention is told where documents end": [
            ("embedding, norms, projections", None),
            ("attention", "kernel"),
            ("MLP or experts", None),
            ("head", None),
        ],
        "segments: what mixes tokens runs by segment": [
            ("embedding, norms, projections", None),
            ("convolution, mixer", "segments"),
            ("MLP or experts", None),
            ("head", None),
        ],
    }
    for each, (route, stack) in zip(axes, layers.items(), strict=True):
        draw_segments(each, list(enumerate(lengths)), 0, -4.9)
        for level, (name, how) in enumerate(stack):
            y = -3.7 + 1.15 * level
            if how == "segments":
                begin = 0.0
                for number, tokens in enumerate(lengths):
                    words = name if tokens > 5 else "mixer"
                    box(each, begin + 0.08, y, tokens - 0.16, HEIGHT, words, facecolor=COLORS[number])
                    begin += tokens
            else:
                box(each, 0.08, y, sum(lengths) - 0.16, HEIGHT, name, facecolor="#dcebf8" if how else "#f3f5f8")
            if how == "kernel":
                for border in np.cumsum(lengths)[:-1]:
                    each.plot([border] * 2, [y, y + HEIGHT], color=LEAKS, linewidth=2, linestyle=(0, (2, 1.5)))
            arrow(each, (sum(lengths) / 2, y - 0.36), (sum(lengths) / 2, y - 0.02), mutation_scale=11, linewidth=1.2)
        note(each, sum(lengths) + 0.3, -4.5, "packed row")
        each.set(xlim=(-0.2, sum(lengths) + 3.8), ylim=(-5.0, 0.75))
        title(each, route)
    return figure


def work_of_ranks(axes: Axes, work: np.ndarray, words: str) -> None:
    """work [steps, ranks]: bars one step after the other; a step ends with its slowest rank."""
    begin = 0.0
    for step, of_ranks in enumerate(work):
        for rank, cost in enumerate(of_ranks):
            axes.add_patch(Rectangle((begin, -rank), of_ranks.max(), HEIGHT, facecolor=EMPTY, edgecolor="none"))
            color = COLORS[step % 4]
            axes.add_patch(Rectangle((begin, -rank), cost, HEIGHT, facecolor=color, edgecolor="white", linewidth=1.5))
        begin += of_ranks.max()
    for rank in range(work.shape[1]):
        note(axes, -0.01 * begin, -rank + HEIGHT / 2, f"rank {rank}", ha="right", color=INK)
    busy = work.mean() / work.max(axis=1).mean()
    title(axes, f"{words}: ranks work {busy:.0%} of the time")


def token_budget() -> Figure:
    """The work of the same documents on four ranks: full rows dealt at random, and a token budget."""
    random = np.random.default_rng(5)
    lengths = np.clip(random.lognormal(6, 1.3, 900), 16, 16384).astype(int)
    ranks, budget, linear = 4, 16384, 12288
    plan = hfp.plan_packing(lengths, hfp.BestFit(budget, seed=3))
    work = np.array([sum(linear * tokens + tokens**2 for _, tokens in pack) for pack in packs_of(plan)], dtype=float)
    at_random = work[: len(work) // ranks * ranks].reshape(-1, ranks)
    epoch = hfp.TokenBudget(budget, linear_cost=linear).plan(sizes_of_documents(lengths), Epoch(0, ranks))
    cost = (linear * lengths + lengths**2).astype(float)
    leveled = np.array(
        [
            [cost[[row for row, _ in epoch.micro_batch(step, rank)]].sum() for rank in range(ranks)]
            for step in range(epoch.num_micro_batches)
        ]
    )
    figure, axes = figure_of(2, (14, 3.2))
    longest = max(at_random.max(axis=1).sum(), leveled.max(axis=1).sum())
    work_of_ranks(axes[0], at_random, "Full rows dealt at random")
    work_of_ranks(axes[1], leveled, f"TokenBudget({budget})")
    for each in axes:
        each.set(xlim=(-0.13 * longest, longest * 1.01), ylim=(0.95 - ranks - 1.2, 0.95))
    words = "A color is a micro-batch on each rank; its width is its work, attention and all else. Gray is waiting."
    note(axes[0], 0, 0.1 - ranks, words)
    return figure


def ranks_per_document() -> Figure:
    """A row on a block of four ranks: which tokens each rank holds, and its attention work."""
    lengths, ranks, thousand = np.array([40, 10, 6, 4, 2, 1, 1]) * 1024, 4, 1024
    layout = hfp.TokenBudget(16 * thousand, max_ranks_per_document=ranks).lay_out(lengths)
    row, begins = int(lengths.sum()), np.cumsum(lengths) - lengths
    figure, axes = figure_of(2, (14, 4.2), width_ratios=[2.5, 1])
    draw_segments(axes[0], list(enumerate((lengths // thousand).tolist())), 0, 0.35)
    note(axes[0], -0.6, 0.35 + HEIGHT / 2, "the row", ha="right", color=INK)
    for number, length in enumerate(lengths[:4] // thousand):
        note(axes[0], begins[number] / thousand + length / 2, 1.4, f"{length}k", ha="center")
    work, pieces = np.zeros(ranks), layout.pieces
    largest = layout.attention_cost.max()
    for rank in range(ranks):
        draw_empty(axes[0], 0, -1 - rank, row / thousand)
        note(axes[0], -0.6, -1 - rank + HEIGHT / 2, f"rank {rank}", ha="right", color=INK)
        note(axes[0], row / thousand + 0.6, -1 - rank + HEIGHT / 2, f"{layout.tokens[rank] // thousand}k")
    for rank, document, start, length in zip(layout.rank, pieces.document, pieces.start, pieces.length, strict=True):
        draw_segments(axes[0], [(document, length / thousand)], (begins[document] + start) / thousand, -1 - rank)
        cost = ((start + length) ** 2 - start**2) / largest
        draw_box(axes[1], work[rank], -1 - rank, cost, COLORS[document], "")
        work[rank] += cost
    of_token = np.concatenate([2 * np.arange(length) + 1 for length in lengths]) / largest
    equal = of_token.reshape(ranks, -1).sum(axis=1)
    for rank, cost in enumerate(equal):
        outline = {"facecolor": "none", "edgecolor": INK, "linewidth": 1.4, "linestyle": (0, (3, 2))}
        axes[1].add_patch(Rectangle((0, -1 - rank), cost, HEIGHT, **outline))
    busy, busy_if_equal = work.mean() / work.max(), equal.mean() / equal.max()
    axes[0].set(xlim=(-6, row / thousand + 4), ylim=(-4.1, 1.6))
    axes[1].set(xlim=(-0.02, equal.max() * 1.02), ylim=(-4.1, 1.6))
    note(axes[1], 0, 0.35 + HEIGHT / 2, f"Dashed: equal slices of the row, {busy_if_equal:.0%}", color=INK)
    title(
        axes[0],
        f"A row of {row // thousand}k tokens on a block of four ranks, {layout.tokens.max() // thousand}k on each",
    )
    title(axes[1], f"Attention work: ranks are {busy:.0%} busy")
    return figure


def bucket_batches() -> Figure:
    figure, (axes,) = figure_of(1, (12, 3.2))
    buckets, tokens, ranks = (4, 8, 16), 16, 3
    rng = np.random.default_rng(2)
    sizes = rng.permutation([4, 8, 16, 4, 16, 8]).tolist()
    for step, bucket in enumerate(sizes):
        for rank in range(ranks):
            for row in range(tokens // bucket):
                color = COLORS[buckets.index(bucket)]
                x = step * (tokens + 1.4) + row * bucket
                draw_box(axes, x, -rank, bucket, color, str(bucket) if bucket > 4 or row == 0 else "4")
        note(axes, step * (tokens + 1.4) + tokens / 2, 0.55 - ranks, f"step {step + 1}", ha="center")
    for rank in range(ranks):
        note(axes, -0.6, -rank + HEIGHT / 2, f"rank {rank}", ha="right", color=INK)
    axes.set(xlim=(-8, len(sizes) * (tokens + 1.4)), ylim=(0.1 - ranks, 0.95))
    title(axes, f"BucketBatches({tokens}): all ranks in the same bucket, {tokens} tokens on each")
    return figure


def length_schedule() -> Figure:
    """One row in four steps of a schedule; a line is an extra border."""
    figure, (axes,) = figure_of(1, (12, 3.2))
    documents, steps = [(0, 13), (1, 5), (2, 9), (3, 5)], 30
    row = sum(tokens for _, tokens in documents)
    schedule = hfp.LengthSchedule(2, steps)
    for number, step in enumerate((0, 5, 10, steps)):
        longest = schedule.length_at(step, row) or row
        draw_segments(axes, documents, 0, -number)
        begin = 0
        for _, tokens in documents:
            for border in range(begin + longest, begin + tokens, longest):
                axes.plot([border] * 2, [-number, HEIGHT - number], color=LEAKS, linewidth=2.5)
            begin += tokens
        whole = "whole documents" if longest == row else f"at most {longest} tokens"
        note(axes, row + 0.5, HEIGHT / 2 - number, f"step {step}: {whole}", color=INK)
    axes.set(xlim=(-0.2, row + 9), ylim=(-3.05, 0.95))
    title(axes, f"LengthSchedule(2, steps={steps}) in a row of {row} tokens")
    return figure


FLOORS = [
    ([("planning", "counts, patterns, plans")], "PackingPlan: which slice of which document goes where"),
    ([("strategies", "which documents share a pack")], "patterns of lengths"),
    (
        [("rows", "packed rows, in Arrow"), ("trees", "shared prefixes once")],
        "rows, with the lengths of their documents",
    ),
    ([("text", "files and chats"), ("streams", "packed as read"), ("fleet", "many processes")], "rows of any source"),
    ([("batch", "rows become tensors"), ("sampling", "rows of each step and rank")], "[1, tokens] and borders"),
    ([("attention", "a patched model keeps documents apart, proven")], "logits, as of each document alone"),
    ([("training", "attach, prepare_dataloader, losses of a step")], "a loss that is the same however a step is split"),
    ([("report", "what packing gains")], "tables, pages, pictures"),
    ([("cli", "hf-packing report, pack, check")], ""),
]
"""The subpackages, from the ground up: name and what it does; and what a floor hands to those above."""


def house() -> Figure:
    figure, (axes,) = figure_of(1, (14, 7.6))
    colors = cycle(COLORS)
    for number, (rooms, gives) in enumerate(FLOORS):
        width = 8.0 / len(rooms)
        for place, (name, what) in enumerate(rooms):
            x = place * width
            box(axes, x + 0.04, number, width - 0.08, 0.86, facecolor=next(colors), edgecolor="none")
            middle = x + width / 2
            axes.text(middle, number + 0.57, name, ha="center", va="center", size=13, weight="bold", color=INK)
            axes.text(middle, number + 0.24, what, ha="center", va="center", size=10.5, color=INK)
        note(axes, 8.55, number + 0.9, gives, size=11.5)
        if gives:
            arrow(axes, (8.3, number + 0.55), (8.3, number + 1.25))
    arrow(axes, (-0.35, len(FLOORS) - 0.2), (-0.35, 0.1))
    axes.text(-0.6, len(FLOORS) / 2, "imports go down", rotation=90, ha="center", va="center", size=12, color=FAINT)
    axes.set(xlim=(-0.8, 13.2), ylim=(-0.1, len(FLOORS)))
    return figure
