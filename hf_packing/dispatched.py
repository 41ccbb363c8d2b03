"""Batches that accelerate reads in one process and cuts up for the others, as if every tensor had a row for each."""

import sys
from typing import Any

from hf_packing.errors import PackingError


def refuse_dispatched_batches(collator: Any) -> None:
    """Refuse to make a batch whose borders accelerate would cut; it dispatches batches of streams by default.

    Accelerate is only looked at where it is loaded: its loader that is being read, and whether it calls this collator.

    Raises:
        PackingError: it dispatches the collator's batches.
    """
    state, data_loader = (sys.modules.get(f"accelerate.{name}") for name in ("state", "data_loader"))
    if state is None or data_loader is None:
        return
    loader = state.GradientState().active_dataloader
    if isinstance(loader, data_loader.DataLoaderDispatcher) and called_by(loader.base_dataloader) is collator:
        raise PackingError(
            "dispatch_batches: expected False, since accelerate would cut cu_seq_lens and other borders of a packed "
            "batch as if they had a value for each row, got True, its default for streams; give TrainingArguments "
            "accelerator_config={'dispatch_batches': False}, or an Accelerator of your own "
            "dataloader_config=DataLoaderConfiguration(dispatch_batches=False)"
        )


def called_by(loader: Any) -> Any:
    """The collator of a DataLoader; Trainer wraps it to remove columns."""
    return getattr(loader.collate_fn, "data_collator", loader.collate_fn)
