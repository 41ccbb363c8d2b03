"""What lazy packs need from datasets, and what is not part of its documented interface."""

import warnings
from typing import Any

import datasets
import pyarrow as pa
from datasets.features.features import register_feature
from datasets.table import ConcatenationTable, MemoryMappedTable


def mapped_tables(dataset: datasets.Dataset) -> list[tuple[str, pa.Table]]:
    """Return the memory-mapped tables that a dataset is made of, with the path of the file of each."""

    def tables(block: Any) -> list[tuple[str, pa.Table]]:
        if isinstance(block, ConcatenationTable):
            return [found for blocks in block.blocks for each in blocks for found in tables(each)]
        return [(block.path, block.table)] if isinstance(block, MemoryMappedTable) else []

    return tables(dataset.data)


def register(feature: type, name: str) -> None:
    """Tell datasets the class of a feature, by the name under which saved datasets refer to it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that register_feature is experimental
        register_feature(feature, name)
