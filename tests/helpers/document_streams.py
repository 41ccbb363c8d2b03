"""Streams of documents, from files of several kinds and from generators, and what their packed rows hold."""

import json
import pickle
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import DatasetInfo, Features, IterableDataset, List, Value, load_dataset
from datasets.iterable_dataset import ArrowExamplesIterable

DOCUMENTS = 240
NAMES = 10**6
"""The first token of document number n is NAMES + n, and no other token is as large."""


def make_documents(number: int = DOCUMENTS, seed: int = 0, median: float = 12.0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(median), 1.0, number), 1, 30 * median).astype(int)
    return [[NAMES + n, *rng.integers(1, 1000, length - 1).tolist()] for n, length in enumerate(lengths)]


def names_in(rows) -> list[int]:
    return [token - NAMES for row in rows for token in row["input_ids"] if token >= NAMES]


def tokens_in(rows) -> int:
    return sum(len(row["input_ids"]) for row in rows)


def split_unevenly(documents: list[list[int]], files: int) -> list[list[list[int]]]:
    """Documents in files, of which one is much larger than the others, and one is empty."""
    cuts = np.sort(np.random.default_rng(files).choice(len(documents) // 8, files - 2, replace=False))
    return [[], *(documents[a:b] for a, b in zip([0, *cuts], [*cuts, len(documents)], strict=True))]


def write_parquet(folder: Path, files: list[list[list[int]]], rows_in_group: int = 40) -> list[str]:
    folder.mkdir(exist_ok=True, parents=True)
    kind = pa.list_(pa.int32())
    for number, documents in enumerate(files):
        table = pa.table(
            {"input_ids": pa.array(documents, kind), "source": pa.array(["a"] * len(documents), pa.string())}
        )
        with pq.ParquetWriter(folder / f"{number}.parquet", table.schema) as writer:
            if documents:
                writer.write_table(table, row_group_size=rows_in_group)
    return [str(folder / f"{number}.parquet") for number in range(len(files))]


def write_jsonl(folder: Path, files: list[list[list[int]]]) -> list[str]:
    folder.mkdir(exist_ok=True)
    for number, documents in enumerate(files):
        lines = [json.dumps({"input_ids": document, "text": "x"}) for document in documents]
        (folder / f"{number}.jsonl").write_text("\n".join(lines))
    return [str(folder / f"{number}.jsonl") for number in range(len(files))]


def read_stream(kind: str, files: list[str]) -> IterableDataset:
    return load_dataset(kind, data_files=files, split="train", streaming=True)


def generate(parts):
    for documents in parts:
        yield from ({"input_ids": document} for document in documents)


def generated(files: list[list[list[int]]]) -> IterableDataset:
    features = Features({"input_ids": List(Value("int64"))})
    return IterableDataset.from_generator(generate, gen_kwargs={"parts": files}, features=features)


def keep_most(row) -> bool:
    return row["input_ids"][-1] % 11 != 0


def reverse(row) -> dict:
    return {"input_ids": [*row["input_ids"][:1], *row["input_ids"][:0:-1]]}


SOURCES = ["parquet", "row groups", "jsonl", "generator", "mapped", "mapped in batches", "arrow map"]


def reverse_batch(batch) -> dict:
    return {"input_ids": [[*ids[:1], *ids[:0:-1]] for ids in batch["input_ids"]]}


def write_source(folder: Path, kind: str, files: int = 4, documents=None) -> Callable[[], IterableDataset]:
    parts = split_unevenly(documents or make_documents(), files)
    if kind == "generator":
        return partial(generated, [part for part in parts if part])
    if kind == "jsonl":
        return partial(read_stream, "json", write_jsonl(folder / "jsonl", parts[1:]))
    opened = partial(read_stream, "parquet", write_parquet(folder / "parquet", parts))
    return {
        "parquet": opened,
        "row groups": lambda: opened().reshard(),
        "mapped": lambda: opened().filter(keep_most).map(reverse),
        "mapped in batches": lambda: opened().map(reverse_batch, batched=True, batch_size=7),
        "arrow map": lambda: opened().with_format("arrow").map(lambda table: table, batched=True, batch_size=9),
    }[kind]


def stream_of(documents, rows_in_table=7, **columns):
    table = pa.table({"input_ids": pa.array(documents, pa.list_(pa.int64())), **columns})
    features = Features.from_arrow_schema(table.schema)

    def tables():
        for start in range(0, len(table), rows_in_table):
            yield start, table.slice(start, rows_in_table)

    examples = ArrowExamplesIterable(tables, {})
    return IterableDataset(examples, info=DatasetInfo(features=features))


def check_resumed(make, rows: list, stops: list[int]) -> None:
    """Stop after so many rows, resume in a new stream, and stop and resume again: all rows come in their order."""
    seen, state = [], None
    for stop in [*stops, None]:
        stream = make()
        if state is not None:
            stream.load_state_dict(pickle.loads(state))
        seen += list(islice(iter(stream), stop))
        if stop:  # datasets loads a state when the first row is read
            state = pickle.dumps(stream.state_dict())
    assert seen == rows
