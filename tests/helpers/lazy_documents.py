"""Documents on disk for tests of lazy packs, packed as always and lazily."""

import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
from datasets import Dataset, concatenate_datasets

import hf_packing as hfp
from hf_packing.rows.lazy import stored_packs

STRATEGIES = [
    hfp.BestFit(16),
    hfp.BestFit(7, overflow="truncate", seed=None),
    hfp.BestFit(7, overflow="drop"),
    hfp.FixedLength(9),
    hfp.FirstCome(16, max_documents=3),
    hfp.Bucket((4, 8, 16)),
]


def columns_of(lengths, seed=0, masks=0, labels=False):
    """Documents of these lengths, with weights and flags, and with masks and labels as asked."""
    rng = np.random.default_rng(seed)
    columns = {
        "input_ids": [rng.integers(0, 1000, length).tolist() for length in lengths],
        "weights": [rng.random(length).tolist() for length in lengths],
        "flags": [(rng.random(length) < 0.5).tolist() for length in lengths],
    }
    if labels:
        columns["labels"] = [rng.integers(-100, -90, length).tolist() for length in lengths]
    for name in ("completion_mask", "assistant_masks")[:masks]:
        columns[name] = [rng.integers(0, 2, length).tolist() for length in lengths]
    return columns


def on_disk(folder, lengths=(5, 3, 0, 9, 12, 1, 20, 4, 4, 2, 7, 30), shards=1, rows_in_batch=1000, **columns):
    """The documents, in so many files, and in record batches of so many rows."""
    table = pa.table(columns_of(lengths, **columns))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [str(folder / f"data-{number}.arrow") for number in range(shards)]
    per_file = -(-len(lengths) // shards)
    for number, path in enumerate(paths):
        with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table.slice(number * per_file, per_file), max_chunksize=rows_in_batch)
    return (
        concatenate_datasets([Dataset.from_file(path) for path in paths]) if shards > 1 else Dataset.from_file(paths[0])
    )


def both(documents, strategy=STRATEGIES[0], **options):
    """The documents packed as always, and lazily, with what was warned of."""
    packed = []
    for lazy in (False, True):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            packed.append(hfp.pack(documents, strategy, lazy=lazy, **options))
        packed.append([str(warning.message) for warning in seen])
    return packed


def same_rows(lazy, packed):
    return lazy.column_names == packed.column_names and len(lazy) == len(packed) > 0 and lazy[:] == packed[:]


def source_of(dataset):
    return stored_packs.open_packs(dataset.features["input_ids"].folders[0]).facts["files"][0]["path"]
