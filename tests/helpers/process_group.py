"""The end of a test's run in several processes."""

import gc

from accelerate import PartialState


def end_process_group() -> None:
    """Wait until all processes are done, then end their group.

    A process that exits within the group can be aborted. Call this when no trainer is left: a DDP model that outlives
    the group hangs.
    """
    gc.collect()
    state = PartialState()
    state.wait_for_everyone()
    state.destroy_process_group()
