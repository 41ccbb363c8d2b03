"""The data loader of `attach`: rows read from the Arrow table, compared with rows read through the format of datasets.

python benchmarks/loader.py

All sides load the same micro-batches from a dataset on disk, and their batches are equal, dtypes included. "before"
reads rows through the dataset's NumPy format, makes batches with a plain collator without checks, and leaves it to
torch to send the tensors of workers through shared memory. "format" reads rows through the format, too, but with
PackingCollator, whose batches workers send as bytes. "attach" is the loader of `attach`. Lengths of documents are
lognormal(6, 1.2). Documents are packed by BestFit, or read as they are with a TokenBudget. Every round times one epoch
of each side.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from internals import RankBatchSampler, SampledRows, batches_loader, sizes_of
from lengths import log_normal
from measure import figure, in_turn, machine, ratio, recorded
from torch.utils.data import DataLoader

import hf_packing as hfp

WORKERS = (0, 2)


class Formatted(datasets.Dataset):
    """A dataset whose rows attach reads through the format, as the rows of every subclass of Dataset."""


def collate_plainly(rows: list[dict]) -> dict[str, Any]:
    """Make the batch that PackingCollator makes, without its checks."""
    lengths = np.concatenate([row.get("seq_lengths", [len(row["input_ids"])]) for row in rows]).astype(np.int64)
    cu_seq_lens = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=cu_seq_lens[1:])
    begin = cu_seq_lens[:-1]
    input_ids, labels = (
        np.concatenate([row[name] for row in rows]).astype(np.int64) for name in ("input_ids", "labels")
    )
    labels[begin] = -100
    position_ids = np.arange(len(input_ids)) - np.repeat(begin, lengths)
    seq_idx = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    return {
        "input_ids": torch.from_numpy(input_ids)[None],
        "labels": torch.from_numpy(labels)[None],
        "position_ids": torch.from_numpy(position_ids)[None],
        **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.from_numpy(cu_seq_lens)),
        **dict.fromkeys(("max_length_q", "max_length_k"), int(lengths.max())),
        "seq_idx": torch.from_numpy(seq_idx)[None],
    }


def loaders(rows: datasets.Dataset, tokens: int, workers: int) -> dict[str, DataLoader]:
    sampler = RankBatchSampler(hfp.TokenBudget(tokens), sizes_of(rows))
    formatted = Formatted(rows.data)
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    return {
        "before": batches_loader(SampledRows(formatted, sampler), collate_plainly, **options),
        "format": batches_loader(SampledRows(formatted, sampler), hfp.PackingCollator(), **options),
        "attach": batches_loader(SampledRows(rows, sampler), hfp.PackingCollator(), **options),
    }


def check_equal(sides: dict[str, DataLoader]) -> None:
    """Compare all batches; this also starts the workers and reads the file for the first time."""
    for batches in zip(*sides.values(), strict=True):
        expected = batches[0]
        for batch in batches[1:]:
            assert batch.keys() == expected.keys()
            for name, value in expected.items():
                assert isinstance(batch[name], type(value)), name
                value, other = torch.as_tensor(value), torch.as_tensor(batch[name])
                assert other.dtype == value.dtype, name
                assert torch.equal(other, value), name


def run(loader: DataLoader) -> None:
    for _ in loader:
        pass


def compare(kind: str, rows: datasets.Dataset, tokens: int, workers: int, rounds: int) -> None:
    sides = loaders(rows, tokens, workers)
    check_equal(sides)
    seconds = in_turn({name: lambda loader=loader: run(loader) for name, loader in sides.items()}, rounds)
    facts = {"kind": kind, "tokens": tokens, "workers": workers, "rows": len(rows), "batches": len(sides["attach"])}
    for name, taken in seconds.items():
        figure(side=name, seconds=taken, **facts)
    speeds = {name: len(rows) / statistics.median(taken) for name, taken in seconds.items()}
    print(
        f"{kind:>10}{tokens:>9,}{workers:>9}"
        + "".join(f"{speed:>10,.0f}" for speed in speeds.values())
        + f"{ratio(seconds['before'], seconds['attach']):>22}{ratio(seconds['format'], seconds['attach']):>22}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8_000_000, help="tokens of a dataset, at most")
    parser.add_argument("--rows", type=int, default=250, help="packed rows of a dataset, at most")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 131_072], help="tokens of a batch")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    datasets.disable_progress_bars()
    print(machine("hf-packing", "datasets", "torch", "numpy", "pyarrow"))
    print(f"\n{'rows per second':>28}{'times as fast as':>46}")
    print(
        f"{'rows':>10}{'tokens':>9}{'workers':>9}{'before':>10}{'format':>10}{'attach':>10}{'before':>22}{'format':>22}"
    )
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for tokens in arguments.lengths:
            total = min(arguments.tokens, tokens * arguments.rows)
            lengths = log_normal(max(total // 800, 1), 6, 1.2, longest=tokens)
            documents = datasets.Dataset.from_dict(
                {"input_ids": [random.integers(0, 128_000, length, dtype=np.int32) for length in lengths]}
            )
            for kind, rows in ("packed", hfp.pack(documents, hfp.BestFit(tokens))), ("documents", documents):
                path = Path(folder) / f"{kind}_{tokens}"
                rows.save_to_disk(path)
                for workers in WORKERS:
                    compare(kind, datasets.load_from_disk(path), tokens, workers, arguments.rounds)


if __name__ == "__main__":
    with recorded(__file__):
        main()
