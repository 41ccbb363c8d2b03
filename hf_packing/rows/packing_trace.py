"""The trace that packing leaves in the description of a dataset.

Without the columns that say where documents begin, a packed row looks like one document. `datasets` keeps the
description through select_columns, map, filter, shuffle, concatenate_datasets and save_to_disk, but loses it through
parquet, JSON, pandas and to_iterable_dataset.
"""

from collections.abc import Iterable
from typing import Any

import datasets

from hf_packing.columns import SEGMENT_COLUMNS
from hf_packing.errors import PackingError

_TRACE, _KEPT = "Packed by hf_packing: ", ", with the labels of first tokens"

LOST_FIRST_LABELS = (
    "labels: expected labels at first tokens for a model that does not predict the next token, got {}. pack and "
    "PackingCollator take these labels away, which causal language models cannot predict; pass keep_first_labels=True "
    "to both, or fn_kwargs={{'keep_first_labels': True}} to map(strategy)"
)


def info_of_packed(known: datasets.DatasetInfo, is_traced: bool, first_labels: bool) -> datasets.DatasetInfo:
    """Return the description of packed rows, given that of the documents.

    Args:
        known: the description of the documents.
        is_traced: whether it gets the trace of packing. Rows of trees need none, since trainers cannot take them for
            documents.
        first_labels: whether first tokens keep their labels.
    """
    info = datasets.DatasetInfo(known.description, known.citation, known.homepage, known.license)
    if is_traced:
        trace = f"{_TRACE}several documents in a row{_KEPT * first_labels}."
        info.description = f"{info.description}\n\n{trace}".lstrip()
    return info


def is_packed(dataset: Any) -> bool:
    """Return whether a dataset has the trace of packing; those of other libraries than `datasets` have none."""
    description = getattr(getattr(dataset, "info", None), "description", None)
    return isinstance(description, str) and _TRACE in description


def refuse_lost_first_labels(dataset: Any) -> None:
    """Raise PackingError if a dataset is packed, and its first tokens have lost their labels."""
    if is_packed(dataset) and _KEPT not in dataset.info.description:
        raise PackingError(LOST_FIRST_LABELS.format("rows that were packed without them"))


def stored_datasets(dataset: Any) -> list[Any]:
    """Return a dataset, or the datasets inside the wrappers of torch and accelerate, such as Subset."""
    if type(dataset).__module__.split(".")[0] not in ("torch", "accelerate"):
        return [dataset]
    inner = [*getattr(dataset, "datasets", ()), getattr(dataset, "dataset", None)]
    return [stored for each in inner if each is not None for stored in stored_datasets(each)]


def refuse_lost_borders(dataset: Any, names: Iterable[str], stored: Iterable[str] = ()) -> None:
    """Raise PackingError if a dataset is packed, but its rows do not say any more where their documents begin.

    Args:
        dataset: any dataset.
        names: names of the columns of its rows.
        stored: names of the columns that the dataset has, of which its format may hide some.
    """
    shown, borders = list(names), set(SEGMENT_COLUMNS)
    if borders.isdisjoint(shown) and (is_packed(dataset) or not borders.isdisjoint(stored)):
        raise PackingError(
            "dataset: expected the column seq_lengths or position_ids in packed rows, which would each train as one "
            f"document without it, got only {', '.join(shown)}. Keep one of these columns in select_columns, "
            f"remove_columns and with_format; with Trainer, pass remove_unused_columns=False; or, if the rows are "
            "documents again, remove such columns and set dataset.info.description = ''"
        )
