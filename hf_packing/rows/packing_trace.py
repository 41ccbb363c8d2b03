"""The trace that packing leaves in the description of a dataset.

Without the columns that say where documents begin, a packed row looks like one document. `datasets` keeps the
description through select_columns, map, filter, shuffle, concatenate_datasets and save_to_disk, but loses it through
parquet, JSON, pandas and to_iterable_dataset.
"""

import re
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from hf_packing.columns import SEGMENT_COLUMNS, SEQ_LENGTHS
from hf_packing.errors import PackingError

_TRACE = re.compile(r"Packed by hf_packing: (?:(\d+) tokens in (\d+) segments|several documents in a row)\.")

_FORGET = "if the rows are documents again, remove such columns and set dataset.info.description = ''"


def with_trace(description: str, tokens: int | None = None, segments: int | None = None) -> str:
    """Return the description of a dataset with the trace of packing.

    Args:
        description: the description of the documents.
        tokens: the number of tokens in all rows; None for a stream and for lazy packs.
        segments: the number of segments in all rows.
    """
    of_rows = "several documents in a row" if tokens is None else f"{tokens} tokens in {segments} segments"
    return f"{description}\n\nPacked by hf_packing: {of_rows}.".lstrip()


def is_packed(dataset: Any) -> bool:
    """Return whether a dataset has the trace of packing; those of other libraries than `datasets` have none."""
    return bool(_traces(dataset))


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
            f"remove_columns and with_format; with Trainer, pass remove_unused_columns=False; or, {_FORGET}"
        )


def has_packs(dataset: Any, names: Iterable[str]) -> bool:
    """Return whether rows of a dataset have several documents: it has the trace of packing, or its rows say so.

    Args:
        dataset: any dataset.
        names: names of the columns of its rows.

    Raises:
        PackingError: the rows have all tokens that were packed, but in another number of segments, as after SFTTrainer
            with packing=True, which takes packed rows for documents.
    """
    table = getattr(dataset, "data", None)  # None for a stream
    if table is None or SEQ_LENGTHS not in set(names) & set(table.column_names):  # not in that of lazy rows
        return is_packed(dataset)
    column = table.column(SEQ_LENGTHS)
    if not pa.types.is_list(column.type) and not pa.types.is_large_list(column.type):
        return is_packed(dataset)
    lengths = pc.list_flatten(column)
    tokens, segments = pc.sum(lengths).as_py() or 0, len(lengths)
    packed = [(int(tokens), int(segments)) for tokens, segments in _traces(dataset) if tokens]
    of_packing = tuple(map(sum, zip(*packed, strict=True))) if packed else (0, 0)
    if of_packing[0] == tokens and of_packing[1] != segments:
        raise PackingError(
            f"column 'seq_lengths': expected the {of_packing[1]} segments in which pack() packed {tokens} tokens, got "
            f"{segments} segments, as if packed rows were packed again. Pass packing=False and padding_free=True to "
            f"SFTConfig; or, {_FORGET}"
        )
    return is_packed(dataset) or segments > len(column)


def _traces(dataset: Any) -> list[tuple[str, str]]:
    """Return the numbers of tokens and of segments in each trace of a dataset; empty texts if they are not known."""
    description = getattr(getattr(dataset, "info", None), "description", None)
    return _TRACE.findall(description) if isinstance(description, str) else []
