"""Check the data loader that is being read: whether the rows of its dataset keep their borders in a batch."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch
from torch.utils.data._utils.fetch import _BaseDatasetFetcher

from hf_packing.batch.segments import read_borders
from hf_packing.columns import CU_SEQ_LENS, INPUT_IDS, LABELS, POSITION_IDS, SEQ_IDX, SEQ_LENGTHS
from hf_packing.errors import PackingError
from hf_packing.rows.packing_trace import has_packs, refuse_lost_borders, stored_datasets


def active_loader() -> Any:
    """Return the data loader of accelerate that is being read; None without accelerate, or outside of its loops."""
    state = sys.modules.get("accelerate.state")
    return None if state is None else state.GradientState().active_dataloader


def datasets_being_read() -> list[Any]:
    """Return the datasets whose rows a DataLoader of torch is giving to its collator; none outside of a loader."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if isinstance(fetcher := frame.f_locals.get("self"), _BaseDatasetFetcher):
            return stored_datasets(fetcher.dataset)
        frame = frame.f_back
    return []


def refuse_dispatched_batches(collator: Any) -> None:
    """Raise PackingError if accelerate makes batches in one process and sends slices of each batch to the others.

    This is accelerate's default for an IterableDataset. If accelerate is imported, its active data loader tells.
    """
    loader = active_loader()
    if loader is None or not isinstance(loader, sys.modules["accelerate.data_loader"].DataLoaderDispatcher):
        return
    used = loader.base_dataloader.collate_fn
    if getattr(used, "data_collator", used) is collator:  # Trainer wraps the collator, to remove columns
        raise PackingError(
            "dispatch_batches: expected False, got True, which is accelerate's default for an IterableDataset. With "
            "True, accelerate sends slices of a batch to the processes, but cu_seq_lens cannot be sliced. Pass "
            "accelerator_config={'dispatch_batches': False} to TrainingArguments, or "
            "dataloader_config=DataLoaderConfiguration(dispatch_batches=False) to your own Accelerator"
        )


_TWO_DOCUMENTS = {
    INPUT_IDS: [1, 1, 1, 1],
    LABELS: [-100, 1, -100, 1],
    POSITION_IDS: [0, 1, 0, 1],
    SEQ_IDX: [0, 0, 1, 1],
    **{name: [0, 2, 4] for name in CU_SEQ_LENS},
    SEQ_LENGTHS: [2, 2],
}
"""A packed row, with all columns that collators read."""

_checked: "WeakSet[Any]" = WeakSet()
"""The data loaders that were checked."""


def check_loader(segments: int) -> None:
    """Check the data loader that is being read, if the rows of its dataset are packed.

    Args:
        segments: number of segments in the batch. If there are more of them than rows were read, the borders of packed
            rows are known, however the caller has found them, and the collator is not asked.

    Raises:
        PackingError: the rows of the dataset have lost their borders, or packed rows were packed again; or the
            collator makes one document of a row.
    """
    loader = active_loader()
    if loader is None or loader in _checked:
        return
    rows_read = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    for dataset in stored_datasets(getattr(loader, "dataset", None)):
        form, names = getattr(dataset, "format", None), getattr(dataset, "column_names", None)  # None of some streams
        if isinstance(form, dict) and not form["output_all_columns"]:
            names = form["columns"]
        if names and has_packs(dataset, names) and (rows_read is None or segments <= rows_read):
            refuse_lost_borders(dataset, names)
            _ask(loader.collate_fn, names)
    _checked.add(loader)


def _ask(collate: Callable[..., Any], names: list[str]) -> None:
    """Raise PackingError if a collator makes one document of a row of two documents with these columns."""
    try:
        with torch.random.fork_rng(devices=[]):
            batch = collate([{name: values for name, values in _TWO_DOCUMENTS.items() if name in names}])
        borders = read_borders(len(batch[INPUT_IDS]), batch)
    except Exception:  # the collator needs other columns, or makes other batches: it cannot be asked
        return
    if borders is None or borders.tolist()[:3] != [0, 2, 4]:
        raise PackingError(
            "data_collator: expected a collator that reads where documents begin in packed rows, got "
            f"{type(getattr(collate, 'data_collator', collate)).__name__}, which makes one document of each row. Pass "
            "data_collator=PackingCollator() to Trainer, padding_free=True and max_length=None to SFTConfig, or call "
            "attach(trainer, TokenBudget(max_tokens))"
        )
