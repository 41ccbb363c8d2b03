"""Fewer truncations improve language modeling (arXiv 2404.10830): its Tables 1 and 2, and which documents are cut.

    python recipes/reproduce/fewer_truncations.py
    python recipes/reproduce/fewer_truncations.py --documents 1000000 10000000 100000000    # 6 GB of memory

Table 1: seconds of planning, compared with the paper's figures and with the paper's algorithm run here, in Python, on
`--theirs` documents. Table 2: rows of `--max-length` tokens compared with plain concatenation. Then the share of
documents that are cut, by their length, with a picture. Lengths are like RefinedWeb's.
"""

from itertools import pairwise
from pathlib import Path

import numpy as np
from common import Report, Stopwatch, options, parse, refinedweb_like, yes_or_no
from matplotlib.figure import Figure
from tqdm.auto import tqdm

import hf_packing as hfp

TIMED_LENGTH = 2048
PAPER_SECONDS = {10**6: 10, 10**7: 106, 10**8: 1066, 10**9: 10_816, 2 * 10**9: 22_244}
"""Table 1, optimized best-fit decreasing, one thread, RefinedWeb, 2048."""
PAPER_MORE_ROWS = {2048: 0.000024, 8192: 0.0000063}
"""Table 2, RefinedWeb."""
STRATEGIES = {"concatenate and cut": hfp.FixedLength, "best fit": hfp.BestFit}
EDGES = (0, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 1 << 18)
"""Bins of document length, tokens, the upper end included."""
BINS = [*(f"{begin + 1} to {end}" for begin, end in pairwise(EDGES[:-1])), f"> {EDGES[-2]}"]
SHORTEST = (1, 8, 16, 32, 64)
EXAMPLE, EXAMPLE_LENGTH = (14, 7, 5, 2, 3), 8
"""Worked out by hand: 4 rows each way, 3 documents cut by concatenation and 1 by best fit."""

Plans = dict[tuple[str, int], hfp.PackingPlan]
"""By strategy and row length."""


def main() -> None:
    parser = options(__doc__, documents=[1_000_000, 10_000_000], theirs=1_000_000, max_length=[2048, 8192])
    arguments = parse(parser, documents=[50_000], theirs=10_000)
    report = Report("Fewer truncations (arXiv 2404.10830)", "numpy")
    table_1(arguments.documents, arguments.theirs, report)
    lengths = refinedweb_like(max(arguments.documents))
    plans = {
        (name, max_length): hfp.plan_packing(lengths, strategy(max_length))
        for max_length in tqdm(arguments.max_length, desc="Planning")
        for name, strategy in STRATEGIES.items()
    }
    table_2(lengths, plans, arguments.max_length, report)
    cuts_by_length(lengths, plans, arguments.max_length, report, arguments.output / "fewer_truncations.png")
    report.save(arguments.output / "fewer_truncations.md")


