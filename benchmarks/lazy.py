"""Lazy packs compared with packed rows: time to the first batch, rows per second, bytes on disk, and their values.

python benchmarks/lazy.py

Documents of lognormal(6, 1.2) lengths lie on disk, and BestFit packs them. "first batch" packs without the cache, and
makes one batch of a random row. "lists" and "NumPy" read random rows through datasets, one in a batch: as Python lists,
without a format, and as NumPy arrays of int32. "attach" is the loader of attach with a TokenBudget. All make the same
batches with PackingCollator, and every round times each side once. At the end, all rows of both sides are compared,
column by column.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from internals import RankBatchSampler, SampledRows, batches_loader, sizes_of
from lengths import log_normal
from measure import figure, in_turn, machine, ratio, recorded
from torch.utils.data import DataLoader

import hf_packing as hfp

COLUMNS = ("input_ids", "labels", "position_ids", "seq_lengths")
ROWS_COMPARED_AT_ONCE = 64


def documents_on_disk(folder: Path, tokens: int) -> datasets.Dataset:
    """Save documents with about so many tokens, and load them from disk."""
    lengths = log_normal(max(tokens // 830, 1), 6, 1.2, longest=100_000)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    values = np.random.default_rng(0).integers(0, 128_000, int(lengths.sum()), dtype=np.int32)
    table = pa.table({"input_ids": pa.LargeListArray.from_arrays(offsets, pa.array(values))})
    datasets.Dataset(table).save_to_disk(folder)
    return datasets.load_from_disk(folder)


def first_batch(documents: datasets.Dataset, row: int, lazy: bool) -> None:
    packed = hfp.pack(documents, hfp.BestFit(row), lazy=lazy, load_from_cache_file=False)
    next(iter(DataLoader(packed, shuffle=True, collate_fn=hfp.PackingCollator())))


def epoch_of(loader: DataLoader) -> Callable[[], int]:
    return lambda: sum(1 for _ in loader)


def through_datasets(rows: datasets.Dataset, workers: int) -> Callable[[], int]:
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    return epoch_of(DataLoader(rows, collate_fn=hfp.PackingCollator(), **options))


def through_attach(rows: datasets.Dataset, tokens: int, workers: int) -> Callable[[], int]:
    sampler = RankBatchSampler(hfp.TokenBudget(tokens), sizes_of(rows))
    options = {"num_workers": workers, "persistent_workers": workers > 0}
    return epoch_of(batches_loader(SampledRows(rows, sampler), hfp.PackingCollator(), **options))


def differing_rows(one: datasets.Dataset, other: datasets.Dataset) -> int:
    """Count rows with a different value or dtype in any column."""
    assert one.column_names == other.column_names == list(COLUMNS)
    assert len(one) == len(other)
    different = 0
    for first in range(0, len(one), ROWS_COMPARED_AT_ONCE):
        numbers = range(first, min(first + ROWS_COMPARED_AT_ONCE, len(one)))
        for row, expected in zip(*(side.__getitems__(numbers) for side in (one, other)), strict=True):
            different += not all(
                row[name].dtype == expected[name].dtype and np.array_equal(row[name], expected[name])
                for name in COLUMNS
            )
    return different


def bytes_beside(documents: datasets.Dataset) -> int:
    """Return the bytes of all files that pack has written beside the documents."""
    home = Path(documents.cache_files[0]["filename"]).parent
    return sum(file.stat().st_size for file in home.glob("packed-*/**/*") if file.is_file())


def compare_first_batch(documents: datasets.Dataset, row: int, rounds: int) -> None:
    seconds = in_turn(
        {"pack": lambda: first_batch(documents, row, False), "lazy": lambda: first_batch(documents, row, True)}, rounds
    )
    for side, taken in seconds.items():
        figure(what="first batch", side=side, row=row, seconds=taken)
        print(f"first batch, {side}: {statistics.median(taken):.2f} s")
    print(f"lazy is sooner by a factor of {ratio(seconds['pack'], seconds['lazy'])}")


def compare_rows(rows: dict[str, dict[str, datasets.Dataset]], row: int, workers: int, rounds: int) -> None:
    """Time the rows of each side, which are given in each format."""
    sides: dict[str, Callable[[], int]] = {}
    for name, formats in rows.items():
        for form, formatted in formats.items():
            sides[f"{name}, {form}"] = through_datasets(formatted, workers)
        sides[f"{name}, attach"] = through_attach(formats["lists"], row, workers)
    num_rows = len(rows["lazy"]["lists"])
    for side in sides.values():  # starts the workers, and reads the files for the first time
        assert side() == num_rows
    seconds = in_turn(sides, rounds)
    for side, taken in seconds.items():
        figure(what="rows", side=side, row=row, workers=workers, rows=num_rows, seconds=taken)
    print(f"\nrows of {row:,} tokens per second, {workers} workers")
    print(f"{'':>14}{'packed':>10}{'lazy':>10}{'lazy / packed':>24}{'lazy attach / packed':>24}")
    for way in ("lists", "NumPy", "attach"):
        one, other = seconds[f"packed, {way}"], seconds[f"lazy, {way}"]
        speeds = [num_rows / statistics.median(taken) for taken in (one, other)]
        print(
            f"{way:>14}{speeds[0]:>10,.0f}{speeds[1]:>10,.0f}{ratio(one, other):>24}"
            f"{ratio(one, seconds['lazy, attach']):>24}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200_000_000, help="tokens of the documents, about")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 131_072], help="tokens of a row")
    parser.add_argument("--read", type=int, default=16_000_000, help="tokens that a side reads in a round")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    datasets.disable_progress_bars()
    print(machine("hf-packing", "datasets", "torch", "numpy", "pyarrow"))
    with tempfile.TemporaryDirectory() as folder:
        documents = documents_on_disk(Path(folder), arguments.tokens)
        for row in arguments.lengths:
            print(f"\n{len(documents):,} documents, rows of {row:,} tokens")
            compare_first_batch(documents, row, arguments.rounds)
            rows: dict[str, dict[str, datasets.Dataset]] = {}
            arrays = documents.with_format("numpy", dtype=np.int32)
            for side, lazy in ("packed", False), ("lazy", True):
                before = bytes_beside(documents)
                arrays_packed = hfp.pack(arrays, hfp.BestFit(row), lazy=lazy)
                size = bytes_beside(documents) - before
                rows[side] = {"lists": hfp.pack(documents, hfp.BestFit(row), lazy=lazy), "NumPy": arrays_packed}
                figure(what="disk", side=side, row=row, documents=len(documents), bytes=size)
                print(f"on disk, {side}: {size / len(documents):,.1f} bytes a document")
            num_rows = len(rows["packed"]["lists"])
            numbers = np.random.default_rng(1).permutation(num_rows)[: max(arguments.read // row, 1)]
            chosen = {
                side: {form: each.select(numbers) for form, each in formats.items()} for side, formats in rows.items()
            }
            for workers in arguments.workers:
                compare_rows(chosen, row, workers, arguments.rounds)
            different = differing_rows(rows["lazy"]["NumPy"], rows["packed"]["NumPy"])
            figure(what="differing rows", row=row, rows=num_rows, different=different)
            print(f"\n{different} of {num_rows:,} rows differ")


if __name__ == "__main__":
    with recorded(__file__):
        main()
