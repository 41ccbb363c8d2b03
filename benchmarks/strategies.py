"""Each strategy on lengths like those of real datasets: padding, cuts, packs, and how few packs are possible.

python benchmarks/strategies.py --documents 1000000
"""

import argparse

from lengths import log_normal, refinedweb_like, uniform
from measure import figure, machine, recorded

import hf_packing as hfp

PAPER_BUCKETS = (2048, 4096, 8192, 16384)


def one_capacity(max_length: int) -> list:
    return [
        hfp.FixedLength(max_length),
        hfp.FirstCome(max_length),
        hfp.Multipack(max_length),
        hfp.ShortestPackFirst(max_length),
        hfp.BestFit(max_length),
        hfp.Optimal(max_length),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1_000_000)
    n = parser.parse_args().documents
    print(machine("hf-packing", "numpy", "scipy"))
    buckets = [hfp.FixedLength(length) for length in PAPER_BUCKETS] + [hfp.BucketByLength(), hfp.Bucket()]
    with_small = [*buckets, hfp.Bucket((512, 1024, *PAPER_BUCKETS))]
    for name, lengths, strategies in (
        ("OrcaMath-like: lognormal(5.9, 0.45) up to 1024", log_normal(n, 5.9, 0.45, 1024), one_capacity(1024)),
        ("the same up to 4096", log_normal(n, 5.9, 0.45, 4096), one_capacity(4096)),
        ("uniform 300..700 at 2048", uniform(n, 300, 700), one_capacity(2048)),
        ("reasoning-like: lognormal(8.8, 0.7) up to 16384", log_normal(n, 8.8, 0.7, 16384), one_capacity(16384)),
        ("RefinedWeb-like, the buckets of arXiv 2407.07495", refinedweb_like(n), with_small),
    ):
        rows = hfp.compare(lengths, strategies)
        for row in rows:
            figure(lengths=name, strategy=row.name, seconds=row.seconds, above_bound=row.gap, **vars(row.metrics))
        print(f"\n{name}, {n:,} documents\n{rows!r}", flush=True)
        print(*(f"{row.name}: {row.note}" for row in rows if row.note), sep="\n")
    lengths = refinedweb_like(10 * n)
    print(f"\nRefinedWeb-like, rows against plain concatenation (arXiv 2404.10830), {10 * n:,} documents")
    for max_length in (2048, 8192):
        concat, best_fit = hfp.compare(lengths, [hfp.FixedLength(max_length), hfp.BestFit(max_length)])
        for row in (concat, best_fit):
            figure(lengths="RefinedWeb-like", strategy=row.name, seconds=row.seconds, **vars(row.metrics))
        more = best_fit.metrics.num_packs / concat.metrics.num_packs - 1
        print(
            f"{best_fit.name}: {best_fit.metrics.num_packs:,} rows for {concat.metrics.num_packs:,}, {more:+.5%}, "
            f"and cut {best_fit.metrics.num_cut_documents:,} documents for {concat.metrics.num_cut_documents:,}, "
            f"of {(lengths > max_length).sum():,} that are longer than a row"
        )


if __name__ == "__main__":
    with recorded(__file__):
        main()
