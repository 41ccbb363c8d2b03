"""Packing documents that share prefixes: packed rows beside rows of trees, and how fast trees are found and written.

Documents have labels, so that rows say what each document trains on. Speeds are tokens of all documents in a second of
processor time: to find shared prefixes, to plan (find, cut and pack trees), and to build rows. "fewer" is tokens of all
documents / tokens of the rows. The texts are in the folder that HF_PACKING_DATA names; "short" needs none.

python benchmarks/trees.py
"""

import argparse
import statistics
import time
from collections import deque

import datasets
from internals import (
    TOKENS_AT_ONCE,
    Packing,
    check_lengths,
    cut_to_pieces,
    find_token_columns,
    find_trees,
    plan_trees,
)
from measure import figure, in_turn, machine, recorded
from tree_data import SETS, Documents, documents_of, short_documents

import hf_packing as hfp

SHORT = "short, 67 tokens each"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", nargs="+", metavar="BEGINNING", help="sets whose names begin so (default: all)")
    parser.add_argument("--number", type=int, help="chats, pairs, questions or short documents to read (default: all)")
    parser.add_argument("--max-length", type=int, default=8192)
    parser.add_argument("--share-prefixes", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    datasets.disable_progress_bars()
    print(machine("hf-packing", "datasets", "pyarrow", "numpy"))
    print(
        f"\nrows of {arguments.max_length:,} tokens, prefixes of at least {arguments.share_prefixes} tokens, best fit"
    )
    columns = f"{'documents':>10}{'Mtokens':>9}{'packed rows':>12}{'tree rows':>10}{'fewer':>7}{'above bound':>12}"
    print(f"{'':28}{columns}{'find Mtok/s':>12}{'plan':>6}{'rows':>6}")
    for name in (*SETS, SHORT):
        if not arguments.sets or name.startswith(tuple(arguments.sets)):
            number = () if arguments.number is None else (arguments.number,)
            documents = short_documents(*number) if name == SHORT else documents_of(name, *number)
            measure(name, documents, arguments)


def measure(name: str, documents: Documents, arguments: argparse.Namespace) -> None:
    strategy, least = hfp.BestFit(arguments.max_length), arguments.share_prefixes
    columns = find_token_columns(documents.as_dataset().data.table)
    lengths = check_lengths(columns["input_ids"].length)
    pieces = cut_to_pieces(lengths, arguments.max_length, "split")
    packing = Packing.of(strategy, share_prefixes=least)
    plans: list[hfp.PackingPlan] = []
    sides = {
        "find": lambda: find_trees(columns, pieces, least, arguments.max_length),
        "plan": lambda: plans.append(plan_trees(columns, strategy, least)),
        "rows": lambda: deque(packing.blocks(columns, plans[-1], TOKENS_AT_ONCE), maxlen=0),
    }
    seconds = in_turn(sides, arguments.rounds, time.process_time)
    plan, packed = plans[-1], hfp.plan_packing(lengths, strategy)
    metrics, tokens = plan.metrics(), int(lengths.sum())
    speed = {side: tokens / statistics.median(times) / 1e6 for side, times in seconds.items()}
    above = metrics.num_packs / metrics.lower_bound - 1
    print(
        f"{name:28}{len(lengths):>10,}{tokens / 1e6:>9.1f}{packed.num_packs:>12,}{metrics.num_packs:>10,}"
        f"{metrics.shared_ratio:>7.2f}{above:>12.2%}{speed['find']:>12.0f}{speed['plan']:>6.0f}{speed['rows']:>6.0f}"
    )
    figure(
        set=name,
        documents=len(lengths),
        tokens=tokens,
        packed_rows=packed.num_packs,
        tree_rows=metrics.num_packs,
        lower_bound=metrics.lower_bound,
        shared_ratio=metrics.shared_ratio,
        processor_seconds=seconds,
    )


if __name__ == "__main__":
    with recorded(__file__):
        main()
