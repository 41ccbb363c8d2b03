"""Files of documents for a fleet, the rows that `pack` makes of them, and an executor without processes."""

import hashlib
import json
import threading
from concurrent.futures import Future
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import hf_packing as hfp

SIZES = (40, 0, 200, 3, 90, 60)
"""Documents of the files: uneven, and one file without any."""
STRATEGY = hfp.BestFit(128)


class Here:
    """Does tasks at once, since processes take a second to start."""

    def submit(self, function, *arguments):
        future = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future


class Together(Here):
    """Does each task at the same time as another executor of this kind."""

    def __init__(self):
        self._both = threading.Barrier(2)

    def submit(self, function, *arguments):
        self._both.wait(240)
        return super().submit(function, *arguments)


class Killed(BaseException):
    """Ends a run in this process, as a signal would."""


def write_files(folder, sizes=SIZES, *, longest=300, seed=0):
    """Write parquet files of documents with input_ids, labels, weights and a text, and return their paths."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number, documents in enumerate(sizes):
        lengths = np.minimum(rng.lognormal(3, 1.2, documents).astype(int), longest)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        ids = rng.integers(0, 50_000, offsets[-1]).astype(np.int32)
        labels = np.where(rng.random(len(ids)) < 0.3, -100, ids).astype(np.int32)
        columns = {"input_ids": ids, "labels": labels, "weights": rng.random(len(ids)).astype(np.float32)}
        arrays = {name: pa.ListArray.from_arrays(offsets, values) for name, values in columns.items()}
        files.append(str(folder / f"{number}.parquet"))
        pq.write_table(pa.table({**arrays, "note": pa.array(["text"] * documents, pa.string())}), files[-1])
    return files


def pack_here(files, output, strategy=STRATEGY, **settings):
    return hfp.fleet.pack(files, strategy, output, **{"executor": Here(), "tasks": 3, **settings})


def rows_of_pack(files, strategy=STRATEGY, **settings):
    documents = datasets.Dataset(pa.concat_tables([pq.read_table(file) for file in files]))
    packed = hfp.pack(documents, strategy, load_from_cache_file=False, **settings)
    return packed.data.table.replace_schema_metadata().combine_chunks()


def rows_of_file(file):
    return pq.read_table(file, use_threads=False).replace_schema_metadata().combine_chunks()


def contents(output):
    """Return the sha256 of all files of an output folder by name, but for unfinished files, which are hidden."""
    files = [path for path in Path(output).rglob("*") if path.is_file() and not path.name.startswith(".")]
    return {str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def check_complete(output):
    known = {file["name"]: file for file in json.loads(Path(output, "manifest.json").read_text())["files"]}
    found = contents(output)
    assert {name for name in found if name.endswith(".parquet")} == set(known)
    for name, file in known.items():
        assert found[name] == file["sha256"]
        assert pq.ParquetFile(Path(output, name)).metadata.num_rows == file["rows"]
