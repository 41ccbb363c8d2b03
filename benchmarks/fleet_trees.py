"""Documents that share prefixes, in eight files: the rows of a fleet, beside those of one plan of all documents.

Documents have labels. "pack" finds trees among all documents; the fleet finds them in each file, and packs the trees of
all files with one plan, or each file by itself. Documents stand in their order, in eight files of equally many, so that
nearly all relatives are in the same file; or in random order, so that they are not. "more tokens" is how many more
tokens the fleet's rows have than those of pack, and "estimated" is what its summary says. Seconds are those of the
fleet with two processes, with and without shared prefixes. The texts are in the folder that HF_PACKING_DATA names;
"short" needs none.

python benchmarks/fleet_trees.py
"""

import argparse
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from measure import figure, in_turn, machine, recorded
from tree_data import SETS, documents_of, short_documents

import hf_packing as hfp

FILES = 8
SHORT = "short, 67 tokens each"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", nargs="+", metavar="BEGINNING", help="sets whose names begin so (default: all)")
    parser.add_argument("--number", type=int, help="chats, pairs, questions or short documents to read (default: all)")
    parser.add_argument("--max-length", type=int, default=8192)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    datasets.disable_progress_bars()
    warnings.simplefilter("ignore", UserWarning)  # of tokens that files share, and of files that are packed alone
    print(machine("hf-packing", "datasets", "pyarrow", "numpy"))
    print(f"\nrows of {arguments.max_length:,} tokens, {FILES} files, best fit\n")
    print(f"{'':28}{'rows':>33}{'in random order':>35}{'seconds':>20}")
    print(f"{'':28}{'pack':>9}{'fleet':>9}{'each alone':>15}{'rows':>9}{'more tokens':>14}", end="")
    print(f"{'estimated':>12}{'documents':>12}{'trees':>8}")
    for name in (*SETS, SHORT):
        if not arguments.sets or name.startswith(tuple(arguments.sets)):
            number = () if arguments.number is None else (arguments.number,)
            documents = short_documents(*number) if name == SHORT else documents_of(name, *number)
            measure(name, documents.as_dataset(), arguments)


def measure(name: str, documents: datasets.Dataset, arguments: argparse.Namespace) -> None:
    strategy = hfp.BestFit(arguments.max_length)
    order = np.random.default_rng(0).permutation(len(documents))
    with tempfile.TemporaryDirectory() as folder:

        def write(order: Any) -> str:
            some = tempfile.mkdtemp(dir=folder)
            for number, part in enumerate(np.array_split(order, FILES)):
                documents.select(part).to_parquet(f"{some}/{number}.parquet")
            return some

        def pack(files: str, share: bool = True, **options: Any) -> hfp.fleet.PackedCorpus:
            output = Path(tempfile.mkdtemp(dir=folder), "packed")
            engine = hfp.fleet.local(arguments.workers)
            return hfp.fleet.pack(files, strategy, output, executor=engine, share_prefixes=share, **options)

        together = write(np.arange(len(documents)))
        one_plan = hfp.pack(documents, strategy, share_prefixes=True, load_from_cache_file=False)
        unique = sum(map(len, one_plan.with_format("numpy")["tree_input_ids"]))
        fleet, alone, scattered = pack(together), pack(together, exchange=False), pack(write(order))
        sides = {"documents": lambda: pack(together, share=False), "trees": lambda: pack(together)}
        seconds = in_turn(sides, arguments.rounds, time.perf_counter)
    tokens = sum(file.tokens for file in scattered.files)
    estimated = scattered.shared_between / tokens
    times = {side: statistics.median(each) for side, each in seconds.items()}
    print(
        f"{name:28}{len(one_plan):>9,}{fleet.num_rows:>9,}{alone.num_rows:>15,}{scattered.num_rows:>9,}"
        f"{1 - unique / tokens:>14.2%}{estimated:>12.2%}{times['documents']:>12.1f}{times['trees']:>8.1f}"
    )
    figure(
        set=name,
        documents=len(documents),
        tokens=fleet.metrics().num_tokens,
        rows={"pack": len(one_plan), "fleet": fleet.num_rows, "alone": alone.num_rows, "scattered": scattered.num_rows},
        unique={"pack": unique, "fleet": sum(file.tokens for file in fleet.files), "scattered": tokens},
        estimated=scattered.shared_between,
        seconds=seconds,
    )


if __name__ == "__main__":
    with recorded(__file__):
        main()
