"""Digests of rows, batches and other nested values, the same on any machine."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import datasets

Cases = dict[str, str | list[float]]
"""Names of cases, and what was found: a digest, a few words, or numbers that may differ in rounding."""


def digest(value: Any) -> str:
    """Return a digest of lists, dicts, strings, booleans, integers, and floats to 9 digits; arrays count as lists."""
    return hashlib.sha256(json.dumps(_plain(value), sort_keys=True).encode()).hexdigest()[:16]


def digest_of_rows(rows: Iterable[Mapping[str, Any]]) -> str:
    found = list(rows)
    return f"{len(found)} rows {digest(found)}"


def digest_of_dataset(dataset: datasets.Dataset) -> str:
    types = [[field.name, str(field.type)] for field in dataset.features.arrow_schema]
    return f"{digest_of_rows(dataset.to_list())} columns {digest(types)}"


def digest_of_batch(batch: Mapping[str, Any]) -> str:
    return digest(
        {
            name: [str(value.dtype), list(value.shape), value.tolist()] if hasattr(value, "dtype") else value
            for name, value in batch.items()
        }
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return value if set(map(type, value)) <= {int, bool, str} else [_plain(each) for each in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return f"{value:.9g}" if isinstance(value, float) else value
