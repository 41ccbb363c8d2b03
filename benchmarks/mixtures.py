"""Mixtures: how far the shares of three sources are off after so many tokens of packed rows.

python benchmarks/mixtures.py

The sources have half, 30 % and 20 % of the tokens, and documents of 200, 1,000 and 5,000 tokens: exactly, or on average
(log-normal). The farthest of the three shares counts, in percent of all tokens: of the documents that the mixture has
given, and of the rows of 8,192 tokens that have come out. Documents wait in windows before they are in rows that come
out, which are in random order.
"""

import argparse
from itertools import islice
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from internals import examples_of
from lengths import log_normal
from measure import figure, machine, recorded

import hf_packing as hfp

SHARES = {"short": 0.5, "middle": 0.3, "long": 0.2}
MEANS = {"short": 200, "middle": 1000, "long": 5000}
ROW = 8192


def source(number: int, mean: int, tokens: float, exactly: bool, seed: int) -> datasets.Dataset:
    documents = int(tokens / mean) + 64
    lengths = np.full(documents, mean)
    if not exactly:
        lengths = log_normal(documents, np.log(mean) - 0.5, 1.0, 20 * mean, seed=10 * seed + number)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    ids = np.full(offsets[-1], number, dtype=np.int32)
    return datasets.Dataset(pa.table({"input_ids": pa.LargeListArray.from_arrays(offsets, ids)}))


def mixture(tokens: int, exactly: bool, seed: int) -> datasets.IterableDataset:
    sources = {
        name: source(number, mean, 1.3 * SHARES[name] * tokens, exactly, seed)
        for number, (name, mean) in enumerate(MEANS.items())
    }
    return hfp.mix(sources, SHARES, stopping_strategy="all_exhausted", seed=seed)


def off(counts: np.ndarray) -> float:
    return float(100 * np.abs(counts / counts.sum() - list(SHARES.values())).max())


def counts_of(ids: Any) -> np.ndarray:
    return np.bincount(ids.combine_chunks().flatten().to_numpy(), minlength=3)


def off_of_documents(mixed: datasets.IterableDataset, streams: int, tokens: int) -> float:
    """Return how far shares are off when every logical stream has given its part of the tokens."""
    examples, counts, each = examples_of(mixed), np.zeros(3), tokens // streams
    for stream in range(streams):
        left = each
        for table in examples.piece(stream, streams).tables():
            ids = table.column("input_ids").combine_chunks().flatten()[:left]
            counts += np.bincount(ids.to_numpy(), minlength=3)
            left -= len(ids)
            if not left:
                break
    return off(counts)


def off_of_rows(mixed: datasets.IterableDataset, streams: int, tokens: int) -> float:
    """Return how far shares are off when so many tokens are in the rows that have come out."""
    packed: Any = hfp.pack(mixed, hfp.BestFit(ROW), streams=streams)
    rows = islice(examples_of(packed).tables(one_row=True), tokens // ROW)
    counts = [counts_of(row.column("input_ids")) for row in rows]
    return off(np.sum(counts, axis=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[10_000_000, 100_000_000])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=3, help="mixtures of each kind, of which the median counts")
    arguments = parser.parse_args()
    datasets.disable_progress_bars()
    print(f"{machine('datasets', 'pyarrow')}\n")
    for exactly in (True, False):
        for tokens in arguments.tokens:
            found: dict[int, list[tuple[float, float]]] = {streams: [] for streams in arguments.streams}
            for seed in range(arguments.rounds):
                mixed = mixture(tokens, exactly, seed)
                for streams, figures in found.items():
                    figures.append((off_of_documents(mixed, streams, tokens), off_of_rows(mixed, streams, tokens)))
            for streams, figures in found.items():
                documents, rows = np.median(figures, axis=0)
                print(
                    f"{'equal' if exactly else 'log-normal'} lengths, {streams} logical streams, after {tokens:,} "
                    f"tokens: shares of documents are {documents:.3f} % off, shares of rows {rows:.3f} %",
                    flush=True,
                )
                figure(exactly=exactly, streams=streams, tokens=tokens, documents=documents, rows=rows)


if __name__ == "__main__":
    with recorded(__file__):
        main()
