"""What multiples cost that FP8 and tensor parallelism ask for: tokens that fill up micro-batches.

python benchmarks/alignment.py

Each set is planned with TokenBudget(16384, overflow="split") for 8 ranks, without and with multiples. "filled" are the
tokens that fill up, as a share of the documents' tokens; "more" are micro-batches beyond those without multiples. The
lengths are read from the folder that HF_PACKING_DATA names, or else drawn from log-normal distributions.
"""

import argparse
import os
from pathlib import Path

import numpy as np
from internals import RankBatchSampler, sizes_of_documents
from lengths import log_normal
from measure import figure, machine, recorded

import hf_packing as hfp

DATA = Path(os.environ.get("HF_PACKING_DATA") or Path(__file__).parents[2] / "shared" / "data") / "lengths"
SETS = ("chat", "instruct", "math", "python", "toolcall", "wiki")
TOKENS, RANKS = 16_384, 8
MULTIPLES = (16, 128)


def drawn(name: str, documents: int) -> np.ndarray:
    file = DATA / f"{name}.npy"
    lengths = np.load(file) if file.exists() else log_normal(8000, 6.5, 1.0, TOKENS)
    return np.random.default_rng(0).choice(lengths, documents).astype(np.int64)


def planned(lengths: np.ndarray, align_tokens: int = 1) -> tuple[int, float]:
    """Return the number of micro-batches over all ranks, and filled tokens as a share of the documents' tokens."""
    budget = hfp.TokenBudget(TOKENS, overflow="split", align_tokens=align_tokens)
    summary = RankBatchSampler(budget, sizes_of_documents(lengths), RANKS).summary()
    assert summary.largest_micro_batch <= TOKENS
    return summary.num_micro_batches * RANKS, (summary.filled or 0) / summary.tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=100_000)
    documents = parser.parse_args().documents
    print(machine("hf-packing", "numpy"))
    print("lengths from HF_PACKING_DATA" if DATA.exists() else "lengths from log-normal distributions")
    print(f"\n{'':<10}{'mean':>8}" + "".join(f"{f'align_tokens={multiple}':>22}" for multiple in MULTIPLES))
    print(f"{'set':<10}{'tokens':>8}" + f"{'filled':>14}{'more':>8}" * len(MULTIPLES))
    for name in SETS:
        lengths = drawn(name, documents)
        least, _ = planned(lengths)
        line = f"{name:<10}{lengths.mean():>8,.0f}"
        for multiple in MULTIPLES:
            batches, filled = planned(lengths, multiple)
            figure(set=name, multiple=multiple, filled=filled, more=batches / least - 1)
            line += f"{filled:>14.2%}{batches / least - 1:>8.2%}"
        print(line, flush=True)


if __name__ == "__main__":
    with recorded(__file__):
        main()
