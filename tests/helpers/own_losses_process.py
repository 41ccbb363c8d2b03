"""One of the processes of test_own_losses: trains a step of each case, and writes its gradients and micro-batches.

torchrun --nproc-per-node 2 own_losses_process.py FOLDER '["NAME", ...]' '[1, 4]'

Each process writes, for each case and number of micro-batches, FOLDER/NAME-ACCUMULATION-RANK.pt.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
from process_group import end_process_group

sys.path.insert(1, str(Path(__file__).parents[1]))

from training.test_own_losses import CASES, train


def main(folder, names, accumulations):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in names:
        for accumulation in accumulations:
            case = CASES[name]
            found = train(folder / "output", case, case.model(), accumulation)
            rank = torch.distributed.get_rank()
            torch.save(found._asdict(), folder / f"{name}-{accumulation}-{rank}.pt")
    end_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(json.loads, sys.argv[2:]))
