"""Facts that ranks compare to detect that their datasets differ: rows, tokens, lengths, content of a few rows."""

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import datasets
import numpy as np

from hf_packing.sampling.row_sizes import SAMPLED_TOKENS, RowSizes, rows_to_sample, sample_of_rows

_READ_TWICE = 32
"""Rows that are read twice, to see whether they are the same each time."""


@dataclass(frozen=True)
class DataFacts:
    """Facts about one rank's dataset, small enough to send to all others."""

    rows: int
    tokens: int
    sizes: str
    """Hex digest of the sizes of all rows."""
    lengths: tuple[int, ...]
    """Tokens of the sampled rows, which are spread over the dataset."""
    contents: tuple[tuple[int, str], ...]
    """Number and hex digest of sampled rows; empty if rows change from one reading to the next."""


def data_facts(dataset: Any, sizes: RowSizes) -> DataFacts:
    """Return the facts by which other ranks compare this dataset with their own.

    Args:
        dataset: map-style.
        sizes: of its rows, as `sizes_of(dataset)` returns them.
    """
    return DataFacts(
        rows=len(sizes),
        tokens=int(sizes.tokens.sum()),
        sizes=replace(sizes, sample=b"").fingerprint,
        lengths=tuple(sizes.tokens[rows_to_sample(len(sizes))].tolist()),
        contents=_contents_sampled(sizes) if sizes.sample else _contents_read(dataset, len(sizes)),
    )


def difference(one: DataFacts, other: DataFacts, here: str, there: str) -> str | None:
    """Return how two datasets differ, in words; None where no difference is known.

    Args:
        one: facts about the first dataset.
        other: facts about the second dataset.
        here: who has the first dataset, such as "rank 0".
        there: who has the second dataset.
    """
    if (one.rows, one.tokens) != (other.rows, other.tokens):
        return (
            f"{here} has {one.rows:,} rows, {one.tokens:,} tokens; {there} has {other.rows:,} rows, "
            f"{other.tokens:,} tokens"
        )
    for row, length, other_length in zip(rows_to_sample(one.rows).tolist(), one.lengths, other.lengths, strict=True):
        if length != other_length:
            return f"row {row} has {length:,} tokens on {here}, {other_length:,} on {there}"
    if one.sizes != other.sizes:
        return f"{here} and {there} both have {one.rows:,} rows, {one.tokens:,} tokens, but the lengths of rows differ"
    for (row, content), (_, other_content) in zip(one.contents, other.contents, strict=False):
        if content != other_content:
            return f"row {row} has the same length on {here} and on {there}, but different tokens or labels"
    return None


def _contents_sampled(sizes: RowSizes) -> tuple[tuple[int, str], ...]:
    """Return digests of rows whose first tokens were sampled together, column by column."""
    sampled = rows_to_sample(len(sizes))
    widths = np.minimum(sizes.tokens[sampled], SAMPLED_TOKENS)
    values = np.frombuffer(sizes.sample, dtype="<i8")
    if not (total := int(widths.sum())) or len(values) % total:  # some rows have a column that others lack
        return ((int(sampled[0]), _digest(sizes.sample)),)
    rows = np.split(values.reshape(-1, total), np.cumsum(widths)[:-1], axis=1)
    return tuple((row, _digest(values.tobytes())) for row, values in zip(sampled.tolist(), rows, strict=True))


def _contents_read(dataset: Any, rows: int) -> tuple[tuple[int, str], ...]:
    """Return digests of rows that are computed when read; of a datasets.Dataset, digests of its transform's inputs."""
    sampled = rows_to_sample(rows)
    numbers = sampled[:: -(-len(sampled) // _READ_TWICE) or 1].tolist()
    if isinstance(dataset, datasets.Dataset):
        stored = dataset.with_format("arrow")[numbers].to_pylist()
        return tuple((number, _digest(repr(row).encode())) for number, row in zip(numbers, stored, strict=True))
    once, twice = (tuple((number, _digest(sample_of_rows([dataset[number]]))) for number in numbers) for _ in range(2))
    return once if once == twice else ()


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
