"""A fleet packs parquet files with two processes, beside the other ways to pack the same files on one machine.

python benchmarks/fleet_pack.py

16 files of uneven size, zstd, with documents of log-normal lengths, 170 tokens on average, are packed into rows of
4,096 tokens with input_ids, labels, position_ids and seq_lengths. Each side is a process of its own, in turn: the fleet
with processes of this machine and with Ray; `pack` between `load_dataset` and `to_parquet`; and `Dataset.map` with a
strategy. Peak memory is that of the driver, with the pages of files that it has mapped, and of the largest process that
it has started, except those of Ray. Ray's start is not in the time.
"""

import argparse
import glob
import json
import logging
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from measure import figure, machine, ratio, recorded

ROW, FILES, WORKERS, BATCH = 4096, 16, 2, 100_000
MEAN, DEVIATION, LONGEST, VOCABULARY = 170, 1.2, 20_000, 128_000


def make_files(folder: Path, tokens: int) -> dict[str, Any]:
    """Write uneven files of documents whose tokens have frequencies as in texts: 1 / rank."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = folder / "in"
    folder.mkdir()
    rng = np.random.default_rng(0)
    documents = written = size = 0
    for number, share in enumerate(rng.dirichlet(np.full(FILES, 3.0))):
        wanted = max(1, int(tokens * share / MEAN))
        lengths = rng.lognormal(np.log(MEAN) - DEVIATION**2 / 2, DEVIATION, wanted)
        lengths = np.clip(np.rint(lengths), 1, LONGEST).astype(np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        ids = np.exp(rng.random(offsets[-1], dtype=np.float32) * np.float32(np.log(VOCABULARY))).astype(np.int32)
        column = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(ids))
        file = folder / f"{number:02d}.parquet"
        pq.write_table(pa.table({"input_ids": column}), file, compression="zstd")
        documents, written, size = documents + wanted, written + len(ids), size + file.stat().st_size
    return {"documents": documents, "tokens": written, "bytes": size}


def local(files: list[str], output: Path) -> None:
    import hf_packing as hfp

    hfp.fleet.pack(files, hfp.BestFit(ROW), output, workers=WORKERS)


def ray(files: list[str], output: Path) -> None:
    import hf_packing as hfp

    hfp.fleet.pack(files, hfp.BestFit(ROW), output, executor="ray")


def pack(files: list[str], output: Path) -> None:
    import datasets

    import hf_packing as hfp

    documents = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=f"{output}/cache")
    hfp.pack(documents, hfp.BestFit(ROW)).to_parquet(output / "packed.parquet")


def through_map(files: list[str], output: Path) -> None:
    import datasets

    import hf_packing as hfp

    documents = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=f"{output}/cache")
    options = {"batched": True, "batch_size": BATCH, "num_proc": WORKERS, "remove_columns": documents.column_names}
    documents.map(hfp.BestFit(ROW), **options).to_parquet(output / "packed.parquet")


SIDES = {
    "local": (local, f"fleet, {WORKERS} processes"),
    "ray": (ray, f"fleet, Ray with {WORKERS} CPUs"),
    "pack": (pack, "load_dataset, pack, to_parquet"),
    "map": (through_map, f"load_dataset, map(num_proc={WORKERS}), to_parquet"),
}


def measured(side: str, folder: Path) -> dict[str, Any]:
    """Run a side, and return its time, its peak memory in bytes, and what it has written."""
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if side == "ray":
        start_ray()
    output = folder / "out"
    output.mkdir()
    began = time.perf_counter()
    SIDES[side][0](sorted(glob.glob(f"{folder}/in/*.parquet")), output)
    seconds = time.perf_counter() - began
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    driver, worker = (resource.getrusage(each).ru_maxrss << 10 for each in whose)
    import pyarrow.parquet as pq

    rows = tokens = 0
    for file in glob.glob(f"{output}/*.parquet"):
        for batch in pq.ParquetFile(file).iter_batches(1024, columns=["input_ids"]):
            rows, tokens = rows + batch.num_rows, tokens + len(batch.column("input_ids").flatten())
    known = {"seconds": seconds, "driver": driver, "rows": rows, "tokens": tokens}
    return known | {"worker": worker if side in ("local", "map") else 0}


def start_ray() -> None:
    """Start Ray on this machine."""
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    import ray

    ray.init("local", num_cpus=WORKERS, include_dashboard=False, log_to_driver=False, logging_level="error")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=320_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--folder", help="where to write, instead of a temporary folder")
    parser.add_argument("--one", choices=["make_files", *SIDES], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        folder = Path(given.folder)
        made = make_files(folder, given.tokens) if given.one == "make_files" else measured(given.one, folder)
        print(json.dumps(made))
        return
    print(f"{machine('hf-packing', 'datasets', 'ray', 'pyarrow', 'numpy')}\n")
    with tempfile.TemporaryDirectory(dir=given.folder and Path(given.folder).resolve()) as folder:
        made = result_of("make_files", folder, given.tokens)
        print(f"{made['documents']:,} documents, {made['tokens']:,} tokens,", end=" ")
        print(f"{made['bytes'] / 1e6:,.0f} MB in {FILES} files")
        found: dict[str, list[dict[str, Any]]] = {side: [] for side in given.sides}
        for _ in range(given.rounds):
            for side in given.sides:
                found[side].append(result_of(side, folder))
                shutil.rmtree(Path(folder, "out"))
    show(found, made["tokens"])


def result_of(side: str, folder: str, tokens: int = 0) -> dict[str, Any]:
    """Run a side in a process of its own, whose peak memory is not that of another one, and return what it found."""
    command = [sys.executable, __file__, "--one", side, "--folder", folder, "--tokens", str(tokens)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def show(found: dict[str, list[dict[str, Any]]], tokens: int) -> None:
    print(f"\n{'':43}{'median s':>9}{'Mtokens/s':>11}{'driver MB':>11}{'worker MB':>11}{'rows':>10}{'padding':>10}")
    for side, rounds in found.items():
        seconds, last = statistics.median(each["seconds"] for each in rounds), rounds[-1]
        padding = 1 - last["tokens"] / (last["rows"] * ROW)
        driver, worker = (max(each[who] for each in rounds) for who in ("driver", "worker"))
        print(
            f"{SIDES[side][1]:43}{seconds:>9.1f}{last['tokens'] / seconds / 1e6:>11.1f}{driver / 1e6:>11,.0f}"
            f"{f'{worker / 1e6:,.0f}' if worker else '-':>11}{last['rows']:>10,}{padding:>10.4%}"
        )
        figure(side=side, rounds=rounds, padding=padding)
        if last["tokens"] != tokens:
            raise AssertionError(f"{side}: expected {tokens} tokens, got {last['tokens']}")
    print()
    times_of = {side: [each["seconds"] for each in rounds] for side, rounds in found.items()}
    for side, other in (("pack", "local"), ("map", "local"), ("local", "ray")):
        if side in found and other in found:
            print(f"{SIDES[other][1]}: {ratio(times_of[side], times_of[other])} times as fast as {SIDES[side][1]}")


if __name__ == "__main__":
    with recorded(__file__):
        main()
