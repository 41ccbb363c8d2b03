"""The end of a script of several processes."""

import gc

from accelerate import PartialState


def end_process_group():
    """Wait for all processes, then end their group. A DDP model that outlives the group hangs, so none may be left."""
    gc.collect()
    state = PartialState()
    state.wait_for_everyone()
    state.destroy_process_group()
