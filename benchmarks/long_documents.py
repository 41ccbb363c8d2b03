"""Documents on several ranks, simulated: how busy ranks are, what they send each other, and seconds to plan.

python benchmarks/long_documents.py

Both sides run the rows that TokenBudget(16384, max_ranks_per_document=8) plans for blocks of 8 ranks. "equal slices"
cuts each row into 8 slices of equally many tokens, as context parallelism without zigzag does. Costs are those of an
8B model: 26,624 pairs of tokens in attention take as long as all linear layers for one token. A token that is sent is
262 kB: 1,024 numbers each of keys and values in bfloat16, in 32 layers, forward and backward. The lengths of chats,
code and web pages are read from the folder that HF_PACKING_DATA names, or else drawn from log-normal distributions with
the same means and deviations.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from internals import Epoch, Pieces, RankLayout, plan_exchange, sizes_of_documents
from lengths import log_normal
from measure import figure, machine, recorded

import hf_packing as hfp

DATA = Path(os.environ.get("HF_PACKING_DATA") or Path(__file__).parents[2] / "shared" / "data") / "lengths"
LOG_NORMAL = {"chat": (6.914, 0.578, 6272), "python": (7.337, 1.868, 196_404), "wiki": (8.326, 0.758, 27_326)}
"""Mean and deviation of the logarithm of lengths, and the largest length, in the files of these names."""

LINEAR_COST = 26_624
TOKENS, RANKS_PER_BLOCK = 16_384, 8
LONGEST = TOKENS * RANKS_PER_BLOCK
SENT_BYTES = 2 * 1024 * 2 * 32 * 2

Layout = Callable[[np.ndarray], RankLayout]


def drawn(name: str, documents: int, rng: np.random.Generator) -> np.ndarray:
    file = DATA / f"{name}.npy"
    lengths = np.load(file) if file.exists() else log_normal(8000, *LOG_NORMAL[name])
    return rng.choice(lengths, documents).astype(np.int64).clip(max=LONGEST)


def chats_and_long(documents: int, rng: np.random.Generator) -> np.ndarray:
    """Draw chats, and 1 % documents of one to eight times as many tokens as a rank may have."""
    long = np.exp(rng.uniform(np.log(TOKENS), np.log(LONGEST), documents // 100)).astype(np.int64)
    return np.concatenate([drawn("chat", documents - len(long), rng), long])


def sets_of(documents: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return the lengths of the documents of each set: `documents` chats, fewer of others, which are longer."""
    books = np.exp(rng.normal(11.5, 0.6, documents // 100)).astype(np.int64).clip(2000, LONGEST)
    return {
        "chat + 1 % long": chats_and_long(documents, rng),
        "code": drawn("python", documents // 4, rng),
        "web + books": np.concatenate([drawn("wiki", len(books) * 18, rng), books]),
    }


def equal_slices(lengths: np.ndarray) -> RankLayout:
    ends = np.cumsum(lengths)
    ends_of_ranks = ends[-1] * np.arange(1, RANKS_PER_BLOCK + 1) // RANKS_PER_BLOCK
    cuts = np.unique(np.concatenate([[0], ends, ends_of_ranks]))
    document, rank = (np.searchsorted(each, cuts[:-1], side="right") for each in (ends, ends_of_ranks))
    pieces = Pieces(document, cuts[:-1] - (ends - lengths)[document], np.diff(cuts))
    return RankLayout(lengths, pieces, rank, RANKS_PER_BLOCK)


def budget() -> hfp.TokenBudget:
    return hfp.TokenBudget(TOKENS, max_ranks_per_document=RANKS_PER_BLOCK, linear_cost=LINEAR_COST)


def rows_of(lengths: np.ndarray, ranks: int) -> list[np.ndarray]:
    """Return the lengths of the documents of each row, in the order in which the blocks run them."""
    plan = budget().plan(sizes_of_documents(lengths), Epoch(0, world_size=ranks // RANKS_PER_BLOCK))
    return np.split(lengths[plan.rows], plan.offsets[1:-1])


def measure(rows: list[np.ndarray], ranks: int, lay_out: Layout) -> dict[str, float]:
    layouts = [lay_out(row) for row in rows]
    work = np.concatenate([LINEAR_COST * layout.tokens + layout.attention_cost for layout in layouts])
    work = work.reshape(-1, ranks)
    received = sum(plan_exchange(layout).num_received for layout in layouts)
    return {
        "utilization": work.mean() / work.max(axis=1).mean(),
        "kilobytes": received * SENT_BYTES / sum(map(sum, rows)) / 1000,
        "largest": max(int(layout.tokens.max()) for layout in layouts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=20_000, help="documents of the first set")
    parser.add_argument("--planned", type=int, default=100_000, help="documents to plan for the most ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 64])
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    print(machine("hf-packing", "numpy"))
    print("lengths from", "HF_PACKING_DATA" if DATA.exists() else "log-normal distributions")
    sides: dict[str, Layout] = {"equal slices": equal_slices, "TokenBudget.lay_out": budget().lay_out}
    for name, lengths in sets_of(arguments.documents, rng).items():
        above = lengths[lengths > TOKENS].sum() / lengths.sum()
        print(
            f"\n{name}: {len(lengths):,} documents, {lengths.sum() / 1e6:.1f} million tokens, {above:.0%} of them in\n"
            f"documents of more than {TOKENS:,} tokens\n{'ranks':>5}  {'':20}{'utilization':>12}{'kB per token':>14}"
            f"{'largest':>10}"
        )
        for ranks in arguments.ranks:
            rows = rows_of(lengths, ranks)
            for side, lay_out in sides.items():
                facts = measure(rows, ranks, lay_out)
                figure(set=name, ranks=ranks, side=side, above=above, **facts)
                print(
                    f"{ranks:>5}  {side:20}{facts['utilization']:>12.3f}{facts['kilobytes']:>14.0f}"
                    f"{facts['largest']:>10,}"
                )
    lengths, ranks = chats_and_long(arguments.planned, rng), max(arguments.ranks)
    began = time.process_time()
    rows = rows_of(lengths, ranks)
    planned = time.process_time()
    layouts = [budget().lay_out(row) for row in rows]
    laid_out = time.process_time()
    for layout in layouts:
        plan_exchange(layout)
    seconds = {"plan": planned - began, "lay_out": laid_out - planned, "exchange": time.process_time() - laid_out}
    figure(documents=len(lengths), ranks=ranks, rows=len(rows), seconds=seconds)
    print(
        f"\n{len(lengths):,} chats and long documents for {ranks} ranks, seconds of the processor: plan "
        f"{seconds['plan']:.2f},\nlay out {len(rows):,} rows {seconds['lay_out']:.2f}, what is sent "
        f"{seconds['exchange']:.2f}; together {sum(seconds.values()):.2f}\n\n"
        "utilization: time that ranks work / time until the slowest one is done. kB per token: received by ranks from\n"
        "others, for each token that is trained on. largest: tokens on a rank."
    )


if __name__ == "__main__":
    with recorded(__file__):
        main()
