"""Choose the columns with one number for each token, such as weights, that reach the model or the trainer's loss.

Trainer keeps the columns that the model's forward takes, or all of them with remove_unused_columns=False.
"""

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import datasets
from torch import nn
from transformers import Trainer

from hf_packing.attention import inner_model
from hf_packing.batch.collate import numbers_in
from hf_packing.columns import KNOWN_COLUMNS
from hf_packing.rows.token_columns import is_token_type, visible_columns
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


def passed_on(data: Any, takes: Takes) -> list[str]:
    """Return the names of the columns of a dataset, or among its features, that packing does not know and that are
    passed on."""
    return [name for name in _columns_of_numbers(data) if takes(name)]


def warn_of_columns_left_out(who: str, data: Any, takes: Takes) -> None:
    """Warn of the columns of numbers that `who`, the function that the user has called, does not pass on."""
    if left_out := sorted(name for name in _columns_of_numbers(data) if not takes(name)):
        way_out = " To read them in compute_loss, set remove_unused_columns=False" if who == "attach" else ""
        warnings.warn(
            f"{who} leaves out the columns {', '.join(left_out)}, since no argument of the model's forward has this "
            f"name.{way_out}",
            stacklevel=3,
        )


def _columns_of_numbers(data: Any) -> list[str]:
    """Return the columns with a number for each token that packing does not know."""
    data = data.documents if isinstance(data, TreesOfDocuments) else data
    if isinstance(data, datasets.IterableDataset):
        data = data.features or datasets.Features()
    elif isinstance(data, datasets.Dataset) and data.format["type"] != "custom":
        data = datasets.Features({name: data.features[name] for name in visible_columns(data)})
    if isinstance(data, datasets.Features):
        return [each.name for each in data.arrow_schema if each.name not in KNOWN_COLUMNS and is_token_type(each.type)]
    row = data[0] if len(data) else {}
    numbers = row if isinstance(row, Mapping) else {}
    return [name for name in numbers if name not in KNOWN_COLUMNS and numbers_in(row[name]) is not None]
