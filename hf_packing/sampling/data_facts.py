"""Facts about the dataset of one rank. Ranks exchange these facts to detect that their datasets differ.

The facts are the number of rows, the number of tokens, a digest of all row sizes, and the content of a few rows.
"""

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import datasets
import numpy as np

from hf_packing.sampling.epoch_plan import RowSizes
from hf_packing.sampling.row_sizes import SAMPLED_TOKENS, rows_to_sample, sample_of_rows

_READ_TWICE = 32
"""The largest number of rows to read twice. Two reads of a row show whether the content of the row changes."""


@dataclass(frozen=True)
class DataFacts:
    """Facts about one rank's dataset, small enough to send to all other ranks."""

    rows: int
    tokens: int
    sizes: str
    """Hex digest of the sizes of all rows."""
    lengths: tuple[int, ...]
    """The number of tokens in each sampled row. Sampled rows are spread evenly over the dataset."""
    contents: tuple[tuple[int, str], ...]
    """Pairs (row number, hex digest of the row's content) for sampled rows; empty if rows change between two reads."""


def data_facts(dataset: Any, sizes: RowSizes) -> DataFacts:
    """Return the facts about this rank's dataset, for comparison with the datasets of other ranks.

    Args:
        dataset: a map-style dataset.
        sizes: sizes of the dataset's rows, as `sizes_of(dataset)` returns them.
    """
    return DataFacts(
        rows=len(sizes),
        tokens=int(sizes.tokens.sum()),
        sizes=replace(sizes, sample=b"").fingerprint,
        lengths=tuple(sizes.tokens[rows_to_sample(len(sizes))].tolist()),
        contents=_contents_sampled(sizes) if sizes.sample else _contents_read(dataset, len(sizes)),
    )


def difference(one: DataFacts, other: DataFacts, here: str, there: str) -> str | None:
    """Return a description of one difference between two datasets, or None if the facts show no difference.

    Args:
        one: facts about the first dataset.
        other: facts about the second dataset.
        here: a name for the holder of the first dataset, such as "rank 0".
        there: a name for the holder of the second dataset, such as "rank 1".
    """
    if (one.rows, one.tokens) != (other.rows, other.tokens):
        return (
            f"{here} has {one.rows:,} rows and {one.tokens:,} tokens, but {there} has {other.rows:,} rows and "
            f"{other.tokens:,} tokens"
        )
    for row, length, other_length in zip(rows_to_sample(one.rows).tolist(), one.lengths, other.lengths, strict=True):
        if length != other_length:
            return f"row {row} has {length:,} tokens on {here}, but {other_length:,} tokens on {there}"
    if one.sizes != other.sizes:
        return (
            f"{here} and {there} both have {one.rows:,} rows and {one.tokens:,} tokens, but some rows have different "
            "lengths, segments or buckets"
        )
    for (row, content), (_, other_content) in zip(one.contents, other.contents, strict=False):
        if content != other_content:
            return f"row {row} has the same length on {here} and on {there}, but different tokens or labels"
    return None


def _contents_sampled(sizes: RowSizes) -> tuple[tuple[int, str], ...]:
    """Return pairs (row number, hex digest of the row's values in the sample) for the rows in `sizes.sample`.

    The sample holds the first tokens of all these rows, then their first labels, then their mask values. If the sample
    cannot be split into rows, the result is one pair, with a digest of the whole sample.
    """
    sampled = rows_to_sample(len(sizes))
    widths = np.minimum(sizes.tokens[sampled], SAMPLED_TOKENS)
    values = np.frombuffer(sizes.sample, dtype="<i8")
    if not (total := int(widths.sum())) or len(values) % total:  # a column is missing in some rows
        return ((int(sampled[0]), _digest(sizes.sample)),)
    rows = np.split(values.reshape(-1, total), np.cumsum(widths)[:-1], axis=1)
    return tuple((row, _digest(values.tobytes())) for row, values in zip(sampled.tolist(), rows, strict=True))


def _contents_read(dataset: Any, rows: int) -> tuple[tuple[int, str], ...]:
    """Return pairs (row number, hex digest of the row's content) for a few rows, which are read from the dataset.

    For a datasets.Dataset, the stored rows are read, before any transform. Rows of any other dataset are read twice. If
    the two reads differ, the result is empty.

    Args:
        dataset: a map-style dataset.
        rows: number of rows in the dataset.
    """
    sampled = rows_to_sample(rows)
    numbers = sampled[:: -(-len(sampled) // _READ_TWICE) or 1].tolist()
    if isinstance(dataset, datasets.Dataset):
        stored = dataset.with_format("arrow")[numbers].to_pylist()
        return tuple((number, _digest(repr(row).encode())) for number, row in zip(numbers, stored, strict=True))
    once, twice = (tuple((number, _digest(sample_of_rows([dataset[number]]))) for number in numbers) for _ in range(2))
    return once if once == twice else ()


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
