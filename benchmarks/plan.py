"""Seconds and peak memory of planning, with everything included, and compared with TRL's best-fit decreasing.

    python benchmarks/plan.py
    python benchmarks/plan.py --documents 1000000 --max-length 2048 8192 --strategy Bucket

Each size runs in a separate process, to measure its own peak memory. The lengths are drawn before the clock starts;
their array counts as memory. The comparison with TRL is on fewer documents.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from lengths import log_normal
from measure import figure, machine, recorded

import hf_packing as hfp

TRL_DOCUMENTS = 200_000
LARGE = 50_000_000
"""From this many documents on, one call is enough."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, nargs="+", default=[1_000_000, 10_000_000, 100_000_000])
    parser.add_argument("--max-length", type=int, nargs="+", default=[2048, 8192, 32768, 131072])
    parser.add_argument(
        "--strategy", default="BestFit", help="a strategy with one max_length, by its name in hf_packing"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(plan_once(arguments)))
        return
    print(machine("hf-packing", "numpy", "trl"))
    print(f"{arguments.strategy}; lengths: lognormal(6, 1.2) clipped to [1, max_length]; the median of")
    print(f"{arguments.rounds} calls, one call from {LARGE:,} documents on\n")
    print(
        f"{'documents':>12}{'max_length':>12}{'seconds':>9}{'documents/s':>13}{'GB':>6}{'packs':>13}{'above bound':>13}"
    )
    for documents in arguments.documents:
        for max_length in arguments.max_length:
            row = in_own_process(documents, max_length, arguments)
            figure(documents=documents, max_length=max_length, strategy=arguments.strategy, **row)
            print(
                f"{documents:>12,}{max_length:>12,}{row['seconds']:>9.2f}{documents / row['seconds']:>13,.0f}"
                f"{row['gigabytes']:>6.1f}{row['packs']:>13,}{row['above']:>13.5%}",
                flush=True,
            )
    beside_trl(arguments.max_length)


def in_own_process(documents: int, max_length: int, arguments: argparse.Namespace) -> dict[str, float]:
    sizes = ["--documents", str(documents), "--max-length", str(max_length), "--rounds", str(arguments.rounds)]
    command = [sys.executable, str(Path(__file__)), "--one", "--strategy", arguments.strategy, *sizes]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def plan_once(arguments: argparse.Namespace) -> dict[str, float]:
    (documents,), (max_length,) = arguments.documents, arguments.max_length
    lengths = log_normal(documents, 6, 1.2, max_length)
    strategy = hfp.Bucket() if arguments.strategy == "Bucket" else getattr(hfp, arguments.strategy)(max_length)
    seconds = []
    for _ in range(arguments.rounds if documents < LARGE else 1):
        began = time.perf_counter()
        plan = hfp.plan_packing(lengths, strategy)
        seconds.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    bound = plan.metrics().lower_bound
    return {
        "seconds": statistics.median(seconds),
        "gigabytes": peak,
        "packs": plan.num_packs,
        "above": plan.num_packs / bound - 1,
    }


def beside_trl(max_lengths: list[int]) -> None:
    """Compare with TRL, which plans and gathers in one function; one byte per token keeps the gathering small."""
    import pyarrow as pa
    from trl.data_utils import _pack_bfd

    print(f"\n{TRL_DOCUMENTS:,} documents, TRL's _pack_bfd (gathering a byte a token along) and BestFit:")
    print(f"{'max_length':>12}{'TRL s':>9}{'packs':>10}{'ours s':>9}{'packs':>10}{'times as fast':>15}")
    for max_length in max_lengths:
        lengths = log_normal(TRL_DOCUMENTS, 6, 1.2, max_length)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        values = pa.nulls(int(offsets[-1]), pa.int8())
        documents = pa.table({"input_ids": pa.ListArray.from_arrays(pa.array(offsets), values)})
        began = time.perf_counter()
        rows = len(_pack_bfd(documents, max_length))
        theirs = time.perf_counter() - began
        ours = []
        for _ in range(5):
            began = time.perf_counter()
            plan = hfp.plan_packing(lengths, hfp.BestFit(max_length))
            ours.append(time.perf_counter() - began)
        median = statistics.median(ours)
        facts = {"trl_seconds": theirs, "trl_packs": rows, "seconds": median, "packs": plan.num_packs}
        figure(documents=TRL_DOCUMENTS, max_length=max_length, **facts)
        print(
            f"{max_length:>12,}{theirs:>9.2f}{rows:>10,}{median:>9.3f}{plan.num_packs:>10,}{theirs / median:>15.0f}",
            flush=True,
        )


if __name__ == "__main__":
    with recorded(__file__):
        main()
