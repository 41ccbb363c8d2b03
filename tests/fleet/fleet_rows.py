"""Files of documents for tests of a fleet, and the rows that it makes of them."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import hf_packing as hfp
from hf_packing.fleet import PackedCorpus
from hf_packing.fleet.tasks import Task, do_task

SIZES = (40, 0, 700, 3, 150)
"""Documents of the files: uneven, and one file without any."""


class Here:
    """An engine that does tasks in this process, since workers take a second to start."""

    def run(self, tasks: Iterable[Task]) -> Iterator[Task]:
        for task in tasks:
            do_task(task)
            yield task


def write_files(
    folder: Path, sizes: tuple[int, ...] = SIZES, *, longest: int = 300, others: bool = True, seed: int = 0
) -> list[str]:
    """Write parquet files of documents with input_ids and, unless `others` is False, labels and weights."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number, documents in enumerate(sizes):
        lengths = np.minimum(rng.lognormal(3, 1.2, documents).astype(int), longest)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        ids = rng.integers(0, 50_000, offsets[-1]).astype(np.int32)
        labels = np.where(rng.random(len(ids)) < 0.3, -100, ids).astype(np.int32)
        columns = {"input_ids": ids, "labels": labels, "weights": rng.random(len(ids)).astype(np.float32)}
        kept = columns if others else {"input_ids": ids}
        arrays = {name: pa.ListArray.from_arrays(offsets, values) for name, values in kept.items()}
        files.append(str(folder / f"{number}.parquet"))
        pq.write_table(
            pa.table({**arrays, "note": pa.array(["text"] * documents, pa.string())}), files[-1], compression="zstd"
        )
    return files


def documents_of(files: list[str]) -> datasets.Dataset:
    """Return the documents of parquet files as one dataset. `load_dataset` cannot read a file without rows."""
    return datasets.Dataset(pa.concat_tables([pq.read_table(file) for file in files]))


def rows_of(packed: PackedCorpus | datasets.Dataset) -> pa.Table:
    """Return packed rows as a table: those of the files that a manifest lists, in order, or those of a dataset."""
    if isinstance(packed, datasets.Dataset):
        table = packed.data.table
    else:
        table = pa.concat_tables([pq.read_table(file, use_threads=False) for file in packed.data_files])
    return table.replace_schema_metadata().combine_chunks()


def check_rows(packed: PackedCorpus, expected: datasets.Dataset) -> None:
    """Check that packed files have the rows of a packed dataset, in order, and that rows have several documents."""
    found, wanted = rows_of(packed), rows_of(expected)
    assert found.schema == wanted.schema
    assert found.equals(wanted)
    assert packed.num_rows == len(expected)
    assert max(len(row) for row in expected["seq_lengths"][:]) > 1


def packed_by_pack(files: list[str], strategy: Any) -> datasets.Dataset:
    """Return the rows that `pack` makes of files."""
    return hfp.pack(documents_of(files), strategy, load_from_cache_file=False)
