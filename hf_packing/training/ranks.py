"""Which processes train on different rows, and what of accelerate would take planned batches apart."""

import os
from typing import Any, NamedTuple

from accelerate import Accelerator

from hf_packing.errors import PackingError


class DataRank(NamedTuple):
    """A process among those that train on different rows."""

    rank: int
    world_size: int


def data_rank(accelerator: Accelerator) -> DataRank:
    """The place of this process; those that share a model by tensor parallelism share their rows as well."""
    together = getattr(accelerator.parallelism_config, "tp_size", 1) if parallelism(accelerator) else 1
    return DataRank(accelerator.process_index // together, accelerator.num_processes // together)


def parallelism(accelerator: Accelerator) -> Any:
    return getattr(accelerator, "parallelism_config", None)


def check_accelerator(accelerator: Accelerator) -> None:
    """Refuse what would cut planned batches anew, or cut documents across processes.

    Raises:
        PackingError: dispatch_batches, split_batches, context or sequence parallelism; processes that do not know of
            each other.
    """
    if (launched := int(os.environ.get("WORLD_SIZE", 1))) > accelerator.num_processes:
        raise PackingError(
            f"accelerator: expected one that knows of all {launched} processes that were launched, this one knows of "
            f"{accelerator.num_processes}, and each would train on all rows; on CPUs it has to be Accelerator(cpu=True)"
        )
    if accelerator.dispatch_batches:
        raise PackingError(
            "dispatch_batches: expected False, got True: one process would read all batches, join and recut them"
        )
    if accelerator.split_batches:
        raise PackingError("split_batches: expected False, got True: planned batches would be cut across processes")
    if not accelerator.gradient_state.sync_with_dataloader:
        raise PackingError(
            "sync_with_dataloader: expected True, got False: the last gradients of an epoch would be lost"
        )
    config = parallelism(accelerator)
    for size in ("cp_size", "sp_size"):
        if (ranks := getattr(config, size, 1) if config else 1) > 1:
            raise PackingError(
                f"{size}: expected 1, got {ranks}: rows cut across processes do not keep their documents apart"
            )
