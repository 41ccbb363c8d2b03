"""Rows for tests, and what writes them."""

import gzip
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

ROWS = [{"text": "one two"}, {"text": "three"}, {"text": ""}]


def write_lines(file, rows):
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def write_gzip(file, rows):
    file.write_bytes(gzip.compress("".join(f"{json.dumps(row)}\n" for row in rows).encode()))
    return file


def write_array(file, rows):
    file.write_text(json.dumps(rows))
    return file


def write_parquet(file, rows):
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file


def write_saved(folder, rows):
    datasets.Dataset.from_list(rows).save_to_disk(folder)
    return folder


def write_splits(folder, rows):
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(folder)
    return folder
