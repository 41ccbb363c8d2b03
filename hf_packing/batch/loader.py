"""Check the data loader of accelerate that is being read: whether the rows of its dataset keep their borders."""

import sys
from typing import Any
from weakref import WeakSet

from hf_packing.errors import PackingError
from hf_packing.rows.packing_trace import refuse_lost_borders, refuse_lost_first_labels, stored_datasets


def active_loader() -> Any:
    """Return the data loader of accelerate that is being read; None without accelerate, or outside of its loops."""
    state = sys.modules.get("accelerate.state")
    return None if state is None else state.GradientState().active_dataloader


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


_checked: "WeakSet[Any]" = WeakSet()
"""The data loaders that were checked."""


def check_loader(segments: int, needs_first_labels: bool) -> None:
    """Check the data loader that is being read, if the rows of its dataset are packed.

    Args:
        segments: number of segments in the batch. If there are more of them than rows were read, the borders of packed
            rows are known, however the caller has found them.
        needs_first_labels: whether the model needs the labels of first tokens, as classifiers of tokens do.

    Raises:
        PackingError: the rows of the dataset have lost their borders, or labels that the model needs.
    """
    loader = active_loader()
    if loader is None or loader in _checked:
        return
    rows_read = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    for dataset in stored_datasets(getattr(loader, "dataset", None)):
        if needs_first_labels:
            refuse_lost_first_labels(dataset)
        form, names = getattr(dataset, "format", None), getattr(dataset, "column_names", None)
        if isinstance(form, dict) and not form["output_all_columns"]:
            names = form["columns"]
        if names and (rows_read is None or segments <= rows_read):  # no names of some streams
            refuse_lost_borders(dataset, names)
    _checked.add(loader)
