"""One of several processes of a test, which calls a function with a folder for its results; see `on_ranks`.

torchrun --nproc-per-node 2 one_rank.py FOLDER FILE FUNCTION '[ARGUMENT, ...]'
"""

import json
import sys
import warnings
from importlib import import_module
from pathlib import Path

import datasets
import torch
from process_group import end_process_group


def main(folder, file, function, arguments):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    sys.path.insert(1, str(file.parent))
    getattr(import_module(file.stem), function)(folder, *arguments)
    end_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