def table_1(sizes: list[int], sample: int, report: Report) -> None:
    strategy, rows = hfp.BestFit(TIMED_LENGTH), []

    def add_row(documents: int, how: str, seconds: float) -> None:
        paper = PAPER_SECONDS.get(documents)
        rows.append((f"{documents:,}, {how}", seconds, paper, paper and paper / seconds))

    for documents in tqdm(sizes, desc="Planning, timed"):
        lengths = refinedweb_like(documents)
        with Stopwatch() as watch:
            hfp.plan_packing(lengths, strategy)
        add_row(documents, "every document dealt", watch.seconds)
    counts = np.bincount(refinedweb_like(sizes[0]))
    for documents in PAPER_SECONDS:
        scaled = counts * (documents // sizes[0])
        with Stopwatch() as watch:
            found = hfp.plan_counts(scaled, strategy)
        add_row(found.num_documents, "from counts alone", watch.seconds)
    columns = ["documents", "ours:.2f", "paper:,", "paper / ours:,.0f"]
    report.table(f"Table 1, CPU seconds to plan rows of {TIMED_LENGTH}", columns, rows)
    lengths = refinedweb_like(sample)
    with Stopwatch() as theirs:
        packs = best_fit_packs(lengths, TIMED_LENGTH)
    with Stopwatch() as ours:
        plan = hfp.plan_packing(lengths, strategy)
    report.say(f"""
        The paper's algorithm, a segment tree in Python, run here on {sample:,} documents: {packs:,} packs, ours
        {plan.num_packs:,}; ours is {theirs.seconds / ours.seconds:.0f} times as fast.

        Our time grows with the number of distinct lengths, and with the number of documents only where each is given
        its place: from counts alone, a billion take no longer than a million. The paper used another machine, so the
        ratio measured on this one is the fair comparison.
    """)


def best_fit_packs(lengths: np.ndarray, max_length: int) -> int:
    """Return how many packs the paper's algorithm needs; it runs in Python, as for the paper's figures.

    Documents longer than max_length are cut into full packs and a remainder. Leaf r of the tree holds r where a pack
    with room r exists, else 0, and each node holds the larger of its children. The search for a piece of w tokens goes
    down from the root, and left where the left child is at least w.
    """
    full, rest = np.divmod(lengths, max_length)
    pieces = np.sort(rest[rest > 0])[::-1]
    leaves = 1 << int(max_length).bit_length()
    tree = [0] * (2 * leaves)
    set_leaf(tree, leaves + max_length, max_length)
    bins_with_room: list[list[list[int]]] = [[] for _ in range(max_length + 1)]
    packs = int(full.sum())
    for piece in tqdm(pieces.tolist(), desc="The paper's best-fit decreasing", unit=" pieces", unit_scale=True):
        node = 1
        while node < leaves:
            node *= 2
            if tree[node] < piece:
                node += 1
        room = node - leaves
        if bins_with_room[room]:
            items = bins_with_room[room].pop()
        else:
            items = []
            packs += 1
        items.append(piece)
        if not bins_with_room[room] and room < max_length:
            set_leaf(tree, node, 0)
        left = room - piece
        if left:
            bins_with_room[left].append(items)
            set_leaf(tree, leaves + left, left)
    return packs


def set_leaf(tree: list[int], node: int, room: int) -> None:
    """Set a leaf of the tree, and the nodes above it, up to the root or until nothing changes."""
    tree[node] = room
    while node > 1:
        node //= 2
        larger = max(tree[2 * node], tree[2 * node + 1])
        if tree[node] == larger:
            return
        tree[node] = larger


def table_2(lengths: np.ndarray, plans: Plans, max_lengths: list[int], report: Report) -> None:
    rows, exact = [], True
    for max_length in max_lengths:
        concatenated, best_fit = (plans[name, max_length].metrics() for name in STRATEGIES)
        longer, packs = int((lengths > max_length).sum()), (concatenated.num_packs, best_fit.num_packs)
        more = packs[1] / packs[0] - 1, PAPER_MORE_ROWS.get(max_length)
        cut = concatenated.truncation_ratio, best_fit.truncation_ratio, longer / len(lengths)
        rows.append((max_length, *packs, *more, *cut))
        exact &= best_fit.num_cut_documents == longer
    columns = ["row", "rows, concatenated:,", "best fit:,", "more:+.5%", "paper:+.5%"]
    columns += ["cut, concatenated:.3%", "best fit:.3%", "longer than a row:.3%"]
    report.table(f"Table 2, rows and cut documents, {len(lengths):,} documents", columns, rows)
    report.say(f"Best fit cuts exactly the documents that are longer than a row: {yes_or_no(exact)}.")

    def more_rows(shortest: int, max_length: int) -> float:
        left = lengths[lengths >= shortest]
        best_fit = hfp.plan_counts(np.bincount(left), hfp.BestFit(max_length)).num_packs
        return best_fit / -(-int(left.sum(dtype=np.int64)) // max_length) - 1

    report.table(
        "Rows beyond those of concatenation, where short documents are left out",
        ["shortest document", *(f"rows of {max_length}:+.5%" for max_length in max_lengths)],
        [(shortest, *(more_rows(shortest, max_length) for max_length in max_lengths)) for shortest in SHORTEST],
    )
    report.say("""
        On the paper's data, best fit needs a few more rows than concatenation. Very short documents fill the last gaps
        of rows, and the lengths sampled here probably have more of them than RefinedWeb, which was filtered: without
        the shortest, best fit needs more rows here too.
    """)


def cuts_by_length(lengths: np.ndarray, plans: Plans, max_lengths: list[int], report: Report, picture: Path) -> None:
    """Show the share of the documents of each bin that are in more than one segment, as a table and as a picture."""
    bins, shares = np.searchsorted(EDGES, lengths) - 1, {}
    documents = np.bincount(bins, minlength=len(BINS))
    for key, plan in plans.items():
        cut = np.bincount(plan.segment_document, minlength=len(lengths)) > 1
        shares[key] = np.bincount(bins[cut], minlength=len(BINS)) / np.maximum(documents, 1)
    columns = ["length", "documents:,", *(f"{name}, {max_length}:.2%" for name, max_length in shares)]
    report.table("Documents cut, by length", columns, zip(BINS, documents, *shares.values(), strict=True))
    concatenated, best_fit = (
        hfp.plan_packing(EXAMPLE, strategy(EXAMPLE_LENGTH)).metrics() for strategy in STRATEGIES.values()
    )
    report.say(f"""
        Concatenation cuts a document of n tokens with the probability n / row, whatever it holds; best fit never cuts a
        document that fits. By hand: documents of {", ".join(map(str, EXAMPLE))} tokens in rows of {EXAMPLE_LENGTH}:
        {concatenated.num_packs} rows with {concatenated.num_cut_documents} documents cut by concatenation,
        {best_fit.num_packs} with {best_fit.num_cut_documents} by best fit.

        ![share of documents cut, by length]({picture.name})
    """)
    figure = Figure(figsize=(6 * len(max_lengths), 4.2))
    places = np.arange(len(BINS))
    for axis, max_length in zip(figure.subplots(1, len(max_lengths), squeeze=False)[0], max_lengths, strict=True):
        for side, (name, color) in enumerate(zip(STRATEGIES, ("#b04030", "#488858"), strict=True)):
            axis.bar(places + 0.4 * side, 100 * shares[name, max_length], 0.4, color=color, label=name)
        axis.set_xticks(places + 0.2, BINS, rotation=40, ha="right")
        axis.set(xlabel="tokens of the document", ylabel="documents cut (%)", title=f"rows of {max_length} tokens")
        axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main()
