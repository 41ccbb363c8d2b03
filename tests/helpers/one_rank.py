"""One of several processes of a test, which calls a function with a folder for its results; see `on_ranks`.

torchrun --nproc-per-node 2 one_rank.py FOLDER FILE FUNCTION '[ARGUMENT, ...]'
"""

import gc
import json
import sys
import warnings
from importlib import import_module
from pathlib import Path

import datasets
import torch
from accelerate import PartialState


def main(folder, file, function, arguments):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    sys.path.insert(1, str(file.parent))
    getattr(import_module(file.stem), function)(folder, *arguments)
    end_process_group()


def end_process_group():
    """Wait for all processes, then end their group: a process that exits within it can be aborted, and a DDP model that
    outlives it hangs."""
    gc.collect()
    state = PartialState()
    state.wait_for_everyone()
    state.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
