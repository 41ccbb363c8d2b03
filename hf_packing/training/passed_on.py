"""Choose the columns with one number for each token, such as weights, that reach the model or the trainer's loss.

Trainer keeps the columns that the model's forward takes, or all of them with remove_unused_columns=False.
"""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import datasets
from torch import nn
from transformers import Trainer

from hf_packing.attention import inner_model
from hf_packing.batch.collate import numbers_in
from hf_packing.columns import INPUT_IDS, KNOWN_COLUMNS, TREE_INPUT_IDS
from hf_packing.rows.token_columns import TokenColumn, check_same_lengths, is_token_type, row_numbers, visible_columns
from hf_packing.sampling.rows import TreesOfDocuments

Takes = Callable[[str], bool]
"""A function that tells whether a column of this name is passed on."""


def taken_by_trainer(trainer: Trainer) -> Takes:
    """Return which columns a trainer keeps in its datasets."""
    if not trainer.args.remove_unused_columns:
        return lambda _: True
    asked = copy.copy(trainer)  # which keeps the columns
    asked._set_signature_columns_if_needed()
    return asked._signature_columns.__contains__  # type: ignore[no-any-return]


def taken_by_model(model: nn.Module | None) -> Takes:
    """Return which columns the forward of a model takes by name; none if there is no model."""
    return (() if model is None else inspect.signature(inner_model(model).forward).parameters).__contains__


def passed_on(dataset: Any, takes: Takes) -> list[str]:
    """Return the names of the columns of a map-style dataset that packing does not know, and that are passed on.

    Raises:
        PackingError: such a column does not have one number for each token.
    """
    dataset = dataset.documents if isinstance(dataset, TreesOfDocuments) else dataset
    names = [name for name in _columns_of_numbers(dataset) if takes(name)]
    if names and isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom":
        table, numbers = dataset.data.table, row_numbers(dataset)
        tokens = TREE_INPUT_IDS if TREE_INPUT_IDS in table.column_names else INPUT_IDS
        columns = {name: TokenColumn(name, table.column(name), numbers) for name in (tokens, *names)}
        check_same_lengths({INPUT_IDS: columns.pop(tokens), **columns})
    return names


def passed_on_in_stream(features: datasets.Features | None, takes: Takes) -> list[str]:
    """Return the names of the columns of a stream that packing does not know, and that are passed on."""
    return [name for name in _numbers_in_schema(features) if takes(name)]


def check_columns(who: str, found: Iterable[Any], takes: Takes) -> None:
    """Warn of columns of numbers that are not passed on, and check those that are.

    Args:
        who: the function that the user has called.
        found: the datasets.
        takes: which columns are passed on.

    Raises:
        PackingError: a column that is passed on does not have one number for each token.
    """
    left_out: set[str] = set()
    for dataset in found:
        left_out.update(name for name in _columns_of_numbers(dataset) if not takes(name))
        if not isinstance(dataset, datasets.IterableDataset):
            passed_on(dataset, takes)
    if left_out:
        way_out = " To read them in compute_loss, set remove_unused_columns=False" if who == "attach" else ""
        warnings.warn(
            f"{who} leaves out the columns {', '.join(sorted(left_out))}, since no argument of the model's forward has "
            f"this name.{way_out}",
            stacklevel=3,
        )


def _columns_of_numbers(dataset: Any) -> list[str]:
    """Return the columns with a number for each token that packing does not know."""
    if isinstance(dataset, datasets.IterableDataset):
        return _numbers_in_schema(dataset.features)
    if isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom":
        seen = [name for name in visible_columns(dataset) if name not in KNOWN_COLUMNS]
        schema = dataset.data.table.schema
        return [name for name in seen if is_token_type(schema.field(name).type)]
    row = dataset[0] if len(dataset) else {}
    numbers = row if isinstance(row, Mapping) else {}
    return [name for name in numbers if name not in KNOWN_COLUMNS and numbers_in(row[name]) is not None]


def _numbers_in_schema(features: datasets.Features | None) -> list[str]:
    schema = [] if features is None else features.arrow_schema
    return [field.name for field in schema if field.name not in KNOWN_COLUMNS and is_token_type(field.type)]
