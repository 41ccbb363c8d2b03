"""Seconds to plan packs, everything included, beside TRL's best-fit decreasing on fewer documents.

python benchmarks/plan.py --documents 1000000 10000000 --max-length 2048
"""

import argparse
import statistics
import time

import numpy as np
import pyarrow as pa
from measure import in_turn, machine

import hf_packing as hfp

TRL_DOCUMENTS = 20_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--max-length", type=int, nargs="+", default=[2048])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print(machine("hf-packing", "numpy", "trl"))
    print("lengths: lognormal(6, 1.2) clipped to [1, max_length]; the median of", arguments.rounds, "calls\n")
    print(
        f"{'documents':>12}{'max_length':>12}{'seconds':>10}{'documents/s':>14}{'packs':>12}{'above lower bound':>20}"
    )
    for documents in arguments.documents:
        for max_length in arguments.max_length:
            lengths = draw(documents, max_length)
            strategy = hfp.BestFit(max_length)
            plan = hfp.plan_packing(lengths, strategy)
            seconds = in_turn({"ours": lambda: hfp.plan_packing(lengths, strategy)}, arguments.rounds)["ours"]  # noqa: B023
            median = statistics.median(seconds)
            metrics = plan.metrics()
            above = metrics.num_packs / metrics.lower_bound - 1
            row = f"{documents:>12,}{max_length:>12,}{median:>10.3f}{documents / median:>14,.0f}{plan.num_packs:>12,}"
            print(f"{row}{above:>20.5%}")
    beside_trl(arguments.max_length[0])


def draw(documents: int, max_length: int) -> np.ndarray:
    return np.clip(np.random.default_rng(0).lognormal(6, 1.2, documents), 1, max_length).astype(np.int64)


def beside_trl(max_length: int) -> None:
    """TRL plans and gathers in one function; tokens of one byte keep the gathering small."""
    from trl.data_utils import _pack_bfd

    lengths = draw(TRL_DOCUMENTS, max_length)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    values = pa.nulls(int(offsets[-1]), pa.int8())
    table = pa.table({"input_ids": pa.ListArray.from_arrays(pa.array(offsets), values)})
    began = time.perf_counter()
    rows = len(_pack_bfd(table, max_length))
    theirs = time.perf_counter() - began
    began = time.perf_counter()
    plan = hfp.plan_packing(lengths, hfp.BestFit(max_length))
    ours = time.perf_counter() - began
    print(
        f"\n{TRL_DOCUMENTS:,} documents at {max_length:,}: TRL's _pack_bfd {theirs:.2f} s for {rows:,} packs, "
        f"gathering a byte a token along; ours {ours:.3f} s for {plan.num_packs:,} packs: "
        f"{theirs / ours:.0f} times as fast"
    )


if __name__ == "__main__":
    main()
