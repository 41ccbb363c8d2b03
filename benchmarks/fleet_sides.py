"""The sides of `fleet_pack.py`, each of which runs in a process of its own and prints what it found as JSON."""

import glob
import hashlib
import json
import logging
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fleet_pack import FILES, ROW, WORKERS

import hf_packing as hfp

BATCH = 100_000
COLUMNS = ("input_ids", "labels", "position_ids", "seq_lengths")
MEAN, DEVIATION, LONGEST = 170, 1.2, 20_000
VOCABULARY = 128_000


def make_files(folder: Path, tokens: int) -> dict[str, Any]:
    """Write uneven files of documents whose tokens have frequencies as in texts: 1 / rank."""
    rng = np.random.default_rng(0)
    documents = written = 0
    (folder / "in").mkdir()
    for number, share in enumerate(rng.dirichlet(np.full(FILES, 3.0))):
        wanted = max(1, int(tokens * share / MEAN))
        lengths = rng.lognormal(np.log(MEAN) - DEVIATION**2 / 2, DEVIATION, wanted)
        lengths = np.clip(np.rint(lengths), 1, LONGEST).astype(np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        ids = np.exp(rng.random(offsets[-1], dtype=np.float32) * np.float32(np.log(VOCABULARY))).astype(np.int32)
        column = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(ids))
        pq.write_table(pa.table({"input_ids": column}), folder / "in" / f"{number:02d}.parquet", compression="zstd")
        documents, written = documents + wanted, written + len(ids)
    return {"documents": documents, "tokens": written, "bytes": sum(os.stat(name).st_size for name in inputs(folder))}


def inputs(folder: Path) -> list[str]:
    return sorted(glob.glob(f"{folder}/in/*.parquet"))


