"""What tells the data of one rank from that of another: rows, tokens, lengths, and the content of a few rows."""

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import datasets
import numpy as np

from hf_packing.sampling.sizes import SAMPLED_TOKENS, RowSizes, sample_of_rows, sampled_rows

READ_TWICE = 32
"""Rows that are read to find out whether they come out the same each time."""


@dataclass(frozen=True)
class DataFacts:
    """Of one rank's dataset, small enough to be sent to all others."""

    rows: int
    tokens: int
    sizes: str
    """Hexadecimal digest of the sizes of all rows."""
    lengths: tuple[int, ...]
    """Tokens of rows from all over the dataset."""
    contents: tuple[tuple[int, str], ...]
    """Number and hexadecimal digest of rows from all over the dataset; none where rows are random at each reading."""


def data_facts(dataset: Any, sizes: RowSizes) -> DataFacts:
    """What other ranks compare with their own dataset.

    Args:
        dataset: map-style.
        sizes: of its rows, as `sizes_of(dataset)` returns them.
    """
    return DataFacts(
        rows=len(sizes),
        tokens=int(sizes.tokens.sum()),
        sizes=replace(sizes, sample=b"").fingerprint,
        lengths=tuple(sizes.tokens[sampled_rows(len(sizes))].tolist()),
        contents=_contents_sampled(sizes) if sizes.sample else _contents_read(dataset, len(sizes)),
    )


def difference(one: DataFacts, other: DataFacts, here: str, there: str) -> str | None:
    """How two datasets differ, in words; None where nothing is known to be different.

    Args:
        one: of the first.
        other: of the second.
        here: who has the first, as "rank 0".
        there: who has the second.
    """
    if (one.rows, one.tokens) != (other.rows, other.tokens):
        return (
            f"{here} has {one.rows:,} rows, {one.tokens:,} tokens; {there} has {other.rows:,} rows, "
            f"{other.tokens:,} tokens"
        )
    for row, length, other_length in zip(sampled_rows(one.rows).tolist(), one.lengths, other.lengths, strict=True):
        if length != other_length:
            return f"row {row} has {length:,} tokens on {here}, {other_length:,} on {there}"
    if one.sizes != other.sizes:
        return f"{one.rows:,} rows, {one.tokens:,} tokens on {here} and on {there}, in rows of other lengths"
    for (row, content), (_, other_content) in zip(one.contents, other.contents, strict=False):
        if content != other_content:
            return f"row {row} has as many tokens on {here} as on {there}, but others, or other labels"
    return None


def _contents_sampled(sizes: RowSizes) -> tuple[tuple[int, str], ...]:
    """Of rows whose beginnings were sampled together, column by column."""
    sampled = sampled_rows(len(sizes))
    widths = np.minimum(sizes.tokens[sampled], SAMPLED_TOKENS)
    values = np.frombuffer(sizes.sample, dtype="<i8")
    if not (total := int(widths.sum())) or len(values) % total:  # some rows have a column that others have not
        return ((int(sampled[0]), _digest(sizes.sample)),)
    rows = np.split(values.reshape(-1, total), np.cumsum(widths)[:-1], axis=1)
    return tuple((row, _digest(values.tobytes())) for row, values in zip(sampled.tolist(), rows, strict=True))


def _contents_read(dataset: Any, rows: int) -> tuple[tuple[int, str], ...]:
    """Of rows that a transform or a class makes; of a datasets.Dataset, what the transform is given."""
    sampled = sampled_rows(rows)
    numbers = sampled[:: -(-len(sampled) // READ_TWICE) or 1].tolist()
    if isinstance(dataset, datasets.Dataset):
        stored = dataset.with_format("arrow")[numbers].to_pylist()
        return tuple((number, _digest(repr(row).encode())) for number, row in zip(numbers, stored, strict=True))
    once, twice = (tuple((number, _digest(sample_of_rows([dataset[number]]))) for number in numbers) for _ in range(2))
    return once if once == twice else ()


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
