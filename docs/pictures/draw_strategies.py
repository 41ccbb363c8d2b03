"""A picture of each strategy: the same twelve documents, packed for real."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from canvas import (
    COLORS,
    FAINT,
    HEIGHT,
    INK,
    LEAKS,
    LENGTHS,
    ROW,
    Segments,
    arrow,
    draw_box,
    draw_empty,
    draw_rows,
    draw_segments,
    figure_of,
    planned,
    title,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import hf_packing as hfp

LONGEST_FIRST = sorted(range(len(LENGTHS)), key=lambda document: -LENGTHS[document])
PLACED = 6
"""Documents in rows at the moment that a picture shows: the next one fits in two rows."""
GAP = 1.2
"""Between rows side by side, in tokens."""


def note(axes: Axes, x: float, y: float, text: str, **options) -> None:
    axes.text(x, y, text, **{"size": 11.5, "color": FAINT, "va": "center", "in_layout": False} | options)


def outcome(rows: Sequence[Segments], capacities: Sequence[int], cut: set[int]) -> str:
    """In words, such as "6 rows, 0 % empty, 3 documents cut"."""
    tokens = sum(tokens for row in rows for _, tokens in row)
    documents = f"{len(cut)} documents" if len(cut) > 1 else "1 document" if cut else "no document"
    return f"{len(rows)} rows, {1 - tokens / sum(capacities):.0%} empty, {documents} cut"


def rows_so_far() -> tuple[list[list[tuple[int, int]]], list[int]]:
    """The first documents, longest first, in a row each since no two fit together; and the room that is left."""
    rows = [[(document, LENGTHS[document])] for document in LONGEST_FIRST[:PLACED]]
    return rows, [ROW - row[0][1] for row in rows]


def placing(strategy, most_room: bool, words: str) -> Figure:
    """Sorted documents, the moment of a choice, and the plan."""
    figure, (left, middle, right) = figure_of(3, (12, 3.9), width_ratios=[1, 1.5, 1])
    for place, document in enumerate(LONGEST_FIRST):
        draw_segments(left, [(document, LENGTHS[document])], 0, 0.24 - place * 0.6, height=0.54)
    left.set(xlim=(-0.2, ROW + 0.2), ylim=(-6.5, 0.95))
    title(left, "1. Longest documents first")
    rows, room = rows_so_far()
    following = LONGEST_FIRST[PLACED]
    fitting = [row for row in range(PLACED) if room[row] >= LENGTHS[following]]
    chosen = (max if most_room else min)(fitting, key=room.__getitem__)
    for number, row in enumerate(rows):
        draw_empty(middle, 0, -number, ROW)
        draw_segments(middle, row, 0, -number)
        if room[number]:
            strong = {"color": INK, "weight": "bold"} if number == chosen else {}
            note(middle, ROW - room[number] / 2, -number + HEIGHT / 2, f"{room[number]}", ha="center", **strong)
    note(middle, ROW + 1, HEIGHT / 2, "room left")
    draw_segments(middle, [(following, LENGTHS[following])], ROW + 3.5, -2.9)
    note(middle, ROW + 3.5, -3.3, f"{LENGTHS[following]} tokens", color=INK)
    arrow(middle, (ROW + 3.3, -2.5), (ROW + 0.1, -chosen + HEIGHT / 2), connectionstyle="arc3,rad=0.2", color=LEAKS)
    middle.set(xlim=(-0.2, ROW + 11), ylim=(-6.5, 0.95))
    title(middle, f"2. {words}")
    rows, capacities, cut = planned(strategy)
    draw_rows(right, rows, capacities, space=7)
    title(right, f"3. {outcome(rows, capacities, cut).rpartition(',')[0]}")
    return figure


def best_fit() -> Figure:
    return placing(hfp.BestFit(ROW, seed=None), False, "Into the row with the least room")


def shortest_pack_first() -> Figure:
    return placing(hfp.ShortestPackFirst(ROW, seed=None), True, "Into the row with the most room")


def optimal() -> Figure:
    lengths, longest = [14, 14, 14, 9, 8, 8, 8, 4, 3, 3, 3, 2], 30
    kinds = sorted(set(lengths))
    figure, axes = figure_of(2, (12, 2.7))
    for each, strategy in zip(axes, (hfp.BestFit, hfp.Optimal), strict=True):
        rows, _, _ = planned(strategy(longest, seed=None), lengths)
        for number, row in enumerate(rows):
            draw_pattern(each, [tokens for _, tokens in row], number, longest, kinds)
        each.set(xlim=(-0.2, longest + 0.2), ylim=(-3.1, 0.95))
        proven = ", proven to be the fewest" if strategy is hfp.Optimal else ""
        title(each, f"{strategy.__name__}: {len(rows)} rows of {longest} tokens{proven}")
    return figure


def draw_pattern(axes: Axes, lengths: Sequence[int], number: int, capacity: int, kinds: Sequence[int]) -> None:
    """A row whose documents are known by their lengths alone."""
    draw_empty(axes, 0, -number, capacity)
    x = 0
    for tokens in lengths:
        draw_box(axes, x, -number, tokens, COLORS[kinds.index(tokens) % len(COLORS)], str(tokens))
        x += tokens


def of_several_lengths(*strategies) -> Figure:
    figure, axes = figure_of(len(strategies), (12, 4.2))
    space = max(len(planned(strategy)[0]) for strategy in strategies)
    for each, strategy in zip(axes, strategies, strict=True):
        rows, capacities, cut = planned(strategy)
        order = sorted(range(len(rows)), key=lambda row: -capacities[row])
        draw_rows(each, [rows[row] for row in order], [capacities[row] for row in order], cut=cut, space=space)
        title(each, f"{type(strategy).__name__}: {outcome(rows, capacities, cut)}")
    return figure


BUCKETS = (4, 8, 12, 16)


def bucket() -> Figure:
    return of_several_lengths(hfp.BestFit(ROW), hfp.Bucket(BUCKETS, padding_threshold=1))


def bucket_by_length() -> Figure:
    return of_several_lengths(hfp.BucketByLength(BUCKETS), hfp.Bucket(BUCKETS, padding_threshold=1))


def in_the_order_of_the_dataset(strategy, side_by_side: int, words: str, cuts: Sequence[int]) -> Figure:
    """All documents in a line, where rows end in it, and the rows."""
    figure, (axes,) = figure_of(1, (12, 3.5))
    rows, capacities, cut = planned(strategy)
    width = max(sum(LENGTHS), side_by_side * (ROW + GAP) - GAP)
    scale = width / sum(LENGTHS)
    x = 0.0
    for document, tokens in enumerate(LENGTHS):
        draw_box(axes, x, 0, tokens * scale, COLORS[document], "")
        crossed = any(abs(at * scale - x - tokens * scale / 2) < 1 for at in cuts)
        middle = x + tokens * scale / 2 + 1.7 * crossed
        axes.text(middle, HEIGHT / 2, str(document + 1), ha="center", va="center", size=11)
        x += tokens * scale
    for at in cuts:
        axes.plot([at * scale] * 2, [-0.25, 1.05], color=LEAKS, linewidth=2, linestyle=(0, (3, 1.5)))
    note(axes, 0, -0.75, words)
    scale = (width - GAP * (side_by_side - 1)) / (side_by_side * ROW)
    for number, row in enumerate(rows):
        x, y = (number % side_by_side) * (ROW * scale + GAP), -2.1 - 1.2 * (number // side_by_side)
        draw_empty(axes, x, y, ROW * scale)
        for document, tokens in row:
            hatch = "///" if document in cut else None
            draw_box(axes, x, y, tokens * scale, COLORS[document], str(document + 1) if tokens > 1 else "", hatch=hatch)
            x += tokens * scale
    axes.set(xlim=(-0.3, width + 0.3), ylim=(-3.5, 1.15))
    title(axes, outcome(rows, capacities, cut))
    return figure


def first_come() -> Figure:
    strategy = hfp.FirstCome(ROW, order="dataset", seed=None)
    rows, _, _ = planned(strategy)
    ends = np.cumsum([sum(tokens for _, tokens in row) for row in rows])[:-1].tolist()
    words = "A document that does not fit closes the row and opens the next one."
    return in_the_order_of_the_dataset(strategy, 4, words, ends)


def fixed_length() -> Figure:
    words = "The documents end to end, cut every 16 tokens. Hatched: documents that are cut."
    cuts = list(range(ROW, sum(LENGTHS), ROW))
    return in_the_order_of_the_dataset(hfp.FixedLength(ROW, seed=None), 3, words, cuts)


def multipack() -> Figure:
    figure, axes = figure_of(2, (12, 4.2))
    for each, seed in zip(axes, (0, 4), strict=True):
        rows, capacities, cut = planned(hfp.Multipack(ROW, window=6, seed=seed))
        draw_rows(each, rows, capacities, space=8)
        title(each, f"seed={seed}: {outcome(rows, capacities, cut)}")
    note(axes[0], 0, -6.75, "Windows of 6 documents; 100,000 by default, which leaves next to nothing empty.")
    return figure


def non_negative_least_squares() -> Figure:
    random = np.random.default_rng(3)
    lengths = np.clip(random.normal(6, 2.5, 400).round().astype(int), 2, 14)
    plan = hfp.plan_packing(lengths, hfp.NonNegativeLeastSquares(ROW, max_documents=3))
    figure, (left, right) = figure_of(2, (12, 4.2))
    left.axis("on")
    counts, kinds = np.bincount(lengths), sorted(set(lengths.tolist()))
    left.bar(kinds, counts[kinds], color=COLORS[: len(kinds)], edgecolor="white")
    left.set(xlabel="tokens of a document", ylabel="documents")
    left.spines[["top", "right"]].set_visible(False)
    left.tick_params(colors=FAINT)
    title(left, f"1. How many of {len(lengths)} documents have each length")
    packs = np.split(plan.segment_length, plan.pack_offsets[1:-1])
    patterns = Counter(tuple(sorted(pack.tolist(), reverse=True)) for pack in packs)
    shown = patterns.most_common(7)
    for number, (pattern, times) in enumerate(shown):
        draw_pattern(right, pattern, number, ROW, kinds)
        note(right, ROW + 0.6, -number + HEIGHT / 2, f"{times} times", size=12, color=INK)
    others = f"and {len(patterns) - len(shown)} more patterns, {plan.num_packs} rows in all"
    note(right, 0, 0.4 - len(shown), others)
    right.set(xlim=(-0.2, ROW + 3.5), ylim=(-0.05 - len(shown), 0.95))
    title(right, "2. How often to use each pattern of up to three")
    return figure