class Parts:
    """The seconds of the parts of a side."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - began

    def run(self, executor: Any) -> "Timed":
        return Timed(executor, self)


class Timed:
    """An executor that times each stage."""

    def __init__(self, executor: Any, parts: Parts) -> None:
        self._executor, self._parts = executor, parts

    def run(self, tasks: Iterable[Any]) -> Iterator[Any]:
        began, stage = time.perf_counter(), ""
        for task in self._executor.run(tasks):
            stage = task.stage
            yield task
        self._parts.seconds[stage] = time.perf_counter() - began


def local(folder: Path, parts: Parts) -> list[str]:
    return fleet(folder, parts, hfp.fleet.local(WORKERS))


def alone(folder: Path, parts: Parts) -> list[str]:
    return fleet(folder, parts, hfp.fleet.local(WORKERS), exchange=False)


def ray(folder: Path, parts: Parts) -> list[str]:
    return fleet(folder, parts, hfp.fleet.ray())


def fleet(folder: Path, parts: Parts, executor: Any, exchange: bool = True) -> list[str]:
    began = time.perf_counter()
    packed = hfp.fleet.pack(
        inputs(folder), hfp.BestFit(ROW), folder / "out", executor=parts.run(executor), exchange=exchange
    )
    parts.seconds["plan and manifest"] = time.perf_counter() - began - sum(parts.seconds.values())
    return packed.data_files


def pack(folder: Path, parts: Parts) -> list[str]:
    return through_datasets(folder, parts, "pack", lambda documents: hfp.pack(documents, hfp.BestFit(ROW)))


def through_map(folder: Path, parts: Parts) -> list[str]:
    def mapped(documents: Any) -> Any:
        options = {"batched": True, "batch_size": BATCH, "num_proc": WORKERS}
        return documents.map(hfp.BestFit(ROW), remove_columns=documents.column_names, **options)

    return through_datasets(folder, parts, "map", mapped)


def through_datasets(folder: Path, parts: Parts, name: str, packed_of: Callable[[Any], Any]) -> list[str]:
    import datasets

    datasets.disable_progress_bars()
    with parts.timed("load_dataset"):
        cache = str(folder / "out" / "cache")
        documents = datasets.load_dataset("parquet", data_files=inputs(folder), split="train", cache_dir=cache)
    with parts.timed(name):
        packed = packed_of(documents)
    with parts.timed("to_parquet"):
        packed.to_parquet(folder / "out" / "packed.parquet")
    return [str(folder / "out" / "packed.parquet")]


def ray_batches(folder: Path, parts: Parts) -> list[str]:
    import ray.data

    options = {"batch_size": BATCH, "batch_format": "pyarrow"}
    with parts.timed("all"):
        documents = ray.data.read_parquet(inputs(folder))
        documents.map_batches(hfp.BestFit(ROW), **options).write_parquet(str(folder / "out"))
    return sorted(glob.glob(f"{folder}/out/*.parquet"))


def ray_groups(folder: Path, parts: Parts) -> list[str]:
    """Group the segments of one plan by output file. The output files are those of `local`, and so are their rows."""
    import ray
    import ray.data

    names = inputs(folder)
    with parts.timed("count"):
        counts = ray.get([ray.remote(lengths_of).remote(name) for name in names])
    with parts.timed("plan"):
        longest = max(len(each) for each in counts)
        dense = np.array([np.pad(each, (0, longest - len(each))) for each in counts])
        table = hfp.plan_counts(dense.sum(axis=0), hfp.BestFit(ROW))
        before = np.cumsum(dense, axis=0) - dense
        shared = ray.put((table, before))
    with parts.timed("deal, group, gather"):
        files = ray.data.from_items([{"number": number, "name": name} for number, name in enumerate(names)])
        dealt = files.map_batches(lambda batch: dealt_file(batch, *ray.get(shared)), batch_size=1)
        rows = dealt.groupby("file", num_partitions=FILES).map_groups(gathered, batch_format="pyarrow")
        rows.write_parquet(str(folder / "out"), partition_cols=["file"])
    written = glob.glob(f"{folder}/out/file=*/*.parquet")
    return sorted(written, key=lambda name: int(Path(name).parent.name.removeprefix("file=")))


def lengths_of(name: str) -> Any:
    return np.bincount(np.diff(pq.read_table(name)["input_ids"].combine_chunks().offsets.to_numpy()))


def dealt_file(batch: Mapping[str, Any], table: Any, before: Any) -> Iterator[dict[str, Any]]:
    """Yield the segments of a file as a table."""
    from internals import TokenColumn

    (number,), (name,) = batch["number"], batch["name"]
    column = TokenColumn("input_ids", pq.read_table(name)["input_ids"])
    dealt = table.deal(column.length, before[number])
    values = pa.array(column.gather(dealt.document, dealt.start, dealt.length))
    offsets = pa.array(np.concatenate([[0], np.cumsum(dealt.length)]).astype(np.int32))
    file = np.minimum(dealt.pack * FILES // table.num_packs, FILES - 1)
    yield pa.table(
        {
            "file": file,
            "pack": dealt.pack,
            "place": dealt.place,
            "input_ids": pa.ListArray.from_arrays(offsets, values),
        }
    )


def gathered(segments: pa.Table) -> pa.Table:
    """Return the packed rows of the segments of an output file."""
    from internals import TokenColumn, pack_rows

    column = TokenColumn("input_ids", segments["input_ids"])
    pack, place = segments["pack"].to_numpy(), segments["place"].to_numpy()
    order = np.lexsort((place, pack))
    first = np.flatnonzero(np.diff(pack[order], prepend=-1))
    plan = hfp.PackingPlan(
        document_length=column.length,
        segment_document=order,
        segment_start=np.zeros(len(order), np.int32),
        segment_length=column.length[order].astype(np.int32),
        pack_offsets=np.append(first, len(order)),
        pack_capacity=np.full(len(first), ROW, np.int32),
    )
    rows = pack_rows({"input_ids": column}, plan, np.arange(plan.num_packs)).table
    return rows.append_column("file", pa.array(np.full(rows.num_rows, segments["file"][0].as_py())))


def rows_of(files: list[str]) -> dict[str, Any]:
    """Return the numbers of rows and tokens of files, and a digest of the rows of all files in order."""
    lengths, values = ({name: hashlib.blake2b(digest_size=8) for name in COLUMNS} for _ in range(2))
    rows = tokens = 0
    for file in files:
        with pq.ParquetFile(file) as parquet:
            if missing := set(COLUMNS) - set(parquet.schema_arrow.names):
                raise AssertionError(f"expected rows with {COLUMNS}, but {missing} are missing")
            for batch in parquet.iter_batches(1024, columns=list(COLUMNS)):
                for name in COLUMNS:
                    lengths[name].update(batch.column(name).value_lengths().to_numpy().astype(np.int32))
                    values[name].update(batch.column(name).flatten().to_numpy().astype(np.int32))
                rows, tokens = rows + batch.num_rows, tokens + len(batch.column("input_ids").flatten())
    digest = " ".join(each[name].hexdigest() for each in (lengths, values) for name in COLUMNS)
    return {"rows": rows, "tokens": tokens, "digest": digest}


def measured(side: str, folder: Path) -> dict[str, Any]:
    """Run a side, and return its times, its peak memory in bytes, and what is known of the rows."""
    (folder / "out").mkdir()
    parts, start = Parts(), 0.0
    if side.startswith("ray"):
        start = start_ray()
    began = time.perf_counter()
    files = SIDES[side](folder, parts)
    seconds = time.perf_counter() - began
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    driver, worker = (resource.getrusage(each).ru_maxrss << 10 for each in whose)
    known = {"seconds": seconds, "parts": parts.seconds, "ray_start": start, "driver": driver}
    return {**known, "worker": 0 if side.startswith(("ray", "pack")) else worker, **rows_of(files)}


def start_ray() -> float:
    """Start Ray on this machine, and return the seconds that it took."""
    os.environ["RAY_DATA_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    import ray

    began = time.perf_counter()
    ray.init("local", num_cpus=WORKERS, include_dashboard=False, log_to_driver=False, logging_level="error")
    return time.perf_counter() - began


SIDES = {side.__name__: side for side in (local, ray, alone, pack, ray_batches, ray_groups)} | {"map": through_map}


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    side, folder, tokens = sys.argv[1:]
    print(json.dumps(make_files(Path(folder), int(tokens)) if side == "make_files" else measured(side, Path(folder))))
