"""Packed streams: how full the rows are, and how fast they come from parquet files.

python benchmarks/streams.py

First, lengths of documents are packed in windows, as `pack` packs a stream with one logical stream, including what
waits and the last window. Beside it: one plan for all documents; batches of 1,000 documents, as TRL packs; and first
fit into 64 open rows, which go out together when a document fits in none of them, as Grain's FirstFitPackIterDataset
does. Then parquet files are read, read and packed, and read and packed batch by batch with `map`, in turn. Documents
longer than a row are split. Last, how many rows lie between two documents that were neighbors in their file.
"""

import argparse
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from internals import WindowSize, check_lengths, choose_waiting
from lengths import log_normal
from measure import figure, machine, recorded

import hf_packing as hfp

LENGTHS = {
    "lognormal": (6.0, 1.2, 10**6),
    "chat": (6.91, 0.58, 6272),
    "wiki": (8.33, 0.76, 27_326),
    "math": (5.08, 0.36, 517),
}
"""Mean and deviation of the logarithm, and longest length in tokens: of a log-normal distribution, and of real data."""

ROWS = {2048: 64, 8192: 64, 131072: 16}
"""Packs in a window for each length of a row, in tokens."""


def pieces(lengths: np.ndarray, row: int) -> tuple[int, np.ndarray]:
    """Return the number of whole rows that long documents are split into, and the lengths of the remainders."""
    rest = lengths % row
    return int((lengths // row).sum()), rest[rest > 0]


def packs_in_windows(lengths: np.ndarray, row: int, window_packs: int) -> int:
    strategy, packs, number, begin = hfp.BestFit(row), 0, 0, 0
    size = WindowSize.of_packs(window_packs, row)
    end = np.cumsum(lengths, dtype=np.int64)
    waiting, age = lengths[:0], np.zeros(0, np.int8)
    while begin < len(lengths):
        before = (end[begin - 1] if begin else 0) - int(waiting.sum())
        enough, most = np.searchsorted(end, [before + size.tokens, before + size.most_tokens]) + 1
        stop = min(max(enough, begin + size.documents - len(waiting)), most, len(lengths))
        together = check_lengths(np.concatenate([waiting, lengths[begin:stop]]))
        age = np.concatenate([age, np.zeros(stop - begin, np.int8)])
        window = strategy.plan_window(together, number)
        plan, waits = window.plan, choose_waiting(window, age, size) & (stop < len(lengths))
        packs += int((~waits).sum())
        kept = waits[plan.pack_of_segment()]
        waiting, age = plan.segment_length[kept], age[plan.segment_document[kept]] + np.int8(1)
        begin, number = stop, number + 1
    return packs


def packs_per_thousand(lengths: np.ndarray, row: int) -> int:
    return sum(
        hfp.plan_packing(lengths[at : at + 1000], hfp.BestFit(row)).num_packs for at in range(0, len(lengths), 1000)
    )


def packs_of_first_fit(lengths: np.ndarray, row: int, bins: int = 64) -> int:
    """First fit into open rows, which all go out when a document fits in none. Documents are at most a row long."""
    room, packs = np.full(bins, row), 0
    for length in lengths.tolist():
        place = int((room >= length).argmax())
        if room[place] < length:
            packs += int((room < row).sum())
            room[:], place = row, 0
        room[place] -= length
    return packs + int((room < row).sum())


def compare_fill(packs: int) -> None:
    print(f"{'lengths':10} {'row':>7} {'documents':>10}  {'one plan':>9} {'stream':>9} {'of 1,000':>9} {'64 rows':>9}")
    for name, (mean, deviation, longest) in LENGTHS.items():
        for row, window_packs in ROWS.items():
            documents = int(1.05 * packs * row / log_normal(10**5, mean, deviation, longest).mean())
            lengths = log_normal(documents, mean, deviation, longest, seed=row)
            whole, rest = pieces(lengths, row)
            made = {
                "one plan": whole + hfp.plan_packing(rest, hfp.BestFit(row)).num_packs,
                "stream": packs_in_windows(lengths, row, window_packs),
                "of 1,000": packs_per_thousand(lengths, row),
                "64 rows": whole + packs_of_first_fit(rest, row),
            }
            fill = {how: float(lengths.sum(dtype=np.int64)) / (number * row) for how, number in made.items()}
            shown = " ".join(f"{each:9.2%}" for each in fill.values())
            print(f"{name:10} {row:7,} {documents:10,}  {shown}   {made['stream']:,} packs", flush=True)
            figure(name=name, row=row, documents=documents, packs=made, fill=fill)


def write_files(folder: Path, tokens: int) -> list[str]:
    files = []
    for number in range(4):
        lengths = log_normal(int(tokens / 4 / 815), *LENGTHS["lognormal"], seed=number)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        ids = np.random.default_rng(number).integers(0, 50_000, offsets[-1], dtype=np.int32)
        table = pa.table({"input_ids": pa.ListArray.from_arrays(offsets, ids)})
        files.append(str(folder / f"{number}.parquet"))
        pq.write_table(table, files[-1], row_group_size=500)
    return files


def tokens_in(tables: Iterator[Any]) -> int:
    return sum(len(table["input_ids"].combine_chunks().flatten()) for table in tables)


def compare_speed(tokens: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = write_files(Path(folder), tokens)

        def source() -> Any:
            return datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)

        def mapped(strategy: Any) -> Any:
            return source().with_format("arrow").map(strategy, batched=True, batch_size=1000)

        for row in (2048, 8192):
            strategy = hfp.BestFit(row)
            sides: dict[str, Callable[[], Any]] = {
                "read only": lambda: (table for _, table in source()._ex_iterable.iter_arrow()),
                "packed stream": lambda strategy=strategy: iter(hfp.pack(source(), strategy).with_format("arrow")),
                "map": lambda strategy=strategy: iter(mapped(strategy)),
            }
            found: dict[str, list[float]] = {side: [] for side in sides}
            for _ in range(rounds):
                for side, tables in sides.items():
                    began = time.perf_counter()
                    read = tokens_in(tables())
                    found[side].append(read / (time.perf_counter() - began) / 1e6)
            speed = {side: statistics.median(each) for side, each in found.items()}
            print(
                f"rows of {row:,}, Mtokens/s: {', '.join(f'{side} {each:.0f}' for side, each in speed.items())}; "
                f"{speed['packed stream'] / speed['map']:.1f} times as fast as map"
            )
            figure(row=row, tokens=tokens, mtokens_per_second=found)
        measure_state(hfp.pack(source(), hfp.BestFit(8192)), 64 * 8192)


def compare_neighbors(documents: int) -> None:
    """Print how far apart packing puts documents that were neighbors in their file."""
    row = 8192
    print("rows between neighbors of a file, rows of 8,192 tokens:")
    with tempfile.TemporaryDirectory() as folder:
        for streams, window_packs in ((None, 64), (None, 1024), (8, 64), (64, 64)):
            files, per_file = streams or 1, documents if streams else 8 * documents
            write_named(Path(folder), files, per_file)
            data_files = [str(Path(folder) / f"{number}.parquet") for number in range(files)]
            stream = datasets.load_dataset("parquet", data_files=data_files, split="train", streaming=True)
            packed = hfp.pack(stream, hfp.BestFit(row), window_packs=window_packs, streams=streams)
            row_of, rows = np.full(files * per_file, -1), 0
            for _, table in packed._ex_iterable.iter_arrow():
                ids = table["input_ids"].combine_chunks()
                begins = np.flatnonzero(ids.flatten().to_numpy() >= 0)
                names = ids.flatten().to_numpy()[begins]
                row_of[names] = rows + np.searchsorted(np.diff(ids.offsets).cumsum(), begins, side="right")
                rows += len(table)
            apart = np.abs(np.diff(row_of.reshape(files, per_file), axis=1)).ravel()
            print(
                f"  {streams or 'no'} logical streams, window_packs={window_packs}: median {np.median(apart):,.0f} of "
                f"{rows:,} rows; {(apart == 0).mean():.1%} in the same row"
            )
            figure(streams=streams, window_packs=window_packs, rows=rows, median=float(np.median(apart)))


def write_named(folder: Path, files: int, documents: int) -> None:
    """Write documents whose first token is the number of the document; all other tokens are -1."""
    for number in range(files):
        lengths = log_normal(documents, *LENGTHS["lognormal"], seed=number)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        ids = np.full(offsets[-1], -1, dtype=np.int32)
        ids[offsets[:-1]] = number * documents + np.arange(documents)
        pq.write_table(pa.table({"input_ids": pa.ListArray.from_arrays(offsets, ids)}), folder / f"{number}.parquet")


def measure_state(packed: Any, window: int) -> None:
    examples = packed._ex_iterable
    examples._init_state_dict()
    sizes, times = [], []
    for _ in examples.iter_arrow():
        began = time.perf_counter()
        state = examples.state_dict()
        times.append(time.perf_counter() - began)
        sizes.append(len(pickle.dumps(state)))
    print(
        f"state, windows of 64 packs of 8,192 tokens, which are {4 * window / 1024:,.0f} KB: "
        f"{statistics.mean(sizes) / 1024:.0f} KB, at most {max(sizes) / 1024:.0f} KB; "
        f"{1e3 * statistics.median(times):.2f} ms"
    )
    figure(state_bytes=sizes, state_seconds=times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packs", type=int, default=4000, help="rows of each kind")
    parser.add_argument("--tokens", type=int, default=30_000_000, help="tokens in the files")
    parser.add_argument("--documents", type=int, default=3000, help="documents in each file of the neighbors")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    datasets.disable_progress_bars()
    print(f"{machine('datasets', 'pyarrow')}\n")
    compare_fill(arguments.packs)
    print()
    compare_speed(arguments.tokens, arguments.rounds)
    print()
    compare_neighbors(arguments.documents)


if __name__ == "__main__":
    with recorded(__file__):
        main()
